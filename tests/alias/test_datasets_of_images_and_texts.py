"""`paddle.dataset`: images, flowers, VOC 2012, reviews and ranked documents, from files of Fluid's formats."""

from __future__ import annotations

import io
import pickle
import sys
import tarfile
import types
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.io import savemat

from penstock.alias.dataset import common, flowers, image, mq2007, sentiment, voc2012
from penstock.errors import SpecError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(common, "DATA_HOME", str(tmp_path))
    return tmp_path


def put_tar(path: Path, files: Mapping[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


@pytest.mark.parametrize("module", [flowers, mq2007, sentiment, voc2012])
def test_fetch_says_which_file_to_put_where(module: Any, cache: Path) -> None:
    with pytest.raises(SpecError, match=f"needs the file {cache}.*is not there.*http"):
        module.fetch()


# ---------------------------------------------------------------- images


def test_the_shorter_edge_is_resized_and_the_middle_kept() -> None:
    row = np.linspace(0, 200, 8).astype(np.uint8)
    whole = np.stack([np.tile(row, (4, 1))] * 3, 2)
    small = image.resize_short(whole, 2)
    assert (small.shape, small.dtype) == ((2, 4, 3), np.uint8)
    np.testing.assert_array_equal(image.resize_short(whole, 4), whole)
    np.testing.assert_array_equal(image.resize_short(whole.transpose(1, 0, 2), 2), small.transpose(1, 0, 2))
    grown = image.resize_short(whole[:, :, 0].astype("float32"), 8)
    expected = torch.nn.functional.interpolate(
        torch.from_numpy(whole[:, :, 0]).float()[None, None], (8, 16), mode="bicubic"
    )
    np.testing.assert_allclose(grown, expected[0, 0], atol=1e-3)  # float32 there, float64 here
    np.testing.assert_array_equal(image.center_crop(whole, 2), whole[1:3, 3:5])


def test_training_crops_and_flips_from_the_generator_of_numpy() -> None:
    whole = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
    np.random.seed(5)
    found = image.simple_transform(whole, 4, 3, is_train=True, mean=[1.0, 2.0, 3.0])
    np.random.seed(5)
    top, left = np.random.randint(0, 2), np.random.randint(0, 4)
    part = whole[top : top + 3, left : left + 3]
    part = part[:, ::-1] if np.random.randint(2) == 0 else part
    np.testing.assert_array_equal(found, part.transpose(2, 0, 1) - np.arange(1.0, 4.0).reshape(3, 1, 1))
    grey = image.simple_transform(whole[:, :, 0], 4, 3, is_train=False, is_color=False)
    np.testing.assert_array_equal(grey, whole[:3, 1:4, 0])


def test_an_archive_of_images_is_batched_into_pickles(cache: Path) -> None:
    archive = put_tar(cache / "a.tar", {"x/1": b"one", "x/2": b"two", "x/3": b"three", "x/4": b"other"})
    listed = image.batch_images_from_tar(str(archive), "train", {"x/1": 7, "x/2": 8, "x/3": 9}, num_per_batch=2)
    files = Path(listed).read_text(encoding="utf-8").split()
    batches = [pickle.loads(Path(file).read_bytes()) for file in files]  # noqa: S301 - what was just written
    assert [(b["label"], b["data"]) for b in batches] == [([7, 8], [b"one", b"two"]), ([9], [b"three"])]
    archive.unlink()
    assert image.batch_images_from_tar(str(archive), "train", {}) == listed, "not written again"


def test_an_image_without_opencv_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(SpecError, match="pip install opencv"):
        image.load_image_bytes(b"")
    monkeypatch.setitem(sys.modules, "cv2", types.SimpleNamespace(imdecode=lambda content, flag: None))
    with pytest.raises(SpecError, match="5 bytes are no image"):
        image.load_image_bytes(b"bytes")


def test_flowers_have_the_labels_of_their_part(cache: Path) -> None:
    folder = cache / "flowers"
    put_tar(folder / "102flowers.tgz", {f"jpg/image_{i:05d}.jpg": bytes([i]) for i in (3, 1, 2)})
    savemat(folder / "imagelabels.mat", {"labels": [[12, 11, 10]]})
    savemat(folder / "setid.mat", {"tstid": [[1, 3]], "trnid": [[2]], "valid": [[1]]})
    plain: Any = lambda sample: sample  # noqa: E731 - a mapper
    assert list(flowers.train(plain, use_xmap=False)()) == [(b"\x03", 9), (b"\x01", 11)]
    assert list(flowers.test(plain)()) == [(b"\x02", 10)]
    endless = iter(flowers.train(plain, use_xmap=False, cycle=True)())
    assert [next(endless)[1] for _ in range(4)] == [9, 11, 9, 11]
    savemat(folder / "setid.mat", {"other": [[1]]})
    with pytest.raises(SpecError, match="no row of numbers 'valid'"):
        flowers.valid(plain)


def test_voc2012_pairs_images_with_classes_of_pixels(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = "VOCdevkit/VOC2012"
    put_tar(
        cache / "voc2012" / "VOCtrainval_11-May-2012.tar",
        {
            f"{root}/ImageSets/Segmentation/val.txt": b"one\ntwo\n",
            f"{root}/JPEGImages/one.jpg": b"\x01\x02",
            f"{root}/SegmentationClass/one.png": b"\x03",
        },
    )
    pillow = types.SimpleNamespace(Image=types.SimpleNamespace(open=lambda file: np.frombuffer(file.read(), np.uint8)))
    monkeypatch.setitem(sys.modules, "PIL", pillow)
    samples = iter(voc2012.val()())
    assert [part.tolist() for part in next(samples)] == [[1, 2], [3]]
    with pytest.raises(SpecError, match=r"has no file .*two\.jpg"):
        next(samples)


# ---------------------------------------------------------------- texts


def test_reviews_are_split_and_numbered_as_nltk_does(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cache / "corpora" / "movie_reviews.zip"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in (("neg/b", "bad . don't !!"), ("neg/a", "bad ."), ("pos/a", "good ."), ("pos/b", "good")):
            archive.writestr(f"movie_reviews/{name}.txt", text)
        archive.writestr("movie_reviews/README", "good")
    words = sentiment.get_word_dict()
    assert words == [(w, i) for i, w in enumerate([".", "bad", "good", "don", "'", "t", "!!"])]
    monkeypatch.setattr(sentiment, "NUM_TRAINING_INSTANCES", 3)
    assert list(sentiment.train()) == [([1, 0], 0), ([2, 0], 1), ([1, 0, 3, 4, 5, 6], 0)]
    assert list(sentiment.test()) == [([2], 1)]


def _document(relevance: int, query: int, first: float) -> str:
    features = " ".join(f"{i}:{first + i}" for i in range(1, 47))
    return f"{relevance} qid:{query} {features} #docid = G{relevance}"


def test_documents_are_ranked_within_their_query(cache: Path) -> None:
    path = cache / "MQ2007" / mq2007._FOLD / "train.txt"
    path.parent.mkdir(parents=True)
    lines = [_document(0, 7, 0), _document(2, 7, 1), _document(1, 7, 2), _document(0, 8, 3), "0 qid:8 1:1 # short"]
    path.write_text("\n".join([*lines, _document(1, 9, 4)]), encoding="utf-8")
    (query, *_), lists = mq2007.load_from_text(f"{mq2007._FOLD}/train.txt"), list(mq2007.train(format="listwise"))
    assert (query.query_id, len(query), query[1].description) == (7, 3, "docid = G2")
    assert [labels.ravel().tolist() for labels, _ in lists] == [[2, 1, 0], [1]]
    assert lists[0][1].shape == (3, 46)
    pairs = [(label.tolist(), better[0], other[0]) for label, better, other in mq2007.train()]
    assert pairs == [([1], 2.0, 3.0), ([1], 2.0, 1.0), ([1], 3.0, 1.0)]
    assert [(label, features[0]) for label, features in mq2007.train(format="pointwise")] == [(2, 2.0), (1, 5.0)]
    with pytest.raises(SpecError, match="expected one of pairwise"):
        next(mq2007.train(format="pairs"))
    with pytest.raises(SpecError, match=r"those of \[7, 9\]"):
        mq2007.QueryList([*query, mq2007.Query(query_id=9)])
