"""HTTP/1.1 server of every port that jaxrl serves itself: a trainer's weights, `sandbox.serve`, `report --watch` and
the API of `env.program`.

A request is admitted or refused by its head, before its body is read. Heads and bodies have a size limit and a
deadline. Connections are counted; one that has not sent a complete head uses a file descriptor but no thread, and is
closed for a new one when the server is full. Standard library only: workers import it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import inspect
import json
import logging
import re
import resource
import socket
import threading
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import NamedTuple, TypeVar

from jaxrl.processes.addresses import address_family

log = logging.getLogger("jaxrl")
MAX_HEAD_BYTES = 1 << 16   # bytes; also of the lengths and trailers of a chunked body
HEAD_SECONDS = 30.0      # from the connection, or the first byte of a later request, to the end of the head
BODY_SECONDS = 120.0     # for the whole body
SEND_SECONDS = 60.0      # for each SLICE of a reply
SLICE = 1 << 24          # bytes
LINGER_SECONDS = 5.0     # in which the rest of a refused request is thrown away,
LINGER_BYTES = 1 << 26   # up to so much


T = TypeVar("T")


class Request(NamedTuple):
    """A request.

    Attributes:
      path: with the query. version: "HTTP/1.1" or another "HTTP/1.x". headers: by name in lower case. body: empty while
        the request is being admitted.
    """

    method: str
    path: str
    version: str
    headers: dict[str, str]
    body: bytes = b""

    @property
    def closes(self) -> bool:
        """Whether this is the last request of its connection."""
        return (self.version != "HTTP/1.1" or self.method == "HEAD"
                or "close" in self.headers.get("connection", "").lower())

    @property
    def bearer(self) -> str:
        """The key in `Authorization: Bearer KEY`, else empty."""
        kind, _, key = self.headers.get("authorization", "").partition(" ")
        return key.strip() if kind.lower() == "bearer" else ""

    def has_key(self, key: str) -> bool:
        """Returns whether the request carries this key, compared in constant time. A request without a key carries
        ""."""
        return hmac.compare_digest(self.bearer.encode(), key.encode())


class Reply(NamedTuple):
    """A reply.

    Attributes:
      status: HTTP status. kind: content type. headers: lines `Name: value`, without those of body, length and
        connection.
    """

    status: int
    body: bytes | bytearray = b""
    kind: str = "application/json"
    headers: tuple[str, ...] = ()


def error(status: int, text: str) -> Reply:
    """Returns an error reply {"error": text} as JSON, with an HTTP status."""
    return Reply(status, json.dumps({"error": text}).encode())


class Server:
    """A listening server; `run`, `start` or `serve` handles requests.

    Args:
      host, port: where it listens; "" = all addresses, port 0 = a free one (see `self.port`).
      admit: called, in the server's loop, with a request without its body; must not block. Returns None, or the reply
        that refuses it.
      answer: called with the whole admitted request, returns the reply: a coroutine function, or a function that runs
        in a thread. If it raises, the reply has status 500 and the error's text.
      longest_body: largest body in bytes; a larger one is refused with status 413.
      connections: open at once, at most half of the process's open files.
      threads: concurrent calls of `answer` if it is not a coroutine function; further ones wait.
      refuse: builds the replies to requests that never reach `admit`: malformed, too large, late.
    """

    def __init__(self, host: str, port: int, answer: Callable, admit: Callable[[Request], Reply | None], *,
                 longest_body: int = 0, connections: int = 256, threads: int = 1,
                 refuse: Callable[[int, str], Reply] = error):
        async def admitted(request: Request) -> Reply | None:
            return admit(request)

        self._admit, self._refuse, self._longest_body = admitted, refuse, longest_body
        self._answer: Callable[[Request], Awaitable[Reply]] = (
            answer if inspect.iscoroutinefunction(answer) else functools.partial(self._in_thread, answer))
        self._most = min(connections, max(8, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))
        self._places = asyncio.Semaphore(threads)
        self._listening = socket.create_server((host, port), family=address_family(host), backlog=128)
        self._listening.setblocking(False)
        self.host, self.port = self._listening.getsockname()[:2]
        self._open: dict[socket.socket, asyncio.Task] = {}
        self._waiting: dict[socket.socket, None] = {}  # those without a whole head, the oldest first
        self._lock, self._closed = threading.Lock(), False
        self._serving: asyncio.Task | None = None  # in self._loop
        self._thread: threading.Thread | None = None

    _loop: asyncio.AbstractEventLoop  # once it serves

    def run(self) -> None:
        """Handles requests until `close`; Ctrl-C in the main thread ends it with KeyboardInterrupt."""
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self.serve())

    def start(self, name: str) -> Server:
        """Handles requests in a daemon thread of that name; returns the server."""
        self._thread = threading.Thread(target=self.run, daemon=True, name=name)
        self._thread.start()
        return self

    def close(self) -> None:
        """Closes all connections, and waits for the thread of `start`. Any other thread may call it, also twice."""
        with self._lock:
            self._closed = True
            if self._serving is None:
                self._listening.close()
            else:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    self._loop.call_soon_threadsafe(self._serving.cancel)
        if self._thread is not None:
            self._thread.join()

    async def serve(self) -> None:
        """Handles requests as a task of the caller's loop until it is cancelled."""
        with self._lock:
            if self._closed:
                return
            self._loop, self._serving = asyncio.get_running_loop(), asyncio.current_task()
        try:
            while True:
                try:
                    sock, _ = await self._loop.sock_accept(self._listening)
                except OSError:  # out of file descriptors, or the other side has gone
                    await asyncio.sleep(0 if self._evict() else 0.1)
                    continue
                self._take(sock)
        finally:
            self._listening.close()
            for task in self._open.values():
                task.cancel()

    def _take(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if len(self._open) >= self._most and not self._evict():
            reply = self._refuse(503, "too many connections; try again")
            with contextlib.suppress(OSError):
                sock.send(_head(reply, close=True) + reply.body)
            sock.close()
            return
        self._waiting[sock] = None
        task = self._open[sock] = self._loop.create_task(self._serve_connection(sock))
        task.add_done_callback(lambda _: self._drop(sock))

    def _evict(self) -> bool:
        """Ends the oldest connection that has not sent a whole head; False if there is none."""
        if not self._waiting:
            return False
        oldest = next(iter(self._waiting))
        del self._waiting[oldest]
        self._open.pop(oldest).cancel()
        return True

    def _drop(self, sock: socket.socket) -> None:
        self._waiting.pop(sock, None)
        self._open.pop(sock, None)
        sock.close()

    async def _serve_connection(self, sock: socket.socket) -> None:
        reader = _Reader(self._loop, sock)
        with contextlib.suppress(OSError, EOFError):  # gone, late or silent
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while await self._one(sock, reader):
                self._waiting[sock] = None
                await reader.some()  # which may take any time: an answered connection stays until its place is wanted

    async def _one(self, sock: socket.socket, reader: _Reader) -> bool:
        """Answers one request. Returns whether another may follow."""
        close = unread = True
        request = None
        try:
            async with asyncio.timeout(HEAD_SECONDS):
                head = await reader.until(b"\r\n\r\n")
            request = _request(head)
            size = _body_size(request)
            refusal = await self._reply(self._admit, request)
            self._waiting.pop(sock, None)
            if refusal is None:
                whole = await self._with_body(sock, reader, request, size)
                reply, size = await self._reply(self._answer, whole), 0
            else:
                reply = refusal
            unread = size != 0
            close = unread or request.closes
        except _Bad as e:
            reply = self._refuse(e.status, str(e))
        bodiless = request is not None and request.method == "HEAD"
        await self._send(sock, reply._replace(body=b"") if bodiless else reply, close)
        if unread:
            await self._discard_rest(sock)
        return not close

    async def _with_body(self, sock, reader: _Reader, request: Request, size: int | None) -> Request:
        if (size or 0) > self._longest_body:
            raise _Bad(413, f"a body of {size} bytes; at most {self._longest_body} are accepted")
        if size != 0 and request.headers.get("expect", "").lower() == "100-continue":
            await self._loop.sock_sendall(sock, b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await (reader.chunked(self._longest_body) if size is None else reader.exactly(size))
        except TimeoutError:
            raise _Bad(408, f"the body did not come within {BODY_SECONDS:g} s") from None
        return request._replace(body=body)

    async def _reply(self, function: Callable[[Request], Awaitable[T]], request: Request) -> T | Reply:
        try:
            return await function(request)
        except Exception as e:
            log.exception("%s %s", request.method, request.path)
            return self._refuse(500, f"{type(e).__name__}: {e}")

    async def _in_thread(self, answer: Callable, request: Request) -> Reply:
        """answer(request) in a thread that keeps no process alive, as those of asyncio.to_thread do."""
        loop, future = self._loop, self._loop.create_future()

        def settle(setter, value):
            if not future.done():
                setter(value)

        def work():
            try:
                outcome = future.set_result, answer(request)
            except BaseException as e:
                outcome = future.set_exception, e
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(settle, *outcome)

        async with self._places:
            threading.Thread(target=work, daemon=True, name="http-answer").start()
            return await future

    async def _send(self, sock: socket.socket, reply: Reply, close: bool) -> None:
        data = memoryview(reply.body)
        for part in (_head(reply, close), *(data[at:at + SLICE] for at in range(0, len(data), SLICE))):
            async with asyncio.timeout(SEND_SECONDS):
                await self._loop.sock_sendall(sock, part)

    async def _discard_rest(self, sock: socket.socket) -> None:
        """What is still on its way: closing before it has come would take the reply away from the other side."""
        self._waiting[sock] = None
        sock.shutdown(socket.SHUT_WR)
        left = LINGER_BYTES
        async with asyncio.timeout(LINGER_SECONDS):
            while left > 0 and (part := await self._loop.sock_recv(sock, 1 << 16)):
                left -= len(part)


class _Bad(Exception):
    """A request that cannot be read."""

    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status


class _Reader:
    """What comes over a connection. Raises EOFError at its end."""

    def __init__(self, loop, sock: socket.socket):
        self._loop, self._sock, self._data = loop, sock, bytearray()

    async def some(self) -> None:
        """Returns when there is a byte."""
        if not self._data:
            await self._more()

    async def until(self, mark: bytes) -> bytes:
        """What comes before the mark, of at most LONGEST_HEAD bytes."""
        start = 0
        while (at := self._data.find(mark, start, MAX_HEAD_BYTES)) < 0:
            if len(self._data) >= MAX_HEAD_BYTES:
                raise _Bad(431, f"no head within {MAX_HEAD_BYTES} bytes")
            start = max(0, len(self._data) - len(mark))
            await self._more()
        return self._taken(at + len(mark))[:at]

    async def exactly(self, size: int) -> bytes:
        while len(self._data) < size:
            await self._more()
        return self._taken(size)

    async def chunked(self, longest: int) -> bytes:
        """A body in chunks of at most `longest` bytes together; trailers are thrown away."""
        out = bytearray()
        while True:
            length = (await self.until(b"\r\n")).partition(b";")[0].strip()
            if not re.fullmatch(rb"[0-9a-fA-F]{1,15}", length):
                raise _Bad(400, f"the length of a chunk is {length[:20]!r}")
            if len(out) + int(length, 16) > longest:
                raise _Bad(413, f"a body of more than {longest} bytes")
            if not int(length, 16):
                break
            out += await self.exactly(int(length, 16))
            if await self.exactly(2) != b"\r\n":
                raise _Bad(400, "a chunk that does not end at its length")
        while await self.until(b"\r\n"):
            pass
        return bytes(out)

    def _taken(self, size: int) -> bytes:
        out = bytes(memoryview(self._data)[:size])
        del self._data[:size]
        return out

    async def _more(self) -> None:
        part = await self._loop.sock_recv(self._sock, 1 << 18)
        if not part:
            raise EOFError
        self._data += part


def _request(head: bytes) -> Request:
    """Parses a request, without its body. Raises _Bad."""
    first, *lines = head.decode("latin-1").lstrip("\r\n").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[0].isalpha() or not re.fullmatch(r"HTTP/1\.[0-9]", words[2]):
        raise _Bad(400, f"not an HTTP/1.1 request: {first[:80]!r}")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name = name.lower()
        if not colon or not re.fullmatch(r"[!#$%&'*+.^_`|~0-9a-z-]+", name):
            raise _Bad(400, f"no header: {line[:80]!r}")
        if name in headers and name in ("content-length", "transfer-encoding", "host", "authorization"):
            raise _Bad(400, f"two headers {name}")
        headers[name] = value.strip()
    return Request(words[0], words[1], words[2], headers)


def _body_size(request: Request) -> int | None:
    """Returns the bytes of the body; None = chunked. Raises _Bad."""
    coding, size = request.headers.get("transfer-encoding"), request.headers.get("content-length", "0")
    if coding is not None and (coding.lower() != "chunked" or "content-length" in request.headers):
        raise _Bad(400, f"Transfer-Encoding: {coding[:40]}: expected chunked, without Content-Length")
    if not re.fullmatch(r"[0-9]{1,18}", size):
        raise _Bad(400, f"Content-Length: {size[:40]}: expected a number of bytes")
    return int(size) if coding is None else None


def _head(reply: Reply, close: bool) -> bytes:
    lines = [f"HTTP/1.1 {reply.status} {HTTPStatus(reply.status).phrase}", f"Content-Type: {reply.kind}",
             f"Content-Length: {len(reply.body)}", *reply.headers, *["Connection: close"] * close]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")
