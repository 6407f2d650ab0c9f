"""Calls over gRPC: large tensors in small chunks, deadlines, tokens, TLS, garbage, a lost server."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import pytest
import trustme
from tests.support.waiting import LIMIT_S

from penstock.errors import PeerError, Unavailable
from penstock.ps.transport.secure import Tls
from penstock.ps.transport.tcp import CHUNK_BYTES, TcpClient, TcpServer, assembled, chunks
from penstock.ps.wire import Message, WireError, WireTensor

Array = npt.NDArray[Any]


def push(values: Array) -> Message:
    """Return a push of one array."""
    tensor = WireTensor("w", str(values.dtype), values.shape, memoryview(values.tobytes()))
    return Message("push", {"job": "j", "trainer": 0, "epoch": 0, "round": 5, "block": "w"}, [tensor])


def values_of(message: Message) -> Array:
    """Return a message's only tensor."""
    (tensor,) = message.tensors
    return np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape)


def echo(message: Message) -> Message:
    """Answer with the same tensors."""
    return Message(
        "answer", {"round": 5, "staleness": 0}, [WireTensor(t.name, t.dtype, t.shape, t.data) for t in message.tensors]
    )


Serve = Callable[..., tuple[TcpServer, TcpClient]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    made: list[Any] = []

    def start(
        handler: Callable[[Message], Message] = echo,
        token: str = "t",
        server: Tls | None = None,
        client: Tls | None = None,
    ) -> tuple[TcpServer, TcpClient]:
        one = TcpServer(handler, address="127.0.0.1:0", job="j", token="t", tls=server)
        other = TcpClient(f"127.0.0.1:{one.port}", job="j", token=token, tls=client)
        made.extend([other, one])
        return one, other

    yield start
    for one in made:
        one.close()


def test_an_exported_proxy_is_not_used(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # the port of `discard`, where no proxy listens
    _, client = serve()
    with client.call(push(np.ones(3)), deadline_s=LIMIT_S) as answer:
        assert np.array_equal(values_of(answer), np.ones(3))


@pytest.mark.parametrize("count", [0, 3, CHUNK_BYTES // 8, CHUNK_BYTES // 8 + 1, 2_000_000])
def test_tensors_arrive_unchanged_whatever_their_size(serve: Serve, count: int) -> None:
    _, client = serve()
    values = np.arange(count, dtype=np.float64)
    with client.call(push(values), deadline_s=LIMIT_S) as answer:
        assert np.array_equal(values_of(answer), values)


def test_no_chunk_is_larger_than_two_mebibytes() -> None:
    sizes = [len(c) for c in chunks(push(np.zeros(1_000_000)))]
    assert max(sizes) == CHUNK_BYTES
    assert len(sizes) == 1 + 4


def test_a_body_ends_where_its_head_says() -> None:
    taken = 0

    def endless() -> Iterator[bytes]:
        nonlocal taken
        yield next(chunks(push(np.ones(3))))
        while taken < 100:
            taken += 1
            yield bytes(16)

    with pytest.raises(WireError, match="announces 24 bytes, but more came"):
        assembled(endless())
    assert taken == 2


def test_a_wrong_token_is_refused_and_nothing_is_handled(serve: Serve) -> None:
    seen: list[Message] = []

    def note(message: Message) -> Message:
        seen.append(message)
        return echo(message)

    _, client = serve(note, token="guessed")
    with pytest.raises(PeerError, match="the job or its token is wrong"):
        client.call(push(np.ones(3)), deadline_s=LIMIT_S)
    assert seen == []


def test_a_fault_of_the_handler_is_an_answer(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    def fail(message: Message) -> Message:
        raise OSError(28, "No space left on device")

    _, client = serve(fail)
    with client.call(push(np.ones(3)), deadline_s=LIMIT_S) as answer:
        assert "OSError: [Errno 28] No space left on device" in str(answer.fields["reason"])
    assert caplog.text.count("Traceback") == 1


def test_a_handler_that_is_unavailable_breaks_the_call(serve: Serve) -> None:
    def go(message: Message) -> Message:
        raise Unavailable("the server has ended")

    _, client = serve(go)
    with pytest.raises(Unavailable, match="the server has ended"):
        client.call(push(np.ones(3)), deadline_s=LIMIT_S)


def test_a_call_ends_at_its_deadline(serve: Serve) -> None:
    release = threading.Event()

    def wait(message: Message) -> Message:
        release.wait(LIMIT_S)
        return echo(message)

    _, client = serve(wait)
    with pytest.raises(Unavailable, match="deadline exceeded"):
        client.call(push(np.ones(3)), deadline_s=0.3)
    release.set()


def test_a_server_that_is_gone_is_named(serve: Serve) -> None:
    server, client = serve()
    server.close()
    with pytest.raises(Unavailable, match=rf"127\.0\.0\.1:{server.port}: unavailable"):
        client.call(push(np.ones(3)), deadline_s=LIMIT_S)


def test_a_port_in_use_is_an_error(serve: Serve) -> None:
    server, _ = serve()
    with pytest.raises(Unavailable, match=rf"cannot listen at 127\.0\.0\.1:{server.port}"):
        TcpServer(echo, address=f"127.0.0.1:{server.port}", job="j", token="t")


def test_a_thousand_malformed_calls_change_nothing(serve: Serve) -> None:
    seen: list[Message] = []

    def note(message: Message) -> Message:
        seen.append(message)
        return echo(message)

    server, client = serve(note)
    good = list(chunks(push(np.ones(100))))
    rng = random.Random(3)
    metadata = (("authorization", "Bearer t"), ("penstock-job", "j"))
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        method: Any = channel.stream_stream("/penstock.ps.Parameters/Call")
        for number in range(1000):
            broken = [bytearray(c) for c in good]
            broken[0][rng.randrange(12)] = rng.choice([0, 255, ord("}")])
            if number % 3 == 0:
                broken.pop()
            if number % 5 == 0:
                broken.append(bytearray(rng.randbytes(50)))
            answers = list(method(iter([bytes(c) for c in broken]), timeout=LIMIT_S, metadata=metadata))
            assert b"refuse" in answers[0] or seen, answers
    assert all(m.kind == "push" for m in seen), "a mutation may leave the message as it was"
    assert len(seen) < 100
    with client.call(push(np.ones(3)), deadline_s=LIMIT_S) as answer:
        assert values_of(answer).tolist() == [1.0, 1.0, 1.0]


def test_tls_encrypts_and_a_stranger_is_not_trusted(serve: Serve) -> None:
    authority, other = trustme.CA(), trustme.CA()
    issued = authority.issue_cert("pserver.test")
    certificate = b"".join(p.bytes() for p in issued.cert_chain_pems)
    server = Tls(key=issued.private_key_pem.bytes(), certificate=certificate)
    trusting = Tls(root=authority.cert_pem.bytes(), server_name="pserver.test")
    _, client = serve(server=server, client=trusting)
    with client.call(push(np.ones(3)), deadline_s=LIMIT_S) as answer:
        assert values_of(answer).tolist() == [1.0, 1.0, 1.0]
    for tls in (Tls(root=other.cert_pem.bytes(), server_name="pserver.test"), None):
        _, stranger = serve(server=server, client=tls)
        with pytest.raises(Unavailable):
            stranger.call(push(np.ones(3)), deadline_s=5)
