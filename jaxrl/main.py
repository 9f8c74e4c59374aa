"""The program of `jaxrl train`, eval and plan: python -m jaxrl.main --config=configs/grpo.py --config.optimizer.lr=1e-5

Loads a config file, applies the overrides, runs the job. Exit status: 0 done or stopped on request; 2 bad config, data
or checkpoint; 1 a run that had to stop (its checkpoints are complete: rerun the same command to resume), or a claim of
certify that does not hold; 128 + n signal n while the run starts (Ctrl-C 130, SIGTERM 143); 130 a second Ctrl-C.
"""

from __future__ import annotations

import contextlib
import errno
import sys
import threading
import time
import traceback

from jaxrl.__main__ import run
from jaxrl.config import help
from jaxrl.config.load import load_config, parse_flags
from jaxrl.errors import ConfigError, RunStopped
from jaxrl.processes.deadline import leave
from jaxrl.processes.faults import GracefulStop
from jaxrl.run.heap import keep_freed_memory

DISK_TROUBLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO,
                errno.ESTALE)


def main(argv: list[str] | None = None, program: str = "train") -> int:
    """Runs the job of a command line, or prints its --help; returns the exit status (see the module), with a message on
    stderr if it failed. Other exceptions propagate.

    argv: None = sys.argv. program: train, or the run.mode that it sets (eval, plan)."""
    argv = sys.argv[1:] if argv is None else argv
    spec = config = None
    try:
        if (topic := help.requested(argv)) is not None:
            from jaxrl.telemetry.names import metrics_table

            print(help.page(topic, program, metrics_table(help.columns())))
            return 0
        spec, overrides = parse_flags(argv)
        if spec is None:
            raise ConfigError(f"--config=FILE is missing, e.g. jaxrl {program} --config=grpo; see jaxrl {program} "
                              "--help")
        if program != "train" and overrides.setdefault("run.mode", program) != program:
            raise ConfigError(f"--config.run.mode={overrides['run.mode']}: jaxrl {program} sets run.mode={program}; "
                              "leave it out, or use jaxrl train")
        keep_freed_memory()
        with GracefulStop(starting=True):
            config = load_config(spec, overrides)
            from jaxrl.api import train  # imports jax: only after the config could be read

            done = train(config)
    except (RunStopped, TimeoutError) as e:
        complain(f"stopped: {e}")
        return 1
    except ConfigError as e:
        complain(e)
        return 2
    except KeyboardInterrupt as e:
        by = f" by {e}" if str(e) else ""
        complain(f"interrupted{by} during start-up; rerun the same command, which resumes where there is a checkpoint")
        return 128 + getattr(e, "number", 2)
    except OSError as e:
        if e.errno not in DISK_TROUBLE:
            raise
        where = e.filename or (config.run.dir if config is not None else spec or "the command line")
        complain(f"stopped: {where}: {e.strerror}; fix this and rerun the same command to resume from the latest "
                 "checkpoint")
        return 1
    return int(done.get("certified") is False)


def peers():
    """Returns the group of processes of the run, of one process before it is set up; None until the module of groups
    is imported."""
    module = sys.modules.get("jaxrl.processes.group")
    return None if module is None else module.peers()


def complain(text) -> None:
    """Prints an error to stderr, with the process's name if it is not the first."""
    group = peers()
    name = f" {group.who(group.index)}" if group and not group.first else ""
    with contextlib.suppress(OSError):  # its reader has gone: the exit status says it
        print(f"jaxrl{name}: {text}", file=sys.stderr)


EXIT_SECONDS = 60.0  # limit for threads and atexit functions of libraries


def command(argv: list[str] | None = None, program: str = "train") -> None:
    """Runs `jaxrl train`, eval or plan, and `python -m jaxrl.main`: calls main, then ends the process within
    EXIT_SECONDS. The exit status is main's, or that of a SystemExit; 1, with the traceback, after another exception.

    Threads and atexit functions of libraries cannot delay the end further: a launcher only restarts ended processes.
    """
    try:
        status = run(lambda argv: main(argv, program), argv)
    except SystemExit as e:  # a warm start that was stopped, the user's code, argparse
        status = (e.code or 0) if isinstance(e.code, int | None) else 1
        if not isinstance(e.code, int | None):
            complain(e.code)
    except Exception:  # a bug in jaxrl or in the user's code
        with contextlib.suppress(OSError):
            traceback.print_exc()
        status = 1
    if group := peers():
        group.leave(status)
    threading.Thread(target=leave_after, args=(EXIT_SECONDS, status), name="exit", daemon=True).start()
    sys.exit(status)


def leave_after(seconds: float, status: int) -> None:
    """Ends the process by force, with this exit status, if it still runs after so many seconds."""
    time.sleep(seconds)
    leave(f"a library kept the process alive for {seconds:g} s after its end: exit forced", status)


if __name__ == "__main__":
    command()
