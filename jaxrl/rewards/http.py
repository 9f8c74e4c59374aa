"""Calls a service over HTTP from a reward worker: retries, pauses, one deadline, and failures as
causes that are counted.

Standard library and httpx. A secret is read from the environment variable that the options name. It is sent in one
header and appears in no message.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import os
import random
import socket
import ssl
import time
import uuid

import certifi
import httpx

from jaxrl.rewards.calling import ServiceError

RETRY_STATUSES = (408, 425, 429, 500, 502, 503, 504)  # statuses that are retried
MAX_REPLY_BYTES = 1 << 26        # bytes of a reply
FIRST_PAUSE, MAX_PAUSE = 0.5, 30.0
GRACE_SECONDS = 10.0     # after the deadline, before the worker is killed


class Budget:
    """The time left for one request, and its last failure.

    seconds: how long from now.

    Attributes:
      until: time.monotonic() of the deadline.
      last: ServiceError of the last failed try, None before one."""

    def __init__(self, seconds: float):
        self.until = time.monotonic() + seconds
        self.last: ServiceError | None = None

    def left(self) -> float:
        """Returns the remaining seconds; negative once they are over."""
        return self.until - time.monotonic()


class Service:
    """Sends requests to the servers of a reward.remote or reward.judge, with retries, one deadline and one secret.

    Args:
      o: options of the reward.remote or reward.judge: deadline_seconds, retries and those of the caller.
      place: {urls: addresses of the servers, key_env: environment variable with the secret, "" = none}.

    Attributes:
      o, urls: the options, and the addresses without a slash at their end.
      seconds: after which the parent kills the worker: deadline_seconds and GRACE_SECONDS.
    """

    def __init__(self, o: dict, place: dict):
        self.o, self.urls = o, [url.rstrip("/") for url in place["urls"]]
        self.seconds = o["deadline_seconds"] + GRACE_SECONDS
        self._secret = os.environ.get(place["key_env"], "") if place["key_env"] else ""
        self._tls = None

    def client(self) -> httpx.AsyncClient:
        """Returns an HTTP client for one batch of work. Redirects are not followed, so that the secret
        stays with its server.
        """
        if self._tls is None:
            self._tls = ssl.create_default_context(cafile=os.environ.get("SSL_CERT_FILE") or certifi.where())
        headers = {"Authorization": f"Bearer {self._secret}"} if self._secret else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        return httpx.AsyncClient(headers=headers, verify=self._tls, timeout=None, limits=limits)

    async def run_until_deadline(self, work):
        """Returns the result of work(budget), or the ServiceError that ended it; waits deadline_seconds at most.

        Lateness is a ServiceError with cause `slow`; what a reply in an unexpected form raises (ValueError, TypeError,
        LookupError, ArithmeticError, AttributeError) one with cause `type`. Other errors are raised.

        work: coroutine function of the request's Budget."""
        seconds = self.o["deadline_seconds"]
        budget = Budget(seconds)
        try:
            async with asyncio.timeout(seconds):
                return await work(budget)
        except ServiceError as e:
            return e
        except TimeoutError:
            before = f" (last try: {budget.last.cause}: {budget.last})" if budget.last else ""
            return ServiceError("slow", f"no reply within deadline_seconds={seconds:g}{before}")
        except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError) as e:  # an unexpected reply format
            return ServiceError("type", f"a reply that cannot be read: {type(e).__name__}: {str(e)[:100]}")

    async def ask(self, client, budget: Budget, urls: list[str], body, kind: str = "application/json", headers=None):
        """Returns the JSON reply to a POST, retrying the URLs in turn, `retries` times at most. All tries carry
        one Idempotency-Key. Between tries it waits as long as the server's Retry-After says, else 0.5 s doubled at each
        try, times a random factor in 0.5..1, at most 30 s. Retried are failed connections (not of TLS) and the statuses
        of RETRY_STATUSES; other failures (another status, a reply that is too long or not JSON) are final.

        Args:
          client: of `client`. budget: time left of the work that the request is part of; its `last` becomes the failure
            of each try. urls: tried in turn. headers: further ones.
          body: JSON-able, or bytes of content type `kind`.

        Raises:
          ServiceError: no usable reply within the tries, or a wait for the next one would last longer than the budget.
        """
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": kind, "Idempotency-Key": uuid.uuid4().hex} | (headers or {})
        for attempt in range(self.o["retries"] + 1):
            try:
                return await self._once(client, urls[attempt % len(urls)], content, headers)
            except ServiceError as e:
                budget.last = e
                if not e.again or attempt == self.o["retries"]:
                    raise
                pause = FIRST_PAUSE * 2**attempt * random.uniform(0.5, 1.0) if e.after is None else e.after
                pause = min(pause, MAX_PAUSE) if e.after is None else pause
                if pause >= budget.left():
                    raise ServiceError(e.cause, f"{e}, and no time is left for a retry") from None
                await asyncio.sleep(pause)

    async def _once(self, client, url: str, content: bytes, headers: dict):
        where, data = url.partition("?")[0], bytearray()
        try:
            async with client.stream("POST", url, content=content, headers=headers) as reply:
                async for chunk in reply.aiter_bytes():
                    data += chunk
                    if len(data) > MAX_REPLY_BYTES:
                        raise ServiceError("long", f"{where} replies with more than {MAX_REPLY_BYTES >> 20} MB")
                status, after = reply.status_code, retry_after(reply.headers.get("retry-after"))
        except httpx.HTTPError as e:
            cause = error_cause(e)
            raise ServiceError(cause, f"{where}: {self._clean(str(e) or type(e).__name__)}",
                               again=cause != "tls") from None
        if status not in (200, 201):
            excerpt = self._clean(bytes(data[:200]).decode("utf-8", "replace"))
            raise ServiceError(f"http_{status}", f"{where} replies with status {status}: {excerpt}",
                               again=status in RETRY_STATUSES, after=after)
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            excerpt = self._clean(bytes(data[:60]).decode("utf-8", "replace"))
            raise ServiceError("json", f"{where} replies with text that is not JSON: {excerpt!r}") from None

    def _clean(self, text: str) -> str:
        text = text.replace(self._secret, "<redacted>") if self._secret else text
        return " ".join(text.split())


def error_cause(error: BaseException) -> str:
    """Returns the cause of an httpx.HTTPError, for the metrics.

    "tls", "host" (unknown name), "refused" (no connection) or "broken" (anything else, as a lost connection)."""
    chain = [error]
    while (inner := chain[-1].__cause__ or chain[-1].__context__) is not None and inner not in chain:
        chain.append(inner)
    if any(isinstance(e, ssl.SSLError) for e in chain):
        return "tls"
    if any(isinstance(e, socket.gaierror) for e in chain):
        return "host"
    return "refused" if isinstance(error, httpx.ConnectError) else "broken"


def retry_after(text: str | None) -> float | None:
    """Returns the seconds from now of a Retry-After header, a number or a date, at least 0; None if it is neither."""
    if text is None:
        return None
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError):
        return None


def rotate_urls(urls: list[str], turn: int, path: str = "") -> list[str]:
    """Returns all URLs in turn, beginning with the one at `turn` (modulo their number), so that requests are spread
    over servers and retries go to the next; those without a path get `path`."""
    turned = [urls[(turn + i) % len(urls)] for i in range(len(urls))]
    return [url if "/" in url.partition("://")[2] else url + path for url in turned]


def get_field(reply, name: str, kind, where: str):
    """Returns the entry `name` of a JSON reply. where: the server, for messages.

    Raises ServiceError with cause `key` if it is missing, `type` if it is no `kind`.
    """
    if not isinstance(reply, dict) or name not in reply:
        has = ", ".join(map(str, reply)) if isinstance(reply, dict) else type(reply).__name__
        raise ServiceError("key", f"{where} has no {name!r}; it has: {has[:100]}")
    if not isinstance(reply[name], kind):
        raise ServiceError("type", f"{where}: {name!r} is {type(reply[name]).__name__} {str(reply[name])[:40]!r}")
    return reply[name]


def check_count(values: list, count: int, where: str) -> list:
    """Returns `values` if it has `count` entries; else raises ServiceError with cause `count`. where: the server, for
    the message."""
    if len(values) != count:
        raise ServiceError("count", f"{where} has {len(values)} entries for {count} completions")
    return values
