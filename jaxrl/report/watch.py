"""The page of runs that go on, served on this machine alone."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

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


def server(watched: Watched, port: int) -> ThreadingHTTPServer:
    """On 127.0.0.1; port 0 takes a free one. It answers / and /data.json, to those that ask for this machine by name:
    a page of elsewhere whose host name leads here is refused."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            port = self.server.server_address[1]
            if self.headers.get("Host", "") not in (f"{LOOPBACK}:{port}", f"localhost:{port}"):
                return self._answer(403, "text/plain", "ask for localhost")
            try:
                if self.path == "/":
                    return self._answer(200, "text/html", page(watched.content()))
                if self.path == "/data.json":
                    return self._answer(200, "application/json", embedded(watched.content()))
            except Exception as e:  # a file vanished meanwhile: the next look finds another
                return self._answer(503, "text/plain", f"{type(e).__name__}: {e}")
            return self._answer(404, "text/plain", "there is / and /data.json")

        def _answer(self, status: int, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            for name, value in (("Content-Type", f"{kind}; charset=utf-8"), ("Content-Length", str(len(body))),
                                ("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff"),
                                ("Cross-Origin-Resource-Policy", "same-origin")):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    return ThreadingHTTPServer((LOOPBACK, port), Handler)
