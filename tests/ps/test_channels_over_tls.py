"""Channels over TLS: the same steps to the bit, and whoever is not the server, or has no TLS, is refused by name."""

from __future__ import annotations

import datetime
import ipaddress
import re
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from tests.ps.channel_jobs import Start, jobs, trained
from tests.ps.proxy import Proxy
from tests.ps.test_tcp_transport import echo
from tests.support.capabilities import absent
from tests.support.certificates import certificates

from penstock.errors import PeerError, Unavailable
from penstock.native.channels import load_openssl
from penstock.native.openssl import SecureSocket, TlsContext
from penstock.ps.remote import PsMode
from penstock.ps.settings import TlsFiles
from penstock.ps.transport.frames import Line
from penstock.ps.transport.local import LineServer, listener_beside
from penstock.ps.transport.secure import SecureLine, Tls, client_context, server_context
from penstock.ps.transport.tcp import TcpClient, TcpServer
from penstock.ps.wire import Message

HELLO = Message("hello", {"job": "j", "token": "t"})
AUTHORITY = trustme.CA()


def tls_of(*names: str, authority: trustme.CA = AUTHORITY, trusts: bytes | None = None) -> Tls:
    """Return the texts of both sides."""
    issued = authority.issue_cert(*names)
    chain = b"".join(part.bytes() for part in issued.cert_chain_pems)
    root = AUTHORITY.cert_pem.bytes() if trusts is None else trusts
    return Tls(root=root, key=issued.private_key_pem.bytes(), certificate=chain)


def contexts() -> tuple[TlsContext, TlsContext]:
    """Return those of a server and of a client that knows it."""
    tls = tls_of("127.0.0.1")
    return server_context(tls), client_context(tls)


@pytest.fixture
def start() -> Iterator[Start]:
    with jobs() as begin:
        yield begin


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    certificates(tmp_path / "tls")
    return TlsFiles(*(tmp_path / "tls" / f"{name}.pem" for name in ("ca", "cert", "key")))


@pytest.mark.parametrize("mode", ["sync", "async", "half_async"])
def test_channels_over_tls_train_as_messages_do_to_the_bit(start: Start, mode: PsMode, files: TlsFiles) -> None:
    expected = trained(start(mode, by_python=True))
    assert trained(start(mode, shared_memory=False)) == expected
    job = start(mode, shared_memory=False, tls=files)
    assert trained(job) == expected
    assert job.steps == [1, 5], "the first step learns how a step is laid out"
    assert [int(number) > 0 for number in job.ahead] == [True] * 2, "sent ahead of the last step"
    assert not any(link.route.is_local for link in job.clients[0].links)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_step_over_tls_that_breaks_is_applied_once(start: Start, mode: PsMode, files: TlsFiles) -> None:
    expected = trained(start(mode, by_python=True))
    job = start(mode, shared_memory=False, tls=files)
    apply, breaks = job.storages[1].update_all, [3]

    def applied(gradients: Any) -> None:
        apply(gradients)
        if breaks and job.steps[1] == breaks[0]:
            breaks.pop()
            job.clients[0]._session.disarm(1)  # while the trainer waits for its answer

    job.storages[1].update_all = applied  # type: ignore[method-assign]
    assert trained(job) == expected
    assert not breaks
    assert job.steps == [2, 5], "Python repeated the step, and the next one went over channels again"


@pytest.mark.parametrize("lacks", ["trainer", "server"])
def test_without_openssl_steps_take_grpc_and_say_why(
    start: Start, files: TlsFiles, caplog: pytest.LogCaptureFixture, lacks: str
) -> None:
    expected = trained(start("sync", by_python=True))
    why = "no TLS for channels: declared absent by PENSTOCK_ABSENT"
    with absent("channels.tls") if lacks == "server" else closing(socket.socket()):
        job = start("sync", shared_memory=False, tls=files)
    with absent("channels.tls") if lacks == "trainer" else closing(socket.socket()):
        assert trained(job) == expected
    assert job.steps == [5, 5]
    assert len(re.findall("steps at .* go through gRPC", caplog.text)) == 2, "once a server"
    assert why in caplog.text


@pytest.mark.parametrize(
    ("path", "version", "why"),
    [
        ("", "BoringSSL", "has BoringSSL; OpenSSL 1.1.1 and 3 have the interface"),
        ("/nowhere/_ssl.so", "OpenSSL 3.9.9", "/nowhere/_ssl.so, is not loaded"),
        (socket.__dict__["_socket"].__file__, "OpenSSL 3.9.9", "does not show its function"),
        ("_ssl", "OpenSSL 3.9.9", "the functions found are of OpenSSL .*, Python's ssl module has OpenSSL 3.9.9"),
    ],
)
def test_a_library_that_cannot_be_used_is_named(path: str, version: str, why: str) -> None:
    found = sys.modules["_ssl"].__file__ if path == "_ssl" else path
    assert re.search(why, load_openssl(str(found), version))


Serve = Callable[..., int]


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers = []

    def begin(tls: Tls | None = None) -> int:
        listener = listener_beside("127.0.0.1:0")
        context = None if tls is None else server_context(tls)
        servers.append(LineServer(echo, job="j", token="t", listener=listener, tls=context))
        port: int = listener.getsockname()[1]
        return port

    yield begin
    for server in servers:
        server.close()


def opened(port: int, tls: Tls | None, name: str = "127.0.0.1") -> Line:
    """Return a line to a server, on which it has answered `hello`. Raises PeerError, Unavailable."""
    connection = socket.create_connection(("127.0.0.1", port))
    if tls is None:
        line = Line(connection, shares=False)
    else:
        line = SecureLine(connection, client_context(tls), name=name)
    deadline = threading.TIMEOUT_MAX
    try:
        line.open(deadline)
        line.send(HELLO, deadline)
        assert line.receive(deadline).kind == "answer"
    except BaseException:
        line.close()
        raise
    return line


OTHER = trustme.CA()
CHILD = AUTHORITY.create_child_ca()


def of_subject(name: str, *addresses: str) -> Tls:
    """Return the texts of a server whose certificate has the name in its subject, beside alternative names or alone."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    made = x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
    made = made.not_valid_before(now - datetime.timedelta(1)).not_valid_after(now + datetime.timedelta(1))
    if addresses:
        others = [x509.IPAddress(ipaddress.ip_address(address)) for address in addresses]
        made = made.add_extension(x509.SubjectAlternativeName(others), critical=False)
    made = made.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    text = made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    form = serialization.PrivateFormat.TraditionalOpenSSL
    secret = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    return Tls(root=text, key=secret, certificate=text)


PAIRS: dict[str, tuple[Tls, str]] = {
    "address": (tls_of("127.0.0.1"), "127.0.0.1"),
    "name": (tls_of("ps.test"), "ps.test"),
    "wildcard": (tls_of("*.ps.test"), "a.ps.test"),
    "two authorities": (tls_of("ps.test", trusts=OTHER.cert_pem.bytes() + AUTHORITY.cert_pem.bytes()), "ps.test"),
    "chain": (tls_of("ps.test", authority=CHILD), "ps.test"),
    "subject alone": (of_subject("ps.test"), "ps.test"),
    "subject beside an address": (of_subject("ps.test", "127.0.0.1"), "ps.test"),
    "only the child trusted": (tls_of("ps.test", authority=CHILD, trusts=CHILD.cert_pem.bytes()), "ps.test"),
    "another address": (tls_of("127.0.0.2"), "127.0.0.1"),
    "another name": (tls_of("ps.test"), "other.test"),
    "address for a name": (tls_of("ps.test"), "127.0.0.1"),
    "two labels for a wildcard": (tls_of("*.ps.test"), "a.b.ps.test"),
    "another authority": (tls_of("ps.test", authority=OTHER), "ps.test"),
    "another subject": (of_subject("ps.test"), "other.test"),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_a_server_is_known_as_it_is_by_grpc(serve: Serve, pair: str) -> None:
    tls, name = PAIRS[pair]
    server = TcpServer(echo, address="127.0.0.1:0", job="j", token="t", tls=tls)
    client = TcpClient(f"127.0.0.1:{server.port}", job="j", token="t", tls=Tls(root=tls.root, server_name=name))
    try:
        client.call(HELLO, deadline_s=5).release()
        by_grpc = True
    except Unavailable:
        by_grpc = False
    finally:
        client.close()
        server.close()
    try:
        opened(serve(tls), tls, name).close()
        by_channel = True
    except PeerError as error:
        assert "the server's certificate is not accepted" in str(error)  # noqa: PT017 # else it is no refusal
        by_channel = False
    assert by_channel == by_grpc
    assert by_channel == (list(PAIRS).index(pair) < 8)


def test_who_speaks_no_tls_is_told_that_it_has_to(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    port = serve(tls_of("127.0.0.1"))
    with pytest.raises(PeerError, match="the other side speaks TLS, and this side does not"):
        opened(port, None)
    opened(port, tls_of("127.0.0.1")).close()
    assert "was refused: the other side does not speak TLS, which this side requires" in caplog.text


def test_a_server_without_tls_is_no_server_for_tls(serve: Serve) -> None:
    with pytest.raises(Unavailable, match=r"closed the connection within the TLS handshake|broke while"):
        opened(serve(), tls_of("127.0.0.1"))


def test_an_old_version_of_tls_is_refused(serve: Serve) -> None:
    port = serve(tls_of("127.0.0.1"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    with socket.create_connection(("127.0.0.1", port)) as connection, pytest.raises((ssl.SSLError, OSError)):
        context.wrap_socket(connection)


@pytest.mark.parametrize("version", ["TLSv1_2", "TLSv1_3"])
def test_python_speaks_with_it_over_each_version(version: str) -> None:
    """Python's own TLS is the oracle: bytes of any lengths arrive both ways."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    AUTHORITY.configure_trust(context)
    context.maximum_version = context.minimum_version = ssl.TLSVersion[version]
    ours, theirs = socket.socketpair()
    server = SecureSocket(contexts()[0], ours.detach())
    sent = [bytes([n % 251]) * n for n in (1, 100, 1 << 14, (1 << 14) + 1, 300_001, 7)]
    whole = b"".join(sent)

    def serve() -> None:
        server.handshake(threading.TIMEOUT_MAX)
        received = bytearray(len(whole))
        receive_all(server, received)
        server.send([received[:5], b"", memoryview(received)[5:]], threading.TIMEOUT_MAX)

    thread = threading.Thread(target=serve)
    thread.start()
    with context.wrap_socket(theirs, server_hostname="127.0.0.1") as client:
        assert client.version() == {"TLSv1_2": "TLSv1.2", "TLSv1_3": "TLSv1.3"}[version]
        for part in sent:
            client.sendall(part)
        got = b""
        while len(got) < len(whole):
            got += client.recv(1 << 16)
    thread.join()
    assert got == whole


def receive_all(stream: SecureSocket, to: bytearray) -> None:
    got = 0
    while got < len(to):
        count = stream.receive_into(memoryview(to)[got:], threading.TIMEOUT_MAX)
        assert count
        got += count


def pair_of() -> tuple[SecureSocket, SecureSocket]:
    """Return both sides of a connection, after the handshake."""
    of_server, of_client = contexts()
    ours, theirs = socket.socketpair()
    server, client = SecureSocket(of_server, ours.detach()), SecureSocket(of_client, theirs.detach(), name="127.0.0.1")
    thread = threading.Thread(target=server.handshake, args=(threading.TIMEOUT_MAX,))
    thread.start()
    client.handshake(threading.TIMEOUT_MAX)
    thread.join()
    return server, client


def test_both_sides_send_and_receive_at_the_same_time() -> None:
    """As gradients and values of a step do: four threads, more bytes than the sockets hold."""
    sides = pair_of()
    blocks = [bytes([number]) * (3 << 20) for number in range(4)]
    found = [bytearray(sum(map(len, blocks))) for _ in sides]

    def send(side: SecureSocket) -> None:
        for block in blocks:
            side.send([b"head", block[:1000], block[1000:-4]], threading.TIMEOUT_MAX)

    threads = [threading.Thread(target=send, args=(side,)) for side in sides]
    threads += [threading.Thread(target=receive_all, args=(s, f)) for s, f in zip(sides, found, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = b"".join(b"head" + block[:-4] for block in blocks)
    assert found[0] == expected
    assert found[1] == expected


def test_a_handshake_and_a_receive_end_at_their_deadlines() -> None:
    ours, theirs = socket.socketpair()
    server = SecureSocket(contexts()[0], ours.detach())
    with theirs, pytest.raises(Unavailable, match="within the deadline"):
        server.handshake(time.monotonic() + 0.05)
    server, _client = pair_of()
    with pytest.raises(Unavailable, match="within the deadline"):
        server.receive_into(bytearray(4), time.monotonic() + 0.05)


def test_signals_do_not_put_a_deadline_off() -> None:
    server, client = pair_of()
    plain, other = socket.socketpair()
    line = Line(plain, shares=False)
    streams: list[Callable[[float], object]] = [lambda until: server.receive_into(bytearray(4), until), line.receive]
    before, over = signal.signal(signal.SIGUSR1, lambda *_: None), threading.Event()
    me = threading.get_ident()

    def interrupt() -> None:
        while not over.wait(0.03):
            signal.pthread_kill(me, signal.SIGUSR1)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        for stream in streams:
            begun = time.monotonic()
            with pytest.raises(Unavailable, match="deadline"):
                stream(begun + 0.3)
            assert time.monotonic() - begun < 5
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    line.close()
    other.close()
    client.shut_down()


def test_messages_of_several_threads_arrive_whole() -> None:
    server, client = pair_of()
    words = [bytes([number]) * 70_001 for number in range(4)]

    def send(word: bytes) -> None:
        for _ in range(20):
            server.send([word[:5], word[5:40_000], word[40_000:]], threading.TIMEOUT_MAX)

    threads = [threading.Thread(target=send, args=(word,)) for word in words]
    for thread in threads:
        thread.start()
    got = bytearray(len(words) * 20 * 70_001)
    receive_all(client, got)
    for thread in threads:
        thread.join()
    messages = [bytes(got[at : at + 70_001]) for at in range(0, len(got), 70_001)]
    assert sorted(messages) == sorted(words * 20)


def test_a_refusal_leaves_no_error_to_pythons_ssl(serve: Serve) -> None:
    """Its sockets take the errors of their thread for their own: a wait for more bytes would be a failure."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    AUTHORITY.configure_trust(context)
    ours, theirs = socket.socketpair()
    of_server = SecureSocket(contexts()[0], ours.detach())
    thread = threading.Thread(target=of_server.handshake, args=(threading.TIMEOUT_MAX,))
    thread.start()
    with context.wrap_socket(theirs, server_hostname="127.0.0.1") as client:
        thread.join()
        with pytest.raises(PeerError, match="is not accepted"):
            opened(serve(tls_of("other.test")), tls_of("other.test"))
        client.settimeout(0.05)
        with pytest.raises(TimeoutError):
            client.recv(1)


def test_the_key_is_in_no_text_of_the_settings() -> None:
    tls = tls_of("127.0.0.1")
    assert b"PRIVATE KEY" in (tls.key or b"")
    assert "PRIVATE KEY" not in repr(tls)


def test_a_connection_without_memory_does_not_end_the_server(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    port, made = serve(tls_of("127.0.0.1")), SecureLine.__init__

    def fail(*_: Any, **__: Any) -> None:
        monkeypatch.setattr(SecureLine, "__init__", made)
        raise MemoryError

    monkeypatch.setattr(SecureLine, "__init__", fail)
    with socket.create_connection(("127.0.0.1", port)) as refused:
        assert refused.recv(1) == b""
    opened(port, tls_of("127.0.0.1")).close()
    assert "a connection is closed, since it cannot be served: MemoryError()" in caplog.text


def test_a_record_that_was_cut_or_changed_breaks_the_connection() -> None:
    for change in ("cut", "changed"):
        of_server, of_client = contexts()
        ours, outer = socket.socketpair()
        theirs, inner = socket.socketpair()
        server = SecureSocket(of_server, ours.detach())
        client = SecureSocket(of_client, theirs.detach(), name="127.0.0.1")
        threads = [
            threading.Thread(target=forward, args=(outer, inner), daemon=True),
            threading.Thread(target=forward, args=(inner, outer, change), daemon=True),
            threading.Thread(target=server.handshake, args=(threading.TIMEOUT_MAX,), daemon=True),
        ]
        for thread in threads:
            thread.start()
        client.handshake(threading.TIMEOUT_MAX)
        threads[2].join()
        client.send([b"MARK" + bytes(50_000)], threading.TIMEOUT_MAX)
        room = bytearray(60_000)
        if change == "cut":
            count = 0
            while got := server.receive_into(room, threading.TIMEOUT_MAX):
                count += got
            assert count < 50_004
        else:
            with pytest.raises(Unavailable, match=r"broke while a message was decrypted: .*mac"):
                receive_all(server, room)
        for side in (server, client):
            side.shut_down()
        for end in (outer, inner):
            end.close()


def forward(source: socket.socket, to: socket.socket, change: str = "") -> None:
    """Carry bytes to the other side; change or cut the first 20 kB piece and what follows."""
    try:
        while piece := bytearray(source.recv(20_000)):
            if change and len(piece) > 10_000:
                if change == "cut":
                    to.sendall(piece[:5_000])
                    break
                piece[5_000] ^= 1
            to.sendall(piece)
        to.shutdown(socket.SHUT_WR)
    except OSError:
        pass


def test_nobody_reads_a_token_along(serve: Serve) -> None:
    for tls in (tls_of("127.0.0.1"), None):
        proxy = Proxy(serve(tls), listens=True)
        with closing(proxy):
            opened(int(proxy.endpoint.rpartition(":")[2]), tls).close()
            assert (b'"token"' in proxy.overheard) == (tls is None)


def test_what_is_no_certificate_is_named() -> None:
    good = tls_of("127.0.0.1")
    for tls, why in [
        (Tls(key=good.key, certificate=b"x"), "certificate cannot be used: it is no PEM text"),
        (Tls(key=b"x", certificate=good.certificate), "key of the server's certificate cannot be used"),
        (Tls(key=tls_of("a.test").key, certificate=good.certificate), "key of the server's certificate cannot be used"),
    ]:
        with pytest.raises(PeerError, match=why):
            server_context(tls)
    for root, why in [(b"x", "authority of servers' certificates is no PEM text"), (None, "PENSTOCK_PS_TLS_CA")]:
        with pytest.raises(PeerError, match=why):
            client_context(Tls(root=root))
