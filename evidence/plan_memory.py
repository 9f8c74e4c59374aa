"""The plan, showing 4: predicted memory against what a run really takes, on meshes of CPU devices.

python evidence/plan_memory.py

A case is a whole GRPO job of two steps (rollout, scoring where asked for, update, publish). It runs twice in processes of its
own: the first fills the compilation cache, the second is measured, so that compiling does not count. Measured: the process's
highest resident memory (VmHWM) less what it has when everything is imported and the devices exist, and less the same difference
of the same job with a model of 0.1 M parameters on rows of 128 tokens (what loaded programs, threads and host code take, whatever the
size). Predicted: per_device.peak_bytes of run.mode=plan for cpu:N, times N (the devices share the process).
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, os.path.dirname(__file__))

CASES = {  # name: (devices, overrides)
    "fsdp 2": (2, {}),
    "fsdp 2, reference, old log-probs, 2 updates": (2, {"algorithm.kl.coef": 0.01, "algorithm.num_minibatches": 2}),
    "fsdp 2, tp 2": (4, {"mesh.tp": 2}),
    "one device, no recomputation, SGD": (1, {"optimizer.name": "sgd", "optimizer.b1": 0.0, "train.tokens_per_microbatch": 1536}),
    "dp 2, blockwise, recomputed": (2, {"mesh.dp": 2, "mesh.fsdp": 1, "model.remat": "full", "train.tokens_per_microbatch": 2048,
                                        "train.row_lengths": (2048,)}),
}
HEADER = ["case", "devices", "peak in", "predicted", "measured", "toy model", "difference"]
MOST = 5 * 2**30
MODEL = {"model_type": "qwen2", "vocab_size": 8192, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6,
         "num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 4096, "tie_word_embeddings": True,
         "eos_token_id": 2}
TOY = MODEL | {"hidden_size": 48, "intermediate_size": 64, "vocab_size": 512}
SHORT = {"train.row_lengths": (128,), "train.tokens_per_microbatch": 128, "rollout.cache_lengths": (128,)}


def job(folder: str, overrides: dict, model=MODEL):
    import jaxrl
    from jaxrl.config.load import put

    c = jaxrl.default_config()
    c.run.dir = folder
    c.model.init, c.model.config, c.model.tokenizer, c.model.scan_layers = "random", model, "jaxrl://arith/tokenizer", "true"
    c.data.path, c.data.max_rows, c.data.prompts_per_step, c.data.max_prompt_tokens = ("jaxrl://arith/train.jsonl",), 64, 2, 64
    c.rollout.group_size, c.rollout.max_new_tokens, c.rollout.prompt_lengths, c.rollout.min_new_tokens = 4, 64, (64,), 48
    c.rollout.cache_lengths, c.rollout.compaction = (1024,), False
    c.reward.functions, c.reward.workers = ("boxed",), 1
    c.train.steps, c.train.row_lengths, c.train.tokens_per_microbatch, c.train.row_counts = 2, (512,), 1024, 1
    c.eval.before = c.eval.after = False
    c.checkpoint.every_steps, c.checkpoint.every_minutes, c.checkpoint.at_end, c.checkpoint.export_at_end = 0, 0.0, False, False
    c.log.console, c.log.tensorboard = "off", False
    for name, value in overrides.items():
        put(c, name, value)
    return c


def status(name: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name + ":"))
    return int(line.split()[1]) * 1024


def measure(case: str, folder: str, size: str) -> None:
    """In a process of its own: runs the job and prints baseline and peak."""
    import jax

    devices, overrides = CASES[case]
    jax.config.update("jax_num_cpu_devices", devices)
    import jaxrl
    import jaxrl.recipes.rl
    from jaxrl import data
    from jaxrl.rollout import embedded  # noqa: F401
    from jaxrl.run import setup

    jax.block_until_ready(jax.numpy.zeros(8) + 1)
    config = job(folder, overrides | SHORT, TOY) if size == "toy" else job(folder, overrides)
    inputs = setup.read_model_inputs(config)  # tokenizer and data bring libraries of their own
    data.load_train(config, inputs.tokenizer, inputs.eos_ids[0])
    Path("/proc/self/clear_refs").write_text("5")
    baseline = status("VmRSS")
    jaxrl.train(config)
    print("MEASURED", baseline, status("VmHWM"))


def measured(case: str, size: str) -> int:
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    for _ in range(2):
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([sys.executable, __file__, case, folder, size], env=env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
    _, baseline, peak = next(x for x in done.stdout.splitlines() if x.startswith("MEASURED")).split()
    return int(peak) - int(baseline)


def predicted(case: str) -> dict:
    from jaxrl.planning import plan

    devices, overrides = CASES[case]
    config = job("runs/plan", {**overrides, "run.mode": "plan", "plan.target": f"cpu:{devices}"})
    return plan.make(config, search=False)


def main():
    from common import record, table

    rows = []
    for case, (devices, _) in CASES.items():
        if sys.argv[1:] and not any(a in case for a in sys.argv[1:]):
            continue
        plan = predicted(case)
        asked = plan["per_device"]["peak_bytes"] * devices
        print(f"{case}: {asked / 2**30:.2f} GiB predicted", flush=True)
        if asked > MOST:
            raise SystemExit(f"{case}: would take more than {MOST / 2**30:.0f} GiB of this machine")
        toy = measured(case, "toy")
        real = measured(case, "whole") - toy
        rows.append([case, devices, plan["per_device"]["peak_in"], *(round(n / 2**30, 3) for n in (asked, real, toy)),
                     f"{100 * (asked / real - 1):+.1f} %"])
        print(rows[-1], flush=True)
        if not sys.argv[1:]:
            record("plan_memory", {"model": MODEL, "columns": HEADER, "rows": rows})
    print("\nhighest memory of a whole GRPO job on CPU devices, GiB over all devices")
    table(HEADER, rows)


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1] in CASES:
        measure(*sys.argv[1:])
    else:
        main()
