"""The environments that ship are learnt: three seeds each, before and after, with controls that do not learn.

    python evidence/environments_learn.py                       # about 40 quiet minutes on two cores
    python evidence/environments_learn.py --names=calc --seeds=0
    python evidence/environments_learn.py --names=library --keep   # this one again, beside the others of the last result
    python evidence/environments_learn.py --names=repair        # needs bubblewrap
    python evidence/environments_learn.py --names=calc --seeds=0 --engine=vllm   # through real vLLM, without controls

One run after the other, each from the command line. Controls of every seed, each from the same warm start: the same RL
with the rewards of each batch dealt out at random; without the tool, with one guess, with one look-up; and supervised
training on its last demonstrations for as many seconds as RL took. Exits with 1 if a bound is missed.

Rewards at random pull nowhere in the mean, but they push: each step is as long as one of real rewards, and a policy that does one of
two things wanders until it does only one. Where one habit is all it takes, such a run may end near 100 %: library did, when each of
its questions took two look-ups, and calc, when all it took was to call the tool. Now what pays depends on what is asked, and no habit
answers more than a third. The bound is on each single run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from common import RESULTS, commit, record, table
from quickstart import ROOT, launch

WITHOUT = {  # what it is about, off
    "calc": ("env.tools=", "env.parser=auto", "env.max_turns=8", "env.max_observation_tokens=1024"),
    "guess": ("env.max_turns=1",), "library": ("env.max_turns=2",)}
SLOWLY = {"repair": ("reward.timeout_seconds=300",)}  # a whole batch of programs in one call
UNSCORED = ROOT / "evidence/unscored_environments.py"
BOUNDS = {  # name -> (figure, whether it is met)
    "ends at 0.80 or more (calc, library: 0.90)": ("after", lambda v, name: v >= (0.8 if name in ("guess", "repair") else 0.9)),
    "starts at 0.45 or less": ("before", lambda v, name: v <= 0.45),
    "has a gap to the sampler of 1e-5 or less, in the mean": ("gap_mean", lambda v, name: v <= 1e-5),
    "takes 180 s or less": ("wall_s", lambda v, name: v <= 180),
    "without what it is about 0.25 or less": ("without", lambda v, name: v <= 0.25),
    "the control judges as the run does": ("judged_apart", lambda v, name: v < 0.01),
    "more demonstrations do not do it (0.6)": ("sft_more", lambda v, name: v < 0.6),
    "rewards dealt out at random add 0.1 or less, in each run": ("shuffled_gain", lambda v, name: v <= 0.1),
}


def seconds(summary: dict) -> float:
    return sum(summary["seconds"][k] for k in ("rollout", "reward", "update", "publish"))


def main_run(name: str, folder: Path, seed: int, engine: str) -> dict:
    engines = ("rollout.slots=0", "rollout.compaction=true") if engine == "vllm" else ()  # the sampler's own, left out
    done = launch(sys.executable, ROOT, folder / "rl", f"run.seed={seed}", f"rollout.engine={engine}", *engines,
                  config=f"configs/env.py:{name}")
    summary = done.pop("summary")
    lines = [json.loads(line) for line in (folder / "rl/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward/mean" in line]
    return done | {
        "name": name, "seed": seed, "before": summary["eval_before"]["accuracy"], "after": summary["eval_after"]["accuracy"],
        "turns": [steps[0]["env/turns"], steps[-1]["env/turns"]], "reward": [steps[0]["reward/mean"], steps[-1]["reward/mean"]],
        "gap_mean": sum(line["gap/mean"] for line in steps) / len(steps),
        "gap_max": max(line["gap/max"] for line in steps), "rl_s": seconds(summary)}


def controls(name: str, folder: Path, seed: int, rl_seconds: float, shuffles: int) -> dict:
    warm = folder / "rl/warm_start"
    same = (f"run.seed={seed}", f"model.path={warm / 'export'}", "run.warm_start=")

    def run(label: str, *overrides: str, config: str = "env") -> dict:
        return launch(sys.executable, ROOT, folder / label, *same, *overrides, config=f"configs/{config}.py:{name}")["summary"]

    without = {}
    if name in WITHOUT:
        done = run("without", "train.max_sequence_tokens=0", *WITHOUT[name])
        without = {"without": done["eval_after"]["accuracy"]}
    other = () if name == "calc" else (f"env.function={UNSCORED}:{name}",)
    dealt = [run(f"shuffled{k}", f"reward.functions={UNSCORED}:dealt_out,{UNSCORED}:own", "reward.weights=1,0",
                 "eval.accuracy_from=own", f"run.seed={seed + 100 * k}", *other, *SLOWLY.get(name, ())) for k in range(shuffles)]
    before = {s["eval_before"]["accuracy"] for s in dealt}
    each = json.loads((warm / "metrics.jsonl").read_text().splitlines()[-1])["time"]["step"]  # seconds of a step, on average
    more = run("sft", "model.init=pretrained", f"data.path=jaxrl://{name}/lazy.jsonl", "data.shuffle=true",
               f"train.steps={round(rl_seconds / each)}", "optimizer.lr=1e-3", "checkpoint.export_at_end=true", config="env_sft")
    judged = run("judged", "run.mode=eval", f"model.path={more['export']}")
    return without | {
            "shuffled_before": max(before), "shuffled": [s["eval_after"]["accuracy"] for s in dealt],
            "sft_more_steps": more["steps"], "sft_more": judged["eval"]["accuracy"]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--names", default="calc,guess,library")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--control-seeds", default="0,1,2", help="seeds that also run the controls")
    parser.add_argument("--shuffles", type=int, default=1, help="runs with shuffled rewards for each of these seeds")
    parser.add_argument("--engine", default="jax", help="vllm: the runs alone, whose time is not bounded")
    parser.add_argument("--out", default="", help="keep the runs here")
    parser.add_argument("--keep", action="store_true", help="of the last result, runs of other names stay, each with its commit")
    args = parser.parse_args()
    at, folder = commit(), Path(args.out or tempfile.mkdtemp(prefix="environments"))
    runs = []
    for name in args.names.split(","):  # the timed ones first
        for seed in map(int, args.seeds.split(",")):
            (folder / f"{name}{seed}").mkdir(parents=True, exist_ok=True)
            runs.append(main_run(name, folder / f"{name}{seed}", seed, args.engine))
            print(json.dumps(runs[-1]), flush=True)
    for run in runs if args.engine == "jax" else ():
        if str(run["seed"]) not in args.control_seeds.split(","):
            continue
        run |= controls(run["name"], folder / f"{run['name']}{run['seed']}", run["seed"], run["rl_s"],
                        args.shuffles)
        run["judged_apart"] = abs(run["shuffled_before"] - run["before"])
        run["shuffled_gain"] = max(run["shuffled"], default=0.0) - run["shuffled_before"]
        print(json.dumps(run), flush=True)
    runs = [{k: round(v, 3 if v > 1e-3 else 9) if isinstance(v, float) else v for k, v in run.items()} | {"commit": at} for run in runs]
    if args.keep:
        last = json.loads((RESULTS / "environments_learn.json").read_text())
        runs = [{"commit": last["commit"]} | run for run in last["results"]["runs"] if run["name"] not in args.names.split(",")] + runs
    names = list(dict.fromkeys(n for r in runs for n in r if n not in ("name", "seed")))
    table(["figure", *[f"{r['name']} {r['seed']}" for r in runs]], [[n, *[r.get(n, "") for r in runs]] for n in names])
    bounds = BOUNDS if args.engine == "jax" else {k: v for k, v in BOUNDS.items() if v[0] != "wall_s"}
    missed = [f"{r['name']}, seed {r['seed']}: {what}, measured {r[figure]}" for r in runs for what, (figure, met) in bounds.items()
              if figure in r and not met(r[figure], r["name"])]
    others = args.names.replace(",", "_") if args.names != parser.get_default("names") and not args.keep else ""
    kind = args.engine if args.engine != "jax" else others
    record("environments_learn" + f"_{kind}" * bool(kind), {
        "command": " ".join(["python evidence/environments_learn.py", *(f"--{name.replace('_', '-')}={value}" for name, value
                                                                        in vars(args).items() if name != "out")]),
        "runs": runs, "missed": missed}, at)
    print("\n".join(missed) or "every bound is met")
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
