"""Serves the page of runs in progress, on this host only."""

from __future__ import annotations

import threading
from pathlib import Path

from jaxrl.processes.http_server import Reply, Request, Server
from jaxrl.report.content import content
from jaxrl.report.page import embedded, page

LOOPBACK = "127.0.0.1"
READ = ("metrics.jsonl", "summary.json", "config.json", "rollouts", "eval", "images")


class WatchedRuns:
    """The content of runs, rebuilt when one of READ has changed in their folders (of a folder: what it holds).

    folders: run directories. steps: training steps whose completions are shown, None for evenly spaced ones. seconds:
    between the page's refreshes."""

    def __init__(self, folders, steps, seconds: float):
        self._folders, self._steps, self._seconds = [Path(f) for f in folders], steps, seconds
        self._lock, self._seen = threading.Lock(), None
        self._content: dict = {}

    def content(self) -> dict:
        """Returns the page's data (report.content); callable from several threads. Raises ConfigError for a folder that
        is no run directory."""
        with self._lock:
            files = [f / name for f in self._folders for name in READ]
            seen = [(p.stat().st_mtime_ns, p.stat().st_size) for p in files if p.exists()]
            if seen != self._seen:
                self._content, self._seen = content(self._folders, self._steps, self._seconds), seen
            return self._content


def server(watched: WatchedRuns, port: int) -> Server:
    """Returns a server on 127.0.0.1; port 0 picks a free one. It serves / and /data.json, only to requests that name
    this host: a foreign page whose host name resolves here is refused.
    """
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
