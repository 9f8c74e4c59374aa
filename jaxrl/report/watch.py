"""The page of runs that go on, served on this machine alone."""

from __future__ import annotations

import threading
from pathlib import Path

from jaxrl.processes.http_server import Reply, Request, Server
from jaxrl.report.content import content
from jaxrl.report.page import embedded, page

LOOPBACK = "127.0.0.1"
READ = ("metrics.jsonl", "summary.json", "config.json", "rollouts", "eval")


class Watched:
    """The content of runs, made anew when a file of theirs has changed."""

    def __init__(self, folders, steps, seconds: float):
        self._folders, self._steps, self._seconds = [Path(f) for f in folders], steps, seconds
        self._lock, self._seen, self._content = threading.Lock(), None, None

    def content(self) -> dict:
        with self._lock:
            files = [f / name for f in self._folders for name in READ]
            seen = [(p.stat().st_mtime_ns, p.stat().st_size) for p in files if p.exists()]
            if seen != self._seen:
                self._content, self._seen = content(self._folders, self._steps, self._seconds), seen
            return self._content


def server(watched: Watched, port: int) -> Server:
    """On 127.0.0.1; port 0 takes a free one. It answers / and /data.json, to those that ask for this machine by name:
    a page of elsewhere whose host name leads here is refused."""
    def admit(request: Request) -> Reply | None:
        if request.headers.get("host", "") not in (f"{LOOPBACK}:{made.port}", f"localhost:{made.port}"):
            return _text(403, "ask for localhost")
        if request.path not in ("/", "/data.json"):
            return _text(404, "there is / and /data.json")
        return None if request.method == "GET" else _text(405, f"{request.method} {request.path}: expected GET")

    def answer(request: Request) -> Reply:
        try:
            if request.path == "/":
                return _text(200, page(watched.content()), "text/html")
            return _text(200, embedded(watched.content()), "application/json")
        except Exception as e:  # a file vanished meanwhile: the next look finds another
            return _text(503, f"{type(e).__name__}: {e}")

    made = Server(LOOPBACK, port, answer, admit, connections=64, refuse=_text)
    return made


def _text(status: int, text: str, kind: str = "text/plain") -> Reply:
    return Reply(status, text.encode(), f"{kind}; charset=utf-8", (
        "Cache-Control: no-store", "X-Content-Type-Options: nosniff", "Cross-Origin-Resource-Policy: same-origin"))
