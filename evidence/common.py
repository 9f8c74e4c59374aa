"""What every evidence script does with its figures: prints them and writes evidence/results/<name>.json."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "numpy")


def machine(python: str = sys.executable) -> dict:
    """Processor, cores, memory, and an interpreter's version and libraries; nothing that names one particular machine."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        model = next(
            (line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")),
            model,
        )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    code = (f"import importlib.metadata as m, json, platform; print(json.dumps({{'python': platform.python_version(), "
            f"**{{n: m.version(n) for n in {PACKAGES}}}}}))")
    versions = json.loads(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout)
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "memory_gib": round(memory, 1),
        **versions,
    }


def commit() -> str:
    """The checked-out commit, with '+' when the tree has uncommitted changes other than results."""
    root = Path(__file__).parent.parent
    run = lambda *a: subprocess.run(["git", "-C", str(root), *a], capture_output=True, text=True).stdout.strip()  # noqa: E731
    status = ("status", "--porcelain", "--untracked-files=no", "--", ".", ":!evidence/results", ":!benchmarks/results")
    return run("rev-parse", "--short", "HEAD") + ("+" if run(*status) else "")


def record(name: str, results, at: str = "", python: str = sys.executable) -> None:
    """Writes evidence/results/<name>.json: date, commit (`at`, or the present one), machine, results."""
    RESULTS.mkdir(exist_ok=True)
    entry = {"date": datetime.date.today().isoformat(), "commit": at or commit(), "machine": machine(python),
             "results": results}
    (RESULTS / f"{name}.json").write_text(json.dumps(entry, indent=1) + "\n")
    print(f"\nwritten: evidence/results/{name}.json")


def table(header: list[str], rows: list[list]) -> None:
    """Prints a plain table."""
    cells = [header, *[[str(c) for c in row] for row in rows]]
    widths = [max(len(r[i]) for r in cells) for i in range(len(header))]
    for k, row in enumerate(cells):
        print("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip())
        if k == 0:
            print("  ".join("-" * w for w in widths))
