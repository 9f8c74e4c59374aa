"""What every script of this folder shares: its arguments, its clock, the reward, and the one line of JSON it prints.

Standard library and numpy only: it is imported in every system's environment.

    python SCRIPT --work FOLDER --steps 2 [--seed 0] [--replay] [--save FILE]

The line: {"system", "versions", "seconds": {"step", "generation", "scoring", "update", "rest"} medians over the steps after the
first, "steps": the same for each step, "first_step": seconds of the first one with all that is compiled in it, "tokens",
"rewards": the mean of each step, where a system has them (of pairs its loss), "peak_rss_mib", "ceiling_gflops"}. `generation` includes handing the
sampler its weights; `scoring` is log-probs of a policy outside the update; `rest` is rewards, tokenization, packing, logging, and
whatever else lies between two steps.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from shapes import Work  # noqa: E402

WEIGHT_DECAY, CLIP_NORM, CLIP_RATIO = 0.01, 1.0, 0.2  # of every system's AdamW and loss
BETA = 0.1  # of DPO
PARTS = ("generation", "scoring", "update")


def arguments(argv=None, **more) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", required=True, type=Work)
    parser.add_argument("--steps", type=int, default=2, help="steps measured, after a first one")
    parser.add_argument("--seed", type=int, default=0, help="of the sampler")
    parser.add_argument("--replay", action="store_true", help="train on the recorded answers")
    parser.add_argument("--save", default="", help="write the parameters after the last step to this .npz, by HF names")
    parser.add_argument("--microbatch", type=int, default=0, help="sequences held at once where nothing is packed; 0 = the shape's")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--eps", type=float, default=1e-8, help="AdamW's")
    parser.add_argument("--unscaled", action="store_true", help="advantages are not divided by the group's standard deviation")
    for name, options in more.items():
        parser.add_argument(f"--{name}", **options)
    args = parser.parse_args(argv)
    args.replay |= not args.work.shape.generates
    args.microbatch = args.microbatch or args.work.shape.microbatch
    return args


def reward(completion: str, **_) -> float:
    """Share of even tokens in an answer; every system computes it from the answer's text."""
    tokens = [int(word[1:]) for word in completion.split()]  # of the last turn, where there are several
    return sum(i % 2 == 0 for i in tokens) / max(len(tokens), 1)


class Clock:
    """Seconds by part, step after step. Parts nest, and an inner one owns its time; one thread at a time may be in them. A
    part that is not in PARTS is rest."""

    def __init__(self):
        self.steps: list[dict[str, float]] = []
        self._spent, self._begin, self._open = defaultdict(float), time.perf_counter(), []

    def start(self) -> None:
        self._begin = time.perf_counter()

    @contextlib.contextmanager
    def part(self, name: str):
        begin = time.perf_counter()
        self._open.append(0.0)
        try:
            yield
        finally:
            took, inner = time.perf_counter() - begin, self._open.pop()
            self._spent[name] += took - inner
            if self._open:
                self._open[-1] += took

    def wrap(self, owner, method: str, name: str) -> None:
        """Counts a method's time as `name`."""
        inner = getattr(owner, method)

        def timed(*args, **kwargs):
            with self.part(name):
                return inner(*args, **kwargs)

        setattr(owner, method, timed)

    def step(self) -> None:
        """A step ends here, and the next one begins."""
        now = time.perf_counter()
        self.add({**self._spent, "step": now - self._begin})
        self._begin, self._spent = now, defaultdict(float)

    def add(self, seconds: dict[str, float]) -> None:
        known = {name: seconds.get(name, 0.0) for name in PARTS}
        self.steps.append({"step": seconds["step"], **known, "rest": seconds["step"] - sum(known.values())})


def ceiling(product, n: int = 1536, seconds: float = 1.0) -> float:
    """GFLOP/s of the best of many products of two n x n matrices; `product()` computes one and waits for it."""
    product()
    best, end = np.inf, time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        product()
        best = min(best, time.perf_counter() - begin)
    return 2 * n**3 / best / 1e9


def copy_bandwidth(threads: int, seconds: float = 1.0) -> float:
    """GB/s read and written by `threads` that copy memory which no cache holds."""
    from concurrent.futures import ThreadPoolExecutor

    pairs = [np.ones((2, 1 << 24)) for _ in range(threads)]
    best, end = np.inf, time.perf_counter() + seconds
    with ThreadPoolExecutor(threads) as pool:
        while time.perf_counter() < end:
            begin = time.perf_counter()
            list(pool.map(lambda pair: np.copyto(pair[0], pair[1]), pairs))
            best = min(best, time.perf_counter() - begin)
    return sum(pair.nbytes for pair in pairs) / best / 1e9


def torch_ceiling() -> float:
    """Of fp32 on this process' cores."""
    import torch

    a = torch.randn(1536, 1536)
    return ceiling(lambda: a @ a)


def jax_ceiling(dtype: str = "float32") -> float:
    """Of the first device; fp32 is computed as fp32."""
    import jax

    n = 1536 if jax.default_backend() == "cpu" else 8192
    a = jax.random.normal(jax.random.key(0), (n, n), dtype)
    multiply = jax.jit(lambda x: jax.numpy.matmul(x, x, precision="highest" if dtype == "float32" else "default"))
    return ceiling(lambda: multiply(a).block_until_ready(), n)


def peak_rss_mib() -> float:
    """The highest resident memory of this process and of each of its descendants that still lives, added up."""
    parents, peaks = {}, {}
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
            parents[int(fields["Pid"])] = int(fields["PPid"])
            peaks[int(fields["Pid"])] = int(fields.get("VmHWM", "0 kB").split()[0]) / 1024

    def ours(pid):
        while pid in parents and pid != os.getpid():
            pid = parents[pid]
        return pid == os.getpid()

    return round(sum(mib for pid, mib in peaks.items() if ours(pid)), 1)


def report(system: str, args, clock: Clock, packages, ceiling_gflops: float, peak: float | None = None, rewards=()) -> None:
    """Prints the line. peak: MiB, where the processes that held it are gone by now. rewards: the mean of each step."""
    first, *later = clock.steps
    names = ("step", *PARTS, "rest")
    print("\n" + json.dumps({
        "system": system, "versions": {name: importlib.metadata.version(name) for name in packages},
        "seconds": {name: round(statistics.median(s[name] for s in later or [first]), 4) for name in names},
        "steps": [{name: round(s[name], 4) for name in names} for s in clock.steps],
        "first_step": round(first["step"], 3), "tokens": args.work.shape.counts(),
        "rewards": [float(r) for r in rewards],
        "peak_rss_mib": peak_rss_mib() if peak is None else peak, "ceiling_gflops": round(ceiling_gflops, 1)}), flush=True)
