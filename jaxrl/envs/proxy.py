"""A worker's loopback server that speaks OpenAI's API: each episode has a key, each call is one of its turns.

    GET  /v1/models
    POST /v1/chat/completions     plain, or with "stream": true as server-sent events

Any other request is refused with the reason. Standard library only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets

from jaxrl.envs import openai
from jaxrl.envs.openai import ChatRequest, RequestError
from jaxrl.processes.http_server import Reply, Request, Server

LONGEST_BODY, CONNECTIONS = 1 << 26, 1024  # bytes; simultaneous connections
CHAT, MODELS = "/v1/chat/completions", "/v1/models"
TRAIN = "x-jaxrl-train"                 # `false`: a side call, sampled from the policy and not trained
RETRY = "x-stainless-retry-count"       # sent by OpenAI's SDKs
OVER = "the episode is over"


class PendingCall:
    """A call that waits for its reply. asked, body: parsed request and its JSON. train: whether the program wants its
    tokens trained. answer: a future of the reply's body."""

    def __init__(self, asked: ChatRequest, body: dict, train: bool, answer: asyncio.Future):
        self.asked, self.body, self.train, self.answer = asked, body, train, answer


class CallQueue:
    """The calls of one episode's program that wait for the model, in order of arrival. images: whether they may show
    any."""

    def __init__(self, images: bool = False):
        self._images = images
        self.calls: asyncio.Queue[PendingCall] = asyncio.Queue()
        self._latest: PendingCall | None = None
        self._closed = False

    async def ask(self, body: dict, train: bool, retry: bool) -> tuple[ChatRequest, dict]:
        """Queues a call and returns (request, reply) once the episode has the reply. A retry by an SDK is the latest
        call, not a new one.

        Args:
          body: parsed JSON. train: whether its tokens are trained. retry: whether the SDK says that it is one.

        Raises RequestError for a body that openai.read_request refuses, for a call that the episode refuses, and for
        any but a retry once the queue is closed."""
        latest = self._latest
        if not (retry and latest is not None and latest.body == body):
            if self._closed:
                raise RequestError(OVER)
            answer = asyncio.get_running_loop().create_future()
            answer.add_done_callback(lambda f: f.cancelled() or f.exception())  # whether or not the caller still waits
            latest = self._latest = PendingCall(openai.read_request(body, self._images), body, train, answer)
            self.calls.put_nowait(latest)
        return latest.asked, await asyncio.shield(latest.answer)

    def close(self, waiting: PendingCall | None) -> None:
        """Refuses the calls that wait, and those that come later, with RequestError. waiting: the call that is being
        answered, or None."""
        self._closed = True
        left = [] if waiting is None else [waiting]
        while not self.calls.empty():
            left.append(self.calls.get_nowait())
        for pending in left:
            if not pending.answer.done():
                pending.answer.set_exception(RequestError(OVER))


class Proxy:
    """The HTTP server through which programs reach the model. `open` gives an episode its queue and key.

    The first call of `url` starts it. images: whether messages may show any."""

    def __init__(self, images: bool = False):
        self._images = images
        self._lines: dict[str, CallQueue] = {}
        self._server: Server | None = None
        self._serving: asyncio.Task | None = None

    def url(self) -> str:
        """Returns the base URL of the API on this host; starts the server at the first call, in the running event loop.
        """
        if self._server is None:
            self._server = Server("127.0.0.1", 0, self._answer, self._admit, longest_body=LONGEST_BODY,
                                  connections=CONNECTIONS, refuse=_refusal)
            self._serving = asyncio.ensure_future(self._server.serve())
        return f"http://127.0.0.1:{self._server.port}/v1"

    @contextlib.contextmanager
    def open(self):
        """Returns a context that yields (API key, CallQueue) of an episode; the key is refused after it."""
        key, line = f"sk-{secrets.token_urlsafe(24)}", CallQueue(self._images)
        self._lines[key] = line
        try:
            yield key, line
        finally:
            del self._lines[key]

    def _admit(self, request: Request) -> Reply | None:
        path = _path(request)
        if request.bearer not in self._lines:
            return _refusal(401, "no episode has this key; use OPENAI_API_KEY of the program's environment")
        if path != CHAT and path != MODELS and not path.startswith(f"{MODELS}/"):
            return _refusal(404, f"{path}: only {CHAT} and {MODELS} exist")
        if path == CHAT and request.method != "POST":
            return _refusal(405, f"{request.method} {path}: expected POST")
        return None

    async def _answer(self, request: Request) -> Reply:
        path = _path(request)
        model = {"id": openai.MODEL, "object": "model", "created": 0, "owned_by": "jaxrl"}
        if path == MODELS:
            return _reply(200, {"object": "list", "data": [model]})
        if path != CHAT:
            return _reply(200, model | {"id": path.removeprefix(f"{MODELS}/")})
        try:
            if (line := self._lines.get(request.bearer)) is None:
                raise RequestError(OVER, 401)
            train = request.headers.get(TRAIN, "").lower() not in ("false", "0", "no")
            retry = request.headers.get(RETRY, "0") not in ("", "0")
            parsed, answer = await line.ask(openai.parse_body(request.body), train, retry)
        except RequestError as e:
            return _reply(e.status, openai.error_body(e))
        return _stream(openai.stream_chunks(answer, parsed.usage)) if parsed.stream else _reply(200, answer)


def _path(request: Request) -> str:
    return request.path.partition("?")[0].rstrip("/")


def _refusal(status: int, text: str) -> Reply:
    return _reply(status, openai.error_body(RequestError(text)))


def _reply(status: int, body: dict) -> Reply:
    return Reply(status, json.dumps(body, ensure_ascii=False).encode("utf-8", "replace"))


def _stream(objects: list[dict]) -> Reply:
    lines = [json.dumps(o, ensure_ascii=False) for o in objects] + ["[DONE]"]
    data = "".join(f"data: {line}\n\n" for line in lines).encode("utf-8", "replace")
    return Reply(200, data, "text/event-stream", ("Cache-Control: no-cache",))
