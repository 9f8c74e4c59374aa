"""Runs that leave a recorded one at a step: what they take from its record, what they compute, and what they end at.

python evidence/fork.py          (some ten minutes)

Runs of tests/helpers/tiny_job.py with two reward functions, six steps, recorded; forks at step 4. Of each: answers taken and sampled, calls
of each function taken and computed, at the fork step and behind it; and whether the state after the last step is the
recorded run's bit by bit. Exits with 1 where

- an unedited fork samples or scores anything, or is not the run that it left, bit by bit
- with one reward edited an answer is sampled at the fork step, the edited function is not called for all of them, or the other is called
- with the loss edited an answer is sampled at the fork step or a function is called
- with a helper edited that a function imports, an old reward is taken
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import replay
from common import record, table

ROOT = Path(__file__).resolve().parent.parent
STEPS, AT, ANSWERS = 6, 4, 16
COMMON = {"eval.sets": "", "eval.every_steps": 0, "rollout.group_size": 4, "checkpoint.export_at_end": False, "record.every": 1,
          "checkpoint.keep": -1, "log.console": "plain", "train.steps": STEPS, "reward.functions": "{rewards}:digits,{rewards}:short"}
TWO = {"algorithm.num_minibatches": 2, "algorithm.ppo_epochs": 2, "algorithm.kl.coef": 0.01}
KINDS = {  # options of the recorded run -> also of its forks
    "sync": {**TWO, "checkpoint.every_steps": 3},
    "sync, step 3 computed again": {**TWO, "checkpoint.every_steps": 2},
    "PPO": {"algorithm.preset": "ppo", "checkpoint.every_steps": 3},
    "LoRA": {"lora.rank": 4, "checkpoint.every_steps": 3},
    "after a warm start": {"run.warm_start": f"{ROOT}/tests/helpers/tiny_job.py:sft", "checkpoint.every_steps": 3},
}
EDITS = {
    "nothing": {},
    "a reward": {"file": ("c.isdigit()", "c in '02468'")},
    "the loss": {"algorithm.clip_high": 0.4, "algorithm.kl.coef": 0.1},
    "weights of rewards": {"reward.weights": "1.0,0.25"},
    "the temperature": {"rollout.temperature": 0.7},
}
BEYOND = {"asynchronous, unedited": {"rollout.max_staleness": 2, "rollout.partial": True, "algorithm.preset": "decoupled_ppo",
                                     "checkpoint.every_steps": 3}}


def options(name: str, folder: Path, rewards: Path, given: dict) -> dict:
    return {**COMMON, **given, "run.dir": folder / name, "reward.functions": COMMON["reward.functions"].format(rewards=rewards)}


def fork(work: Path, of: Path, name: str, given: dict, edit: dict, devices: str = "", launch: int = 0, rewards=None) -> dict:
    """What became of a fork: counts at its step and behind it, and whether its end is the recorded run's."""
    own = work / f"{name} code" / "fork_rewards.py"
    own.parent.mkdir()
    text = (rewards or ROOT / "evidence" / "fork_rewards.py").read_text("utf-8")
    own.write_text(text.replace(*edit["file"]) if "file" in edit else text, "utf-8")
    said = {key: value for key, value in edit.items() if key != "file"}
    began = time.monotonic()
    replay.call({**options(name, work, own, given), **said, "fork.run": of, "fork.step": AT}, devices=devices, launch=launch)
    steps = json.loads((work / name / "summary.json").read_text())["fork"]["steps"]
    behind = {key: sum(own[key] for step, own in steps.items() if int(step) > AT) for key in ("completions_taken", "completions_sampled")}
    return {"at": steps[str(AT)], "steps_behind_that_took_any": len(steps) - 1, "behind": behind,
            "bitwise": same_end(work / name, of), "seconds": round(time.monotonic() - began, 1)}


def same_end(a: Path, b: Path) -> bool:
    """Whether parameters and optimizer are equal to the bit after the last step of two recorded runs."""
    from jaxrl.records import files

    one, two = (files.read(files.steps(folder / files.FOLDER)[STEPS]) for folder in (a, b))
    return one.header["states"] == two.header["states"] and np.array_equal(one.arrays["state/after"], two.arrays["state/after"])


def wrong_of(edit: str, found: dict) -> list[str]:
    """What of a fork is not as it must be."""
    all_taken, all_computed = {"taken": ANSWERS, "computed": 0}, {"taken": 0, "computed": ANSWERS}
    sampled = ANSWERS if edit == "the temperature" else 0
    wanted = {"completions_taken": ANSWERS - sampled, "completions_sampled": sampled,
              "rewards": {"digits": all_computed if edit == "a reward" else all_taken, "short": all_taken}}
    if edit == "the temperature":  # other answers, which only by chance are recorded ones
        wanted["rewards"] = found["at"]["rewards"]
    out = [] if found["at"] == wanted else [f"at the fork step {found['at']}"]
    if edit == "nothing" and (not found["bitwise"] or found["behind"] != {"completions_taken": ANSWERS * (STEPS - AT), "completions_sampled": 0}):
        out.append(f"not the run it left: bitwise {found['bitwise']}, behind it {found['behind']}")
    if edit != "nothing" and found["bitwise"]:
        out.append("the edit changed nothing")
    return out


def stale(work: Path) -> tuple[dict, list]:
    """A function that imports a helper, which is edited; and one that is edited beside it."""
    out, wrong = {}, []
    source = work / "with_helper" / "fork_rewards.py"
    source.parent.mkdir()
    text = (ROOT / "evidence" / "fork_rewards.py").read_text("utf-8").replace("def digits", "import helper\n\n\ndef digits")
    source.write_text(text.replace("len(completion) / 12", "len(completion) / helper.LONGEST"), "utf-8")
    (source.parent / "helper.py").write_text("LONGEST = 12\n")
    replay.call(options("helped", work, source, KINDS["sync"]))
    for k, longest in enumerate((12, 13)):
        name = f"helped {longest}"
        folder = work / f"{name} code"
        folder.mkdir()
        shutil.copy(source, folder / "fork_rewards.py")
        (folder / "helper.py").write_text(f"LONGEST = {longest}\n")
        replay.call({**options(name, work, folder / "fork_rewards.py", KINDS["sync"]), "fork.run": work / "helped", "fork.step": AT})
        out[f"helper {'edited' if k else 'as it was'}"] = told = json.loads(
            (work / name / "summary.json").read_text())["fork"]["steps"][str(AT)]["rewards"]
        if told["short"]["taken"] != (0 if k else ANSWERS):
            wrong.append(f"helper {longest}: {told}")
    return out, wrong


def main() -> int:
    rows, failed = [], []
    work = Path(tempfile.mkdtemp(prefix="fork_"))
    replay.CACHE["run.compile_cache"] = work / "xla"
    try:
        for k, (kind, given) in enumerate({**KINDS, **BEYOND}.items()):
            run = f"run{k}"
            replay.call(options(run, work, ROOT / "evidence" / "fork_rewards.py", given))
            for i, (edit, changes) in enumerate(EDITS.items()):
                if kind != "sync" and edit not in ("nothing", "a reward") or kind in BEYOND and edit != "nothing":
                    continue
                found = fork(work, work / run, f"fork{k}_{i}", given, changes)
                wrong = [] if kind in BEYOND else wrong_of(edit, found)
                rows.append({"run": kind, "edited": edit, **found, "wrong": wrong})
                failed += [f"{kind}, {edit}: {text}" for text in wrong]
                print(kind, edit, json.dumps(found), *wrong, flush=True)
            if kind == "sync":
                for place, (devices, launch, mesh) in {"fsdp 2": ("2", 0, {"mesh.fsdp": 2}), "2 processes": ("", 2, {"mesh.fsdp": 2})}.items():
                    found = fork(work, work / run, f"on {place}", {**given, **mesh}, {}, devices, launch)
                    rows.append({"run": f"{kind}, left on {place}", "edited": "nothing", **found, "wrong": []})
                    print(place, json.dumps(found), flush=True)
        helper, wrong = stale(work)
        failed += wrong
    finally:
        shutil.rmtree(work, ignore_errors=True)
    table(["run", "edited", "answers taken", "sampled", "rewards taken", "computed", "taken behind", "bitwise"],
          [[r["run"], r["edited"], r["at"]["completions_taken"], r["at"]["completions_sampled"],
            *(", ".join(f"{n} {c[kind]}" for n, c in r["at"]["rewards"].items()) for kind in ("taken", "computed")),
            r["behind"]["completions_taken"], r["bitwise"]] for r in rows])
    record("fork", {"command": "python evidence/fork.py", "forks": rows, "helper": helper, "failed": failed})
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
