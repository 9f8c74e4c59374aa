"""jaxrl.processes.http_server against real sockets, and the four servers that are made of it: what a stranger can cost them."""

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time

import pytest
from helpers.tiers import first_only

from jaxrl.envs.proxy import Proxy
from jaxrl.processes import http_server
from jaxrl.processes.http_server import Reply, Server
from jaxrl.report.watch import WatchedRuns
from jaxrl.report.watch import server as watch_server
from jaxrl.rollout.vllm import transport
from jaxrl.sandbox import serve

KEY = "the-key"
PATIENCE = 120.0  # seconds after which a test fails; none waits for it otherwise


def admit(request):
    return None if request.has_key(KEY) else http_server.error(401, "wrong key")


def echo(request):
    return Reply(200, json.dumps([request.method, request.path, request.body.decode()]).encode())


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch):
    """Deadlines that no slow machine reaches; tests of a deadline set their own."""
    for name in ("HEAD_SECONDS", "BODY_SECONDS", "SEND_SECONDS", "LINGER_SECONDS"):
        monkeypatch.setattr(http_server, name, PATIENCE)


@pytest.fixture
def start():
    """start(**options of Server) -> a server that answers."""
    made = []

    def make(answer=echo, **options):
        made.append(Server("127.0.0.1", 0, answer, admit, **{"longest_body": 1 << 20} | options).start("test"))
        return made[-1]

    yield make
    for server in made:
        server.close()


def connect(port):
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)


def to_end(sock):
    """All that comes until the other side closes."""
    out = b""
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(1 << 16):
            out += part
    return out


def raw(port, data):
    with connect(port) as sock:
        sock.sendall(data)
        return to_end(sock)


def head(*lines, first="POST /x HTTP/1.1", key=KEY):
    return "\r\n".join([first, f"Authorization: Bearer {key}", *lines, "", ""]).encode()


def ask(port, body=None, key=KEY, path="/x", method="POST", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request(method, path, body, {"Authorization": f"Bearer {key}", **headers})
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


# ---- the servers of jaxrl


@contextlib.contextmanager
def sandbox_service(tmp_path):
    server = serve.server("127.0.0.1", 0, 2, KEY).start("sandbox")
    try:
        yield server.port, KEY, "/nowhere", 404
    finally:
        server.close()


@contextlib.contextmanager
def weights(tmp_path):
    network = transport.Network("127.0.0.1")
    try:
        yield int(network.address.rpartition(":")[2]), network.key, "/1", 404
    finally:
        network.close()


@contextlib.contextmanager
def watch(tmp_path):
    class Nothing(WatchedRuns):
        def content(self):
            raise OSError("no run here")

    server = watch_server(Nothing([tmp_path], None, 5.0), 0).start("watch")
    try:
        yield server.port, None, "/", 503
    finally:
        server.close()


@contextlib.contextmanager
def proxy(tmp_path):
    ready, ended, told = threading.Event(), asyncio.Event(), {}

    async def main():
        made = Proxy()
        told["loop"] = asyncio.get_running_loop()
        with made.open() as (key, _):
            told.update(port=int(made.url().rpartition(":")[2].partition("/")[0]), key=key)
            ready.set()
            await ended.wait()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert ready.wait(PATIENCE)
    try:
        yield told["port"], told["key"], "/v1/models", 200
    finally:
        told["loop"].call_soon_threadsafe(ended.set)
        thread.join()


@pytest.fixture(params=first_only([proxy, sandbox_service, weights, watch]), ids=lambda made: made.__name__)
def ours(request, tmp_path):
    """(port, key, a path, the status that whoever shows the key gets there); without a key the Host is asked for."""
    with request.param(tmp_path) as found:
        yield found


def test_a_key_is_asked_for_before_the_body(ours):
    """A stranger who announces a body that nobody could hold is refused while none of it has come."""
    port, key, path, _ = ours
    wrong = "Host: elsewhere.example" if key is None else "Authorization: Bearer wrong"
    for size in ("Content-Length: 99999999999999", "Transfer-Encoding: chunked"):
        with connect(port) as sock:
            sock.sendall(f"POST {path} HTTP/1.1\r\n{wrong}\r\n{size}\r\n\r\n".encode())
            status = sock.recv(1 << 16).split(b" ")[1]
            assert status == (b"403" if key is None else b"401")


def test_a_body_that_is_too_large_is_not_read(ours):
    port, key, path, status = ours
    method = "GET" if path != "/nowhere" else "POST"
    right = f"Host: 127.0.0.1:{port}" if key is None else f"Authorization: Bearer {key}"
    with connect(port) as sock:
        sock.sendall(f"{method} {path} HTTP/1.1\r\n{right}\r\nContent-Length: 99999999999999\r\n\r\n".encode())
        assert sock.recv(1 << 16).split(b" ")[1] == (b"404" if path == "/nowhere" else b"413")


def test_a_head_without_end_is_refused(ours):
    """Told so, and closed at last to whoever does not listen."""
    port, sent, most = ours[0], 0, 1 << 29
    with connect(port) as sock:
        sock.sendall(b"X" * http_server.MAX_HEAD_BYTES)
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 431 ")
        with contextlib.suppress(ConnectionError):
            while sent < most:
                sock.sendall(bytes(1 << 20))
                sent += 1 << 20
    assert sent < most


def test_silent_connections_cost_no_threads_and_keep_nobody_out(ours):
    port, key, path, status = ours
    threads, silent = threading.active_count(), []
    try:
        for _ in range(300):
            silent.append(connect(port))
        found, _ = ask(port, key=key or "", path=path, method="GET")
        assert found == status and threading.active_count() <= threads + 1  # the one that answers
    finally:
        for sock in silent:
            sock.close()


# ---- the rule


def test_the_oldest_silent_connection_gives_way(start):
    server = start(connections=8)
    silent = [connect(server.port) for _ in range(8)]
    until(lambda: len(server._open) == 8)
    assert ask(server.port, b"hello")[0] == 200
    assert to_end(silent[0]) == b""
    silent[-1].sendall(head("Content-Length: 0", "Connection: close"))  # the newest is there still
    assert to_end(silent[-1]).startswith(b"HTTP/1.1 200 OK")
    for sock in silent:
        sock.close()


def test_when_all_are_at_work_further_ones_get_503(start):
    begun, go = threading.Semaphore(0), threading.Event()

    def slow(request):
        begun.release()
        assert go.wait(PATIENCE)
        return echo(request)

    server, found = start(slow, connections=8, threads=3), []
    clients = [threading.Thread(target=lambda: found.append(ask(server.port, b"x")[0])) for _ in range(8)]
    for client in clients:
        client.start()
    for _ in range(3):  # of the eight three are at work, the others wait without a thread
        assert begun.acquire(timeout=PATIENCE)
    until(lambda: len(server._open) == 8 and not server._waiting)
    assert sum(t.name == "http-answer" for t in threading.enumerate()) == 3
    with connect(server.port) as sock:
        assert b"503 Service Unavailable" in to_end(sock)
    go.set()
    for client in clients:
        client.join()
    assert found == [200] * 8


@pytest.mark.full
def test_silence_and_dripping_end(start, monkeypatch):
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.3)
    port = start().port
    with connect(port) as sock:
        assert to_end(sock) == b""
    with connect(port) as sock:
        sock.setblocking(False)
        end, drips = time.monotonic() + PATIENCE, 0
        while True:
            assert time.monotonic() < end
            try:
                sock.send(b"P")
                drips += 1
                time.sleep(0.02)
                if sock.recv(1) == b"":
                    break
            except BlockingIOError:
                continue
            except ConnectionError:
                break
        assert drips
    monkeypatch.setattr(http_server, "HEAD_SECONDS", PATIENCE)
    monkeypatch.setattr(http_server, "BODY_SECONDS", 0.3)
    for lines, body in (("Content-Length: 10",), b"12345"), (("Transfer-Encoding: chunked",), b"5\r\n12345\r\n"):
        assert b"408 Request Timeout" in raw(port, head(*lines) + body)


def test_a_reply_that_nobody_takes_ends(start, monkeypatch):
    monkeypatch.setattr(http_server, "SEND_SECONDS", 0.3)
    server = start(lambda request: Reply(200, bytes(1 << 26)))
    with connect(server.port) as sock:
        sock.sendall(head())
        until(lambda: server._open)
        until(lambda: not server._open)
    monkeypatch.setattr(http_server, "SEND_SECONDS", PATIENCE)
    assert len(ask(server.port)[1]) == 1 << 26


def test_a_refusal_reaches_a_client_that_sends_its_whole_body(start):
    port = start(longest_body=1000).port
    status, body = ask(port, b"x" * (1 << 22), key="wrong")
    assert (status, json.loads(body)) == (401, {"error": "wrong key"})
    assert ask(port, b"x" * (1 << 22))[0] == 413


@pytest.mark.parametrize("data, status", [
    (b"hello\r\n\r\n", 400), (b"GET /x\r\n\r\n", 400), (b"GET  /x HTTP/1.1\r\n\r\n", 400), (b"GET /x HTTP/2\r\n\r\n", 400),
    (head("Content-Length: -1"), 400), (head("Content-Length: \xb2".encode("latin-1").decode("latin-1")), 400),
    (head("Content-Length: 1", "Content-Length: 2"), 400), (head("Content-Length: 99999999999999999999"), 400),
    (head("Transfer-Encoding: gzip"), 400), (head("Transfer-Encoding: chunked", "Content-Length: 3"), 400),
    (head(" folded"), 400), (head("no colon"), 400), (head("na me: 1"), 400), (head("Authorization: Bearer x"), 400),
    (head("Transfer-Encoding: chunked") + b"-5\r\n", 400), (head("Transfer-Encoding: chunked") + b"0x5\r\n", 400),
    (head("Transfer-Encoding: chunked") + b"2\r\nabcd", 400), (head("Transfer-Encoding: chunked") + b"ffffffffff\r\n", 413),
    (head("Transfer-Encoding: chunked") + b"1;" + b"x" * (1 << 17), 431)])
def test_what_is_no_request_is_told_so(start, data, status):
    assert raw(start().port, data).startswith(f"HTTP/1.1 {status} ".encode())


def test_requests_follow_each_other(start):
    """Three at once, one of them in chunks; HEAD has no body; an answer that fails is a 500 and no lost connection."""
    def answer(request):
        if request.path == "/fails":
            raise KeyError("x")
        return echo(request)

    port = start(answer).port
    out = raw(port, head("Content-Length: 2") + b"ab" + head("Transfer-Encoding: chunked")
              + b"2;a=b\r\ncd\r\n1\r\ne\r\n0\r\nTrailer: x\r\n\r\n" + head(first="GET /fails HTTP/1.1")
              + head("Connection: close", first="GET /y HTTP/1.1"))
    assert [out.count(part) for part in (b'["POST", "/x", "ab"]', b'["POST", "/x", "cde"]', b"500 Internal", b"KeyError",
                                         b'["GET", "/y", ""]')] == [1] * 5
    assert raw(port, head(first="HEAD /x HTTP/1.1")).endswith(b"\r\n\r\n")
    assert b"Connection: close" in raw(port, head(first="GET /x HTTP/1.0"))
    with connect(port) as sock:
        sock.sendall(head("Expect: 100-continue", "Content-Length: 2", "Connection: close"))
        assert sock.recv(1 << 16) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(b"ok")
        assert b'"ok"' in to_end(sock)


def test_closing_ends_it(start):
    server = start(lambda request: Reply(200, bytes(1 << 28)))
    idle, taking = connect(server.port), connect(server.port)
    taking.sendall(head())
    assert taking.recv(10)
    server.close()
    server.close()
    assert to_end(idle) == b"" and len(to_end(taking)) < 1 << 28
    assert not server._thread.is_alive()
    with pytest.raises(ConnectionRefusedError):
        connect(server.port)
    never = Server("127.0.0.1", 0, echo, admit)
    never.close()
    never.run()  # which ends at once
