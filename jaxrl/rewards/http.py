"""Asking a service over HTTP, in a reward worker: tries, waits, one deadline for all of it, and what went wrong as a
cause that can be counted. The standard library and httpx.

A secret is read from the environment variable that the options name. It goes into one header and into no message.
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

AGAIN = (408, 425, 429, 500, 502, 503, 504)  # statuses that another try may change
LONGEST = 1 << 26        # bytes of an answer
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
GRACE_SECONDS = 10.0     # beyond the deadline, before the worker is killed


class Budget:
    """The time of one question, and the last failure in it."""

    def __init__(self, seconds: float):
        self.until, self.last = time.monotonic() + seconds, None

    def left(self) -> float:
        return self.until - time.monotonic()


class Service:
    """What speaks to a service. Args: o, the options of a reward.remote or reward.judge; place: {urls, key_env}."""

    def __init__(self, o: dict, place: dict):
        self.o, self.urls = o, [url.rstrip("/") for url in place["urls"]]
        self.seconds = o["deadline_seconds"] + GRACE_SECONDS
        self._secret = os.environ.get(place["key_env"], "") if place["key_env"] else ""
        self._tls = None

    def client(self) -> httpx.AsyncClient:
        """To be opened for one batch of work. Redirections are not followed: the secret goes where it was sent."""
        if self._tls is None:
            self._tls = ssl.create_default_context(cafile=os.environ.get("SSL_CERT_FILE") or certifi.where())
        headers = {"Authorization": f"Bearer {self._secret}"} if self._secret else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        return httpx.AsyncClient(headers=headers, verify=self._tls, timeout=None, limits=limits)

    async def within(self, work):
        """What `work(budget)` gives, or the ServiceError that ended it, at the deadline at the latest."""
        seconds = self.o["deadline_seconds"]
        budget = Budget(seconds)
        try:
            async with asyncio.timeout(seconds):
                return await work(budget)
        except ServiceError as e:
            return e
        except TimeoutError:
            before = f" (the last try: {budget.last.cause}: {budget.last})" if budget.last else ""
            return ServiceError("slow", f"no answer within deadline_seconds={seconds:g}{before}")
        except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError) as e:  # of a form not foreseen
            return ServiceError("type", f"an answer that cannot be read: {type(e).__name__}: {str(e)[:100]}")

    async def ask(self, client, budget: Budget, urls: list[str], body, kind: str = "application/json", headers=None):
        """The JSON answer to a POST, with tries at the URLs in turns. All tries carry one Idempotency-Key.

        body: JSON-able, or bytes of another `kind`. Raises ServiceError.
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
                pause = min(pause, LONGEST_PAUSE) if e.after is None else pause
                if pause >= budget.left():
                    raise ServiceError(e.cause, f"{e}, and no time is left for another try") from None
                await asyncio.sleep(pause)

    async def _once(self, client, url: str, content: bytes, headers: dict):
        where, data = url.partition("?")[0], bytearray()
        try:
            async with client.stream("POST", url, content=content, headers=headers) as reply:
                async for chunk in reply.aiter_bytes():
                    data += chunk
                    if len(data) > LONGEST:
                        raise ServiceError("long", f"{where} answers with more than {LONGEST >> 20} MB")
                status, after = reply.status_code, retry_after(reply.headers.get("retry-after"))
        except httpx.HTTPError as e:
            cause = cause_of(e)
            raise ServiceError(cause, f"{where}: {self._clean(str(e) or type(e).__name__)}",
                               again=cause != "tls") from None
        if status not in (200, 201):
            said = self._clean(bytes(data[:200]).decode("utf-8", "replace"))
            raise ServiceError(f"http_{status}", f"{where} answers with status {status}: {said}",
                               again=status in AGAIN, after=after)
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            said = self._clean(bytes(data[:60]).decode("utf-8", "replace"))
            raise ServiceError("json", f"{where} answers with what is no JSON: {said!r}") from None

    def _clean(self, text: str) -> str:
        text = text.replace(self._secret, "<redacted>") if self._secret else text
        return " ".join(text.split())


def cause_of(error: BaseException) -> str:
    """Of an httpx.HTTPError: tls, host (its name is unknown), refused (no connection), broken (it was lost)."""
    chain = [error]
    while (inner := chain[-1].__cause__ or chain[-1].__context__) is not None and inner not in chain:
        chain.append(inner)
    if any(isinstance(e, ssl.SSLError) for e in chain):
        return "tls"
    if any(isinstance(e, socket.gaierror) for e in chain):
        return "host"
    return "refused" if isinstance(error, httpx.ConnectError) else "broken"


def retry_after(text: str | None) -> float | None:
    """Seconds of a Retry-After header: a number or a date; None where it is neither."""
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


def at(urls: list[str], turn: int, path: str = "") -> list[str]:
    """The URLs from the `turn`-th on, around; those without a path get `path`."""
    turned = [urls[(turn + i) % len(urls)] for i in range(len(urls))]
    return [url if "/" in url.partition("://")[2] else url + path for url in turned]


def field(said, name: str, kind, where: str):
    """An entry of an answer, of this type. Raises ServiceError: key (it is not there), type."""
    if not isinstance(said, dict) or name not in said:
        has = ", ".join(map(str, said)) if isinstance(said, dict) else type(said).__name__
        raise ServiceError("key", f"{where} has no {name!r}; it has: {has[:100]}")
    if not isinstance(said[name], kind):
        raise ServiceError("type", f"{where}: {name!r} is {type(said[name]).__name__} {str(said[name])[:40]!r}")
    return said[name]


def counted(values: list, count: int, where: str) -> list:
    """A list that must have so many entries. Raises ServiceError: count."""
    if len(values) != count:
        raise ServiceError("count", f"{where} has {len(values)} entries for {count} completions")
    return values
