"""Several processes of one run on this machine: jaxrl launch --processes=4 -- --config=configs/grpo.py ...

For trying a multi-host run on one machine, and for sharing a machine's GPUs between processes. Arguments after `--` go
to `jaxrl` (the flags of `jaxrl train`); a script (`-- train.py ...`) is run instead of it. Process 0 has the console;
lines of the others start with their number. If one process fails, the others get a grace time and are then killed, and
the launcher reports which failed first and how. SIGTERM and Ctrl-C go to all processes: they save and exit.

Exit status: 0 all done or stopped on request, else that of the process that failed first (128 + n for signal n).
Standard library only: the launcher touches no device.
"""

from __future__ import annotations

import argparse
import glob
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

from jaxrl.__main__ import run

NOT_RETRIED = (2, 130)  # an invalid config, Ctrl-C


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parses the command line. Returns (options of the launcher, arguments of the processes).

    Exits with status 2 and a message for wrong options, or if there is nothing after `--`; with 0 after --help.
    """
    parser = argparse.ArgumentParser(prog="jaxrl launch", description=(__doc__ or "").split("\n\n")[0],
                                     epilog="After `--`: the flags of jaxrl train, or a script with its own.")
    parser.add_argument("--processes", type=int, required=True, help="processes to start")
    parser.add_argument("--devices", type=int, default=0,
                        help="devices of each: simulated ones without a GPU (default 1), else its share of the GPUs "
                             "(default all)")
    parser.add_argument("--cpus", type=int, default=0,
                        help="processor cores of each, a different set for each; 0 = all for all")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE",
                        help="environment of all; may be repeated")
    parser.add_argument("--retries", type=int, default=0,
                        help="how often all are restarted after one failed; they resume from the latest checkpoint")
    parser.add_argument("--grace", type=float, default=20.0,
                        help="seconds until the others are killed after one failed")
    own, rest = (argv[:argv.index("--")], argv[argv.index("--") + 1:]) if "--" in argv else (argv, [])
    options, others = parser.parse_known_args(own)
    if others:
        known = " ".join(arg for arg in own if arg not in others)
        parser.error(f"{others[0]}: flags of the run come after --: jaxrl launch {known} -- "
                     f"{' '.join(others + rest)}" if others[0].startswith("--config") else f"{others[0]}: unknown flag")
    if options.processes < 1 or options.devices < 0 or options.cpus < 0 or options.retries < 0 or options.grace < 0:
        parser.error("--processes must be at least 1, the other numbers must not be negative")
    if any("=" not in entry for entry in options.env):
        parser.error(f"--env={next(e for e in options.env if '=' not in e)}: expected NAME=VALUE")
    if not rest:
        parser.error("nothing to run: give the flags of jaxrl train after --, e.g. -- --config=configs/grpo.py")
    return options, rest


def environments(options, port: int, environ=os.environ) -> list[dict[str, str]]:
    """Returns the environment of every process: coordinator, rank, and its devices and threads.

    GPUs are split evenly unless --devices says how many each gets; without GPUs each has --devices CPU devices (1 by
    default). --env is set last and wins, but for CUDA_VISIBLE_DEVICES, which names the GPUs that are split. Raises
    SystemExit if there are fewer GPUs than requested, or than processes.

    options: of `parse`. port: of the coordinator, on this machine.
    """
    added = dict(entry.split("=", 1) for entry in options.env)
    gpus = visible_gpus({**environ, **added})
    out = []
    for i in range(options.processes):
        env = {**environ, "PYTHONUNBUFFERED": "1", "JAXRL_COORDINATOR": f"127.0.0.1:{port}",
               "JAXRL_PROCESSES": str(options.processes), "JAXRL_PROCESS": str(i)}
        if gpus:
            share = options.devices or len(gpus) // options.processes
            if share * options.processes > len(gpus) or not share:
                raise SystemExit(f"jaxrl.launch: --processes={options.processes} x --devices={options.devices}: there "
                                 f"are {len(gpus)} GPUs")
            env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[i * share:(i + 1) * share])
        else:
            env |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(options.devices or 1)}
        if options.cpus:
            env["OMP_NUM_THREADS"] = str(options.cpus)
        out.append({**env, **added, **({"CUDA_VISIBLE_DEVICES": env["CUDA_VISIBLE_DEVICES"]} if gpus else {})})
    return out


def visible_gpus(environ) -> list[str]:
    """Returns the NVIDIA devices that jax would use: those of CUDA_VISIBLE_DEVICES before a negative number if it is
    set, else all of the machine.

    [] if JAX_PLATFORMS is cpu. environ: environment variables.
    """
    if environ.get("JAX_PLATFORMS", "cuda") == "cpu":
        return []
    there = sorted(int(p.removeprefix("/dev/nvidia")) for p in glob.glob("/dev/nvidia[0-9]*"))
    named = environ.get("CUDA_VISIBLE_DEVICES")
    names = [] if named is None else [n.strip() for n in named.split(",") if n.strip()]
    return [str(i) for i in there] if named is None else list(itertools.takewhile(lambda n: n[0] != "-", names))


class Group:
    """The processes of one attempt, started by the constructor, with their coordinator at a free port. Raises
    SystemExit as `environments` does.

    Args:
      options: of `parse`. command: words that each process runs.
    """

    def __init__(self, options, command: list[str]):
        self.options, self.stopping = options, False
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self.processes = [self._start(i, command, env) for i, env in enumerate(environments(options, port))]

    def _start(self, i: int, command, env) -> subprocess.Popen:
        shown: dict[str, Any] = {} if i == 0 else {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, process_group=0, **shown)
        if self.options.cpus:
            cores, n = sorted(os.sched_getaffinity(0)), self.options.cpus
            os.sched_setaffinity(process.pid, {cores[k % len(cores)] for k in range(i * n, (i + 1) * n)})
        if i:
            threading.Thread(target=self._copy, args=(i, process.stdout), daemon=True).start()
        return process

    @staticmethod
    def _copy(i: int, lines) -> None:
        for line in lines:
            sys.stdout.buffer.write(b"[%d] " % i + line)
            sys.stdout.flush()

    def signal(self, number) -> None:
        """Sends a signal to all processes that still run."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def run(self) -> int:
        """Waits for all processes, killing the rest `grace` seconds after one failed; returns the exit status: that of
        the process that failed first, 0 if none did."""
        first, end = None, float("inf")
        while any(p.poll() is None for p in self.processes):
            if first is None and (first := self._first_to_fail()) is not None:
                end = time.monotonic() + self.options.grace
            if time.monotonic() > end:
                say(f"killing {sum(p.poll() is None for p in self.processes)} processes that still run "
                    f"--grace={self.options.grace:g} s after the failure")
                self.signal(signal.SIGKILL)
                end = float("inf")
            time.sleep(0.05)
        first = self._first_to_fail() if first is None else first
        return 0 if first is None else status_of(self.processes[first])

    def _first_to_fail(self) -> int | None:
        failed = [i for i, p in enumerate(self.processes) if p.poll()]
        if not failed:
            return None
        # of several found at once a killed one comes first: the others stopped because of it
        first = min(failed, key=lambda i: self.processes[i].returncode)
        say(f"process {first} of {len(self.processes)} (pid {self.processes[first].pid}) failed first: "
            f"{ended(self.processes[first])}")
        return first


def status_of(process) -> int:
    """Returns a process's exit status as a shell has it: 128 + number of the signal that killed it."""
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def ended(process) -> str:
    """Returns how a process ended, as text: by a signal, or with an exit status."""
    code = process.returncode
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def say(text: str) -> None:
    """Prints a line of the launcher on standard error."""
    print(f"jaxrl.launch: {text}", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Runs `jaxrl launch` with these arguments (default sys.argv); returns its exit status.

    If one fails, all processes are restarted up to --retries times, except after an invalid config, Ctrl-C or a signal
    to the launcher, which it forwards to them. The status is that of the last attempt. Only in the main thread: it
    handles SIGTERM, SIGINT and SIGHUP.
    """
    options, rest = parse(sys.argv[1:] if argv is None else argv)
    command = [sys.executable, *(rest if rest[0].endswith(".py") and rest[0][0] != "-"
                                 else ("-m", "jaxrl", *rest))]
    stopping, group = [], None

    def forward(number, frame):
        stopping.append(number)
        if group is not None:
            group.signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, forward)
    status = 0
    for attempt in range(options.retries + 1):
        if attempt:
            say(f"restarting from the latest checkpoint ({attempt} of --retries={options.retries})")
        group = Group(options, command)
        status = group.run()
        if status == 0 or status in NOT_RETRIED or stopping:
            break
    return status


if __name__ == "__main__":
    sys.exit(run(main))
