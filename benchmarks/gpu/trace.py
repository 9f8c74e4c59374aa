"""A trace of the JAX profiler as tables: programs with their launches, copies and gaps, and kernels by time.

    python benchmarks/gpu/trace.py FILE.xplane.pb          (or a run's folder)

On GPUs a kernel is an event of a stream, on TPUs of the line "XLA Ops", on CPUs an operation of a thread. A gap is the
time between two kernels of one program that follow each other, in which nothing runs on the device. The profiler turns
CUDA graphs off, so that a traced step has more and longer gaps than others.
"""

from __future__ import annotations

import collections
import sys
from pathlib import Path
from typing import NamedTuple

COPIES = ("memcpy", "memset", "copy", "dynamic-slice", "dynamic_slice")
CONTAINERS = ("while", "cond")  # events that hold those of their bodies
LONG_GAP = 10_000  # ns


class Event(NamedTuple):
    program: str
    kernel: str
    start: float  # ns
    end: float


def events(file) -> list[Event]:
    """Of the first device, in the order of their start."""
    from jax.profiler import ProfileData

    found = []
    planes = {plane.name: plane for plane in ProfileData.from_file(str(file)).planes}
    device = next((name for name in sorted(planes) if name.startswith("/device:") and "CUSTOM" not in name), "/host:CPU")
    for row in planes[device].lines if device in planes else ():
        if "TPU" in device and row.name != "XLA Ops":
            continue
        for event in row.events:
            stats = dict(event.stats)
            if device == "/host:CPU" and "hlo_op" not in stats or event.name.startswith(CONTAINERS):
                continue
            program = str(stats.get("hlo_module", "")).removeprefix("jit_")
            found.append(Event(program, event.name, event.start_ns, event.start_ns + event.duration_ns))
    return sorted(found, key=lambda e: e.start)


def programs(found: list[Event]) -> dict[str, dict]:
    """Per program, longest first: launches, ms of kernels and of copies among them, ms and number of gaps between two
    kernels of one program that follow each other (long: more than 10 us)."""
    out = collections.defaultdict(lambda: dict(launches=0, busy_ms=0.0, copies=0, copies_ms=0.0, gaps_ms=0.0,
                                               long_gaps=0))
    before, until = None, 0.0
    for event in found:
        row, took = out[event.program], (event.end - event.start) / 1e6
        row["launches"] += 1
        row["busy_ms"] += took
        if is_copy(event.kernel):
            row["copies"] += 1
            row["copies_ms"] += took
        if before == event.program and event.start > until:
            row["gaps_ms"] += (event.start - until) / 1e6
            row["long_gaps"] += event.start - until > LONG_GAP
        before, until = event.program, max(until, event.end)
    return dict(sorted(out.items(), key=lambda item: -item[1]["busy_ms"]))


def kernels(found: list[Event]) -> dict[tuple[str, str], dict]:
    """(program, kernel) -> launches, ms, us of one; longest first."""
    out = collections.defaultdict(lambda: dict(launches=0, ms=0.0))
    for event in found:
        row = out[event.program, event.kernel]
        row["launches"] += 1
        row["ms"] += (event.end - event.start) / 1e6
    for row in out.values():
        row["us_each"] = 1e3 * row["ms"] / row["launches"]
    return dict(sorted(out.items(), key=lambda item: -item[1]["ms"]))


def device_time(found: list[Event]) -> dict:
    """Of all streams together: ms from first to last, ms in which something runs, ms in which nothing does."""
    busy, until = 0.0, 0.0
    for event in found:
        busy += max(0.0, event.end - max(until, event.start))
        until = max(until, event.end)
    span = until - found[0].start if found else 0.0
    return dict(span_ms=span / 1e6, busy_ms=busy / 1e6, idle_ms=(span - busy) / 1e6)


def is_copy(kernel: str) -> bool:
    return any(word in kernel.lower() for word in COPIES)


def files(folder) -> list[Path]:
    folder = Path(folder)
    return [folder] if folder.is_file() else sorted(folder.rglob("*.xplane.pb"))


def report_trace(report, folder, shown: int = 12) -> None:
    """Rows of the traces below a run's folder: the device, its programs, the `shown` kernels that take longest."""
    for file in files(folder):
        found = events(file)
        report("trace", **device_time(found))
        for name, row in list(programs(found).items())[:8]:
            report(f"trace: program {name or '(none)'}", **row)
        for (program, kernel), row in list(kernels(found).items())[:shown]:
            report(f"trace: kernel {program or '(none)'}: {kernel[:80]}", **row)


def main(folder: str) -> None:
    for file in files(folder):
        found = events(file)
        print(f"{file}: " + ", ".join(f"{name} {value:.1f}" for name, value in device_time(found).items()))
        print(f"{'program':40s}{'launches':>10s}{'ms':>10s}{'copies':>10s}{'ms':>10s}{'gaps ms':>10s}{'> 10 us':>10s}")
        for name, r in programs(found).items():
            print(f"{name[:38]:40s}{r['launches']:10d}{r['busy_ms']:10.2f}{r['copies']:10d}{r['copies_ms']:10.2f}"
                  f"{r['gaps_ms']:10.2f}{r['long_gaps']:10d}")
        print(f"{'kernel':80s}{'launches':>10s}{'ms':>10s}{'us each':>10s}")
        for (program, kernel), r in list(kernels(found).items())[:40]:
            print(f"{program + ': ' + kernel[:60]:80s}{r['launches']:10d}{r['ms']:10.2f}{r['us_each']:10.1f}")


if __name__ == "__main__":
    main(sys.argv[1])
