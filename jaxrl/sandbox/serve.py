"""Serves this host's bwrap sandbox to other hosts: a small HTTP service that runs one program per request.

    JAXRL_SANDBOX_KEY=... python -m jaxrl.sandbox.serve --port=8700 --at-once=16

POST /run {"argv": [...], "stdin": base64, "files": {path: base64}, "limits": {...}}
-> 200 {"exit", "stdout", "stderr", "limit"}; 400 for invalid arguments; 503 {"error"} if the sandbox failed.
Without JAXRL_SANDBOX_KEY it listens on loopback only; with it every request must carry it as a bearer token.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import json
import os

from jaxrl.processes.http_server import Reply, Request, Server, error
from jaxrl.sandbox import SandboxError, configure, probe, run

KEY = "JAXRL_SANDBOX_KEY"
MAX_REQUEST_BYTES = 1 << 26  # bytes of a request
CONNECTIONS = 512


def server(host: str, port: int, at_once: int, key: str = "") -> Server:
    """Returns a server for requests with the key ("" = all requests) that runs `at_once` programs at a time. It replies
    401 to a missing or wrong key, 404 to another path than /run, 405 to another method than POST. host: address to
    listen on, "" = all."""
    def admit(request: Request) -> Reply | None:
        if key and not request.has_key(key):
            return error(401, "the bearer token is missing or wrong")
        if request.path != "/run":
            return error(404, f"{request.path}: only /run exists")
        return None if request.method == "POST" else error(405, f"{request.method} /run: expected POST")

    return Server(host, port, answer, admit, longest_body=MAX_REQUEST_BYTES, connections=CONNECTIONS, threads=at_once)


def answer(request: Request) -> Reply:
    """Runs the request's program and returns the reply: 200 with exit, stdout, stderr and limit as JSON, 400 for
    invalid arguments, 503 if the sandbox failed."""
    try:
        task = json.loads(request.body)
        files = {name: base64.b64decode(data) for name, data in task["files"].items()}
        ran = run(task["argv"], base64.b64decode(task["stdin"]), files, **task["limits"])
    except SandboxError as e:
        return error(503, str(e))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        return error(400, f"{type(e).__name__}: {e}")
    return Reply(200, json.dumps(dataclasses.asdict(ran)).encode())


def main() -> None:
    """Starts the service from the command line, with the bwrap sandbox. Raises SandboxError if that does not isolate
    programs."""
    parser = argparse.ArgumentParser(description="Runs programs of other machines in this machine's sandbox.")
    parser.add_argument("--port", type=int, default=8700)
    parser.add_argument("--at-once", type=int, default=os.cpu_count())
    parser.add_argument("--paths", default="", help="further folders that programs may read, separated by commas")
    args = parser.parse_args()
    configure({"backend": "bwrap", "paths": tuple(filter(None, args.paths.split(",")))})
    probe()
    key = os.environ.get(KEY, "")
    print(f"a sandbox at port {args.port}" + " of this machine only" * (not key), flush=True)
    server("" if key else "127.0.0.1", args.port, args.at_once, key).run()


if __name__ == "__main__":
    main()
