"""The program of `jaxrl train`, eval and plan: python -m jaxrl.main --config=configs/grpo.py --config.optimizer.lr=1e-5

Loads a config file, applies the overrides, runs the job. Exit status: 0 done or stopped on request, 2 bad config, data
or checkpoint, 1 a run that had to stop (its checkpoints are whole; the same command resumes) or a claim of certify that
does not hold, 128 + n for signal n while the run starts (Ctrl-C 130, SIGTERM 143), 130 for a second Ctrl-C.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
import traceback

from jaxrl.__main__ import run
from jaxrl.config import help
from jaxrl.config.load import load_config, parse_flags
from jaxrl.errors import ConfigError, RunStopped
from jaxrl.processes.faults import GracefulStop

DISK_TROUBLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO,
                errno.ESTALE)


def main(argv: list[str] | None = None, program: str = "train") -> int:
    """Runs the job of a command line and returns the exit status. program: train, or the run.mode that it sets."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if (topic := help.requested(argv)) is not None:
            from jaxrl.telemetry.names import metrics_table

            print(help.page(topic, program, metrics_table(help.columns())))
            return 0
        spec, overrides = parse_flags(argv)
        if spec is None:
            raise ConfigError(f"--config=FILE is missing, e.g. jaxrl {program} --config=grpo; jaxrl {program} --help "
                              "says more")
        if program != "train" and overrides.setdefault("run.mode", program) != program:
            raise ConfigError(f"--config.run.mode={overrides['run.mode']}: jaxrl {program} sets run.mode={program}; "
                              "leave it out, or use jaxrl train")
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
        complain(f"{e or 'interrupted'}: left before there was anything to save; the same command goes on from the "
                 "newest checkpoint")
        return 128 + getattr(e, "number", 2)
    except OSError as e:
        if e.errno not in DISK_TROUBLE:
            raise
        complain(f"stopped: {e.filename or config.run.dir}: {e.strerror}; mend that, and the same command goes on from "
                 "the newest checkpoint")
        return 1
    return int(done.get("certified") is False)


def peers():
    """The processes of the run; None before any could have met."""
    module = sys.modules.get("jaxrl.processes.group")
    return module and module.peers()


def complain(text) -> None:
    name = f" {peers().who(peers().index)}" if peers() and not peers().first else ""
    print(f"jaxrl{name}: {text}", file=sys.stderr)


EXIT_SECONDS = 60.0  # for what libraries do when the process ends


def command(argv: list[str] | None = None, program: str = "train") -> None:
    """`jaxrl train` and `python -m jaxrl.main`: main, and then the process ends, whatever threads and atexit functions
    of libraries wait for: a launcher tries again only what has ended."""
    try:
        status = run(lambda argv: main(argv, program), argv)
    except Exception:  # a mistake in jaxrl or in code of the user's
        traceback.print_exc()
        status = 1
    if peers():
        peers().leave(status)
    threading.Thread(target=leave_after, args=(EXIT_SECONDS, status), name="exit", daemon=True).start()
    sys.exit(status)


def leave_after(seconds: float, status: int) -> None:
    """Ends the process by force if it is still there after so many seconds."""
    time.sleep(seconds)
    os.write(2, f"\njaxrl: a library did not let the process end for {seconds:g} s: left\n".encode())
    os._exit(status)


if __name__ == "__main__":
    command()
