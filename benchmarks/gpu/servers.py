"""Parts that train with real vLLM servers: gap and seconds of five steps, publishing, sleep and wake, adapters, staleness."""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from gpu import rows
from gpu.cases import ADAPTERS, CASES, job
from gpu.training import PHASES, WARM, medians, peak

STEPS = 5
SYNCHRONOUS, AHEAD = "vllm-0.5B", "vllm-ahead"  # parts of the suite
WAYS = {  # how weights and memory are shared -> options
    "shm": {"rollout.vllm.transport": "shm"},
    "network": {"rollout.vllm.transport": "network"},
    "nccl": {"rollout.vllm.transport": "nccl", "rollout.vllm.devices": ("1",)},
    "asleep": {"rollout.placement": "colocated"},
    "adapters": {**dict(ADAPTERS), "lora.publish": "adapter"},
    "lora": {**dict(ADAPTERS), "lora.publish": "merged"},
    "ahead": {"rollout.max_staleness": 2, "rollout.partial": True},
}


def run(report, name: str, way: str) -> None:
    """Five steps of a case through a server of ours."""
    if not report.needs("steps", "vllm"):
        return
    if way == "nccl" and report.origin["devices"] < 2:
        report.refuse("steps", f"NCCL refuses two processes on one GPU; GPUs here: {report.origin['devices']}")
        return
    with tempfile.TemporaryDirectory() as folder:
        config = job_of(name, f"{folder}/run", way)
        with report.stage("steps"):
            try:
                train(report, name, config)
            except Exception:
                report("server", log=log_of(f"{folder}/run"))
                raise
        if way == "ahead":
            report_beside(report)


def job_of(name: str, folder: str, way: str):
    """The case's job with vLLM; what only the embedded sampler reads is left to its defaults."""
    import jaxrl
    from jaxrl.config.load import put

    c, default = job(name, folder, STEPS), jaxrl.default_config()
    c.rollout.engine = "vllm"
    c.rollout.prompt_lengths, c.rollout.compaction = default.rollout.prompt_lengths, default.rollout.compaction
    for option, value in WAYS[way].items():
        put(c, option, value)
    return c


def train(report, name: str, config) -> None:
    import jaxrl

    started, naps = time.monotonic(), timed_sleep()

    def after(step):
        lines = [json.loads(text) for text in (Path(config.run.dir) / "metrics.jsonl").read_text().splitlines()]
        now = next(line for line in reversed(lines) if "update" in line["time"])
        if step.number == 1:
            report("start", seconds=time.monotonic() - started - now["time"]["step"])
        shown = {key.replace("/", "_"): value for key, value in (now | now["time"]).items()
                 if key.startswith(("gap/", "publish/"))}
        report(f"step {step.number}", **{n: now["time"][n] for n in PHASES if n in now["time"]}, **shown)
        report_so_far(report, name, [line for line in lines if "update" in line["time"]], naps)

    jaxrl.train(config, callbacks=[after])


def report_so_far(report, name: str, lines: list[dict], naps: dict) -> None:
    """Rows over the steps so far: a part that is cut off keeps them."""
    if len(lines) <= WARM:
        return
    steps, warm = [line["time"] for line in lines], lines[WARM:]
    found, median = medians(steps), lambda key: statistics.median((line | line["time"])[key] for line in warm)
    report("steps", steps=len(steps), **found, **peak(), compilations_after_warm_up=int(
        sum(step["compilations"] for step in steps[WARM:])))
    if report.part != AHEAD:  # there it is only what the trainer waited
        tokens = statistics.median(line.get("rollout/tokens", CASES[name].sequences * CASES[name].answer) for line in warm)
        report("rollout", seconds=found["rollout"], tokens_per_second=tokens / found["rollout"])
    report("gap", largest_mean=max(line["gap/mean"] for line in lines), largest=max(line["gap/max"] for line in lines))
    report("publish", **{key: median(f"publish/{key}") for key in ("seconds", "gb_per_second", "probe")})
    for what, calls in naps.items():
        if calls:
            report(what, seconds=statistics.median(c["seconds"] for c in calls), calls=len(calls), **{
                key: calls[-1][key] for key in ("gib_before", "gib_after") if calls[-1][key] is not None})


def report_beside(report) -> None:
    """A step with max_staleness=2 beside the sum of the synchronous phases, where those were measured at this commit."""
    own = {row["part"]: row for row in rows.read(report.file)
           if row["name"] == "steps" and row["commit"] == report.origin["commit"] and "step" in row}
    if {AHEAD, SYNCHRONOUS} <= own.keys():
        parts = sum(own[SYNCHRONOUS].get(n, 0.0) for n in PHASES if n not in ("other", "step"))
        report(f"beside {SYNCHRONOUS}", step_of_sum=own[AHEAD]["step"] / parts, step_of_step=own[AHEAD]["step"] / own[SYNCHRONOUS]["step"])


def timed_sleep() -> dict[str, list[dict]]:
    """Keeps seconds, and the GPU's memory before and after, of every call that puts a server to sleep or wakes it."""
    from jaxrl.rollout.vllm.adapter import Control

    found: dict[str, list[dict]] = {"sleep": [], "wake": []}

    def timed(what, call):
        def run(self, *arguments):
            before, started = used_gib(), time.monotonic()
            out = call(self, *arguments)
            found[what].append({"seconds": time.monotonic() - started, "gib_before": before, "gib_after": used_gib()})
            return out

        return run

    Control.sleep, Control.wake_up = timed("sleep", Control.sleep), timed("wake", Control.wake_up)
    return found


def used_gib() -> float | None:
    """Memory of the first GPU that any process has; None without nvidia-smi."""
    try:
        said = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True,
                              text=True).stdout
    except OSError:
        return None
    return float(said.split()[0]) / 1024 if said.strip() else None


def log_of(folder: str) -> str:
    """The end of the servers' logs."""
    return "\n".join(file.read_text(errors="replace")[-1500:] for file in sorted(Path(folder).glob("vllm/*.log")))


