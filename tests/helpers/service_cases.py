"""A service that gives scores, as real HTTP on this machine, and what can go wrong with one: for tests and evidence.

A case returns (what the user sees, outcome). It raises AssertionError where a failure has a score or enters a statistic, or where
something lasts beyond its deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import ssl
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

import numpy as np

from jaxrl.config.load import default_config
from jaxrl.rewards import RewardFailure, RewardItem, RewardPool
from jaxrl.rewards.calling import Call, ServiceError
from jaxrl.rewards.services import find_services

DEADLINE, SLACK = 2.0, 60.0  # seconds; the slack is for busy machines
# A certificate of nobody's but these tests, for 127.0.0.1, 2020 to 2120.
PEM = """-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgc5WgQs8IPzCt6wr2
ryq/c6uCs47qP7d0IsjGwbqL+wyhRANCAAS4K2P2q1RU/zYjNVPqA3E2S3MZQPcN
ETeCNbEttaD7IG8GlAaA2mr5FfWrTfY1H+p7pzi8co7Tb7w1+Qh7UX65
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBXTCCAQKgAwIBAgIBBzAKBggqhkjOPQQDAjAUMRIwEAYDVQQDDAlsb2NhbGhv
c3QwIBcNMjAwMTAxMDAwMDAwWhgPMjEyMDAxMDEwMDAwMDBaMBQxEjAQBgNVBAMM
CWxvY2FsaG9zdDBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABLgrY/arVFT/NiM1
U+oDcTZLcxlA9w0RN4I1sS21oPsgbwaUBoDaavkV9atN9jUf6nunOLxyjtNvvDX5
CHtRfrmjQzBBMA8GA1UdEwEB/wQFMAMBAf8wDwYDVR0RBAgwBocEfwAAATAdBgNV
HQ4EFgQUW1gaAZAUuOQzlDg2k2F4oQ6xTPswCgYIKoZIzj0EAwIDSQAwRgIhAKEF
nF8gHOQ3rFBX878uuShYCkk+3RjB0l1Bj8gmr5YkAiEA7mpwdHv4jKfajb5b9tT7
EW0Nnsdgu+4txJ0HEUt+BeQ=
-----END CERTIFICATE-----
"""


class Scripted:
    """A server. answer: (number of the request, path, headers, body) -> JSON-able, or (status, headers, bytes), or a function that is
    given the handler. requests: (path, headers, body) of all that came."""

    def __init__(self, answer, tls=False, port=0):
        self.answer, self.requests, self._tls, self._lock = answer, [], tls, threading.Lock()
        self._open(port)

    def _open(self, port):
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                with outer._lock:
                    outer.requests.append((self.path, dict(self.headers.items()), body))
                    number = len(outer.requests) - 1
                said = outer.answer(number, self.path, {k.lower(): v for k, v in self.headers.items()}, body)
                if callable(said):
                    said(self)
                    return
                status, headers, data = said if isinstance(said, tuple) else (200, {}, json.dumps(said).encode())
                self.reply(status, headers, data)

            def reply(self, status, headers, data):
                self.send_response(status)
                for name, value in ({"Content-Length": str(len(data))} | headers).items():
                    self.send_header(name, value)
                self.end_headers()
                with contextlib.suppress(OSError):
                    self.wfile.write(data)

            def log_message(self, *_):
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads, allow_reuse_address = True, True

            def handle_error(self, *_):
                pass

        self._server = Server(("127.0.0.1", port), Handler)
        if self._tls:
            with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
                file.write(PEM)
                file.flush()
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(file.name)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self):
        return f"http{'s' if self._tls else ''}://127.0.0.1:{self.port}"

    def restart(self, seconds):
        """Away for so long, then at the same port."""
        self.close()
        threading.Timer(seconds, self._open, (self.port,)).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


def config(**options):
    """A job with the rewards exact and remote. options: of reward.remote."""
    c = default_config()
    c.reward.functions, c.reward.workers, c.reward.max_failed_fraction = ("exact", "remote"), 1, 1.0
    c.reward.remote.update({"deadline_seconds": DEADLINE, "retries": 2} | options)
    return c


def items(count=4):
    return [RewardItem(f"q{i}", f"a{i}", {"answer": f"a{i % 2}"}, group=i // 2, sample=i % 2, token_ids=[5 + i, 6], context_ids=[1, 2 + i])
            for i in range(count)]


def asked(c, rows=None):
    """(result, seconds) of one scoring."""
    with RewardPool(c) as pool:
        pool.wait()
        began = time.monotonic()
        result = pool.score(rows or items())
        return result, time.monotonic() - began


def service_scores(kind, rows, **options):
    """What a service's reward gives in this process: numbers, and failures as their cause. options: of reward.<kind>."""
    c = default_config()
    c.reward[kind].update(options)
    told, places, _ = find_services(c, {kind}, {})
    one = Call(kind, kind, {"services": told, "places": places})
    made = asyncio.run(one.call_batch([vars(row) for row in rows], {}))
    return [x.cause if isinstance(x, ServiceError) else x for x in made]


def lengths(number, path, headers, body):
    """The service: a completion's score is its number."""
    return {"scores": [float(item["completion"][1:]) for item in json.loads(body)["items"]]}


def fails(cause: str, answer=lengths, tls=False, url=None, quick=False, **options):
    """The whole batch has no score, by this cause, within the deadline; the other reward goes on, and the step's mean is its alone."""
    with Scripted(answer, tls) as server:
        c = config(servers=(url or server.url,), **options)
        result, seconds = asked(c)
        limit = DEADLINE + SLACK if not quick else SLACK
        assert seconds < limit, seconds
        said = [row["remote"] for row in result.outcomes]
        assert all(text.startswith(f"error: {cause}: ") for text in said), said
        assert np.isnan(result.parts["remote"]).all()
        np.testing.assert_array_equal(result.parts["exact"], [1, 1, 0, 0])
        np.testing.assert_array_equal(result.total, result.parts["exact"])  # absent is not zero: nothing was added, no one left out
        assert result.metrics[f"reward/remote/failed_{cause}"] == 1.0 and result.metrics["reward/failed_fraction"] == 1.0
        c.reward.update({"functions": ("remote",), "max_failed_fraction": 0.5})
        with RewardPool(c) as pool:
            try:
                pool.score(items())
                raise AssertionError("the run goes on without rewards")
            except RewardFailure as e:
                assert cause in str(e) and "fix the service of remote" in str(e)
        return said[0].replace(server.url, "URL").replace(str(url), "URL"), "absent; the run stops where too many are"


def works(answer, tls=False, **options):
    """All scores came in the end; returns the server for what it saw."""
    with Scripted(answer, tls) as server:
        result, seconds = asked(config(servers=(server.url,), **options))
        np.testing.assert_array_equal(result.parts["remote"], [0, 1, 2, 3])
        assert seconds < DEADLINE + SLACK and result.metrics["reward/failed_fraction"] == 0
        return server


def refused():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{s.getsockname()[1]}"
    return fails("refused", url=url)


def slow():
    return fails("slow", lambda *_: time.sleep(DEADLINE + 1) or {})


def drips():
    """A byte now and then, which no limit between two bytes would end."""
    def drip(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(100):
                handler.wfile.write(b" ")
                time.sleep(0.1)
    return fails("slow", lambda *_: drip)


def busy_for_good():
    return fails("http_429", lambda *_: (429, {"Retry-After": "0.05"}, b"slow down"))


def busy_at_first():
    server = works(lambda n, *rest: (429, {"Retry-After": "0.3"}, b"") if n < 2 else lengths(n, *rest))
    assert len({headers["Idempotency-Key"] for _, headers, _ in server.requests}) == 1 and len(server.requests) == 3
    return "", f"right after {len(server.requests)} tries under one Idempotency-Key"


def busy_for_longer():
    return fails("http_503", lambda *_: (503, {"Retry-After": "3600"}, b""), quick=True)


def broken_inside():
    return fails("http_500", lambda *_: (500, {}, b"Traceback ..."))


def not_allowed():
    return fails("http_401", lambda *_: (401, {}, b"who are you?"), quick=True)


def hang_up(handler):
    handler.close_connection = True
    with contextlib.suppress(OSError):
        handler.connection.shutdown(socket.SHUT_RDWR)


def truncated():
    def half(handler):
        handler.reply(200, {"Content-Length": "100"}, b'{"scores": [1,')
        hang_up(handler)
    return fails("broken", lambda *_: half)


def half_json():
    return fails("json", lambda *_: (200, {}, b'{"scores": [1,'), quick=True)


def web_page():
    return fails("json", lambda *_: (200, {}, b"<html>"), quick=True)


def wrong_count():
    return fails("count", lambda *_: {"scores": [1.0]}, quick=True)


def wrong_type():
    return fails("type", lambda *_: {"scores": [float("nan"), "1", [1.0], {}]}, quick=True)


def scores_no_list():
    return fails("type", lambda *_: {"scores": "1, 2, 3, 4"}, quick=True)


def key_missing():
    return fails("key", lambda *_: {"rewards": [1, 2, 3, 4]}, quick=True)


def score_key_missing():
    return fails("key", lambda *_: {"scores": [{"other": 1.0}] * 4}, score_key="quality", quick=True)


def self_signed():
    return fails("tls", tls=True, quick=True)


def trusted():
    """The same certificate, named in SSL_CERT_FILE."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "ca.pem")
        with open(path, "w") as file:
            file.write(PEM[PEM.index("-----BEGIN CERT"):])
        before = os.environ.get("SSL_CERT_FILE")
        os.environ["SSL_CERT_FILE"] = path
        try:
            works(lengths, tls=True)
        finally:
            os.environ.pop("SSL_CERT_FILE") if before is None else os.environ.update(SSL_CERT_FILE=before)
    return "", "right"


def restarts():
    """Away in the middle of a batch for half a second, at the same place afterwards."""
    def answer(n, *rest):
        if n == 0:
            threading.Thread(target=server.restart, args=(0.5,)).start()
            return hang_up
        return lengths(n, *rest)

    with Scripted(answer) as server:
        result, seconds = asked(config(servers=(server.url,), deadline_seconds=DEADLINE + SLACK, retries=5))
        np.testing.assert_array_equal(result.parts["remote"], [0, 1, 2, 3], str(result.outcomes))
        assert len({headers["Idempotency-Key"] for _, headers, _ in server.requests}) == 1
    return "", f"right after {len(server.requests)} requests that arrived, under one Idempotency-Key"


CASES = {
    "refused": refused, "slow": slow, "drips": drips, "429 for good": busy_for_good, "429 at first": busy_at_first,
    "503, Retry-After an hour": busy_for_longer, "500": broken_inside, "401": not_allowed, "truncated": truncated, "half a JSON": half_json,
    "a web page": web_page, "wrong count": wrong_count, "NaN": wrong_type, "scores are no list": scores_no_list, "key missing": key_missing,
    "score_key missing": score_key_missing, "self-signed certificate": self_signed, "the same, trusted": trusted,
    "restarts in mid-batch": restarts}


def form(body: bytes) -> dict:
    return {name: values[0] for name, values in parse_qs(body.decode()).items()}
