"""Runs of the tiny job taken apart: replays on the same and on other meshes, flipped bits, other settings on one batch, five runs that are
broken on purpose and explained, and what recording costs.

python evidence/replay.py [--parts=replay,bits,try,explain,cost]

replay   a synchronous, an asynchronous, a PPO, a LoRA and an episodes run of four steps, and one of two processes; each replayed from the
         checkpoint of step 2 on the same mesh (one CPU device) and on two simulated devices (fsdp and dp), in a process of its own
explain  runs of eight steps in which one thing goes wrong at one step; found without being told which step, and who did it
cost     W1 of benchmarks/peers: processor seconds of a step, and of its record

Exits with 1 where a replay on the same mesh is not bitwise, one on another is beyond rounding, a flipped bit is not found, or another
answer than the guilty one is named.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from common import RESULTS, record, table

ROOT = Path(__file__).resolve().parent.parent
BROKEN = ROOT / "evidence" / "broken_runs.py"
COMMON = {"eval.sets": "", "eval.every_steps": 0, "rollout.group_size": 4, "checkpoint.export_at_end": False, "record.every": 1,
          "checkpoint.every_steps": 2, "checkpoint.keep": -1, "log.console": "plain"}
KINDS = {
    "sync, 2 passes x 2 mini-batches": {"algorithm.num_minibatches": 2, "algorithm.ppo_epochs": 2, "algorithm.kl.coef": 0.01},
    "asynchronous, decoupled": {"rollout.max_staleness": 2, "rollout.partial": True, "algorithm.preset": "decoupled_ppo"},
    "PPO": {"algorithm.preset": "ppo"},
    "LoRA": {"lora.rank": 4},
    "episodes": {"env.function": f"{ROOT}/tests/helpers/worlds.py:slow", "env.max_turns": 4, "env.max_observation_tokens": 8,
                 "reward.functions": "", "algorithm.preset": "gigpo", "model.chat_template": "{work}/chat.jinja"},
}
MESHES = {"1 device": ("", {}), "fsdp 2": ("2", {"mesh.fsdp": 2}), "dp 2": ("2", {"mesh.dp": 2, "mesh.fsdp": 1})}
CACHE = {}


def call(options: dict, config=ROOT / "tests" / "helpers" / "tiny_job.py", devices: str = "", launch: int = 0) -> str:
    """Runs jaxrl.main to its end and returns what it says; ends this program where it fails."""
    flags = [f"--config={config}", *(f"--config.{name}={value}" for name, value in {**CACHE, **options}.items())]
    start = ["jaxrl.launch", f"--processes={launch}", "--devices=1", "--"] if launch else ["jaxrl.main"]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    if devices:
        env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    done = subprocess.run([sys.executable, "-m", *start, *flags], env=env, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        sys.exit(f"{' '.join(flags)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def trained(folder: Path, options: dict, launch: int = 0) -> Path:
    sys.path.insert(0, str(ROOT / "tests"))
    from helpers import worlds

    (folder.parent / "chat.jinja").write_text(worlds.TEMPLATE, "utf-8")
    options = {name: str(value).format(work=folder.parent) for name, value in options.items()}
    call({**COMMON, "run.dir": folder, "train.steps": 4, **options}, launch=launch)
    return folder


def again(folder: Path, mode: str = "replay", devices: str = "", **options) -> dict:
    call({"run.mode": mode, "run.dir": folder, "log.console": "plain", **options}, config=folder / "config.json", devices=devices)
    return json.loads((folder / "summary.json").read_text())


# ---- replays


def replays(work: Path) -> tuple[list, list]:
    rows, failed = [], []
    runs = {kind: (options, 0) for kind, options in KINDS.items()} | {"two processes": ({"mesh.fsdp": 2}, 2)}
    for k, (kind, (options, launch)) in enumerate(runs.items()):
        folder = trained(work / f"run{k}", options, launch)
        told = json.loads((folder / "summary.json").read_text())["record"]
        for mesh, (devices, where) in MESHES.items():
            if launch and mesh == "dp 2":
                continue
            where = where or {"mesh.fsdp": 1, "mesh.dp": 1}
            found = again(folder, devices=devices, **{"replay.steps": "3:4", **where})["replay"]
            kinds = [s["result"] for s in found["steps"]]
            first = next((f"{s['first']}: {s['where']}" for s in found["steps"] if "first" in s), "")
            rows.append({"run": kind, "mesh": mesh, "steps": kinds, "first": first, "bytes_per_token": told["bytes_per_token"]})
            same = mesh == ("fsdp 2" if launch else "1 device")
            if "different" in kinds or (same and set(kinds) != {"bitwise"}):
                failed.append(f"{kind} on {mesh}")
            print(f"{kind:32s} {mesh:9s} {', '.join(kinds)}  {first[:90]}", flush=True)
    return rows, failed


def flipped(work: Path) -> tuple[dict, list]:
    """Every one of 300 bits of a record, flipped."""
    from jaxrl.errors import ConfigError
    from jaxrl.records import files

    path = files.steps(work / "run0" / files.FOLDER)[3]
    content, draw, found, named = path.read_bytes(), np.random.default_rng(0), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        for bit in draw.integers(0, 8 * len(content), 300):
            broken = bytearray(content)
            broken[bit // 8] ^= 1 << bit % 8
            (Path(folder) / path.name).write_bytes(bytes(broken))
            try:
                files.read(Path(folder) / path.name)
            except ConfigError as e:
                found += "step_00000003" in str(e)
                named += " (in " in str(e)
    return {"flipped": 300, "found": found, "array_named": named}, [] if found == 300 else ["a flipped bit is not found"]


# ---- other settings


def tries(work: Path) -> tuple[dict, list]:
    text = "algorithm.clip_high=0.28,0.4;optimizer.lr=0.003,0.1;algorithm.kl.coef=0.0,1.0;algorithm.ppo_epochs=1"
    found = again(work / "run0", **{"replay.steps": "3", "replay.try": text})["tried"][0]
    table(["setting", "step", "angle", "KL", "outside clip", "predicted", "realised", "others"],
          [[r["setting"], f"{r['step']:.3g}", f"{r['angle']:.1f}", f"{r['kl']:.3g}", f"{r['outside_clip']:.1%}",
            *(f"{r[n]:+.3g}" for n in ("predicted", "realised", "others"))] for r in found["rows"]])
    return found, []


# ---- broken runs


def spiked(folder: Path) -> None:
    """One step at twenty times the learning rate: two resumes."""
    for steps, lr in ((5, 0.01), (6, 0.2), (8, 0.01)):
        call({**COMMON, "run.dir": folder, "train.steps": steps, "optimizer.lr": lr, "checkpoint.every_steps": 1})


def broken(folder: Path, **options) -> None:
    call({**COMMON, "run.dir": folder, "train.steps": 8, "optimizer.lr": 0.01, **options})


EXPLOIT = {"train.steps": 24, "optimizer.lr": 0.03, "eval.sets": "test=jaxrl://arith/test.jsonl", "eval.max_rows": 24, "eval.every_steps": 4,
           "eval.rewards": f"{BROKEN}:letters", "reward.pass_mark": 0.4, "reward.functions": f"{BROKEN}:digits",
           "eval.temperature": 1.0, "data.max_rows": 96}


def is_poisoned(told, sure):
    sure("step 6", told["step"] == 6)
    sure("the answer", [(s["group"], s["sample"]) for s in told["suspects"]] == [(22, 1)])


def is_corrupted(told, sure):
    sure("step 6", told["step"] == 6)
    sure("the group", {s["group"] for s in told["suspects"]} == {22} and len(told["suspects"]) == 4)


def is_spiked(told, sure):
    sure("step 6", told["step"] == 6)
    sure("nobody", not told["suspects"] and "learning rate" in told["why"])


def is_stale(told, sure):
    sure("step 6, the first that samples from weights of version 5", told["step"] == 6)
    sure("all", "the engine had other weights" in told["why"])


def is_exploited(told, sure):
    sure("the sign", "held-out accuracy" in told["why"])
    named = told["heaviest"]
    sure("what was rewarded", bool(named) and all(r["advantage"] > 0 for r in named))
    sure("digits", np.mean([r["score"] for r in named]) > told["score"])


CASES = {
    "poisoned reward": (lambda f: broken(f, **{"reward.functions": f"{BROKEN}:poisoned"}), is_poisoned),
    "corrupted group": (lambda f: broken(f, **{"rollout.engine": f"{BROKEN}:corrupting"}), is_corrupted),
    "learning-rate spike": (spiked, is_spiked),
    "stale weights": (lambda f: broken(f, **{"rollout.engine": f"{BROKEN}:frozen"}), is_stale),
    "exploit": (lambda f: broken(f, **EXPLOIT), is_exploited),
}


def explained(work: Path) -> tuple[list, list]:
    rows, failed = [], []
    for name, (make, check) in CASES.items():
        folder = work / name.replace(" ", "_")
        make(folder)
        found = again(folder, "explain")
        wrong = []
        told = found.get("explained", [])
        if not told:
            wrong = ["no step stands out"]
        else:
            check(told[0], lambda what, fine, wrong=wrong: None if fine else wrong.append(what))
        rows.append({"run": name, "anomalies": [f"{a['step']}: {a['name']}" for a in found["anomalies"]],
                     "explained": [{"step": t["step"], "why": t["why"], "replay": t["replay"]["result"]} for t in told], "wrong": wrong})
        failed += [f"{name}: {what}" for what in wrong]
        print(f"{name}: {'; '.join(rows[-1]['anomalies'])}", *(f"  step {t['step']} ({t['replay']}): {t['why']}" for t in
                                                               rows[-1]["explained"]), *wrong, sep="\n", flush=True)
    return rows, failed


# ---- cost


COST = """
import json, sys, tempfile, time
from pathlib import Path
sys.path[:0] = ["benchmarks/peers", "evidence"]
import measure, ours
from shapes import SHAPES, make
import jaxrl
from jaxrl.recipes import rl
from jaxrl.rl import recording
work = make(SHAPES["W1"], Path(sys.argv[1]) / "W1")
args = measure.arguments(["--work", str(work), "--steps", "4"])
spent, steps = {"look": 0.0, "write": 0.0}, []
def counted(name, function, clock):
    def wrapped(*given):
        began = clock()
        out = function(*given)
        if name == "look":
            out.on_host()  # until it is computed
        spent[name] += clock() - began
        return out
    return wrapped
recording.Recording.hash_states = counted("look", recording.Recording.hash_states, time.process_time)
recording.Recording._write = counted("write", recording.Recording._write, time.thread_time)
one_step = rl.one_step
def step(parts):
    began, wall = time.process_time(), time.monotonic()
    out = one_step(parts)
    steps.append({"cpu": time.process_time() - began, "wall": time.monotonic() - wall, **{k: spent.pop(k) for k in list(spent)}})
    spent.update(look=0.0, write=0.0)
    return out
rl.one_step = step
config = ours.config_of(args, str(Path(sys.argv[1]) / "run"))
config.record.every = 1
out = jaxrl.train(config)
print(json.dumps({"steps": steps, "record": out["record"]}))
"""


def cost(work: Path) -> tuple[dict, list]:
    """Processor seconds, which other work on the machine does not change much."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", COST, str(work)], env=env, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    found = json.loads(done.stdout.strip().splitlines()[-1])
    later = found["steps"][2:]  # the first compile
    median = {name: float(np.median([s[name] for s in later])) for name in ("cpu", "wall", "look", "write")}
    share = (median["look"] + median["write"]) / median["cpu"]
    out = {"processor_seconds": {"step": median["cpu"], "state": median["look"], "file": median["write"]}, "share": share,
           **found["record"]}
    print(json.dumps(out, indent=1))
    return out, [] if share < 0.02 else [f"recording takes {share:.1%} of W1's step"]


def main() -> int:
    started = time.monotonic()
    asked = [a.removeprefix("--parts=").split(",") for a in sys.argv[1:] if a.startswith("--parts=")]
    parts = {"replay": replays, "bits": flipped, "try": tries, "explain": explained, "cost": cost}
    wanted = asked[0] if asked else list(parts)
    before = RESULTS / "replay.json"
    out = json.loads(before.read_text())["results"] if before.exists() and asked else {}
    failed = {}
    work = Path(tempfile.mkdtemp(prefix="replay_"))
    CACHE["run.compile_cache"] = work / "xla"
    try:
        if "replay" not in wanted and {"bits", "try"} & set(wanted):
            trained(work / "run0", KINDS["sync, 2 passes x 2 mini-batches"])
        for name in wanted:
            out[name], failed[name] = parts[name](work)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    out["failed"] = {**out.get("failed", {}), **failed}
    out["seconds"] = round(time.monotonic() - started)
    record("replay", {"command": "python evidence/replay.py", **out})
    return int(any(out["failed"].values()))


if __name__ == "__main__":
    sys.exit(main())
