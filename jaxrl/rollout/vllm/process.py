"""Runs a vLLM server as a child process in its own session, with its output in a file, and ends it
with its child processes.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from jaxrl.processes.addresses import address_family, bare_host
from jaxrl.rollout.protocol import EngineLost
from jaxrl.vllm_plugin import OWNER, start_time

GRACE_SECONDS = 10.0  # from SIGTERM to SIGKILL
LOG_BYTES = 64_000_000  # of a log, and of the previous part


def free_port(host: str) -> int:
    """Returns a TCP port of a host that is free now; it is not reserved, and another program may take it."""
    host = bare_host(host)
    with socket.socket(address_family(host)) as s:
        s.bind((host, 0))
        return s.getsockname()[1]


class ServerProcess:
    """A running vLLM server, which starts here. It ends when the trainer ends, however that happens, if jaxrl is
    installed in its environment: the plugin in each of its processes watches the trainer. Else `stop` has to end it.

    Args:
      command: words of the command line.
      env: variables to add to this process's environment.
      log_file: file to which the server's output is appended.

    Attributes:
      pid: id of the process, its session and its process group. log_file: as given.
    """

    def __init__(self, command: list[str], env: dict[str, str], log_file: Path):
        log_file.parent.mkdir(parents=True, exist_ok=True)
        self.log_file = log_file
        owner = f"{os.getpid()}:{start_time(os.getpid())}"
        with open(log_file, "ab") as output:
            self._from = output.tell()
            self._process = subprocess.Popen(command, env={**os.environ, **env, OWNER: owner}, stdin=subprocess.DEVNULL,
                                             stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        self.pid = self._process.pid

    def exit_status(self) -> int | None:
        """Returns the exit status; None while it runs, negative = the signal that ended it."""
        return self._process.poll()

    def ended(self) -> str:
        """Returns how the process ended, as text for messages; "still running" if it has not."""
        status = self.exit_status()
        if status is None:
            return "still running"
        return f"ended by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"

    def last_errors(self) -> str:
        """Returns the last two lines of its log since its start that look like an error, else its last two lines; the
        last 800 characters of them."""
        with open(self.log_file, "rb") as f:
            f.seek(self._from)
            lines = [line.strip() for line in f.read().decode(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "rror:" in line or "rror while" in line]
        return " | ".join((errors or lines)[-2:])[-800:]

    def bound_log(self) -> None:
        """Moves a log of more than LOG_BYTES to `.old.log`, in place of the earlier one. The server appends, so it
        continues in an empty file."""
        if self.log_file.stat().st_size > LOG_BYTES:
            shutil.copyfile(self.log_file, self.log_file.with_suffix(".old.log"))
            os.truncate(self.log_file, 0)
            self._from = 0

    def stop(self) -> None:
        """Sends SIGTERM to the whole session, and SIGKILL to the rest after GRACE_SECONDS, which also ends processes
        that are suspended (SIGSTOP). Raises subprocess.TimeoutExpired if the server's process does not end."""
        for sig, patience in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, GRACE_SECONDS)):
            if not self._alive():
                break
            self._signal(sig)
            end = time.monotonic() + patience
            while self._alive() and time.monotonic() < end:
                time.sleep(0.05)
        self._process.wait(timeout=GRACE_SECONDS)

    def kill(self) -> None:
        """Kills the session. Raises EngineLost if the server's process does not end within GRACE_SECONDS."""
        self._signal(signal.SIGKILL)
        try:
            self._process.wait(timeout=GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            raise EngineLost(f"vLLM server process {self.pid} does not end within {GRACE_SECONDS:g} s of SIGKILL: its "
                             "device or disk hangs"
                             ) from None

    def _signal(self, sig) -> None:
        try:
            os.killpg(self.pid, sig)
        except ProcessLookupError:
            pass

    def _alive(self) -> bool:
        """Whether any process of the session is left."""
        self._process.poll()
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        return True
