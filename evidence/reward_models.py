"""A reward model on the embedded task, GRPO that learns from it alone, and a control that is exploited.

    python evidence/reward_models.py [--folder DIR]     # a quarter of an hour on two quiet cores

From one warm start (seed 0): a reward model on 6000 pairs and one on 24 (configs/reward_model.py and :weak), GRPO with each
(:rl, :rl_weak) and with the true reward (configs/grpo.py). Exits with 1 where a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from common import commit, record, table

ROOT = Path(__file__).resolve().parent.parent


def launch(folder: Path, name: str, config: str, *options) -> dict:
    """The summary of a run; one that is finished in the folder is not made again."""
    run, file = folder / name, folder / name / "summary.json"
    if not (file.exists() and json.loads(file.read_text())["finished"]):
        command = [sys.executable, "-m", "jaxrl.main", f"--config={ROOT / 'configs' / config}", f"--config.run.dir={run}",
                   "--config.log.console=plain", *[f"--config.{o}" for o in options]]
        subprocess.run(command, cwd=ROOT, check=True)
    return json.loads(file.read_text())


def policy(folder: Path, name: str, config: str, start: str, scorer: str = "") -> dict:
    """Held-out accuracy by `boxed`, and the mean score of the reward model, before and after."""
    options = [start, "run.warm_start=", *([f"reward.model.path={folder / scorer / 'export'}"] if scorer else [])]
    summary = launch(folder, name, config, *options)
    out = {"run": name, "accuracy_before": summary["eval_before"]["accuracy"], "accuracy_after": summary["eval_after"]["accuracy"]}
    for when in ("before", "after") if scorer else ():
        out[f"score_{when}"] = summary[f"eval_{when}"]["sets"]["test"]["reward/reward_model"]
    return out


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="", help="for the runs")
    folder = Path(parser.parse_args().folder or tempfile.mkdtemp(prefix="reward_models")).resolve()
    at = commit()
    launch(folder, "warm", "grpo_sft.py")
    start = f"model.path={folder / 'warm/export'}"
    scorers = {name: launch(folder, name, config, start, "run.warm_start=")["eval_after"]["accuracy"]
               for name, config in (("rm", "reward_model.py"), ("weak", "reward_model.py:weak"))}
    runs = [policy(folder, "boxed", "grpo.py", start), policy(folder, "rl", "reward_model.py:rl", start, "rm"),
            policy(folder, "rl_weak", "reward_model.py:rl_weak", start, "weak")]
    names = list(dict.fromkeys(key for run in runs for key in run))
    table(names, [[round(run[n], 3) if isinstance(run.get(n), float) else run.get(n, "") for n in names] for run in runs])
    true, good, weak = runs
    bounds = {
        "held-out pairs right, 6000 pairs: 90 % or more": scorers["rm"] >= 0.9,
        "within 5 points of the true reward": true["accuracy_after"] - good["accuracy_after"] <= 0.05,
        "24 pairs: the score rises": weak["score_after"] > weak["score_before"],
        "24 pairs: accuracy stays 20 points below": true["accuracy_after"] - weak["accuracy_after"] >= 0.2,
    }
    missed = [name for name, met in bounds.items() if not met]
    record("reward_models", {"command": "python evidence/reward_models.py", "pair_accuracy": scorers, "runs": runs, "missed": missed}, at)
    print("held-out pair accuracy", scorers)
    print("\n".join(missed) or "every bound is met")
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
