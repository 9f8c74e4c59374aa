"""The command `jaxrl` (or `python -m jaxrl`): its programs by name.

Imports a program only once it is chosen. `python -m jaxrl.main`, `python -m jaxrl.report` ... are the same programs.
"""

from __future__ import annotations

import difflib
import importlib
import os
import select
import sys
from collections.abc import Callable
from typing import NamedTuple

import jaxrl


class Program(NamedTuple):
    """A program of the command `jaxrl`. module: its import path, with main(argv) -> exit status. what: its line in the
    usage. mode: the run.mode that it sets; "" = none."""

    module: str
    what: str
    mode: str = ""


PROGRAMS = {
    "train": Program("jaxrl.main", "run the job of a config"),
    "eval": Program("jaxrl.main", "evaluate a run's newest checkpoint, or a model (run.mode=eval)", "eval"),
    "plan": Program("jaxrl.main", "memory and time of a job on any devices (run.mode=plan)", "plan"),
    "report": Program("jaxrl.report.__main__", "one HTML page about one or several runs"),
    "diff": Program("jaxrl.diff", "where two runs part, and by what"),
    "doctor": Program("jaxrl.doctor.__main__", "check this machine: versions, devices, kernels, vLLM"),
    "launch": Program("jaxrl.launch", "several processes of one run on this machine"),
    "serve": Program("jaxrl.serve", "vLLM servers of this host; serve tinker: a training service"),
    "migrate": Program("jaxrl.migrate.__main__", "translate a config of TRL, verl, SkyRL, AReaL, ROLL ..."),
}
USAGE = """usage: jaxrl PROGRAM [...]

{programs}

jaxrl PROGRAM --help says more; jaxrl --version prints the version.
example: jaxrl train --config=grpo --config.optimizer.lr=1e-5
`jaxrl --config=...` is short for `jaxrl train --config=...`;
`python -m jaxrl` is the same command."""


def command() -> None:
    """Runs the program that the command line names and ends the process with its exit status; 2 for an unknown one."""
    argv = sys.argv[1:]
    first = argv[0] if argv else "--help"
    if first in ("-h", "--help", "help"):
        sys.exit(run(_say_usage, argv))
    if first in ("-V", "--version", "version"):
        sys.exit(run(lambda _: print(f"jaxrl {jaxrl.__version__}"), argv))
    if first.startswith("-") or "=" in first:  # flags of train
        first, argv = "train", ["train", *argv]
    if first not in PROGRAMS:
        print(f"jaxrl: {unknown(first)}", file=sys.stderr)
        sys.exit(2)
    program = PROGRAMS[first]
    module = importlib.import_module(program.module)
    if program.module == "jaxrl.main":
        module.command(argv[1:], first)
    sys.exit(run(module.main, argv[1:]))


def run(main: Callable, argv: list[str] | None = None) -> int:
    """Runs main(argv) and returns its exit status (0 for None); 141, as of SIGPIPE and without a traceback, if the
    reader of standard output has gone (`| head`)."""
    try:
        try:
            return main(argv) or 0
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not reader_is_gone():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to flush goes nowhere
        return 141


def reader_is_gone() -> bool:
    """Returns whether standard output is a pipe that nobody reads."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def unknown(name: str) -> str:
    """Returns the message for a program that does not exist: the nearest name, or all names; for a .py
    file how a config is named."""
    if name.partition(":")[0].endswith(".py"):
        return f"{name}: a config is given as jaxrl train --config={name}"
    near = difflib.get_close_matches(name, PROGRAMS, n=1, cutoff=0.5)
    hint = f"did you mean jaxrl {near[0]}?" if near else f"there are {', '.join(PROGRAMS)}"
    return f"no program {name!r}; {hint}"


def _say_usage(argv: list[str]) -> None:
    width = max(map(len, PROGRAMS))
    print(USAGE.format(programs="\n".join(f"  {name:<{width}}  {p.what}" for name, p in PROGRAMS.items())))


if __name__ == "__main__":
    command()
