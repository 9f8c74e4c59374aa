"""A sandbox for other machines: a small HTTP service that runs each program in this machine's bwrap sandbox.

    JAXRL_SANDBOX_KEY=... python -m jaxrl.sandbox.serve --port=8700 --at-once=16

POST /run {"argv": [...], "stdin": base64, "files": {path: base64}, "limits": {...}}
-> 200 {"exit", "stdout", "stderr", "limit"}; 400 for what no sandbox takes; 503 {"error"} where the sandbox failed.
Without JAXRL_SANDBOX_KEY it listens to this machine only; with it every request must carry it as a bearer token.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import hmac
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from jaxrl.sandbox import SandboxError, configure, probe, run

KEY = "JAXRL_SANDBOX_KEY"
LONGEST = 1 << 26  # bytes of a request
SILENT_SECONDS = 60.0  # until a connection that says nothing is closed


class Handler(BaseHTTPRequestHandler):
    """server.key: the bearer token, "" = none. server.places: a semaphore, of programs at once."""

    timeout = SILENT_SECONDS

    def do_POST(self):
        given = self.headers.get("Authorization", "")
        if self.server.key and not hmac.compare_digest(given.encode(), f"Bearer {self.server.key}".encode()):
            return self._say(401, {"error": "the bearer token is missing or wrong"})
        try:
            size = int(self.headers.get("Content-Length", ""))
            if self.path != "/run" or not 0 <= size <= LONGEST:
                raise ValueError("POST /run, with a body of at most 64 MiB")
            told = json.loads(self.rfile.read(size))
            files = {name: base64.b64decode(data) for name, data in told["files"].items()}
            argv, stdin, limits = told["argv"], base64.b64decode(told["stdin"]), told["limits"]
            with self.server.places:
                ran = run(argv, stdin, files, **limits)
        except SandboxError as e:
            return self._say(503, {"error": str(e)})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
            return self._say(400, {"error": f"{type(e).__name__}: {e}"})
        return self._say(200, dataclasses.asdict(ran))

    def _say(self, status: int, answer: dict) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format, *args):
        """Nothing: a line per program is no help."""


def server(host: str, port: int, at_once: int, key: str = "") -> ThreadingHTTPServer:
    """Listens; `serve_forever()` serves."""
    found = ThreadingHTTPServer((host, port), Handler)
    found.daemon_threads, found.key, found.places = True, key, threading.BoundedSemaphore(at_once)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs programs of other machines in this machine's sandbox.")
    parser.add_argument("--port", type=int, default=8700)
    parser.add_argument("--at-once", type=int, default=os.cpu_count())
    parser.add_argument("--paths", default="", help="further folders that programs may read, separated by commas")
    args = parser.parse_args()
    configure({"backend": "bwrap", "paths": tuple(filter(None, args.paths.split(",")))})
    probe()
    key = os.environ.get(KEY, "")
    print(f"a sandbox at port {args.port}" + " of this machine only" * (not key), flush=True)
    server("" if key else "127.0.0.1", args.port, args.at_once, key).serve_forever()


if __name__ == "__main__":
    main()
