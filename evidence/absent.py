"""Whether a model can write a text that has no score: everything that reads what models write, on hostile texts.

    python evidence/absent.py [PART OF A READER'S NAME ...]

Texts and readers are those of tests/helpers/hostile_texts.py: every built-in reward, every parser of tool calls, turns of every family of
chat templates, environments, actions of services, judges, scores of services, and programs under unit tests; each marker again and again,
open, nested and unclosed, numbers of up to 100,000 digits, towers of powers, values that are not finite. Each reader reads each text at
25 kB and at 100 kB. Expected: no exception, no score but that of a wrong answer, and time in proportion: `ratio` is the seconds of
processor time at 100 kB over those at 25 kB (4 is linear; texts that are short by themselves, and times below FLOOR seconds, have none).
Programs have one second of processor time, `math` and `format` have two, so their ratios end there. Writes evidence/results/absent.json
and, with all tables, evidence/results/absent.txt; a quarter of an hour.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from pathlib import Path

sys.path[:0] = [os.path.dirname(__file__), str(Path(__file__).parent.parent / "tests")]

from common import RESULTS, record, table  # noqa: E402
from helpers import hostile_texts  # noqa: E402

SMALL, LARGE = 25_000, 100_000
FLOOR = 0.05  # seconds
SHOWN = 25    # rows of the slowest


def spent() -> float:
    """Processor time of this process and of those it waited for."""
    t = os.times()
    return t.user + t.system + t.children_user + t.children_system


def measure(name: str, read, small: dict, large: dict) -> tuple[list[dict], list[str]]:
    """Rows of the large texts, and what went wrong."""
    rows, wrong = [], []
    for label, text in large.items():
        seconds = []
        for size, one in ((SMALL, small[label]), (LARGE, text)):
            began = spent()
            try:
                read(one)
            except BaseException as e:
                if isinstance(e, KeyboardInterrupt):
                    raise
                wrong.append(f"{name}: {label} at {size}: {type(e).__name__}: {str(e)[:200]!r}")
            seconds.append(spent() - began)
        ratio = seconds[1] / seconds[0] if len(text) > 2 * len(small[label]) and seconds[0] > 0 and seconds[1] >= FLOOR else None
        rows.append({"reader": name, "text": label, "seconds": round(seconds[1], 3), "ratio": ratio and round(ratio, 1)})
    return rows, wrong


def main(parts: list[str]) -> int:
    hostile_texts.limits_alone()
    known = hostile_texts.readers()
    readers = {name: read for name, read in known.items() if not parts or any(part in name for part in parts)}
    small, large = hostile_texts.texts(SMALL), hostile_texts.texts(LARGE)
    rows, wrong, began = [], [], time.monotonic()
    for name, read in readers.items():
        found, faults = measure(name, read, small, large)
        rows += found
        wrong += faults
        print(f"{name}: {len(found)} texts, {sum(r['seconds'] for r in found):.1f} s, slowest {max(r['seconds'] for r in found):.2f} s, "
              f"{len(faults)} wrong ({time.monotonic() - began:.0f} s so far)", flush=True)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        print(f"{len(readers)} of {len(known)} readers, {len(large)} texts, {SMALL} and {LARGE} characters; "
              f"{len(wrong)} without the score of a wrong answer\n")
        by_reader = [[name, len(of), f"{sum(r['seconds'] for r in of):.2f}", f"{max(r['seconds'] for r in of):.3f}",
                      max(r["ratio"] or 0 for r in of)] for name in readers if (of := [r for r in rows if r["reader"] == name])]
        table(["reader", "texts", "seconds of all at 100 kB", "slowest", "highest ratio"], by_reader)
        print("\nThe slowest:")
        slowest = sorted(rows, key=lambda r: -r["seconds"])[:SHOWN]
        table(["reader", "text", "seconds", "ratio"], [[r["reader"], r["text"], r["seconds"], r["ratio"] or ""] for r in slowest])
        print("\nThe steepest:")
        steepest = sorted((r for r in rows if r["ratio"]), key=lambda r: -r["ratio"])[:SHOWN]
        table(["reader", "text", "seconds", "ratio"], [[r["reader"], r["text"], r["seconds"], r["ratio"]] for r in steepest])
        print("\nWithout the score of a wrong answer:", *(wrong or ["none"]), sep="\n")
    print("\n" + out.getvalue())
    if not parts:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "absent.txt").write_text(out.getvalue())
        record("absent", {"readers": len(readers), "texts": len(large), "wrong": wrong, "slowest": slowest, "steepest": steepest})
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
