"""Showing 5 of the migration: one job of each system and kind trains two steps on a CPU, shrunk.

    python evidence/migrate_train_kinds.py --clones=DIR [--only=roll,verl/sft]     # some forty minutes

The configs are of migrate_corpus.CORPUS (its repositories and commits); of TRL, whose examples are programs with flags, commands that
stand here. A kind that a system has no example of has no row. What is overridden is what SMALL says: the model (two layers from scratch;
with images a small Qwen3-VL), lengths, batch, rows, engine, dtypes, places, and models beside the policy, which are small ones here.
Recipe, columns, loss, advantage, ratios, bounds, KL, aggregation, rewards, schedule, environment and stub are as they were migrated; a
reward that stops the run until it is written is taken out (`without`). Rows have the columns that the config names. Exits with 1 where a
run does not end with two steps and finite losses within ten minutes. A result is written as soon as it is there; --only leaves those of
the others as they are.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [os.path.dirname(__file__), os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]

from common import RESULTS, commit, record, table  # noqa: E402
from migrate_corpus import CORPUS, clone, migrate, take  # noqa: E402
from migrate_train import CHAT, MODEL  # noqa: E402

from configs.env_sft import VISION  # noqa: E402
from jaxrl.config.load import load_config  # noqa: E402

TRL = "--model_name_or_path=a/m --dataset_name=a/d --per_device_train_batch_size=4 --gradient_accumulation_steps=2"
RUNS = {  # system -> kind -> the end of a file's name in the corpus, (repository, commit, version, file), or a command
    "skyrl": {
        "grpo": "examples/train/gsm8k/run_gsm8k.sh",
        "ppo": "examples/train/ppo/run_ppo.sh",
        "sft": "sft/run_sft_fsdp.sh",
        "agentic": "run_skyrl_sql.sh",
        "lora": "lora/run_qwen2_5_0.5b_gsm8k_grpo_lora.sh",
        "image": "geometry3k/run_geometry3k.sh",
        "image_sft": "sft/run_sft_megatron_vlm.sh",
        "image_agentic": ("NovaSky-AI/SkyRL", "a956457", "0.3", "examples/train/visgym/run_visgym_from_instruct.sh"),
    },
    "verl": {
        "grpo": "grpo_trainer/run_qwen2-7b_math.sh",
        "ppo": "ppo_trainer/run_deepseek7b_llm.sh",
        "sft": "sft/gsm8k/run_qwen_megatron_fsdp.sh",
        "distill": "on_policy_distillation_trainer/run_qwen3_8b_fsdp.sh",
        "agentic": "sglang_multiturn/run_qwen2.5-3b_gsm8k_multiturn.sh",
        "image": "grpo_trainer/run_qwen2_5_vl-7b.sh",
        "image_sft": "sft/vlm/run_qwen3_vl_2b.sh",
        "image_lora": "grpo_trainer/run_qwen2_5_vl-7b_lora.sh",
        "lora": "grpo_trainer/run_qwen2_5-3b_gsm8k_grpo_lora.sh",
        "gpg": "gpg_trainer/run_qwen3_8b_fsdp.sh",
    },
    "trl": {
        "grpo": "Qwen2.5-1.5B-Instruct/grpo/config_demo.yaml",
        "sft": "OpenR1-Distill-7B/sft/config_distill.yaml",
        "dpo": f"trl dpo {TRL} --beta=0.2",
        "reward": f"trl reward {TRL} --center_rewards_coefficient=0.01",
        "rloo": f"trl rloo {TRL} --reward_funcs=accuracy_reward --steps_per_generation=4 --normalize_advantages --reward_clip_range -1 2",
        "distill": f"trl gkd {TRL} --teacher_model_name_or_path=a/t --lmbda=1.0",
        "image": ("huggingface/trl", "f2cd577", "1.16", "examples/scripts/grpo_vlm.py"),
    },
    "areal": {
        "grpo": "math/gsm8k_grpo.yaml",
        "ppo": "math/gsm8k_ppo.yaml",
        "sft": "v1:math/gsm8k_sft.yaml",
        "dpo": "alignment/hhrlhf_dpo.yaml",
        "reward": "alignment/hhrlhf_rw.yaml",
        "agentic": "multi_turn_math/gsm8k_grpo_mt.yaml",
        "image": "vlm/clevr_count_70k_grpo.yaml",
        "image_sft": "vlm/clevr_count_70k_sft.yaml",
    },
    "rlinf": {
        "grpo": "math/qwen2.5-1.5b-grpo-megatron.yaml",
        "ppo": "math/qwen2.5-1.5b-ppo-megatron.yaml",
        "image": "vqa/qwen2.5-vl-3b-grpo-fsdp.yaml",
        "image_sft": "sft/config/qwen2_5_vl_sft_vlm.yaml",
    },
    "roll": {
        "grpo": "qwen3-next-80BA3B-rlvr_megatron/rlvr_config.yaml",
        "ppo": "docs_examples/example_ppo.yaml",
        "sft": "qwen2.5-7B-sft_megatron/sft_config.yaml",
        "dpo": "dpo_examples/qwen2.5-3B_dpo_megatron.yaml",
        "distill": "qwen3-8B-onpolicy-distill-megatron/onpolicy_distill_config.yaml",
        "agentic": "qwen2.5-0.5B-agentic/agent_val_frozen_lake.yaml",
        "image": "qwen2.5-vl-7B-rlvr/rlvr_megatron.yaml",
        "image_agentic": ("alibaba/ROLL", "8eb27cc", "0.3.0", "examples/qwen2.5-vl-3B-agentic/agentic_val_sokoban.yaml"),
        "image_distill": ("alibaba/ROLL", "8eb27cc", "0.3.0", "examples/qwen2.5-vl-7B-distill/distill_vl_megatron.yaml"),
    },
    "tunix": {
        "grpo": "rl/grpo/gsm8k/run_gemma2_2b.sh",
        "ppo": "rl/ppo/gsm8k/run_qwen3_1.7b.sh",
        "program": ("google/tunix", "c7d8950", "0.1.7", "examples/math_gsm8k/gemma_grpo_demo_nb.py"),
        "notebook": ("google/tunix", "c7d8950", "0.1.7", "examples/grpo_gemma.ipynb"),
    },
    "cosmos_rl": {
        "grpo": "qwen2-5-3b-p-fsdp1-tp1-r-tp1-pp1-grpo.toml",
        "sft": "qwen2-5-3b-tp1-sft.toml",
        "agentic": "multiturn-3b-p-fsdp1-tp1-r-tp1-pp1-grpo.toml",
        "distill": "qwen3/qwen3-8b-distill.toml",
    },
}
SMALL = {
    "run.resume": "never",
    "train.steps": 2,
    "data.epochs": 0,
    "model.path": "",
    "model.init": "random",
    "data.subset": "",
    "data.split": "train",
    "rollout.placement": "auto",
    "rollout.servers": (),
    "rollout.vllm.devices": (),
    "rollout.vllm.replicas": 1,
    "rollout.vllm.tensor_parallel": 1,
    "rollout.vllm.max_model_len": 0,
    "mesh.roles": {},
    "mesh.tp": 1,
    "mesh.cp": 1,
    "mesh.ep": 1,
    "mesh.dp": 1,
    "mesh.fsdp": -1,
    "rollout.max_new_tokens": 16,
    "data.max_prompt_tokens": 96,
    "train.tokens_per_microbatch": 0,
    "train.score_tokens_per_microbatch": 0,
    "train.max_sequence_tokens": 0,
    "train.compute_dtype": "fp32",
    "train.param_dtype": "fp32",
    "rollout.dtype": "fp32",
    "log.wandb": False,
    "log.console": "plain",
    "log.every_steps": 1,
    "eval.sets": (),
    "eval.every_steps": 0,
    "eval.before": False,
    "eval.after": False,
    "checkpoint.every_steps": 0,
    "checkpoint.every_epochs": 0.0,
    "checkpoint.every_minutes": 0.0,
    "checkpoint.at_end": False,
    "checkpoint.export_at_end": False,
    "checkpoint.export_every_steps": 0,
    "checkpoint.upload.to": "",
    "rollout.max_staleness": 0,
    "rollout.partial": False,
    "rollout.sync_every": 1,
    "model.revision": "",
    "model.remat": "auto",
    "critic.path": "",
    "reward.judge.model": "",
    "log.sinks": (),
    "rollout.engine": "jax",
}
LONGEST = 600  # seconds of a run
REWARDS = "tunix/cli/reward_fn"
PROGRAM = (
    "import json, sys, jaxrl\nfrom jaxrl.config.load import load_config\nfile, changes = sys.argv[1], json.load(open(sys.argv[2]))\n"
    "jaxrl.train(load_config(file, changes))\n"
)


def find(system: str, end: str) -> tuple[str, str, str, str]:
    """(repository, commit, version, file) of the newest entry of the corpus with a file of this end."""
    for repository, at, version, files in CORPUS[system]:
        for name in files:
            if name.endswith(end.removeprefix("v1:")):
                return repository, at, version, name
    raise SystemExit(f"{system}: no {end} in the corpus")


def rows(config, out: Path) -> None:
    """Rows with the columns that the config names: sums as questions, messages where they are asked for, pictures of one colour."""
    data, recipe, lines = config.data, config.run.recipe, []
    for i in range(32):
        question, answer = f"What is {i} plus {i + 1}?", str((2 * i + 1) % 10)
        user = [{"role": "user", "content": question}]
        talk = {good: [*user, {"role": "assistant", "content": text}] for good, text in ((True, answer), (False, str((2 * i + 2) % 10)))}
        row: dict = {"tag": "FrozenLake", "domain": "math_rule", "data_source": "openai/gsm8k", "env_class": "gsm8k"}
        turns = recipe == "sft" and data.train_turns == "all"
        if data.image_column and config.model.config.get("vision_config"):
            user[0]["content"] = f"<image>{question}"
            put(row, data.image_column, [picture(i)])
        put(row, data.prompt_column, talk[True] if turns else user if recipe == "rl" and data.chat != "false" else question)
        put(row, data.answer_column, f"#### {answer}")
        if data.train_turns != "all":
            put(row, data.completion_column, answer)
        if recipe in ("preference", "reward_model"):
            for column, good in ((data.chosen_column, True), (data.rejected_column, False)):
                put(row, column, talk[good] if data.chat != "false" else talk[good][1]["content"])
        lines.append(json.dumps(row))
    (out / "rows.jsonl").write_text("\n".join(lines) + "\n")
    (out / "chat.jinja").write_text(CHAT)


def put(row: dict, column: str, value) -> None:
    """Sets a column, `a.b` as field b of a."""
    *above, leaf = column.split(".")
    for name in above:
        row = row.setdefault(name, {})
    if leaf:
        row[leaf] = value


def picture(i: int) -> str:
    """A PNG of one colour as a data URI."""
    import base64
    import io

    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (32, 32), (8 * i, 255 - 8 * i, 90)).save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def written_rows(program: Path, data: Path) -> str:
    """Rows as RLinf's class of them reads them, written anew by the program that the migration wrote."""
    import base64

    import pyarrow
    import pyarrow.parquet

    space: dict = {"__name__": "rows"}
    exec(program.read_text(), space)
    source = [{"question": f"What is {i} plus {i + 1}?", "choices": ["up", "down"], "correct_answer": "AB"[i % 2],
               "image": {"bytes": base64.b64decode(picture(i).partition(",")[2]), "path": None}} for i in range(32)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(source), data / "source.parquet")
    space["write"]([str(data / "source.parquet")], str(data / "rows.parquet"))
    return str(data / "rows.parquet")


def lettered(out: Path) -> str:
    """The tokenizer of pictures, with letters of choices."""
    import shutil

    from jaxrl.data.sources import EMBEDDED

    shutil.copytree(EMBEDDED / "pictures" / "tokenizer", out)
    whole = json.loads((out / "tokenizer.json").read_text())
    vocabulary = whole["model"]["vocab"]
    vocabulary |= {letter: len(vocabulary) + i for i, letter in enumerate("AB.")}
    (out / "tokenizer.json").write_text(json.dumps(whole))
    return str(out)


def teacher(out: Path, seeing: bool) -> str:
    """A folder with a small random model."""
    import shutil

    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    from jaxrl.data.sources import EMBEDDED

    model = dict(VISION if seeing else MODEL)
    config = AutoConfig.for_model(model.pop("model_type"), **model)
    (AutoModelForImageTextToText if seeing else AutoModelForCausalLM).from_config(config).save_pretrained(out)
    shutil.copytree(EMBEDDED / ("pictures" if seeing else "arith") / "tokenizer", out, dirs_exist_ok=True)
    return str(out)


def changes(config, kind: str, data: Path, work: Path) -> dict:
    """The options that a machine without GPUs and models cannot keep."""
    o = dict(SMALL)
    seeing = kind.startswith("image")
    o |= {
        "model.config": VISION if seeing else MODEL,
        "model.tokenizer": "jaxrl://pictures/tokenizer" if seeing else "jaxrl://arith/tokenizer",
        "data.prompts_per_step": max(4, config.algorithm.num_minibatches or 1),
        "data.path": (str(data / "rows.jsonl"),),
        "data.sources": {},
        "run.dir": str(work / "run"),
    }
    if not seeing:
        o["model.chat_template"] = str(data / "chat.jinja")
    if config.run.recipe in ("sft", "preference", "reward_model"):
        o |= {"data.prompts_per_step": 4, "data.max_prompt_tokens": 96, "rollout.max_new_tokens": 96}
    if config.rollout.group_size > 4 and config.run.recipe == "rl":
        o["rollout.group_size"] = 4
    if config.env.function or config.env.tools:
        o |= {"env.max_turns": min(config.env.max_turns, 3), "env.max_observation_tokens": 32}
    if seeing:
        o |= {"data.image_min_pixels": 256, "data.image_max_pixels": 256, "data.max_prompt_tokens": 128, "model.frozen": ()}
        if config.env.image_tokens:
            o["env.image_tokens"] = 64
    for role in ("teacher", "reference"):
        if config[role].path:
            o[f"{role}.path"], o[f"{role}.dtype"] = teacher(work / role, seeing), "fp32"
    if config.run.recipe == "distill" and not config.teacher.path:
        o["teacher.path"] = teacher(work / "teacher", seeing)
    if config.reward.model.path:
        o |= {"reward.model.path": "", "reward.functions": ("math",), "reward.weights": ()}
    return o


def run(system: str, kind: str, clones: Path, work: Path) -> dict:
    """Migrates, trains, and returns the outcome of the migration and what the lines of metrics say."""
    end = RUNS[system][kind]
    out, data, tree = work / "out", work / "data", work / "tree"
    for folder in (data, tree):
        folder.mkdir()
    if isinstance(end, str) and end.startswith("trl "):
        version, name = "1.16", "run.sh"
        (tree / name).write_text(end + "\n")
    else:
        repository, at, version, name = end if isinstance(end, tuple) else find(system, end)
        if name.endswith((".py", ".ipynb")):
            text = subprocess.run(["git", "-C", str(clone(clones, repository)), "show", f"{at}:{name}"], capture_output=True, check=True)
            name = Path(name).name
            (tree / name).write_bytes(text.stdout)
        else:
            take(clone(clones, repository), at, [name], tree)
    own = {}
    if system == "tunix":  # whose rewards are called where they lie
        of = subprocess.run(["git", "-C", str(clone(clones, repository)), "archive", at, REWARDS], capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", str(tree)], input=of.stdout, check=True)
        own["TUNIX"] = str(tree)
    status, said, report = migrate(system, tree / name, version, out)
    row = {"config": end if isinstance(end, str) else f"{end[3]} at {end[1]}", "outcome": report.get("outcome", said.strip()[:200])}
    if status:
        return row | {"steps": 0, "ok": False, "why": "; ".join(e["why"] for e in report.get("lacks", []) if e["refused"])[:200]}
    config = load_config(str(out / report["config"]))
    o = changes(config, kind, data, work)
    config.model.config = o["model.config"]
    stubs = [f for f in report["files"] if f.endswith("_reward.py") and "has to be written" in (out / f).read_text()]
    if stubs:
        o |= {"reward.functions": ("math",), "reward.weights": ()}
    rows(config, data)
    for f in report["files"]:
        if f.endswith("_rows.jsonl"):
            o["data.path"] = (str(out / f),)
        if f.endswith("_rows.py"):
            o |= {"data.path": (written_rows(out / f, data),), "model.tokenizer": lettered(work / "tokenizer")}
    (work / "changes.json").write_text(json.dumps(o))
    start = time.perf_counter()
    with open(work / "out.txt", "w+") as text:
        child = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(out / report["config"]), str(work / "changes.json")],
            cwd=out,
            stdin=subprocess.DEVNULL,
            stdout=text,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **own, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.path.dirname(os.path.dirname(os.path.abspath(__file__)))},
        )
        try:
            code = child.wait(LONGEST)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # with its workers
            code = child.wait()
    metrics = work / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    losses = [line["loss"] for line in lines if "loss" in line]
    ok = code == 0 and len(losses) == 2 and all(map(math.isfinite, losses))
    row |= {
        "exit": code,
        "recipe": config.run.recipe,
        "steps": len(losses),
        "ok": ok,
        "loss": losses,
        "reward": [line["reward/mean"] for line in lines if "reward/mean" in line],
        "without": [*stubs, *(["reward.model"] if config.reward.model.path else [])],
        "seconds": round(time.perf_counter() - start),
    }
    if not ok:
        print(system, kind, (work / "out.txt").read_text()[-1500:], flush=True)
        row["why"] = (work / "out.txt").read_text().strip().splitlines()[-1:]
    return row


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clones", type=Path, required=True)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    file = RESULTS / "migrate_train_kinds.json"
    results = json.loads(file.read_text())["results"] if file.exists() else {}
    only = [x for x in args.only.split(",") if x]
    for system, kinds in RUNS.items():
        for kind in kinds:
            name = f"{system}/{kind}"
            if only and system not in only and name not in only:
                continue
            with tempfile.TemporaryDirectory() as tmp:
                results[name] = run(system, kind, args.clones, Path(tmp)) | {"commit": commit()}
            record("migrate_train_kinds", {f"{s}/{k}": results[f"{s}/{k}"] for s in RUNS for k in RUNS[s] if f"{s}/{k}" in results})
    names = ("config", "outcome", "recipe", "steps", "ok", "seconds", "without")
    table(["job", *names], [[name, *(r.get(n, "") for n in names)] for name, r in results.items()])
    return int(not all(r["ok"] for r in results.values() if r["outcome"] != "refused"))


if __name__ == "__main__":
    sys.exit(main())
