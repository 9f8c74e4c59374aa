"""Showing 1, 2 and 5 of the migration: example configs of other systems at named commits, read by jaxrl.migrate.

    python evidence/migrate_corpus.py --clones=DIR [--seeds=DIR] [--systems=skyrl,verl]     # some two minutes

DIR holds git clones named owner+name, with their history. Their files are taken from git into a temporary folder and are
never committed here (licences, size). For every config:

    outcome        full, partial or refused (exit 0 or 3); unreadable (2) only for those of UNREADABLE, with their reason
    keys           every key of the source stands in the report exactly once. What the source's keys are an independent reader
                   says: bash itself, which runs the script in a sandbox without commands (bubblewrap, no network, an empty
                   PATH; every command only prints its words), and PyYAML for files of YAML
    meaning        sequences per step, optimizer steps, learning rate, clips, KL, lengths, sampling, staleness, groups and
                   evaluation of the config that was written are what RULES says, which was written down from the sources'
                   code and reads the independent reader's keys, not the tables
    checks         the config passes jaxrl's own checks, for run.mode=plan where plans count what it has
    seconds        of the command alone, in a process of its own, for the first config of a system

With --seeds, a folder of the reference documents: every block of YAML in them is read, too, and must not end in a trace.
Exits with 1 where one of this does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import yaml

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, os.path.dirname(__file__))

from common import record, table  # noqa: E402

from jaxrl.config import load_config  # noqa: E402
from jaxrl.config_checks import check  # noqa: E402
from jaxrl.errors import ConfigError  # noqa: E402
from jaxrl.migrate import __main__ as command  # noqa: E402

# system -> (repository, commit or tag, --from-version, files)
CORPUS = {
    "skyrl": [
        ("NovaSky-AI/SkyRL", "a956457", "0.3", [f"examples/train/{n}.sh" for n in (
            "gsm8k/run_gsm8k", "gsm8k/run_32b_gsm8k", "algorithms/drgrpo/run_drgrpo_gsm8k", "algorithms/cispo/run_cispo_gsm8k",
            "algorithms/dapo/run_dapo_gsm8k", "algorithms/rloo/run_rloo", "algorithms/reinforce++/run_reinforce++",
            "algorithms/sapo/run_sapo_qwen3_4b_aime", "algorithms/clip_cov_kl_cov/run_clip_cov", "ppo/run_ppo",
            "megatron/run_megatron_dapo_qwen3_30b_a3b", "lora/run_qwen2_5_0.5b_gsm8k_grpo_lora", "async/async_run_gsm8k",
            "search/run_search", "geometry3k/run_geometry3k", "tis_correction/run_dapo_tis")]),
        ("NovaSky-AI/SkyRL", "skyrl_train-v0.1.0", "train-0.1", [f"skyrl-train/examples/{n}.sh" for n in (
            "gsm8k/run_gsm8k", "ppo/run_ppo", "text_to_sql/run_skyrl_sql")]),
    ],
    "verl": [("volcengine/verl", "b178a3c", "0.7", [f"examples/{n}.sh" for n in (
        "grpo_trainer/run_qwen2-7b_math", "grpo_trainer/run_qwen3-8b", "ppo_trainer/run_deepseek7b_llm",
        "grpo_trainer/run_deepseek671b_math_megatron_80gb", "gmpo_trainer/test_dapo_7b_math", "rloo_trainer/run_qwen2-7b",
        "remax_trainer/run_qwen2.5-3b_seq_balance", "reinforce_plus_plus_trainer/run_qwen2-7b_math_rf",
        "cispo_trainer/run_cispo_qwen2_5_0_5b_gsm8k", "rollout_correction/run_with_rollout_corr",
        "grpo_trainer/run_qwen2_5-3b_gsm8k_grpo_lora", "grpo_trainer/run_qwen2_5_vl-7b",
        "sglang_multiturn/run_qwen2.5-3b_gsm8k_multiturn")]),
        ("volcengine/verl", "v0.4.1", "0.4", [f"examples/{n}.sh" for n in (
            "grpo_trainer/run_qwen2-7b_math", "ppo_trainer/run_qwen2-7b_rm")])],
    "trl": [
        ("huggingface/open-r1", "1416fa0", "0.18", [f"recipes/{n}.yaml" for n in (
            "Qwen2.5-1.5B-Instruct/grpo/config_demo", "DeepSeek-R1-Distill-Qwen-1.5B/grpo/config_demo",
            "Qwen2.5-1.5B-Instruct/grpo/config_demo_code", "Qwen2.5-Coder-7B-Instruct/grpo/config_codeforces",
            "Qwen2.5-1.5B-Instruct/grpo/config_demo_code_ioi")]),
        ("huggingface/trl", "f2cd577", "1.9", ["examples/cli_configs/example_config.yaml"]),
    ],
    "areal": [("inclusionAI/AReaL", "4aef98d", "1.0", [f"examples/{n}.yaml" for n in (
        "math/gsm8k_grpo", "math/gsm8k_ppo", "math/gsm8k_drgrpo", "math/gsm8k_gspo", "math/gsm8k_liteppo", "math/gsm8k_rloo",
        "math/gsm8k_sapo", "math/gsm8k_m2po", "math/gsm8k_grpo_megatron", "math/gsm8k_grpo_lora", "math/boba_grpo",
        "math/gsm8k_reinforce", "math/gsm8k_sft", "multi_turn_math/gsm8k_grpo_mt", "tau2/config_30b_moe_airline")])],
}
GPUS = {"trl": 8}  # the scripts' own, which their YAML does not say: a node of eight
UNREADABLE: dict[str, str] = {}


def clone(root: Path, repository: str) -> Path:
    """The git directory of a repository."""
    for place in (root / repository.replace("/", "+"), root / repository.replace("/", "+") / "repo", root / repository.split("/")[1]):
        if (place / "HEAD").exists() or (place / ".git").exists():
            return place
    raise SystemExit(f"{repository}: no clone in {root}")


def take(git: Path, commit: str, files: list[str], out: Path) -> None:
    """The text files of a commit that lie where these do, down to their folder of examples."""
    folders = sorted({re.match(r"(.*?(?:examples|recipes))/", f)[1] for f in files})
    names = subprocess.run(["git", "-C", str(git), "ls-tree", "-r", "--name-only", commit, *folders], capture_output=True, text=True,
                           check=True).stdout.split("\n")
    texts = [n for n in names if n.endswith((".sh", ".yaml"))]
    archive = subprocess.run(["git", "-C", str(git), "archive", commit, *texts], capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", str(out)], input=archive, check=True)


# -- an independent reader ---------------------------------------------------------------------------------------------

BASH = r"""
command_not_found_handle() { printf '%s\0' "$@"; printf '\1'; }
python() { command_not_found_handle python "$@"; }; python3() { command_not_found_handle python3 "$@"; }
uv() { command_not_found_handle uv "$@"; }
bash() { shift 0; case "$1" in *.sh) source "$@";; *) command_not_found_handle bash "$@";; esac; }
HOME='$HOME'; set +e; PATH=/none
source "$SCRIPT"
"""


def keys_of_script(path: Path, root: Path) -> dict[str, str]:
    """Keys and texts of the command with most `a.b=c`, as bash expands its words."""
    box = ["bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/usr", "/usr", "--ro-bind", str(root), str(root), "--tmpfs", "/tmp2",
           *(x for d in ("/lib", "/lib64", "/bin") if Path(d).exists() for x in ("--ro-bind", d, d)), "--proc", "/proc", "--dev", "/dev",
           "--clearenv", "--setenv", "SCRIPT", str(path), "--setenv", "PATH", "/none", "--chdir", str(root), "/bin/bash", "-c", BASH]
    done = subprocess.run(box, capture_output=True, timeout=20)
    best: dict[str, str] = {}
    for one in done.stdout.split(b"\1"):
        words = one.decode("utf-8", "replace").split("\0")
        found = {}
        for word in words:
            if m := re.fullmatch(r"(?:\+\+|\+)?([A-Za-z_][\w./]*)=(.*)", word, re.S):
                found[m[1]] = m[2]
        best = found if len(found) > len(best) and any("." in k for k in found) else best
    return best


def keys_of_yaml(path: Path) -> dict[str, object]:
    def walk(node, prefix):
        if isinstance(node, dict) and node:
            for k, v in node.items():
                yield from walk(v, f"{prefix}.{k}" if prefix else str(k))
        else:
            yield prefix, node

    return dict(walk(yaml.safe_load(path.read_text("utf-8")), ""))


def same_keys(report: dict, mine: dict) -> list[str]:
    """Keys that are missing, or that stand twice; a table given as one word (a={b: c}) may stand as its entries."""
    theirs = Counter(k["key"] for k in report["keys"])
    twice = [k for k, n in theirs.items() if n > 1]
    whole = lambda k: any(t.startswith(k + ".") for t in theirs)  # noqa: E731
    return twice + [k for k in mine if k not in theirs and not whole(k) and not re.match(r"hydra|defaults$", k)]


# -- rules, written down from the sources' code --------------------------------------------------------------------------


class Keys:
    """The independent reader's keys as numbers and flags, references within the file followed."""

    def __init__(self, keys: dict):
        self.keys = keys

    def __call__(self, *names, default=None):
        value = next((self.keys[n] for n in names if n in self.keys), default)
        for _ in range(9):
            m = re.fullmatch(r"\$\{([\w.]+)\}", value) if isinstance(value, str) else None
            value = self.keys.get(m[1]) if m else value
        if isinstance(value, str):
            text = value.strip("'\"")
            if text.lower() in ("true", "false", "null", "none", ""):
                return {"true": True, "false": False}.get(text.lower())
            with contextlib.suppress(ValueError):
                return float(text)
            return text
        return value


def skyrl(k: Keys, c, version: str) -> dict:
    """skyrl/train/trainer.py, utils/utils.py (validate_batch_sizes), utils/ppo_utils.py."""
    a, s, o = "trainer.algorithm.", "generator.sampling_params.", "trainer.policy.optimizer_config."
    out = {
        "prompts": (c.data.prompts_per_step, k("trainer.train_batch_size", default=1024)),
        "group": (c.rollout.group_size, k("generator.n_samples_per_prompt", default=5)),
        "updates": (c.algorithm.num_minibatches * c.algorithm.ppo_epochs, k("trainer.train_batch_size", default=1024)
                    / k("trainer.policy_mini_batch_size", default=256) * k("trainer.update_epochs_per_batch", default=1)),
        "lr": (c.optimizer.lr, k(o + "lr", default=1e-6)),
        "warmup": (c.optimizer.warmup_steps, k(o + "num_warmup_steps", "trainer.num_warmup_steps", default=0)),
        "longest": (c.rollout.max_new_tokens, k(s + "max_generate_length", default=1024)),
        "prompt": (c.data.max_prompt_tokens, k("trainer.max_prompt_length", default=512)),
        "temperature": (c.rollout.temperature, k(s + "temperature", default=1.0)),
        "epochs": (c.data.epochs, k("trainer.epochs", default=1)),
        "eval every": (c.eval.every_steps, max(k("trainer.eval_interval", default=5), 0)),
    }
    on = k(a + "use_kl_loss", default=True) or k(a + "use_kl_in_reward", default=False)
    out["kl"] = (c.algorithm.kl.coef, k(a + "kl_loss_coef", default=0.001) if on else 0.0)
    if c.algorithm.policy_loss == "clip":
        out["clip"] = ((c.algorithm.clip_low, c.algorithm.clip_high),
                       (k(a + "eps_clip_low", default=0.2), k(a + "eps_clip_high", default=0.2)))
    own = any(name.startswith("generator.eval_sampling_params.") for name in k.keys)
    greedy = 0.0 if version.startswith("train") or not own else 1.0
    out["eval temperature"] = (c.eval.temperature, k("generator.eval_sampling_params.temperature", default=greedy))
    return out


def verl(k: Keys, c, version: str) -> dict:
    """verl/trainer/ppo/ray_trainer.py, core_algos.py, the generated configs of the tags."""
    a, r = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
    out = {
        "prompts": (c.data.prompts_per_step, k("data.train_batch_size", default=1024)),
        "group": (c.rollout.group_size, k(r + "n", default=1)),
        "updates": (c.algorithm.num_minibatches * c.algorithm.ppo_epochs, k("data.train_batch_size", default=1024)
                    / k(a + "ppo_mini_batch_size", default=256) * k(a + "ppo_epochs", default=1)),
        "longest": (c.rollout.max_new_tokens, k("data.max_response_length", default=512)),
        "prompt": (c.data.max_prompt_tokens, k("data.max_prompt_length", default=512)),
        "temperature": (c.rollout.temperature, k(r + "temperature", default=1.0)),
        "lr": (c.optimizer.lr, k(a + "optim.lr", default=1e-6)),
        "epochs": (c.data.epochs, k("trainer.total_epochs", default=30)),
        "eval every": (c.eval.every_steps, max(k("trainer.test_freq", default=-1), 0)),
        "kl": (c.algorithm.kl.coef, k(a + "kl_loss_coef", default=0.001) if k(a + "use_kl_loss", default=False) else
               k("algorithm.kl_ctrl.kl_coef", default=0.001) if k("algorithm.use_kl_in_reward", default=False) else 0.0),
    }
    mode = k(a + "policy_loss.loss_mode", default="vanilla")
    if mode in ("vanilla", "gspo", "geo_mean"):
        out["clip"] = ((c.algorithm.clip_low, c.algorithm.clip_high),
                       (k(a + "clip_ratio_low", default=0.2), k(a + "clip_ratio_high", default=0.2)))
        out["dual clip"] = (c.algorithm.dual_clip, k(a + "clip_ratio_c", default=3.0) if mode == "vanilla" else 0.0)
    return out


def trl(k: Keys, c, version: str) -> dict:
    """trl/trainer/grpo_config.py (__post_init__) and grpo_trainer.py, eight processes."""
    accumulated = k("gradient_accumulation_steps", default=1)
    whole = k("per_device_train_batch_size", default=8) * 8 * accumulated
    return {
        "sequences": (c.data.prompts_per_step * c.rollout.group_size, whole),
        "group": (c.rollout.group_size, k("num_generations", default=8)),
        "updates": (c.algorithm.num_minibatches * c.algorithm.ppo_epochs, k("num_iterations", default=1)),
        "lr": (c.optimizer.lr, k("learning_rate", default=1e-6)),
        "longest": (c.rollout.max_new_tokens, k("max_completion_length", default=256)),
        "temperature": (c.rollout.temperature, k("temperature", default=1.0)),
        "kl": (c.algorithm.kl.coef, k("beta", default=0.04 if version == "0.18" else 0.0)),
        "warmup": (c.optimizer.warmup_fraction, k("warmup_ratio", default=0.0)),
    }


def areal(k: Keys, c, version: str) -> dict:
    """areal/trainer/ppo/actor.py, areal/utils/functional, api/cli_args.py."""
    a, o = "actor.", "actor.optimizer."
    scale, bias = k(a + "reward_scaling", default=1.0), k(a + "reward_bias", default=0.0)
    out = {
        "prompts": (c.data.prompts_per_step, k("train_dataset.batch_size", default=1)),
        "group": (c.rollout.group_size, k("gconfig.n_samples", default=1)),
        "updates": (c.algorithm.num_minibatches, k(a + "ppo_n_minibatches", default=4)),
        "lr": (c.optimizer.lr, k(o + "lr", default=1e-3)),
        "longest": (c.rollout.max_new_tokens, k("gconfig.max_new_tokens", default=16384)),
        "temperature": (c.rollout.temperature, k("gconfig.temperature", default=1.0)),
        "staleness": (c.rollout.max_staleness, k("rollout.max_head_offpolicyness", default=0)),
        "kl": (c.algorithm.kl.coef, k(a + "kl_ctl", default=0.1)),
        "reward of 1": (min(max(c.reward.scale + c.reward.bias, -c.reward.clip), c.reward.clip),
                        min(max((1 + bias) * scale, -k(a + "reward_clip", default=20.0)), k(a + "reward_clip", default=20.0))),
        "epochs": (c.data.epochs, k("total_train_epochs", default=1)),
    }
    if c.algorithm.policy_loss == "clip":
        low = k(a + "eps_clip", default=0.2)
        out["clip"] = ((c.algorithm.clip_low, c.algorithm.clip_high), (low, k(a + "eps_clip_higher") or low))
    return out


RULES = {"skyrl": skyrl, "verl": verl, "trl": trl, "areal": areal}


def differ(rules: dict) -> list[str]:
    near = lambda a, b: a == b or isinstance(a, int | float) and isinstance(b, int | float) and abs(a - b) <= 1e-9 * abs(b)  # noqa: E731
    return [f"{what}: {ours} and not {theirs}" for what, (ours, theirs) in rules.items()
            if not (all(map(near, ours, theirs)) if isinstance(ours, tuple) else near(ours, theirs))]


# -- one config --------------------------------------------------------------------------------------------------------


def migrate(system: str, file: Path, version: str, out: Path) -> tuple[int, str, dict]:
    """(exit status, what was printed, the report)."""
    argv = [system, str(file), f"--from-version={version}", f"--out={out}", *([f"--gpus={GPUS[system]}"] if system in GPUS else [])]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = command.main(argv)
    report = json.loads((out / "report.json").read_text()) if (out / "report.json").exists() else {}
    return status, said.getvalue(), report


def problems(system: str, file: Path, root: Path, version: str, out: Path) -> tuple[str, list[str]]:
    """(outcome, what does not hold)."""
    status, said, report = migrate(system, file, version, out)
    if status == 2:
        return "unreadable", [] if UNREADABLE.get(file.name, "?") in said else [said.strip()]
    mine = keys_of_script(file, root) if file.suffix == ".sh" else keys_of_yaml(file)
    wrong = [f"key {k}" for k in same_keys(report, mine)] + (["no keys of its own were found"] if len(mine) < 5 else [])
    if report["outcome"] != "refused":
        here = os.getcwd()
        os.chdir(out)
        try:
            config = load_config(report["config"])
            wrong += differ(RULES[system](Keys(mine), config, version))
            config.log.wandb = False
            config.model.path = config.model.path or "a/model"
            uncounted = config.lora.rank or config.reward.model.path  # which plans do not count
            config.run.mode, config.plan.target = ("train", "") if uncounted else ("plan", "h100:8")
            check(config)
        except ConfigError as e:
            wrong.append(str(e))
        finally:
            os.chdir(here)
    return report["outcome"], wrong


def documents(folder: Path) -> list[dict]:
    """Every block of YAML in the reference documents; none may end in a trace, what cannot be read is said."""
    rows = []
    for system, name in (("skyrl", "skyrl.rst"), ("areal", "areal.md")):
        text = (folder / name).read_text("utf-8")
        blocks = re.findall(r"```ya?ml\n(.*?)```", text, re.S)
        for found in re.findall(r"\.\. code-block:: yaml *\n\n((?:[ ]+.*\n|\s*\n)+)", text):
            least = min(len(line) - len(line.lstrip()) for line in found.splitlines() if line.strip())
            blocks.append("\n".join(line[least:] for line in found.splitlines()))
        statuses: Counter = Counter()
        for block in blocks:
            with tempfile.TemporaryDirectory() as tmp:
                (Path(tmp) / "block.yaml").write_text(block)
                statuses[{0: "read", 2: "unreadable", 3: "refused"}[migrate(system, Path(tmp) / "block.yaml", "docs" if
                         system == "skyrl" else "0.3", Path(tmp) / "out")[0]]] += 1
        rows.append({"document": name, "blocks": len(blocks), **statuses})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clones", type=Path, required=True)
    parser.add_argument("--seeds", type=Path)
    parser.add_argument("--systems", default=",".join(CORPUS))
    args = parser.parse_args()
    results, bad = {}, 0
    for system in args.systems.split(","):
        outcomes, wrong, count, seconds = Counter(), {}, 0, None
        for repository, commit, version, files in CORPUS[system]:
            with tempfile.TemporaryDirectory() as tmp:
                root = Path(tmp) / "tree"
                root.mkdir()
                take(clone(args.clones, repository), commit, files, root)
                for i, name in enumerate(files):
                    outcome, found = problems(system, root / name, root, version, Path(tmp) / f"out{i}")
                    outcomes[outcome] += 1
                    count += 1
                    if found:
                        wrong[f"{repository}@{commit}:{name}"] = found
                    if seconds is None:
                        start = time.perf_counter()
                        subprocess.run([sys.executable, "-m", "jaxrl.migrate", system, str(root / name), f"--out={tmp}/timed",
                                        *([f"--gpus={GPUS[system]}"] if system in GPUS else [])], capture_output=True)
                        seconds = round(time.perf_counter() - start, 2)
        results[system] = {"configs": count, **outcomes, "seconds": seconds, "wrong": wrong}
        bad += len(wrong)
        for name, found in wrong.items():
            print(name, *found, sep="\n    ")
    table(["system", "configs", "full", "partial", "refused", "unreadable", "wrong", "seconds"],
          [[s, r["configs"], *(r.get(o, 0) for o in ("full", "partial", "refused", "unreadable")), len(r["wrong"]), r["seconds"]]
           for s, r in results.items()])
    if args.seeds:
        results["documents"] = documents(args.seeds)
        print(*results["documents"], sep="\n")
    record("migrate_corpus", results)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
