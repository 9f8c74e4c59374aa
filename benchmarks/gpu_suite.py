"""What can only be shown on an accelerator, in one command and under eight minutes on one H200:

    python benchmarks/gpu_suite.py            (--tiny: the same at a tiny shape, also on a CPU; --out FILE: where the JSON goes)

kernels: benchmarks/kernels.py, which first holds every implementation for this device to float64 and then times it; its tables go
to benchmarks/results/ (with --tiny nowhere).

plan: memory and seconds per phase of three GRPO steps of a 0.5B and a 1.5B model (random weights, embedded sampler, answers of
full length), as run.mode=plan and plan.predict say before, and as the run and the device say after. Every shape runs in a
process of its own, because the highest memory of a device is kept per process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "evidence"))

SHAPES = {  # model of evidence/plan_shapes.py: (prompts, group, answer, tokens per microbatch)
    "0.5B": (64, 8, 512, 16384),
    "1.5B": (64, 8, 512, 16384),
    "tiny": (4, 4, 32, 256),
}
PROMPT, STEPS = 40, 3
KERNEL_MINUTES = 4.0


def job(name: str, folder: str):
    """GRPO on the embedded problems; no end before the longest answer, so that lengths are known."""
    from plan_shapes import MODELS

    import jaxrl

    prompts, group, answer, microbatch = SHAPES[name]
    c = jaxrl.default_config()
    c.run.dir, c.rollout.engine = folder, "jax"
    c.model.init, c.model.config, c.model.tokenizer = "random", MODELS[name], "jaxrl://arith/tokenizer"
    c.data.path, c.data.prompts_per_step, c.data.max_prompt_tokens = ("jaxrl://arith/train.jsonl",), prompts, PROMPT
    c.rollout.group_size, c.rollout.max_new_tokens, c.rollout.min_new_tokens = group, answer, answer
    c.rollout.prompt_lengths, c.rollout.compaction = (PROMPT,), False
    c.reward.functions = ("boxed",)
    c.train.steps, c.train.tokens_per_microbatch, c.train.row_counts = STEPS, microbatch, 1
    c.eval.before = c.eval.after = False
    c.checkpoint.every_steps, c.checkpoint.every_minutes, c.checkpoint.at_end, c.checkpoint.export_at_end = 0, 0.0, False, False
    c.log.console, c.log.tensorboard = "off", False
    return c


def plan_against_run(name: str) -> dict:
    """{"device", "predicted", "measured", "ratio"} of one shape on the first device of this process."""
    import jax

    import jaxrl
    from jaxrl import sharding
    from jaxrl.recipes import plan, setup
    from jaxrl.recipes.planning.case import open_case
    from jaxrl.sharding import targets

    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    with tempfile.TemporaryDirectory() as folder:
        config = job(name, folder)
        target = targets.name_of(jax.devices()[0])
        planned = config.copy_and_resolve_references()
        planned.run.mode, planned.plan.target = "plan", f"{target}:{jax.device_count()}"
        case = open_case(planned)
        full = plan.make(planned, search=False)
        jaxrl.train(config)
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        predicted = plan.predict(config, sharding.make_mesh(config.mesh), setup.build_model(
            config, case.hf_config, setup.resolve_dtype(config.train.compute_dtype)))
    last = {key.removeprefix("time/"): value for key, value in lines[-1]["time"].items()}
    stats = jax.devices()[0].memory_stats() or {}
    measured = {"peak_bytes": stats.get("peak_bytes_in_use", 0), "step_seconds": last["step"],
                **{f"{phase}_seconds": last[phase] for phase in ("rollout", "update", "publish") if phase in last}}
    said = {"peak_bytes": full["per_device"]["peak_bytes"], "step_seconds": full["step_seconds"],
            **{f"{phase}_seconds": p["seconds"] for phase, p in full["phases"].items()}}
    return {"device": jax.devices()[0].device_kind, "planned": said, "predicted": predicted, "measured": measured,
            "cross_check": full.get("cross_check", {}), "error": full.get("error", {}),
            "ratio": {key: said[key] / value for key, value in measured.items() if value and key in said}}


def in_a_process(name: str) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        done = subprocess.run([sys.executable, __file__, "--one", name, "--out", str(out)], capture_output=True, text=True)
        if done.returncode:
            return {"failed": done.stderr[-2000:]}
        return json.loads(out.read_text())


def kernels(tiny: bool) -> dict:
    """{"seconds", "failed"}: the tables are written by kernels.py itself."""
    started = time.monotonic()
    command = [sys.executable, str(Path(__file__).with_name("kernels.py")), "--minutes", str(KERNEL_MINUTES)]
    command += ["--tiny"] if tiny else ["--out", str(Path(__file__).parent / "results")]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout, flush=True)
    failed = {"failed": (done.stdout + done.stderr)[-2000:]} if done.returncode else {}
    return {"seconds": round(time.monotonic() - started, 1), **failed}


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--one", choices=SHAPES)
    parser.add_argument("--out", default="")
    args = parser.parse_args(argv)
    if args.one:
        Path(args.out).write_text(json.dumps(plan_against_run(args.one)))
        return 0
    started = time.monotonic()
    results = {"kernels": kernels(args.tiny)}
    for name in ("tiny",) if args.tiny else ("0.5B", "1.5B"):
        results[name] = in_a_process(name)
        print(json.dumps({name: results[name]}, indent=1), flush=True)
    results["seconds"] = round(time.monotonic() - started, 1)
    if args.out:
        Path(args.out).write_text(json.dumps(results, indent=1) + "\n")
    return int(any("failed" in r for r in results.values() if isinstance(r, dict)))


if __name__ == "__main__":
    sys.exit(main())
