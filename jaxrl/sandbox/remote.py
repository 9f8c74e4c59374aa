"""Sandbox backend over HTTP: jaxrl's service (jaxrl/sandbox/serve.py) or SandboxFusion's run_code.

Requests without a valid reply in time are retried `sandbox.retries` times and then raise SandboxError: the completion
has no score.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import http.client
import json
import os
import random
import shlex
import time
import urllib.error
import urllib.request

from jaxrl.processes import http_client
from jaxrl.sandbox.types import Limits, RunResult, SandboxError, Settings

GRACE_SECONDS = 10.0   # for the network and the service's queue
RETRY_STATUSES = (408, 425, 429, 500, 502, 503, 504)  # HTTP statuses that are retried


def run(argv: list[str], stdin: bytes, files: dict[str, bytes], limits: Limits, settings: Settings) -> RunResult:
    """Runs one program on the service.

    Args:
      argv: the program and its arguments; "python" is the service's interpreter.
      stdin: its standard input. files: relative path -> content, in its folder.
      limits: of the run; a reply is waited for limits.seconds and GRACE_SECONDS. SandboxFusion receives seconds and
        memory_mb alone. More than output_bytes characters in both streams hit that limit here, too, and each
        stream is cut to as many.
      settings: url, api ("jaxrl" or "fusion"), key_env and retries.

    Raises SandboxError if the key's variable is not set, if none of 1 + retries tries gets a valid reply, and at once
    for a redirect, a status that is not in RETRY_STATUSES, an error of jaxrl's service, and JSON of another form.
    """
    message, read = {"jaxrl": (_ours, _read_ours), "fusion": (_fusion, _read_fusion)}[settings.api]
    place, body = message(argv, stdin, files, limits)
    url = settings.url.rstrip("/")
    url = url if url.endswith(place) else url + place
    headers = {"Content-Type": "application/json"}
    if settings.key_env:
        if not os.environ.get(settings.key_env):
            raise SandboxError(f"sandbox.key_env={settings.key_env}: this environment variable is not set; set "
                               "it to the service's key")
        headers["Authorization"] = f"Bearer {os.environ[settings.key_env]}"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    for left in range(settings.retries, -1, -1):
        try:
            ran = read(_answer(request, limits.seconds + GRACE_SECONDS))
            break
        except _Retry as e:
            if not left:
                raise SandboxError(f"{settings.url}: {e} (after {settings.retries + 1} tries)") from None
            time.sleep(0.2 * 2 ** (settings.retries - left) * (1.0 + random.random()))
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise SandboxError(f"{settings.url}: the reply does not fit sandbox.api={settings.api}: "
                               f"{type(e).__name__}: {e}"[:300]) from None
    if len(ran.stdout) + len(ran.stderr) > limits.output_bytes:
        return RunResult(None, ran.stdout[:limits.output_bytes], ran.stderr[:limits.output_bytes], "output_bytes")
    return ran


class _Retry(Exception):
    """What may be otherwise the next time."""


def _answer(request, seconds: float):
    try:
        data = http_client.fetch(request, seconds)
    except urllib.error.HTTPError as e:
        if 300 <= e.code < 400:
            raise SandboxError(f"{request.full_url}: it redirects to {e.headers.get('Location')}, which is not"
                               " followed: the key would go there; name the service itself in sandbox.url") from None
        told = b""
        with contextlib.suppress(OSError, http.client.HTTPException):
            told = e.read(300)
        text = f"HTTP {e.code}: {told.decode('utf-8', 'replace')}"
        if e.code in RETRY_STATUSES:
            raise _Retry(text) from None
        remedy = "; set the environment variable that sandbox.key_env names to its key" * (e.code in (401, 403))
        raise SandboxError(f"{request.full_url}: {text}{remedy}") from None
    except (OSError, EOFError) as e:  # refused, reset, late, TLS
        raise _Retry(f"{getattr(e, 'reason', e) or type(e).__name__}: check that the service runs and that this host "
                     "reaches it") from None
    except Exception as e:  # http.client's
        raise _Retry(f"{type(e).__name__}: {e}") from None
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise _Retry(f"a reply that is not JSON: {data[:80]!r}") from None


def _base64_files(files: dict[str, bytes]) -> dict[str, str]:
    return {name: base64.b64encode(data).decode() for name, data in files.items()}


def _ours(argv, stdin, files, limits):
    return "/run", {"argv": argv, "stdin": base64.b64encode(stdin).decode(), "files": _base64_files(files),
                    "limits": dataclasses.asdict(limits)}


def _read_ours(answer) -> RunResult:
    if "error" in answer:
        raise SandboxError(f"the service: {str(answer['error'])[:500]}")
    exit, limit = answer["exit"], answer["limit"]
    if not (exit is None and limit or type(exit) is int) or not isinstance(limit, str):
        raise ValueError(f"exit {exit!r}, limit {limit!r}")
    return RunResult(exit, _text(answer["stdout"]), _text(answer["stderr"]), limit)


def _fusion(argv, stdin, files, limits):
    """Returns (path, body) of a request that runs a program as a line of bash in the folder that has the files."""
    argv = ["python3" if argv[0] == "python" else argv[0], *argv[1:]]
    return "/run_code", {"language": "bash", "code": shlex.join(argv), "stdin": stdin.decode("utf-8", "replace"),
                         "files": _base64_files(files), "fetch_files": [], "compile_timeout": limits.seconds,
                         "run_timeout": limits.seconds, "memory_limit_MB": limits.memory_mb}


def _read_fusion(answer) -> RunResult:
    ran = answer.get("run_result")
    if answer["status"] == "SandboxError" or not ran or ran["status"] not in ("Finished", "TimeLimitExceeded"):
        raise _Retry(f"SandboxFusion reports {answer['status']}: {str(answer.get('message'))[:300]}")
    out, err = (_text(ran.get(name) or "") for name in ("stdout", "stderr"))
    if ran["status"] == "TimeLimitExceeded":
        return RunResult(None, out, err, "seconds")
    code = ran["return_code"]
    if type(code) is not int:
        raise ValueError(f"return_code {code!r}")
    return RunResult(code if code >= 0 else 128 - code, out, err)


def _text(value) -> str:
    if not isinstance(value, str):
        raise ValueError(f"text expected, got {type(value).__name__}")
    return value
