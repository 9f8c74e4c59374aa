"""Parts that train with the embedded sampler, or with given completions: steps, decoding, update, trace, plan."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from gpu import rows as results
from gpu.cases import CASES, PROMPT, described, job
from gpu.trace import report_trace

SUITE = Path(__file__).resolve().parents[1] / "gpu_suite.py"
WARM = 2  # steps that compile
PHASES = ("rollout", "reward", "score", "update", "publish", "other", "step")


def steps_of(folder: str) -> list[dict]:
    """Of each completed step its seconds by phase, compilations and perf/*."""
    file = Path(folder) / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [line["time"] for line in lines if "update" in line["time"]]


def medians(steps: list[dict]) -> dict:
    """Medians of seconds by phase over the steps after the first WARM."""
    warm = steps[WARM:] or steps
    return {name: statistics.median(row.get(name, 0.0) for row in warm) for name in PHASES if name in warm[-1]}


def peak() -> dict:
    """{"peak_gib"} of the first device since this process began; {} where the device does not tell."""
    import jax

    stats = jax.devices()[0].memory_stats() or {}
    return {"peak_gib": stats["peak_bytes_in_use"] / 2**30} if "peak_bytes_in_use" in stats else {}


def trained(report, name: str, config, traced: bool = True, prefix: str = "", more=lambda found: None) -> list[dict]:
    """Trains, with rows after every step, to which more(medians) may add; the last step is traced and not counted. Returns the
    seconds of the others."""
    import jaxrl
    from jaxrl.config.load import put

    case, last = CASES[name], config.train.steps + traced
    if traced:
        config.train.steps = last
        put(config, "profile.steps", (last, last))

    def after(step):
        steps = steps_of(config.run.dir)
        if step.number == 1:
            report(f"{prefix}first step", **{n: steps[0][n] for n in PHASES if n in steps[0]})
        elif step.number < last or not traced:
            report_steps(report, case, steps, prefix)
            if len(steps) > WARM:
                more(medians(steps))

    jaxrl.train(config, callbacks=[after])
    return steps_of(config.run.dir)[:last - traced]


def report_steps(report, case, steps: list[dict], prefix: str = "") -> None:
    """Rows of the steps so far: a part that is cut off keeps them."""
    if len(steps) <= WARM:
        return
    found = medians(steps)
    report(f"{prefix}steps", steps=len(steps), **found, **peak(),
           compilations_after_warm_up=int(sum(row["compilations"] for row in steps[WARM:])))
    if found.get("update"):
        mfu = {"mfu": steps[-1]["perf/update_mfu"]} if "perf/update_mfu" in steps[-1] else {}
        report(f"{prefix}update", seconds=found["update"], tokens_per_second=case.tokens / found["update"], **mfu)


def run(report, name: str) -> None:
    """Steps of a case, the last of them traced: a profiler that takes the process along leaves the rows of the others."""
    with report.stage("predicted"):
        report("predicted", **predicted(name))
    decoding = read_of(name) if CASES[name].kind == "samples" else None
    with tempfile.TemporaryDirectory() as folder:
        with report.stage("steps"):
            trained(report, name, job(name, f"{folder}/run"),
                    more=lambda found: decoding and report_decoding(report, name, found["rollout"], *decoding))
        with report.stage("trace"):
            report_trace(report, f"{folder}/run")


def read_of(name: str) -> tuple[float, float]:
    """(bytes that a rollout's decode steps have to read, bytes a second of the chip or 0)."""
    import jax

    from jaxrl.sharding import targets

    case, (_, model) = CASES[name], resolved(name)
    seen, width = sum(PROMPT + t for t in range(1, case.answer)) * case.sequences, model.compute_dtype.itemsize
    cache = 2 * seen * model.config.num_kv_heads * model.config.head_dim * model.config.num_layers
    chip = targets.name_of(jax.devices()[0])
    bandwidth = targets.parse(f"{chip}:1").chip.bandwidth if chip else 0
    return width * (model.num_parameters * (case.answer - 1) + cache), bandwidth


def report_decoding(report, name: str, seconds: float, read: float, bandwidth: float) -> None:
    """A rollout beside what its decode steps have to read, weights and filled cache, at the chip's bandwidth (prompts taken
    as PROMPT tokens, so somewhat too many)."""
    case = CASES[name]
    roofline = {"roofline_seconds": read / bandwidth, "share": read / bandwidth / seconds} if bandwidth else {}
    report("decoding", seconds=seconds, ms_a_token=1e3 * seconds / case.answer,
           tokens_per_second=case.sequences * case.answer / seconds, **roofline)


def resolved(name: str) -> tuple:
    """(Spec, Model) of a case on the devices of this process."""
    from jaxrl.resolve.spec import here, resolve
    from jaxrl.run import setup

    described_as = described(CASES[name].model or name)
    with tempfile.TemporaryDirectory() as folder:
        spec = resolve(job(name, f"{folder}/run"), here(), described_as)
    return spec, setup.build_model(spec, described_as)


def predicted(name: str) -> dict:
    """What a run says before its first step; nothing is compiled for it."""
    from jaxrl import sharding
    from jaxrl.planning import plan

    spec, model = resolved(name)
    found = plan.predict(spec, sharding.make_mesh(spec.mesh), model)
    return {("peak_gib" if n == "peak_bytes" else n): x / 2**30 if n == "peak_bytes" else x for n, x in found.items()}


def ahead(report, name: str, steps: int) -> None:
    """The job with and without rollout.max_staleness=2, sampler and trainer on one device: a step beside the sum of the
    phases."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for stale in (0, 2):
            with report.stage(f"max_staleness={stale}: steps"):
                config = job(name, f"{folder}/{stale}", steps)
                config.run.compile_cache = f"{folder}/cache"
                config.rollout.max_staleness, config.rollout.partial = stale, stale > 0
                found[stale] = medians(trained(report, name, config, traced=False, prefix=f"max_staleness={stale}: "))
    if len(found) == 2:
        parts = sum(found[0].get(n, 0.0) for n in PHASES if n not in ("other", "step"))
        report("max_staleness=2 beside 0", step_of_sum=found[2]["step"] / parts, step_of_step=found[2]["step"] / found[0]["step"])


def first_steps(report, name: str) -> None:
    """The seconds of a first step in a new process with an empty cache of compiled programs, and in a second one with that
    cache. name: of a case; or, in those processes, with the row's name and the cache's folder, apart by "|"."""
    name, *own = name.split("|")
    with tempfile.TemporaryDirectory() as folder:
        if not own:
            for row in ("empty cache", "filled cache"):
                command = [sys.executable, str(SUITE), "--one", report.part, "--file", str(report.file), "--share", f"{name}|{row}|{folder}"]
                if code := subprocess.run(command).returncode:
                    report.failed.append(f"{row}: its process ended with {code}")
            return
        config = job(name, f"{folder}/run", 1)
        row, config.run.compile_cache = own
        trained(report, name, config, traced=False, prefix=f"{row}: ")


def planned(report, *names: str) -> None:
    """What run.mode=plan says of these cases on this file's device, over what it measured at this commit. Needs no device:
    programs compile for the target where jax's plugin for it is installed."""
    from jaxrl.planning import plan
    from jaxrl.sharding import targets

    commit = report.origin["commit"]
    rows = [row for row in results.read(report.file) if row["commit"] == commit]
    for name in names:
        own = {row["name"]: row for row in rows if row["part"] == name}
        if "steps" not in own:
            report.refuse(name, f"part {name} has no row of commit {commit}")
            continue
        with report.stage(name):
            kind = report.origin["device"].lower()
            chip = next((chip for chip in targets.CHIPS if chip in kind), "cpu")
            config = job(name, "run")
            config.run.mode, config.plan.target = "plan", f"{chip}:1"
            full = plan.make(config, search=False)
            said = {"peak_gib": full["per_device"]["peak_bytes"] / 2**30, "step": full["step_seconds"],
                    **{phase: p["seconds"] for phase, p in full["phases"].items()}}
            ratios = {f"{n}_of_measured": said[n] / own["steps"][n] for n in said if own["steps"].get(n)}
            report(name, **said, **ratios)
