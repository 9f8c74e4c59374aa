"""Showing 2 of the migration: an example config of each system is planned for its own GPUs and trains three steps here, by overrides alone.

    python evidence/migrate_train.py --clones=DIR [--systems=skyrl,verl]     # some five minutes

The configs are of migrate_corpus.CORPUS. What is overridden is what a machine without GPUs and a model for tests cannot keep:
the model (two layers from scratch, the shipped tokenizer), lengths, batch, engine, dtypes, places. Data are files with the
columns that the system's own have. Whatever makes the loss (advantage, ratios, bounds, KL, aggregation, reward file, schedule)
is as it was migrated. The plan is the printed
command with a local config.json of a model of eight heads, a small one. Exits with 1 where a plan does not fit, or a run does not
end with three finite steps within five minutes; the first rewards of AReaL and RLinf are checked by hand: (0 - 0.5) x 10 = -5 and
-1 x 5 = -5 for wrong answers. A system's result is written as soon as it is there;
--systems leaves those of the others as they are.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, os.path.dirname(__file__))

import pyarrow  # noqa: E402
import pyarrow.parquet  # noqa: E402
from common import RESULTS, commit, record, table  # noqa: E402
from migrate_corpus import CORPUS, clone, migrate, take  # noqa: E402

# system -> (file of the corpus, further overrides; DATA is the folder of the rows)
RUNS = {
    "skyrl": ("gsm8k/run_gsm8k.sh", ["data.path=DATA/rows.parquet", "eval.sets=test=DATA/few.parquet"]),
    "verl": ("grpo_trainer/run_qwen2-7b_math.sh", ["data.path=DATA/rows.parquet", "eval.sets=test=DATA/few.parquet"]),
    "trl": ("Qwen2.5-1.5B-Instruct/grpo/config_demo.yaml", [
        "data.path=DATA/rows.jsonl", "reward.functions=math", "reward.weights=", "checkpoint.upload.to=", "model.revision="]),
    "areal": ("math/gsm8k_grpo.yaml", ["data.path=DATA/rows.jsonl", "data.subset=", "eval.sets=test=DATA/few.jsonl",
                                       "rollout.max_staleness=0", "rollout.partial=False"]),
    "rlinf": ("math/qwen2.5-1.5b-grpo-megatron.yaml", ["data.path=DATA/rows.jsonl", "eval.sets=test=DATA/few.jsonl", "mesh.tp=1"]),
    "roll": ("qwen3-next-80BA3B-rlvr_megatron/rlvr_config.yaml", ["data.path=DATA/rows.jsonl", "mesh.ep=1"]),
    "cosmos_rl": ("qwen2-5-3b-p-fsdp1-tp1-r-tp1-pp1-grpo.toml", [
        "data.path=DATA/rows.jsonl", "rollout.max_staleness=0", "train.max_sequence_tokens=0", "checkpoint.export_every_steps=0"]),
}
WRONG = {"areal": -5.0, "rlinf": -5.0}  # the reward of a batch without a right answer
MODEL = {"model_type": "qwen2", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
         "intermediate_size": 64, "vocab_size": 512, "max_position_embeddings": 4096, "tie_word_embeddings": True}
SMALL = [
    "run.resume=never", "train.steps=3", "model.path=", "model.init=random", "model.tokenizer=jaxrl://arith/tokenizer",
    "model.chat_template=DATA/chat.jinja", f"model.config={MODEL}", "data.prompts_per_step=8", "rollout.engine=jax",
    "rollout.placement=auto", "rollout.vllm.devices=", "rollout.vllm.max_model_len=0", "mesh.roles={}", "rollout.max_new_tokens=16",
    "data.max_prompt_tokens=256", "train.tokens_per_microbatch=0", "train.score_tokens_per_microbatch=0", "train.compute_dtype=fp32",
    "rollout.dtype=fp32", "log.wandb=false", "log.console=plain", "eval.max_rows=4", "checkpoint.every_steps=0",
    "checkpoint.at_end=False", "checkpoint.export_at_end=False",
]
PLANNED = MODEL | {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 32768,
                   "max_position_embeddings": 65536}
LONGEST = 300  # seconds of a run
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"


def rows(out: Path) -> None:
    """Rows as the systems' own scripts write them: messages and nested answers in Parquet, plain columns in JSON lines."""
    said = [(f"What is {i} plus {i + 1}?", str(2 * i + 1)) for i in range(64)]
    nested = [{"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": q}], "env_class": "gsm8k",
               "reward_spec": {"method": "rule", "ground_truth": a}, "reward_model": {"style": "rule", "ground_truth": a}} for q, a in said]
    plain = [{"question": q, "problem": q, "prompt": q, "solution": a, "solutions": [a], "result": a, "ground_truth": a, "tag": "deepmath",
              "messages": json.dumps([{"role": "user", "content": q}]), "answer": f"work\n#### {a}"} for q, a in said]
    for name, count in (("rows", 64), ("few", 8)):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(nested[:count]), out / f"{name}.parquet")
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in plain[:count]))
    (out / "chat.jinja").write_text(CHAT)
    (out / "model").mkdir()
    (out / "model" / "config.json").write_text(json.dumps(PLANNED))


def plan(report: dict, out: Path, data: Path, more: list[str], log) -> int:
    """The status of the printed command that plans, with a folder that holds nothing but a config.json: 0 = it fits."""
    command = [sys.executable, *shlex.split(report["commands"]["plan"])[1:], f"--config.model.path={data / 'model'}",
               *(f"--config.{o}" for o in more if o.startswith("mesh."))]
    done = subprocess.run(command, cwd=out, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          env={**os.environ, "JAX_PLATFORMS": "cpu"})
    log.write(done.stdout if done.returncode else "")
    return done.returncode


def run(system: str, clones: Path, work: Path) -> dict:
    """Migrates, trains, and returns the outcome of the migration and what the three lines of metrics say."""
    name, more = RUNS[system]
    repository, commit, version, files = next(entry for entry in CORPUS[system] if any(f.endswith(name) for f in entry[3]))
    tree, out, data = work / "tree", work / "out", work / "data"
    for folder in (tree, data):
        folder.mkdir()
    take(clone(clones, repository), commit, files, tree)
    rows(data)
    _, _, report = migrate(system, tree / next(f for f in files if f.endswith(name)), version, out)
    flags = [f"--config.{o.replace('DATA', str(data))}" for o in (*SMALL, *more, f"run.dir={work / 'run'}")]
    with open(work / "plan.txt", "w") as said:
        planned = plan(report, out, data, more, said)
    start, command = time.perf_counter(), [sys.executable, "-m", "jaxrl.main", f"--config={report['config']}", *flags]
    with open(work / "out.txt", "w+") as said:
        status = subprocess.Popen(command, cwd=out, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, start_new_session=True,
                                  env={**os.environ, "JAX_PLATFORMS": "cpu"})
        try:
            code = status.wait(LONGEST)
        except subprocess.TimeoutExpired:
            os.killpg(status.pid, signal.SIGKILL)  # with its reward workers
            code = status.wait()
    metrics = work / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    steps = [line for line in lines if "reward/mean" in line]
    ok = code == 0 and len(steps) == 3 and all(math.isfinite(line["loss"]) for line in steps if "loss" in line)
    ok = ok and planned == 0
    if system in WRONG:
        ok = ok and steps[0]["reward/mean"] == WRONG[system]
    if not ok:
        print((work / "plan.txt").read_text()[-4000:] or (work / "out.txt").read_text()[-4000:])
    return {"config": name, "outcome": report["outcome"], "plan": planned, "steps": len(steps), "ok": ok,
            "seconds": round(time.perf_counter() - start), "reward": [line["reward/mean"] for line in steps]}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clones", type=Path, required=True)
    parser.add_argument("--systems", default=",".join(RUNS))
    args = parser.parse_args()
    file = RESULTS / "migrate_train.json"
    results = json.loads(file.read_text())["results"] if file.exists() else {}
    for system in args.systems.split(","):
        with tempfile.TemporaryDirectory() as tmp:
            results[system] = {**run(system, args.clones, Path(tmp)), "commit": commit()}
        record("migrate_train", {s: results[s] for s in RUNS if s in results})
    names = ("config", "outcome", "plan", "steps", "ok", "seconds")
    table(["system", *names], [[s, *(r.get(n, "") for n in names)] for s, r in results.items()])
    return int(not all(r["ok"] for r in results.values()))


if __name__ == "__main__":
    sys.exit(main())
