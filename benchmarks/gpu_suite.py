"""What can only be shown on an accelerator, in one command and under eight minutes on one H200:

    python benchmarks/gpu_suite.py            (--tiny: the same at a tiny shape, also on a CPU; --out FILE: where the JSON goes)

kernels: benchmarks/kernel_table.py, which first holds every implementation for this device to float64 and then times it; its tables go
to benchmarks/results/ (with --tiny nowhere).

the rest: GRPO of models with random weights, embedded sampler, answers of full length. Every case runs in a process of its own,
because the highest memory of a device is kept per process:

    0.5B     twenty steps in rows of 2k tokens: seconds by phase, peak memory, programs compiled after the first two steps, MFU,
             tokens/s, and decoding beside its roofline (the bytes of weights and filled cache that its steps read, at the chip's
             bandwidth); memory and seconds as run.mode=plan and plan.predict said before. Then six steps with max_staleness=2,
             sampler and trainer on the same device: the step beside the sum of the synchronous phases
    1.5B     the same for three steps, the update on 16k packed tokens
    0.6B     the same on 16k packed tokens, for tokens/s of training
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "evidence"))


class Case(NamedTuple):
    prompts: int
    group: int
    answer: int
    microbatch: int
    row: int          # tokens of a packed row
    steps: int
    ahead: int = 0    # steps with max_staleness=2 after them


CASES = {  # by the model of evidence/plan_shapes.py
    "0.5B": Case(32, 8, 256, 16384, 2048, 20, 6),
    "1.5B": Case(32, 8, 512, 16384, 16384, 3),
    "0.6B": Case(32, 8, 512, 16384, 16384, 3),
    "tiny": Case(4, 4, 32, 256, 256, 4, 3),
}
PROMPT, WARM = 40, 2
KERNEL_MINUTES = 3.0


def job(name: str, folder: str):
    """GRPO on the embedded problems; no end before the longest answer, so that lengths are known."""
    from plan_shapes import MODELS

    import jaxrl

    case = CASES[name]
    c = jaxrl.default_config()
    c.run.dir, c.rollout.engine = folder, "jax"
    c.model.init, c.model.config, c.model.tokenizer = "random", MODELS[name], "jaxrl://arith/tokenizer"
    c.data.path, c.data.prompts_per_step, c.data.max_prompt_tokens = ("jaxrl://arith/train.jsonl",), case.prompts, PROMPT
    c.rollout.group_size, c.rollout.max_new_tokens, c.rollout.min_new_tokens = case.group, case.answer, case.answer
    c.rollout.prompt_lengths, c.rollout.compaction = (PROMPT,), False
    c.reward.functions = ("boxed",)
    c.train.steps, c.train.tokens_per_microbatch, c.train.row_lengths, c.train.row_counts = case.steps, case.microbatch, (case.row,), 1
    c.eval.before = c.eval.after = False
    c.checkpoint.every_steps, c.checkpoint.every_minutes, c.checkpoint.at_end, c.checkpoint.export_at_end = 0, 0.0, False, False
    c.log.console, c.log.tensorboard = "off", False
    return c


def steps_of(folder: str) -> list[dict]:
    """What the clock said of each step: seconds by phase, compilations, perf/*."""
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [line["time"] for line in lines if "reward/mean" in line]


def of_a_step(steps: list[dict]) -> dict:
    """Medians over the steps after the first WARM, and the programs that those waited for."""
    rows = steps[WARM:] or steps
    names = [n for n in rows[-1] if n not in ("wall", "compilations", "compilations_beside", "compiled_programs")]
    return {**{n: statistics.median(row.get(n, 0.0) for row in rows) for n in names},
            "compilations_after_warm_up": sum(row["compilations"] for row in rows)}


def decoding_bytes(case: Case, model, width: int) -> float:
    """What the decode steps of one batch have to read: all weights at every step, and the keys and values of the tokens so far
    (prompts taken as PROMPT tokens, so somewhat too many)."""
    cfg = model.config
    seen = sum(PROMPT + t for t in range(1, case.answer)) * case.prompts * case.group
    return width * (model.num_parameters * (case.answer - 1) + 2 * seen * cfg.num_kv_heads * cfg.head_dim * cfg.num_layers)


def one(name: str) -> dict:
    """One case on the first device of this process."""
    import jax

    import jaxrl
    from jaxrl import sharding
    from jaxrl.planning import plan
    from jaxrl.planning.case import open_case
    from jaxrl.recipes import setup
    from jaxrl.sharding import targets
    from jaxrl.spec import here, resolve

    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    device, case = jax.devices()[0], CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        config = job(name, f"{folder}/run")
        planned = config.copy_and_resolve_references()
        planned.run.mode, planned.plan.target = "plan", f"{targets.name_of(device)}:{jax.device_count()}"
        opened = open_case(planned)
        full = plan.make(planned, search=False)
        jaxrl.train(config)
        measured = of_a_step(steps_of(f"{folder}/run"))
        measured["peak_bytes"] = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
        spec = resolve(config, here(), opened.hf_config)
        model = setup.build_model(spec, opened.hf_config)
        predicted = plan.predict(spec, sharding.make_mesh(config.mesh), model)
        out = {"device": device.device_kind, "case": case._asdict(), "measured": measured, "predicted": predicted,
               "cross_check": full.get("cross_check", {}), "error": full.get("error", {})}
        if bandwidth := opened.target.chip.bandwidth:
            least = decoding_bytes(case, model, model.compute_dtype.itemsize) / bandwidth
            out["decoding"] = {"roofline_seconds": least, "share": least / measured["rollout"]}
        if case.ahead:
            config = job(name, f"{folder}/ahead")
            config.train.steps, config.rollout.max_staleness, config.rollout.partial = case.ahead, 2, True
            jaxrl.train(config)
            ahead = of_a_step(steps_of(f"{folder}/ahead"))
            parts = sum(measured.get(n, 0.0) for n in ("rollout", "reward", "score", "update", "publish"))
            out["ahead"] = {**ahead, "step_of_sum": ahead["step"] / parts,
                            "peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use", 0)}
    said = {"peak_bytes": full["per_device"]["peak_bytes"], "step": full["step_seconds"],
            **{phase: p["seconds"] for phase, p in full["phases"].items()}}
    return {**out, "planned": said, "ratio": {key: said[key] / measured[key] for key in said if measured.get(key)}}


def in_a_process(name: str) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        done = subprocess.run([sys.executable, __file__, "--one", name, "--out", str(out)], capture_output=True, text=True)
        if done.returncode:
            return {"failed": done.stderr[-2000:]}
        return json.loads(out.read_text())


def kernels(tiny: bool) -> dict:
    """{"seconds", "failed"}: the tables are written by kernel_table.py itself."""
    started = time.monotonic()
    command = [sys.executable, str(Path(__file__).with_name("kernel_table.py")), "--minutes", str(KERNEL_MINUTES)]
    command += ["--tiny"] if tiny else ["--out", str(Path(__file__).parent / "results")]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout, flush=True)
    failed = {"failed": (done.stdout + done.stderr)[-2000:]} if done.returncode else {}
    return {"seconds": round(time.monotonic() - started, 1), **failed}


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--one", choices=CASES)
    parser.add_argument("--out", default="")
    args = parser.parse_args(argv)
    if args.one:
        Path(args.out).write_text(json.dumps(one(args.one)))
        return 0
    started = time.monotonic()
    results = {"kernels": kernels(args.tiny)}
    for name in ("tiny",) if args.tiny else ("0.5B", "1.5B", "0.6B"):
        results[name] = in_a_process(name)
        print(json.dumps({name: results[name]}, indent=1), flush=True)
    results["seconds"] = round(time.monotonic() - started, 1)
    if args.out:
        Path(args.out).write_text(json.dumps(results, indent=1) + "\n")
    return int(any("failed" in r for r in results.values() if isinstance(r, dict)))


if __name__ == "__main__":
    sys.exit(main())
