"""jaxrl report RUN [RUN ...] [--out FILE] [--steps 1,20,40] [--watch [--port N] [--every SECONDS]]

Writes one HTML file about one or several run directories, to RUN/report.html of the first or to --out. Runs that differ
in their seed alone are drawn as one curve with a band. With --watch nothing is written: the page is served on this
machine's loopback address and follows the runs while they go on, until Ctrl-C.

Exit status: 0 done; 2 a directory that holds no run, or a place that cannot be written.
"""

from __future__ import annotations

import argparse
import contextlib
import sys

from jaxrl.__main__ import run
from jaxrl.errors import ConfigError
from jaxrl.report.page import write_report
from jaxrl.report.watch import WatchedRuns, server


def main(argv=None) -> int:
    """Runs `jaxrl report`; returns the exit status: 0, or 2 for a folder without a run or a place that cannot be
    written."""
    parser = argparse.ArgumentParser(prog="jaxrl report", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run directory")
    parser.add_argument("--out", help="the file to write (default: report.html in the first run)")
    parser.add_argument("--steps", type=_steps,
                        help="training steps whose completions are shown (default: 8, evenly spaced)")
    parser.add_argument("--watch", action="store_true", help="serve the page on 127.0.0.1 while the runs go on")
    parser.add_argument("--port", type=int, default=8770, help="with --watch (default 8770; 0 = a free one)")
    parser.add_argument("--every", type=float, default=10.0,
                        help="with --watch: seconds between two looks (default 10)")
    args = parser.parse_args(argv)
    if args.every < 1:
        parser.error(f"--every={args.every:g}: at least 1 second")
    try:
        if args.watch:
            return _watch(args)
        path = write_report(args.runs, args.out, args.steps)
    except (ConfigError, OSError) as e:
        print(f"jaxrl: {e}", file=sys.stderr)
        return 2
    print(f"{path} ({path.stat().st_size / 1e6:.2f} MB)")
    return 0


def _watch(args) -> int:
    watched = WatchedRuns(args.runs, args.steps, args.every)
    watched.content()  # a wrong directory is said here
    serving = server(watched, args.port)
    print(f"http://127.0.0.1:{serving.port}/ shows {', '.join(args.runs)}; Ctrl-C ends it", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        serving.run()
    return 0


def _steps(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


if __name__ == "__main__":
    sys.exit(run(main))
