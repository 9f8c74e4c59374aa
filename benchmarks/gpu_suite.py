"""What can only be shown on an accelerator, in one command and at most ten minutes on one H200:

    python benchmarks/gpu_suite.py            (--tiny: the same at a tiny shape, also on a CPU; --out FILE: where the JSON goes)

kernels: benchmarks/kernel_table.py, which first holds every implementation for this device to float64 and then times it: attention (with
windows and sinks, too), decoding, experts (of two published layers, and 8 to 128 of them), log-probs; its tables go to
benchmarks/results/ (with --tiny nowhere).

the rest: training of models with random weights, answers of full length. Every case runs in a process of its own, because the highest
memory of a device is kept per process, and a case that fails, or is not done in CASE_SECONDS, leaves what others and its own finished
stages found: FILE is written after each. After TOTAL_MINUTES a case is ended, or not begun, and says so (--one NAME --out FILE: it alone).

    0.5B     twenty steps in rows of 2k tokens: seconds by phase, peak memory, programs compiled after the first two steps, MFU,
             tokens/s, and decoding beside its roofline (the bytes of weights and filled cache that its steps read, at the chip's
             bandwidth); memory and seconds as run.mode=plan and plan.predict said before. Then six steps with max_staleness=2,
             sampler and trainer on the same device: the step beside the sum of the synchronous phases
    1.5B     the same for three steps, the update on 16k packed tokens
    0.6B     the same on 16k packed tokens, for tokens/s of training
    lora     1.5B with adapters of rank 16 on all linear maps, answers as given (no sampling): the update on 16k packed tokens
    experts  a model of 64 experts, 8 to a token, 1.1B parameters: the same update
    dpo      0.5B on 64 pairs of 40 + 256 tokens, with the reference's scores
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

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
    model: str = ""   # of evidence/plan_shapes.py or MODELS; empty: the case's name
    kind: str = "samples"  # or "given": answers are given; or "pairs": DPO
    options: tuple = ()  # further (option, value)


MODELS = {  # beside those of evidence/plan_shapes.py
    "1B of 64 experts": {"like": "30B-A3B", "num_experts": 64, "hidden_size": 1024, "moe_intermediate_size": 512, "num_hidden_layers": 8,
                         "num_attention_heads": 16},
    "tiny of 4 experts": {"like": "30B-A3B", "vocab_size": 256, "num_experts": 4, "num_experts_per_tok": 2, "hidden_size": 64,
                          "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
                          "eos_token_id": 2},
}
ADAPTERS = (("lora.rank", 16), ("lora.export", "adapter"))
CASES = {  # by the model of evidence/plan_shapes.py
    "0.5B": Case(32, 8, 256, 16384, 2048, 20, 6),
    "1.5B": Case(32, 8, 512, 16384, 16384, 3),
    "0.6B": Case(32, 8, 512, 16384, 16384, 3),
    "lora": Case(32, 8, 512, 16384, 16384, 4, model="1.5B", kind="given", options=ADAPTERS),
    "experts": Case(32, 8, 512, 16384, 16384, 4, model="1B of 64 experts", kind="given"),
    "dpo": Case(64, 2, 256, 16384, 2048, 4, model="0.5B", kind="pairs"),
    "tiny": Case(4, 4, 32, 256, 256, 4, 3),
    "tiny lora": Case(4, 4, 32, 256, 256, 3, model="tiny", kind="given", options=ADAPTERS),
    "tiny experts": Case(4, 4, 32, 256, 256, 3, model="tiny of 4 experts", kind="given"),
    "tiny dpo": Case(4, 2, 32, 256, 256, 3, model="tiny", kind="pairs"),
}
FULL = ("0.5B", "1.5B", "lora", "experts", "dpo", "0.6B")
PROMPT, WARM = 40, 2
KERNEL_MINUTES, TOTAL_MINUTES, TINY_MINUTES, CASE_SECONDS = 4.0, 9.8, 60.0, 150.0


def described(model: str) -> dict:
    """The config.json of a model."""
    import plan_shapes

    own = dict(MODELS.get(model, {"like": model}))
    return {**plan_shapes.MODELS[own.pop("like")], **own}


def job(name: str, folder: str):
    """GRPO on the embedded problems, or DPO on pairs of sums; no end before the longest answer, so that lengths are known."""
    import jaxrl
    from jaxrl.config.load import put

    case = CASES[name]
    c = jaxrl.default_config()
    c.run.dir, c.rollout.engine = folder, "jax"
    c.model.init, c.model.config, c.model.tokenizer = "random", described(case.model or name), "jaxrl://arith/tokenizer"
    c.data.path, c.data.prompts_per_step, c.data.max_prompt_tokens = ("jaxrl://arith/train.jsonl",), case.prompts, PROMPT
    c.rollout.group_size, c.rollout.max_new_tokens, c.rollout.min_new_tokens = case.group, case.answer, case.answer
    c.rollout.prompt_lengths, c.rollout.compaction = (PROMPT,), False
    if case.kind == "given":
        c.rollout.engine, c.algorithm.mismatch.correction, c.algorithm.mismatch.warn = f"{__file__}:engine", "none", 0.0
    if case.kind == "pairs":
        c.run.recipe, c.rollout.min_new_tokens, c.data.path = "preference", 0, (pairs(case, f"{folder}.jsonl"),)
    c.reward.functions = ("boxed",)
    c.train.steps, c.train.tokens_per_microbatch, c.train.row_lengths, c.train.row_counts = case.steps, case.microbatch, (case.row,), 1
    c.eval.before = c.eval.after = False
    c.checkpoint.every_steps, c.checkpoint.every_minutes, c.checkpoint.at_end, c.checkpoint.export_at_end = 0, 0.0, False, False
    c.log.console, c.log.tensorboard = "off", False
    for option, value in case.options:
        put(c, option, value)
    return c


def pairs(case: Case, file: str) -> str:
    """Writes pairs of sums for all steps, whose digits and signs are tokens of the embedded tokenizer; an answer's end is one more."""
    draw = np.random.default_rng(0)
    sums = lambda n: "".join("+" if i % 2 else str(draw.integers(0, 10)) for i in range(n))  # noqa: E731
    rows = [{"prompt": sums(PROMPT), "chosen": sums(case.answer - 1), "rejected": sums(case.answer - 1)}
            for _ in range(case.prompts * case.steps)]
    Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def engine(context):
    """An engine that answers at once, with tokens drawn from the request's seed: rollout.engine of the cases that only train."""
    from jaxrl.rollout import Engine, Health, Result

    class Given(Engine):
        def __init__(self):
            self.done, self.version = [], -1

        def submit(self, requests):
            for r in requests:
                n = r.sampling.max_new_tokens
                tokens = np.random.default_rng(r.seed).integers(3, context.hf_config["vocab_size"], n).astype(np.int32)
                zeros = np.zeros(n, np.float32)
                self.done.append(Result(r.id, tokens, zeros, zeros, np.full(n, self.version, np.int32), "length", r.seed))

        def poll(self, deadline_s):
            done, self.done = self.done, []
            return done

        def publish(self, params, version):
            self.version = version

        def abort(self, ids=None):
            self.done = []

        def health(self):
            return Health(True, version=self.version)

        def close(self): ...

    return Given()


def steps_of(folder: str) -> list[dict]:
    """What the clock said of each step: seconds by phase, compilations, perf/*."""
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [line["time"] for line in lines if "update" in line["time"]]


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


@contextlib.contextmanager
def stage(out: dict, name: str, file: Path):
    """One stage of a case: its failure is a result, and `file` has all results so far behind it."""
    try:
        yield
    except Exception as e:  # noqa: BLE001 what others found stays
        out["failed"] = out.get("failed", "") + f"{name}: {type(e).__name__}: {e}"[:2000] + "\n"
    file.write_text(json.dumps(out))


def one(name: str, file: Path) -> None:
    """One case on the first device of this process, written to `file` stage by stage."""
    import jax

    import jaxrl
    from jaxrl import sharding
    from jaxrl.planning import plan
    from jaxrl.resolve.spec import here, resolve
    from jaxrl.run import setup

    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    device, case = jax.devices()[0], CASES[name]
    peak = lambda: (device.memory_stats() or {}).get("peak_bytes_in_use", 0)  # noqa: E731
    out = {"device": device.device_kind, "case": case._asdict()}
    with tempfile.TemporaryDirectory() as folder:
        config = job(name, f"{folder}/run")
        with stage(out, "measured", file):
            jaxrl.train(config)
            out["measured"] = {**of_a_step(steps_of(f"{folder}/run")), "peak_bytes": peak()}
        with stage(out, "ahead", file):
            if case.ahead and "measured" in out:
                out["ahead"] = ahead_of(job(name, f"{folder}/ahead"), case, out["measured"]) | {"peak_bytes": peak()}
        with stage(out, "predicted", file):
            hf_config = described(case.model or name)
            spec = resolve(config, here(), hf_config)
            model = setup.build_model(spec, hf_config)
            out["predicted"] = plan.predict(spec, sharding.make_mesh(config.mesh), model)
        if case.kind == "samples":  # of the others a prediction alone: a plan compiles as long as they run
            with stage(out, "planned", file):
                out |= planned_beside(out.get("measured", {}), job(name, f"{folder}/plan"), case, device)


def planned_beside(measured: dict, config, case: Case, device) -> dict:
    """What run.mode=plan says of a case, over what was measured, and decoding beside the bytes that it has to read."""
    import jax

    from jaxrl.planning import plan
    from jaxrl.planning.case import open_case
    from jaxrl.sharding import targets

    config.run.mode, config.plan.target = "plan", f"{targets.name_of(device)}:{jax.device_count()}"
    opened, full = open_case(config), plan.make(config, search=False)
    said = {"peak_bytes": full["per_device"]["peak_bytes"], "step": full["step_seconds"],
            **{phase: p["seconds"] for phase, p in full["phases"].items()}}
    out = {"planned": said, "ratio": {key: said[key] / measured[key] for key in said if measured.get(key)},
           "cross_check": full.get("cross_check", {}), "error": full.get("error", {})}
    bandwidth = opened.target.chip.bandwidth
    if bandwidth and measured.get("rollout"):
        least = decoding_bytes(case, opened.model, opened.model.compute_dtype.itemsize) / bandwidth
        out["decoding"] = {"roofline_seconds": least, "share": least / measured["rollout"]}
    return out


def ahead_of(config, case: Case, measured: dict) -> dict:
    """The same job with answers that may be two steps old: its step beside the sum of the synchronous phases."""
    import jaxrl

    config.train.steps, config.rollout.max_staleness, config.rollout.partial = case.ahead, 2, True
    jaxrl.train(config)
    ahead = of_a_step(steps_of(config.run.dir))
    parts = sum(measured.get(n, 0.0) for n in ("rollout", "reward", "score", "update", "publish"))
    return {**ahead, "step_of_sum": ahead["step"] / parts}


def in_a_process(name: str, seconds: float = CASE_SECONDS) -> dict:
    """What a case found, with "failed" where it did not come to its end."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "out.json"
        command = [sys.executable, __file__, "--one", name, "--out", str(file)]
        with tempfile.TemporaryFile("w+") as said:
            try:
                code = subprocess.run(command, stdout=said, stderr=said, timeout=seconds).returncode
                ended = f"its process ended with {code}" * bool(code)
            except subprocess.TimeoutExpired:
                ended = f"not done after {seconds:.0f} s"
            said.seek(0)
            ended = ended and f"{ended}: {said.read()[-2000:]}"
        found = json.loads(file.read_text()) if file.exists() else {}
    return found | ({"failed": found.get("failed", "") + ended} if ended else {})


def kernels(tiny: bool) -> dict:
    """{"seconds", "failed"}: the tables are written by kernel_table.py itself."""
    started = time.monotonic()
    command = [sys.executable, str(Path(__file__).with_name("kernel_table.py")), "--minutes", str(KERNEL_MINUTES)]
    command += ["--tiny"] if tiny else ["--out", str(Path(__file__).parent / "results")]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout, flush=True)
    failed = {"failed": (done.stdout + done.stderr)[-2000:]} if done.returncode else {}  # its tables have all that was found
    return {"seconds": round(time.monotonic() - started, 1), **failed}


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--one", choices=CASES)
    parser.add_argument("--out", default="")
    args = parser.parse_args(argv)
    if args.one:
        one(args.one, Path(args.out))
        return 0
    started, results = time.monotonic(), {}
    for name in ("kernels", *(FULL if not args.tiny else (n for n in CASES if n not in FULL))):
        left = 60 * (TINY_MINUTES if args.tiny else TOTAL_MINUTES) - (time.monotonic() - started)
        if name == "kernels":
            results[name] = kernels(args.tiny)
        else:
            results[name] = in_a_process(name, left if args.tiny else min(left, CASE_SECONDS)) if left > 0 else {
                "failed": f"not begun after {TOTAL_MINUTES:g} minutes"}
        print(json.dumps({name: results[name]}, indent=1), flush=True)
        results["seconds"] = round(time.monotonic() - started, 1)
        if args.out:
            Path(args.out).write_text(json.dumps(results, indent=1) + "\n")
    return int(any("failed" in r for r in results.values() if isinstance(r, dict)))


if __name__ == "__main__":
    sys.exit(main())
