"""`paddle.dataset`: files of Fluid's formats in Fluid's cache, what stands in for them, and what an error says."""

from __future__ import annotations

import gzip
import io
import logging
import pickle
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.alias.dataset import cifar, common, conll05, imdb, imikolov, mnist, movielens, uci_housing, wmt14, wmt16
from penstock.errors import SpecError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(common, "DATA_HOME", str(tmp_path))
    return tmp_path


def put(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def put_tar(path: Path, files: Mapping[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def test_an_error_says_which_file_to_put_where(cache: Path) -> None:
    with pytest.raises(SpecError) as caught:
        imdb.word_dict()
    text = str(caught.value)
    assert str(cache / "imdb" / "imdb%2FaclImdb_v1.tar.gz") in text
    assert imdb.URL in text


def test_a_file_with_another_sum_is_read_with_a_warning(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = put(cache / "any" / "a.txt", b"text")
    assert common.download("http://host.example/a.txt", "any", "00") == str(path)
    assert "1cb251ec0d568de6a929b520c4aed8d1, not 00" in caplog.text
    assert common.md5file(str(path)) == "1cb251ec0d568de6a929b520c4aed8d1"


def test_samples_are_split_over_files_and_trainers(cache: Path) -> None:
    common.split(lambda: iter(range(10)), 3, suffix=str(cache / "part-%02d"))
    parts = [list(common.cluster_files_reader(str(cache / "part-*"), 2, number)()) for number in range(2)]
    assert parts == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9]]


@pytest.mark.parametrize("module", [cifar, conll05, imdb, imikolov, movielens, wmt14, wmt16])
def test_fetch_names_the_file_that_is_not_there(module: Any) -> None:
    with pytest.raises(SpecError, match=f"put the file of http.*{module.__name__.rpartition('.')[2]}"):
        module.fetch()


@pytest.mark.parametrize("module", [mnist, uci_housing])
def test_fetch_needs_no_file_where_other_data_stands_in(module: Any) -> None:
    module.fetch()


# ---------------------------------------------------------------- images


def idx(values: np.ndarray) -> bytes:
    header = np.array([(8 << 8) + values.ndim, *values.shape], ">u4")
    return gzip.compress(header.tobytes() + values.tobytes())


def test_mnist_reads_idx_files(cache: Path) -> None:
    images = np.array([[[0, 255], [51, 102]], [[255, 0], [0, 0]]], np.uint8)
    put(cache / "mnist" / "t10k-images-idx3-ubyte.gz", idx(images))
    put(cache / "mnist" / "t10k-labels-idx1-ubyte.gz", idx(np.array([7, 3], np.uint8)))
    (first, label), (_, other) = mnist.test()()
    assert (first.dtype, label, other) == (np.float32, 7, 3)
    np.testing.assert_allclose(first, [-1, 1, -0.6, -0.2], atol=1e-6)


def test_half_a_data_set_is_an_error(cache: Path) -> None:
    put(cache / "mnist" / "t10k-images-idx3-ubyte.gz", idx(np.zeros((1, 2, 2), np.uint8)))
    with pytest.raises(SpecError, match="t10k-labels-idx1-ubyte"):
        mnist.test()


def test_a_file_of_another_format_is_refused(cache: Path) -> None:
    for name in ("images-idx3", "labels-idx1"):
        put(cache / "mnist" / f"t10k-{name}-ubyte.gz", idx(np.zeros((4,), np.uint8)))
    with pytest.raises(SpecError, match="no IDX file of bytes with 3 dimensions"):
        mnist.test()


def test_digits_stand_in_for_mnist_and_it_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    train, test = list(mnist.train()()), list(mnist.test()())
    assert (len(train), len(test), train[0][0].shape) == (1437, 360, (784,))
    pixels = np.stack([image for image, _ in train])
    assert (pixels.min(), pixels.max(), pixels.dtype.name) == (-1.0, 1.0, "float32")
    assert {label for _, label in test} == set(range(10))
    assert caplog.text.count("from scikit-learn") == 2, "once for each part"


def test_cifar_reads_the_pickles_of_an_archive(cache: Path) -> None:
    image = np.arange(3072, dtype=np.int64).reshape(1, 3072).astype(np.uint8)
    batch = pickle.dumps({b"data": image, b"labels": [4]})
    fine = pickle.dumps({b"data": image, b"fine_labels": [40]})
    put_tar(cache / "cifar" / "cifar-10-python.tar.gz", {"c/data_batch_1": batch, "c/data_batch_2": batch, "c/x": b""})
    put_tar(cache / "cifar" / "cifar-100-python.tar.gz", {"c/train": fine})
    samples = list(cifar.train10()())
    assert [label for _, label in samples] == [4, 4]
    np.testing.assert_allclose(samples[0][0], image[0] / 255, rtol=1e-6)
    assert [label for _, label in cifar.train100()()] == [40]
    endless = iter(cifar.train10(cycle=True)())
    assert [next(endless)[1] for _ in range(5)] == [4] * 5


class _Calls:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (print, ("run",))


def test_cifar_runs_nothing_that_an_archive_holds(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put_tar(cache / "cifar" / "cifar-10-python.tar.gz", {"c/test_batch": pickle.dumps({b"data": _Calls()})})
    with pytest.raises(SpecError, match=r"no pickle of arrays alone.*it names builtins\.print"):
        next(iter(cifar.test10()()))
    assert capsys.readouterr().out == ""


class _Addresses:
    """An array of objects whose addresses are the bytes of the file."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]:
        return (np.ndarray, ((1,),), (1, (1, 3072), _PlainObjects(), False, b"A" * 8 * 3072))


class _PlainObjects:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]:
        return (np.dtype, ("O", False, True), (3, "|", None, None, None, -1, -1, 0))


def test_cifar_makes_no_objects_of_addresses(cache: Path) -> None:
    batch = pickle.dumps({b"data": _Addresses(), b"labels": [1]}, protocol=2)
    put_tar(cache / "cifar" / "cifar-10-python.tar.gz", {"c/test_batch": batch})
    with pytest.raises(SpecError, match="an array of object, which are no numbers"):
        next(iter(cifar.test10()()))


def test_cifar_reads_text_of_python_2_as_bytes(cache: Path) -> None:
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR(I1\n(I1\nI3072\nt"
    dtype = b"cnumpy\ndtype\n(S'u1'\nI0\nI1\ntR(I3\nS'|'\nNNNI-1\nI-1\nI0\ntb"
    pixels = b"I00\nT\x00\x0c\x00\x00" + b"\xff" * 3072 + b"tb"
    put_tar(
        cache / "cifar" / "cifar-10-python.tar.gz",
        {"c/test_batch": b"(dS'data'\n" + array + dtype + pixels + b"sS'labels'\n(lI7\nas."},
    )
    ((image, label),) = cifar.test10()()
    assert label == 7
    np.testing.assert_array_equal(image, np.ones(3072, np.float32))


# ---------------------------------------------------------------- numbers


def test_housing_is_centred_and_divided_by_its_range(cache: Path) -> None:
    rows = np.random.default_rng(3).uniform(1, 9, (10, 14))
    put(cache / "uci_housing" / "housing.data", "\n".join(" ".join(map(str, row)) for row in rows).encode())
    features = (rows - rows.mean(0)) / (rows.max(0) - rows.min(0))
    train, test = list(uci_housing.train()()), list(uci_housing.test()())
    assert (len(train), len(test)) == (8, 2)
    np.testing.assert_allclose(np.stack([x for x, _ in train + test]), features[:, :13], rtol=1e-12)
    np.testing.assert_allclose(np.stack([y for _, y in train + test]), rows[:, 13:], rtol=1e-12)
    np.testing.assert_array_equal(uci_housing.predict_reader()[0], test[0][0])


def test_diabetes_stands_in_for_housing(caplog: pytest.LogCaptureFixture) -> None:
    samples = [*uci_housing.train()(), *uci_housing.test()()]
    features, prices = (np.stack(part) for part in zip(*samples, strict=True))
    assert (features.shape, prices.shape) == ((442, 13), (442, 1))
    np.testing.assert_allclose(features.mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(np.ptp(features, axis=0), 1)
    assert "data about diabetes" in caplog.text


# ---------------------------------------------------------------- text


def test_imdb_numbers_words_by_frequency(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imdb, "_CUTOFF", 1)
    files = {
        "aclImdb/train/pos/1.txt": b"Good, good film!\n",
        "aclImdb/train/neg/1.txt": b"bad film",
        "aclImdb/test/pos/1.txt": b"bad: good",
        "aclImdb/train/unsup/1.txt": b"film film film",
    }
    put_tar(cache / "imdb" / "imdb%2FaclImdb_v1.tar.gz", files)
    words = imdb.word_dict()
    assert words == {"good": 0, "bad": 1, "film": 2, "<unk>": 3}
    assert list(imdb.train(words)()) == [([0, 0, 2], 0), ([1, 2], 1)]
    assert list(imdb.test(words)()) == [([1, 0], 0)]


def test_imikolov_gives_n_grams_and_sequences(cache: Path) -> None:
    files = {
        "./simple-examples/data/ptb.train.txt": b" a b a \n c \n",
        "./simple-examples/data/ptb.valid.txt": b"a <unk>\n",
    }
    put_tar(cache / "imikolov" / "imikolov%2Fsimple-examples.tgz", files)
    words = imikolov.build_dict(0)
    assert words == {"<e>": 0, "<s>": 1, "a": 2, "b": 3, "c": 4, "<unk>": 5}
    assert list(imikolov.train(words, 4)()) == [(1, 2, 3, 2), (2, 3, 2, 0)]
    assert list(imikolov.test(words, 2)()) == [(1, 2), (2, 5), (5, 0)]
    sequences = list(imikolov.train(words, 2, imikolov.DataType.SEQ)())
    assert sequences == [([1, 4], [4, 0])], "those longer than n are left out"
    with pytest.raises(SpecError, match="n=0"):
        imikolov.train(words, 0)


def test_movielens_joins_users_films_and_ratings(cache: Path) -> None:
    path = put(cache / "movielens" / "movielens%2Fml-1m.zip", b"")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            "ml-1m/movies.dat", "7::Big Fish (2003)::Drama|Comedy\n9::Caf\xe9 (1999)::Drama\n".encode("latin-1")
        )
        archive.writestr("ml-1m/users.dat", "3::F::18::4::02139\n5::M::56::12::0\n")
        archive.writestr("ml-1m/ratings.dat", "".join(f"{3 + 2 * (i % 2)}::7::4::0\n" for i in range(200)))
    assert (movielens.max_movie_id(), movielens.max_user_id(), movielens.max_job_id()) == (9, 5, 12)
    assert movielens.movie_categories() == {"Comedy": 0, "Drama": 1}
    assert movielens.get_movie_title_dict() == {"big": 0, "café": 1, "fish": 2}
    train, test = list(movielens.train()()), list(movielens.test()())
    assert (len(train) + len(test), 5 < len(test) < 40) == (200, True)
    assert sorted({str(sample) for sample in train}) == [
        "[3, 1, 1, 4, 7, [1, 0], [0, 2], [3.0]]",
        "[5, 0, 6, 12, 7, [1, 0], [0, 2], [3.0]]",
    ]


def test_wmt14_pairs_sentences(cache: Path) -> None:
    words = b"<s>\n<e>\n<unk>\nun\ndeux\n"
    files = {
        "w/src.dict": words,
        "w/trg.dict": words,
        "w/train/train": b"un deux\tdeux\nno tab\n" + b"un " * 90 + b"\tun\n",
    }
    put_tar(cache / "wmt14" / "wmt14.tgz", files)
    assert list(wmt14.train(5)()) == [([0, 3, 4, 1], [0, 4], [4, 1])]
    assert list(wmt14.train(4)()) == [([0, 3, 2, 1], [0, 2], [2, 1])], "a smaller dictionary"
    assert wmt14.get_dict(4)[0] == {0: "<s>", 1: "<e>", 2: "<unk>", 3: "un"}
    with pytest.raises(SpecError, match="has no file test/test"):
        list(wmt14.test(4)())


def test_wmt16_makes_dictionaries_of_both_languages(cache: Path) -> None:
    files = {"wmt16/train": b"a a b\tx\nb a\tx y\n", "wmt16/val": b"b c\ty\n"}
    put_tar(cache / "wmt16" / "wmt16.tar.gz", files)
    assert wmt16.get_dict("en", 4) == {"<s>": 0, "<e>": 1, "<unk>": 2, "a": 3}
    assert wmt16.get_dict("de", 9, reverse=True)[4] == "y"
    assert list(wmt16.validation(9, 9)()) == [([0, 4, 2, 1], [0, 4], [4, 1])]
    assert list(wmt16.validation(9, 9, "de")()) == [([0, 4, 1], [0, 4, 2], [4, 2, 1])]
    with pytest.raises(SpecError, match="'fr'"):
        wmt16.train(9, 9, "fr")


def test_conll05_gives_context_and_tags_of_each_predicate(cache: Path) -> None:
    put(cache / "conll05st" / "conll05st%2FwordDict.txt", b"<unk>\nbos\neos\nthe\ncat\nsat\ndown\n")
    put(cache / "conll05st" / "conll05st%2FverbDict.txt", b"sit\n")
    put(cache / "conll05st" / "conll05st%2FtargetDict.txt", b"B-A0\nI-A0\nB-V\nI-V\nO\n")
    words = gzip.compress(b"the\ncat\nsat\nhere\n\n")
    props = gzip.compress(b"- (A0*\n- *)\nsit (V*)\n- *\n\n")
    folder = "conll05st-release/test.wsj"
    put_tar(
        cache / "conll05st" / "conll05st-tests.tar.gz",
        {f"{folder}/words/test.wsj.words.gz": words, f"{folder}/props/test.wsj.props.gz": props},
    )
    ((*sample, tags),) = conll05.test()()
    assert tags == [0, 1, 2, 4]
    assert sample[0] == [3, 4, 5, 0]
    assert [column[0] for column in sample[1:7]] == [3, 4, 5, 0, 2, 0], "two before, the predicate, two behind; verb"
    assert (sample[7], {len(column) for column in sample}) == ([1, 1, 1, 1], {4})
