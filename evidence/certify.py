"""run.mode=certify as whole runs: faults of a user's own code and of jaxrl's, and presets and configs that have none.

python evidence/certify.py [--only=TEXT]          (some 30 minutes on two cores, two runs at a time)

Runs of tests/helpers/tiny_job.py, one process each, with

- each loss, advantage and reward of tests/helpers/certify_defects.py, and the sound ones beside them
- each of FAULTS put into jaxrl itself
- each preset
and of each of CONFIGS, unchanged. Exits with 1 where a defect's claim holds, or its run ends with 0 or names no counterexample; and where anything
sound breaks a claim. --only takes the runs whose name holds TEXT; the rest of the result stays, and each row has its commit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import RESULTS, commit, record, table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
os.environ["JAX_PLATFORMS"] = "cpu"

from helpers import certify_defects  # noqa: E402

from jaxrl.algorithms import PRESETS  # noqa: E402

JOB, EPISODES = "tests/helpers/tiny_job.py", "configs/env.py:guess"
CONFIGS = ("grpo.py", "grpo_async.py", "grpo_gsm8k.py", "grpo_moe.py", "grpo_vllm.py", "ppo.py", "env.py:calc", "lora.py")
PLACES = "import sys; pack = sys.modules['jaxrl.training.pack']; places = pack._positions\n"
# What is wrong with jaxrl -> (what is run before the program's main, the claim that finds it).
FAULTS = {
    "a token is predicted from one place too early": (PLACES + """
def wrong(traj, micro):
    held, (row, slot, token, source, *rest) = places(traj, micro)
    return held, (row, slot, token, source - (source > 0), *rest)
pack._positions = wrong
""", "scoring"),
    "answers of one row see each other": (PLACES + """
def wrong(traj, micro):
    (row, at, token, position, segment, prefix), scored = places(traj, micro)
    return (row, at, token, position, segment * 0 + 1, prefix * 0), scored
pack._positions = wrong
""", "packing"),
    "answers behind the first do not see the prompt that they share": (PLACES + """
def wrong(traj, micro):
    (row, at, token, position, segment, prefix), scored = places(traj, micro)
    return (row, at, token, position, segment, prefix * (segment < 3)), scored
pack._positions = wrong
""", "scoring"),
    "weights sum to 1 in each microbatch": ("""
import jaxrl.training as training
pack = training.pack
def wrong(traj, micro, columns, weights, *rest):
    own = [i for blocks in micro.rows for block in blocks for i in block.sequences]
    inside = sum(abs(w[traj.offsets[i]:traj.offsets[i + 1]]).sum() for w in weights.values() for i in own)
    return pack(traj, micro, columns, {name: w / max(inside, 1e-9) for name, w in weights.items()}, *rest)
training.pack = wrong
""", "microbatches"),
    "moments of the optimizer are not restored": ("""
import dataclasses, jax
from jaxrl.checkpoint.checkpointer import Checkpointer
restore = Checkpointer.restore
def wrong(self, *given):
    found = restore(self, *given)
    forget = lambda path, x: x * 0 if ".mu" in jax.tree_util.keystr(path) else x
    return found._replace(arrays=jax.tree_util.tree_map_with_path(forget, found.arrays))
Checkpointer.restore = wrong
""", "resume"),
}
START = "import jaxrl.certify.update\n{}\nimport sys\nfrom jaxrl import main\nsys.exit(main.main(sys.argv[1:]))"


def cases() -> list[tuple[str, str, str, dict, str, str]]:
    """(kind, name, config, options, code before main, claim that must not hold) of each run."""
    out = [("a user's", name, JOB, options, "", claim) for name, (options, claim) in certify_defects.DEFECTS.items()]
    out += [("jaxrl's", name, JOB, {}, code, claim) for name, (code, claim) in FAULTS.items()]
    out += [("sound", name, JOB, options, "", "") for name, options in certify_defects.SOUND.items()]
    out += [("preset", name, EPISODES if name == "gigpo" else JOB, {"algorithm.preset": name}, "", "") for name in PRESETS]
    return out + [("config", name, f"configs/{name}", {}, "", "") for name in CONFIGS]


def certified(work: Path, k: int, config: str, options: dict, code: str) -> dict:
    """What a run says: status, claims that do not hold with what is told of them, how many hold, seconds."""
    folder, began = work / str(k), time.monotonic()
    given = {"run.mode": "certify", "run.dir": folder, "run.compile_cache": work / "xla", **options}
    said = [f"--config.{name}={','.join(value) if isinstance(value, tuple) else value}" for name, value in given.items()]
    start = ["-c", START.format(code)] if code else ["-m", "jaxrl.main"]
    done = subprocess.run([sys.executable, *start, f"--config={config}", *said], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})
    if not (folder / "certify.json").exists():
        return {"status": done.returncode, "broken": {}, "holds": 0, "error": done.stderr[-2000:], "seconds": 0}
    claims = json.loads((folder / "certify.json").read_text())["claims"]
    broken = {c["name"]: c["told"] for c in claims if c["verdict"] == "does not hold"}
    return {"status": done.returncode, "broken": broken, "shown": [c["name"] for c in claims if c["case"] is not None],
            "holds": sum(c["verdict"] == "holds" for c in claims), "seconds": round(time.monotonic() - began, 1),
            "not_applicable": {c["name"]: c["told"] for c in claims if c["verdict"] == "not applicable"}}


def wrong_of(claim: str, found: dict) -> str:
    """What is not as it must be; "" where all is."""
    if "error" in found:
        return f"it ended with {found['status']} and no certificate: {found['error'][-300:]}"
    if not claim:
        return f"{found['broken']}" if found["broken"] or found["status"] else ""
    if claim not in found["broken"]:
        return f"{claim} holds"
    return "" if found["status"] == 1 and claim in found["shown"] else f"status {found['status']}, cases of {found['shown']}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="")
    only = parser.parse_args().only
    runs, rows = [case for case in cases() if only in case[1]], []
    with tempfile.TemporaryDirectory(prefix="certify_") as work, ThreadPoolExecutor(2) as pool:
        results = pool.map(lambda k: certified(Path(work), k, *runs[k][2:5]), range(len(runs)))
        for (kind, name, _, _, _, claim), found in zip(runs, results, strict=True):
            rows.append({"kind": kind, "name": name, "claim": claim, "commit": commit(), **found, "wrong": wrong_of(claim, found)})
            print(kind, name, claim, json.dumps(found["broken"]), rows[-1]["wrong"], flush=True)
    table(["", "run", "claim that must break", "claims that break", "hold", "s", "wrong"],
          [[r["kind"], r["name"], r["claim"], ", ".join(r["broken"]), r["holds"], r["seconds"], r["wrong"]] for r in rows])
    if only:
        made = {(r["kind"], r["name"]): r for r in rows}
        earlier = json.loads((RESULTS / "certify.json").read_text())["results"]["runs"]
        rows = [made.pop((r["kind"], r["name"]), r) for r in earlier] + list(made.values())
    record("certify", {"command": "python evidence/certify.py", "runs": rows, "wrong": [r["name"] for r in rows if r["wrong"]]})
    return int(any(r["wrong"] for r in rows))


if __name__ == "__main__":
    sys.exit(main())
