"""Probes a sandbox before it is used: tries what must not work, and checks that it did not."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import secrets
import socket
import tempfile

from jaxrl.sandbox.types import Limits, SandboxError, Settings

log = logging.getLogger("jaxrl.sandbox")
SECONDS = 20.0  # of the probe's run, on a machine that does other things, too

PROGRAM = """
import json, os, socket, sys, time
told, found = json.load(sys.stdin), {}
def tries(name, what):
    try:
        found[name] = what() or ""
    except BaseException as e:
        found[name] = type(e).__name__
def canary():
    return open(told["canary"]).read()
def connects():
    socket.create_connection(("127.0.0.1", told["port"]), 2.0).close()
    return "connected"
def writes():
    open(told["canary"] + ".new", "w").close()
    return "written"
def holds():
    block = bytearray(told["memory"])
    for at in range(0, len(block), 4096):
        block[at] = 1
    return "held"
def sees():
    return told["variable"] if os.environ.get("JAXRL_SANDBOX_CANARY") else ""
for name, what in (("file", canary), ("network", connects), ("write", writes), ("memory", holds),
                   ("environment", sees)):
    tries(name, what)
print(told["nonce"], json.dumps(found), flush=True)
for _ in range(told["forks"]):
    if os.fork() == 0:
        time.sleep(30)
        os._exit(0)
if told["forks"]:
    time.sleep(2)
    print(told["nonce"], "forked", flush=True)
"""
VIOLATIONS = {"file": "reads a file outside the sandbox", "network": "reaches a port of this host",
              "write": "writes outside its folder", "memory": "uses more memory than sandbox.memory_mb",
              "environment": "sees this process's environment", "forks": "runs more processes than sandbox.processes"}
RLIMITS_PROBES = ("memory", "forks")  # what rlimits enforces
REMOTE_PROBES = ("file", "network")      # what can be probed of a remote sandbox from here


def _remedy(limit: str) -> str:
    """Returns the remedy if the first program did not run and met this limit; "" = none."""
    if limit.endswith("seconds"):
        return f"it had {SECONDS:g} s: the host that ran it is overloaded, or something there hangs"
    if limit:
        return f"raise sandbox.{limit}"
    return ("the program is Python itself: sandbox.memory_mb must hold it, and the folders of the interpreter must be "
            "visible (sandbox.paths)")


def check(settings: Settings, limits: Limits, run) -> None:
    """Runs a program in the sandbox that tries to escape. Raises SandboxError, with a remedy, if it succeeds, does not
    run, or cannot be set up.

    The program tries to read and write files outside, to connect to a port of this host, to see this process's
    environment, and to use more memory and processes than the limits. What must fail depends on the backend: rlimits
    promises memory and processes alone, and logs a warning; a remote sandbox is not asked to fork.

    Args:
      settings: backend and address.
      limits: of the job. The probe keeps memory and processes, and has limits of its own for time and output.
      run: (command, stdin, files, limits, settings) -> RunResult.
    """
    nonce = secrets.token_hex(8)
    limits = dataclasses.replace(limits, seconds=SECONDS, cpu_seconds=SECONDS, output_bytes=1 << 16)
    forks = 0 if settings.backend == "remote" else limits.processes + 50
    home = os.path.expanduser("~")  # which is nearer to what is at stake than a temporary folder
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(tempfile.TemporaryDirectory(
                prefix=".canary", dir=home if os.access(home, os.W_OK) else None))
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            os.chmod(folder, 0o777)  # it must be the sandbox that keeps it, also where programs are another user
            canary = os.path.join(folder, "canary")
            with open(canary, "w") as file:
                file.write(nonce)
        except OSError as e:
            raise SandboxError(f"the sandbox cannot be probed: {e}; the probe needs to write a file in {home} or "
                               f"{tempfile.gettempdir()}, and a port of 127.0.0.1") from None
        task = {"nonce": nonce, "canary": canary, "port": server.getsockname()[1], "forks": forks, "variable": "seen",
                "memory": (limits.memory_mb + 64) << 20}
        ran = run(["python", "-I", "-S", "probe.py"], json.dumps(task).encode(), {"probe.py": PROGRAM.encode()},
                  limits, settings)
    lines = [line.removeprefix(nonce).strip() for line in ran.stdout.splitlines() if line.startswith(nonce)]
    if not lines:
        raise SandboxError(f"sandbox.backend={settings.backend}: the probe program did not run (exit {ran.exit}, limit "
                           f"{ran.limit or 'none'}): {ran.stderr[-300:].strip()}; {_remedy(ran.limit)}")
    found = json.loads(lines[0])
    worked = {"file": found["file"] == nonce, "network": found["network"] == "connected",
              "write": found["write"] == "written", "memory": found["memory"] == "held",
              "environment": found["environment"] == "seen", "forks": bool(forks) and lines[-1] == "forked"}
    promised = {"bwrap": tuple(worked), "rlimits": RLIMITS_PROBES, "remote": REMOTE_PROBES}[settings.backend]
    broken = [VIOLATIONS[name] for name in promised if worked[name]]
    if broken:
        raise SandboxError(f"sandbox.backend={settings.backend} does not isolate programs: a program "
                           f"{', and '.join(broken)}; "
                           "no program was run. Use another host's sandbox (sandbox.backend=remote), or see "
                           "docs/guides/sandbox.md")
    if settings.backend == "rlimits":
        log.warning("sandbox.backend=rlimits is not a sandbox: programs can do everything you can, within the limits")
