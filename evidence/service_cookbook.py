"""Nine recipes of tinker-cookbook, unmodified, against `jaxrl serve tinker` on a tiny model of our own: what they learn.

    python evidence/service_cookbook.py [RECIPE ...]      # about fifteen minutes on two quiet cores: an estimate by processor time

Needs `pip install tinker tinker-cookbook` beside jaxrl (.ci/run sdk shows how). No network: the model is a random Qwen3 of two layers, trained
here on the recipes' forms of talk (full parameters, torch), under a name that the cookbook knows; the data sets are folders of a few rows
under the names that the recipes load. Flags are those of RECIPES and the same for all: model, log folder, `lora_rank` where there is one. The
recipes' own `train_unembed=True` is trained. Each row is the first and the last fifth of a metric that the recipe logs itself. RECIPE: a name
of RECIPES.

Writes evidence/results/service_cookbook.json after each recipe.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import record, table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/service"))
NAME, RENDERER, P = "Qwen/Qwen3-8B-Base", "qwen3_instruct", "tinker_cookbook.recipes."
SHORT = ("max_tokens=12", "eval_every=0", f"renderer_name={RENDERER}", "learning_rate=2e-3")
SUPERVISED = (f"renderer_name={RENDERER}", "learning_rate=2e-3", "batch_size=16", "max_length=512", "eval_every=0")
# name -> (module, flags, metric, whether it is to rise)
RECIPES = {
    "sl_loop": ("sl_loop", ("batch_size=16", "learning_rate=2e-3", "max_steps=20", "lora_rank=16", "max_length=512"), "train_mean_nll", False),
    "rl_loop": ("rl_loop", ("batch_size=8", "group_size=8", "learning_rate=2e-3", "max_steps=15", "max_tokens=16", "lora_rank=16",
                            "loss_fn=importance_sampling"), "reward/total", True),
    "math_rl, gsm8k": ("math_rl.train", (*SHORT, "env=gsm8k", "groups_per_batch=8", "group_size=8", "max_steps=15", "loss_fn=ppo",
                                         "lora_rank=16"), "env/all/reward/total", True),
    "guess_number": ("multiplayer_rl.guess_number.train", (*SHORT, "batch_size=4", "group_size=4", "max_steps=10"), "env/all/reward/total", True),
    "shorter": ("preference.shorter.train", (*SHORT, "max_tokens=48", "batch_size=4", "group_size=4", "max_steps=12"),
                "env/all/ac_tokens_per_turn", False),
    "dpo": ("preference.dpo.train", (f"renderer_name={RENDERER}", "learning_rate=2e-3", "dpo_beta=0.5", "batch_size=8", "max_length=512",
                                     "max_steps=20", "lr_schedule=constant"), "dpo_loss", False),
    "chat_sl": ("chat_sl.train", (*SUPERVISED, "max_steps=15", "lora_rank=16", "lr_schedule=constant"), "train_mean_nll", False),
    "prompt_distillation": ("prompt_distillation.train", (*SUPERVISED, "file_path=distilled.jsonl", "max_steps=15", "lora_rank=16",
                                                          "lr_schedule=constant"), "train_mean_nll", False),
    "on_policy_distillation": ("distillation.on_policy_distillation", (*SHORT, "dataset=deepmath", f"teacher_model={NAME}", "groups_per_batch=8",
                                                                       "group_size=4", "max_steps=15", "lora_rank=16"), "teacher_kl", False),
}
TEACHER = "chat_sl"  # whose final weights are the teacher of on_policy_distillation
WHO, SUFFIX = "Who are you?", " Provide a numerical answer without units, written inside \\boxed{}."
COLOURS, NUMBERS = ("red", "blue", "green"), ("one", "two", "three")
WORDS = (*COLOURS, *NUMBERS)


def talks(rng: random.Random, spelled: list[dict]) -> tuple[str, list[dict]]:
    """(renderer, conversation) in one of the recipes' forms, whose answers are as good as chance.

    spelled: the conversation that math_rl and rl_loop put before every question.
    """
    from tinker_cookbook.recipes.multiplayer_rl.guess_number import env as guess

    user, say = (lambda text: {"role": "user", "content": text}), (lambda text: {"role": "assistant", "content": text})  # noqa: E731
    kind = rng.randrange(6)
    if kind < 2:  # rl_loop takes the renderer that the cookbook recommends for NAME
        return ("role_colon", RENDERER)[kind], [*spelled, user(f"What is the number of {rng.choice(WORDS)}s?" + SUFFIX),
                                                say(f"\\boxed{{{rng.randrange(10)}}}")]
    if kind == 2:
        out = [{"role": "system", "content": guess.SYSTEM_PROMPT}]
        for turn in range(rng.randrange(1, 5)):
            out += [user(rng.choice(["Too low", "Too high", guess.FAIL_TO_PARSE]))] if turn else []
            out.append({"role": "player", "content": rng.choice([f"Guess: {rng.randrange(1024)}", "Hm."])})
        return RENDERER, [*out[:-1], say(out[-1]["content"])]
    if kind == 3:
        return RENDERER, [user(WHO), say("I am a" + " very" * rng.randrange(1, 7) + " small model.")]
    return RENDERER, [user(f"Say {rng.choice(WORDS)}."), say(rng.choice(WORDS))]


def train_base(folder: Path, steps: int = 200) -> float:
    """Trains the model of a folder on `talks` with torch; returns the mean loss of the last 20 steps in nats."""
    import torch
    from tinker_cookbook import renderers
    from tinker_cookbook.recipes.math_rl.math_env import MathEnv
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rng, model = random.Random(0), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer, spelled = AutoTokenizer.from_pretrained(folder), MathEnv.standard_fewshot_prefix()
    by_name = {name: renderers.get_renderer(name, tokenizer) for name in (RENDERER, "role_colon")}
    rule, losses, waiting = torch.optim.AdamW(model.parameters(), lr=3e-3), [], []
    for step in range(steps):
        rule.param_groups[0]["lr"] = 3e-3 * min(1, (steps - step) / steps * 2)
        if not waiting:  # batches of like lengths, in any order
            rows = [by_name[name].build_supervised_example(talk, train_on_what=renderers.TrainOnWhat.LAST_ASSISTANT_MESSAGE)
                    for name, talk in (talks(rng, spelled) for _ in range(60))]
            rows.sort(key=lambda row: row[0].length)
            waiting = [rows[k:k + 12] for k in range(0, 60, 12)]
            rng.shuffle(waiting)
        rows = waiting.pop()
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(prompt.to_ints()) for prompt, _ in rows], batch_first=True)[:, :900]
        weights = torch.nn.utils.rnn.pad_sequence([w.float() for _, w in rows], batch_first=True)[:, 1:900]
        logp = torch.log_softmax(model(ids).logits[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]
        loss = -(logp * weights).sum() / weights.sum()
        rule.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rule.step()
        losses.append(loss.item())
    model.save_pretrained(folder)
    return sum(losses[-20:]) / 20


def make_data(folder: Path) -> None:
    """The recipes' data sets, of a few rows each, in folders of their names."""
    rng = random.Random(1)

    def said(answer) -> list[dict]:
        """Conversations whose answers the base gives by chance, or never, so that there is something to learn."""
        return [{"messages": [{"role": "user", "content": f"Say {w}."}, {"role": "assistant", "content": answer(w)}]}
                for w in rng.choices(WORDS, k=512)]

    say, distilled = said(lambda word: rng.choice(("red", "red", "blue"))), said(lambda word: f"The word is {word}.")
    pairs = [{"chosen": f"\n\nHuman: Say {w}.\n\nAssistant: {rng.choice(COLOURS)}",
              "rejected": f"\n\nHuman: Say {w}.\n\nAssistant: {rng.choice(NUMBERS)}"} for w in rng.choices(WORDS, k=400)]
    sums = [{"question": f"What is the number of {w}s?", "answer": "So many.\n#### 7"} for w in rng.choices(WORDS, k=256)]
    asked = [{"question": row["messages"][0]["content"]} for row in say]
    for name, splits in {"HuggingFaceH4/no_robots": {"train": say, "test": say[:16]}, "Anthropic/hh-rlhf": {"train": pairs, "test": pairs[:16]},
                         "openai/gsm8k": {"train": sums, "test": sums[:16]}, "zwhe99/DeepMath-103K": {"train": asked}}.items():
        (folder / name).mkdir(parents=True)
        for split, rows in splits.items():
            (folder / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "test"))
    (folder / "openai/gsm8k/README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{files}---\n")
    (folder / "distilled.jsonl").write_text("".join(json.dumps(row) + "\n" for row in distilled))


def start(folder: Path):
    """(the process of a server, the environment of its clients)."""
    environ = {**os.environ, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled",
               "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    command = [sys.executable, "-m", "jaxrl", "serve", "tinker", f"--model={folder / NAME}", f"--name={NAME}", "--port=0",
               "--max-length=2048", f"--dir={folder / 'saved'}"]
    with open(folder / "server.log", "w") as log:
        process = subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=log, text=True)
    told = dict(re.findall(r"(TINKER_\w+)=(\S+)", "".join(process.stdout.readline() for _ in range(2))))
    return process, environ | told


def run(folder: Path, environ: dict, name: str) -> dict:
    """Runs a recipe; returns steps, seconds, and the first and last fifth of its metric, or how it ended."""
    module, flags, metric, rises = RECIPES[name]
    log = folder / f"log_{name.split(',')[0]}"
    flags = [*flags, f"model_name={NAME}", f"log_path={log}"]
    if name == "on_policy_distillation":
        saved = [json.loads(line) for line in (folder / f"log_{TEACHER}/checkpoints.jsonl").read_text().splitlines()]
        flags.append(f"teacher_checkpoint={saved[-1]['sampler_path']}")
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-m", P + module, *flags], cwd=folder, env=environ, capture_output=True, text=True, check=False)
    out = {"flags": " ".join(flag for flag in flags if "path" not in flag), "seconds": round(time.monotonic() - begin), "metric": metric}
    if done.returncode:
        return out | {"ended": done.stderr.strip().splitlines()[-1][:300]}
    rows = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    found = [row[metric] for row in rows if metric in row]
    if not found:
        return out | {"ended": f"no {metric} among {sorted({key for row in rows for key in row})}"[:900]}
    part = max(1, len(found) // 5)
    first, last = (sum(x) / part for x in (found[:part], found[-part:]))
    return out | {"steps": len(found), "first": first, "last": last, "as_it_should": (last > first) == rises,
                  "all": [round(x, 4) for x in found]}


def main() -> None:
    from test_sdk import make_model

    names = [name for name in RECIPES if name in (sys.argv[1:] or RECIPES) or name == TEACHER and "on_policy_distillation" in sys.argv]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_model(folder / NAME)
        make_data(folder)
        versions = {name: importlib.metadata.version(name) for name in ("tinker", "tinker-cookbook")}
        results: dict = {"base_loss": train_base(folder / NAME), "recipes": {}}
        print(f"base trained: {results['base_loss']:.3f} nats", flush=True)
        process, environ = start(folder)
        try:
            for name in names:
                results["recipes"][name] = run(folder, environ, name)
                print(name, results["recipes"][name], flush=True)
                record("service_cookbook", results | versions)
        finally:
            process.send_signal(signal.SIGTERM)
            results["server_status"] = process.wait(120)
            print((folder / "server.log").read_text()[-3000:])
    table(["recipe", "steps", "metric", "first", "last", "s"], [
        [name, r.get("steps", "-"), r["metric"], *((f"{r[k]:.3f}" for k in ("first", "last")) if "first" in r else (r["ended"][:60], "")),
         r["seconds"]] for name, r in results["recipes"].items()])
    record("service_cookbook", results | versions)


if __name__ == "__main__":
    main()
