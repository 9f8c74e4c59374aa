"""Parts of the suite that benchmarks/kernel_table.py measures: kernels held to float64, their times and rates."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gpu import rows

MINUTES = 2.2   # after them no new row is begun
PROCESSES = 4   # that compile correctness cases at once, each with threads
SUITE = Path(__file__).resolve().parents[1] / "gpu_suite.py"


def timed(report, part: str, tiny: bool, models: tuple = ()) -> None:
    """One of kernel_table.PARTS, of these models, or layers of experts, where it has some. Rows that this commit has are not
    measured again, so that a part that was out of time goes on where it stopped."""
    import kernel_table

    commit = report.origin["commit"]
    known = {row["name"] for row in rows.read(report.file) if (row["part"], row["commit"]) == (report.part, commit) and "milliseconds" in row}

    def note(row):
        values = {name: value for name, value in row.items() if name not in ("op", "model", "shape", "implementation")}
        report(named(row), **values)

    sizes = kernel_table.TINY if tiny else kernel_table.FULL
    if models and not tiny:
        sizes = sizes | {"layers" if part == "experts" else "models": list(models)}
    table = kernel_table.Table(MINUTES if not tiny else kernel_table.UNLIMITED, quick=tiny, note=note, known=lambda row: named(row) in known)
    kernel_table.run(part, table, sizes)
    if left := sum(row.get("not_run") == kernel_table.LATE for row in table.rows):
        report.not_run = f"{rows.NOT_RUN}: {left} rows, out of time; the part again goes on with them"


def named(row: dict) -> str:
    return ", ".join(row[name] for name in ("op", "model", "shape", "implementation"))


def correctness(report, share: str = "") -> None:
    """All implementations against float64, by several processes at once; share, i/n: what one of them does."""
    if share:
        import kernel_table

        def note(row):
            refused = row["error"].startswith("refused")
            report(f"{row['implementation']}, {row['case']}", seconds=row["seconds"], not_run=row["error"] if refused else "",
                   failed="" if refused else row["error"], among_others=row.get("among_others", ""))

        i, n = map(int, share.split("/"))
        threads = max(1, len(os.sched_getaffinity(0)) // n)
        kernel_table.correctness(kernel_table.held_here(), note, (i, n), threads)
        return
    processes = max(1, min(PROCESSES, len(os.sched_getaffinity(0)) // 2))
    command = [sys.executable, str(SUITE), "--one", report.part, "--file", str(report.file), "--share"]
    shares = [subprocess.Popen([*command, f"{i}/{processes}"]) for i in range(processes)]
    codes = [process.wait() for process in shares]
    report.failed += [f"process {i} ended with {code}" for i, code in enumerate(codes) if code]
