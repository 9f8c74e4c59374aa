"""The loopback server of a worker that speaks OpenAI's API: each episode has a key, each call is a turn of it.

    GET  /v1/models
    POST /v1/chat/completions     plain, or with "stream": true as server-sent events

Whatever else is asked for is refused with the reason. Standard library only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets

from jaxrl.envs import openai
from jaxrl.envs.openai import Asked, Refused

LONGEST_HEAD, LONGEST_BODY = 1 << 16, 1 << 26  # bytes
REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 405: "Method Not Allowed",
           413: "Content Too Large"}
TRAIN = "x-jaxrl-train"                 # `false`: a side call, answered by the policy and not trained
RETRY = "x-stainless-retry-count"       # of OpenAI's SDKs


class Pending:
    """A call. answer: a future of the body."""

    def __init__(self, asked: Asked, body: dict, train: bool, answer: asyncio.Future):
        self.asked, self.body, self.train, self.answer = asked, body, train, answer


class Line:
    """The calls of one episode, in the order in which they came."""

    def __init__(self):
        self.calls: asyncio.Queue[Pending] = asyncio.Queue()
        self._latest: Pending | None = None

    async def ask(self, body: dict, train: bool, retry: bool) -> tuple[Asked, dict]:
        """The answer, when the episode has it. What an SDK sends once more is the latest call, not another one."""
        latest = self._latest
        if not (retry and latest is not None and latest.body == body):
            answer = asyncio.get_running_loop().create_future()
            answer.add_done_callback(lambda f: f.cancelled() or f.exception())  # whether or not somebody waits still
            latest = self._latest = Pending(openai.read(body), body, train, answer)
            self.calls.put_nowait(latest)
        return latest.asked, await asyncio.shield(latest.answer)

    def close(self, waiting: Pending | None) -> None:
        """Nothing is answered any more."""
        left = [] if waiting is None else [waiting]
        while not self.calls.empty():
            left.append(self.calls.get_nowait())
        for pending in left:
            if not pending.answer.done():
                pending.answer.set_exception(Refused("the episode is over"))


class Proxy:
    """The server. `open` gives an episode its line and key. It is started by the first one."""

    def __init__(self):
        self._lines: dict[str, Line] = {}
        self._starting: asyncio.Future | None = None

    async def url(self) -> str:
        """The base of the API."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(
                asyncio.start_server(self._connection, "127.0.0.1", 0, limit=LONGEST_HEAD))
        server = await asyncio.shield(self._starting)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"

    @contextlib.contextmanager
    def open(self):
        """(key, line) of an episode, as long as it runs."""
        key, line = f"sk-{secrets.token_urlsafe(24)}", Line()
        self._lines[key] = line
        try:
            yield key, line
        finally:
            del self._lines[key]

    async def _connection(self, reader, writer) -> None:
        with contextlib.suppress(ConnectionError, EOFError, asyncio.LimitOverrunError, ValueError):
            try:
                while await self._request(reader, writer):
                    pass
            finally:
                writer.close()

    async def _request(self, reader, writer) -> bool:
        """Answers one; whether another may follow."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ", 2)
        headers = {name.strip().lower(): value.strip() for name, _, value in (h.partition(":") for h in head[1:])}
        try:
            body = await _body(reader, writer, headers)
            asked, answer = await self._answer(method, path.partition("?")[0].rstrip("/"), headers, body)
            if asked is not None and asked.stream:
                _stream(writer, openai.chunks(answer, asked.usage))
            else:
                _send(writer, 200, answer)
        except Refused as e:
            _send(writer, e.status, openai.error(e))
            if e.status == 413:  # its body was not read
                return False
        await writer.drain()
        return headers.get("connection", "").lower() != "close"

    async def _answer(self, method: str, path: str, headers: dict, body: bytes) -> tuple[Asked | None, dict]:
        line = self._lines.get(headers.get("authorization", "").removeprefix("Bearer ").strip())
        if line is None:
            raise Refused("no episode has this key; OPENAI_API_KEY of the program's environment is its own", 401)
        model = {"id": openai.MODEL, "object": "model", "created": 0, "owned_by": "jaxrl"}
        if path == "/v1/models":
            return None, {"object": "list", "data": [model]}
        if path.startswith("/v1/models/"):
            return None, model | {"id": path.removeprefix("/v1/models/")}
        if path != "/v1/chat/completions":
            raise Refused(f"{path}: only /v1/chat/completions and /v1/models are here", 404)
        if method != "POST":
            raise Refused(f"{method} {path}: expected POST", 405)
        try:
            given = json.loads(body)
        except (ValueError, RecursionError):
            raise Refused("the body is no JSON") from None
        train = headers.get(TRAIN, "").lower() not in ("false", "0", "no")
        return await line.ask(given, train, headers.get(RETRY, "0") not in ("", "0"))


async def _body(reader, writer, headers: dict) -> bytes:
    if headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return await _chunked(reader)
    length = headers.get("content-length", "0")
    if not length.isdigit() or int(length) > LONGEST_BODY:
        raise Refused(f"a body of {length[:20]} bytes", 413)
    return await reader.readexactly(int(length))


async def _chunked(reader) -> bytes:
    out = b""
    while True:
        try:
            size = int((await reader.readline()).partition(b";")[0], 16)
        except ValueError:
            raise Refused("a chunk without its length", 413) from None
        if len(out) + size > LONGEST_BODY:
            raise Refused(f"a body of more than {LONGEST_BODY} bytes", 413)
        out += await reader.readexactly(size)
        await reader.readline()
        if not size:
            return out


def _send(writer, status: int, body: dict) -> None:
    data = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
    writer.write(f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: application/json\r\n"
                 f"Content-Length: {len(data)}\r\n\r\n".encode() + data)


def _stream(writer, objects: list[dict]) -> None:
    lines = [json.dumps(o, ensure_ascii=False) for o in objects] + ["[DONE]"]
    data = "".join(f"data: {line}\n\n" for line in lines).encode("utf-8", "replace")
    writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\n"
                 f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
