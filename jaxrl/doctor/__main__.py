"""jaxrl doctor [--out FILE] [--skip vllm,kernels]

Checks this machine: package versions, memory, disk, devices, every kernel of this device against the reference,
collectives, the cache of compiled programs, and, if vLLM is installed, a server of a tiny model.
Prints what is wrong and what to do, and writes all of it, without secrets, to a file that you can attach to an issue.

Exit status: 0 if nothing is wrong, 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jaxrl.__main__ import run
from jaxrl.doctor.examinations import EXAMINATIONS

MARKS = {"ok": "  ok   ", "note": "  note ", "wrong": "  WRONG", "-": "  -    "}
TAIL = 15  # last lines of stderr that are shown of a failed examination


def main(argv=None) -> int:
    """Runs `jaxrl doctor`: prints and writes what each examination found, without secrets; returns 1 if anything is
    wrong, else 0. Raises OSError if the file cannot be written.

    argv: None = sys.argv. --one runs one examination in this process and prints its lines as JSON.
    """
    parser = argparse.ArgumentParser(prog="jaxrl doctor", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="jaxrl-doctor.txt", help="the file to write (default jaxrl-doctor.txt)")
    parser.add_argument("--skip", default="", help=f"of {','.join(EXAMINATIONS)}, those to leave out")
    parser.add_argument("--one", choices=EXAMINATIONS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        lines = EXAMINATIONS[args.one][0]()
        print("\n" + json.dumps([list(line) for line in lines]))
        return 0
    skip = [name for name in args.skip.split(",") if name]
    if unknown := set(skip) - set(EXAMINATIONS):
        parser.error(f"--skip={', '.join(sorted(unknown))}: choose from {', '.join(EXAMINATIONS)}")
    text, wrong = [], 0
    for name in EXAMINATIONS:
        if name in skip:
            continue
        seconds, lines = run_examination(name)
        text.append(redact("\n".join([f"{name} ({seconds:.1f} s)", *(
            MARKS[state] + " " + said.replace("\n", "\n         ") for state, said in lines)])))
        wrong += sum(state == "wrong" for state, _ in lines)
        print(text[-1], flush=True)
    last = f"{wrong} things are wrong" if wrong else "nothing is wrong"
    text.append(last)
    Path(args.out).write_text("\n".join(text) + "\n", "utf-8")
    print(f"{last}; written to {args.out}")
    return int(bool(wrong))


def run_examination(name: str) -> tuple[float, list]:
    """Runs an examination in its own process and returns (seconds, [(state, text)]).

    A failure, a signal or a timeout of the process is returned as one line with the state "wrong".
    """
    began, limit = time.monotonic(), EXAMINATIONS[name][1]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        process = subprocess.Popen([sys.executable, "-m", "jaxrl.doctor", f"--one={name}"], stdout=subprocess.PIPE,
                                   stderr=said, text=True, start_new_session=True)
        try:
            out, _ = process.communicate(timeout=limit)
            status = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with servers that it started
            out, status = process.communicate()[0], None
        said.seek(0)
        tail = "\n".join(said.read().splitlines()[-TAIL:])
    seconds = time.monotonic() - began
    try:
        if status == 0:
            return seconds, [tuple(line) for line in json.loads(out.splitlines()[-1])]
    except (ValueError, IndexError):
        pass
    why = f"did not end within {limit} s" if status is None else (
        f"was ended by {signal.Signals(-status).name}" if status < 0 else f"failed with status {status}")
    return seconds, [("wrong", f"{name} {why}; its last lines:\n{tail}")]


def redact(text: str) -> str:
    """Removes what looks like a secret, and the path of the user's home, from a text. Without the packages that
    jaxrl.config.load needs, all lines with "=" but those of pip install are left out."""
    for place, instead in ((str(Path.home()), "~"),):
        text = text.replace(place, instead) if len(place) > 1 else text
    try:
        from jaxrl.config.load import redacted_text
    except ImportError:  # a package that jaxrl.config.load needs is missing: leave out what could hold one
        return "\n".join(line for line in text.split("\n") if "=" not in line or "pip install" in line)
    return redacted_text(text)


if __name__ == "__main__":
    sys.exit(run(main))
