"""What python -m jaxrl.doctor says where something is wrong, and what a run does on a kernel that is.

    python evidence/doctor.py [--vllm PYTHON] [--other-jax FOLDER] [--parts here,jax,broken,run,vllm]

This machine; an environment with vLLM (--vllm, its interpreter); a jax that jaxrl does not take (--other-jax: a folder made by
pip install --no-deps --target FOLDER jax==0.7.2 jaxlib==0.7.2); a broken kernel: an attention over rows that does not see the
shared prompt, put before the platform's own by a sitecustomize.py. With it a run of configs/grpo.py:tiny takes the next
implementation, and its metrics are those of the run without it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common import RESULTS, record

ROOT = Path(__file__).parent.parent
BROKEN = """
import os
if os.environ.get("BROKEN_KERNEL"):
    from jaxrl.kernels.attention.packed import api, reference
    def broken(q, k, v, ids, **how):
        return reference.attention(q, k, v, ids._replace(q_prefixes=None), **how)
    api.IMPLEMENTATIONS["broken"] = broken
    api.ORDERS["cpu"] = ("broken", *api.ORDERS["cpu"])
"""


def doctor(work: Path, name: str, *flags: str, python: str = sys.executable, path=(), **variables) -> dict:
    file = work / f"{name}.txt"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT)))} | variables
    done = subprocess.run([python, "-m", "jaxrl.doctor", f"--out={file}", *flags], env=environment, capture_output=True, text=True)
    lines = file.read_text().splitlines()
    print(f"== {name}\n" + "\n".join(lines))
    return {"exit": done.returncode, "not_ok": [t.strip() for t in lines if t.startswith(("  WRONG", "  note", "  -"))],
            "last": lines[-1]}


def run(work: Path, name: str, **variables) -> tuple[list[dict], str]:
    """(metrics without times, what the run said) of configs/grpo.py:tiny."""
    folder = work / name
    environment = os.environ | {"PYTHONPATH": f"{work}{os.pathsep}{ROOT}", "HOME": str(work)} | variables
    done = subprocess.run([sys.executable, "-m", "jaxrl.main", "--config=configs/grpo.py:tiny", f"--config.run.dir={folder}",
                           "--config.log.console=plain", f"--config.run.compile_cache={work}/xla"], cwd=ROOT, env=environment,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(t) for t in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "time"} for row in rows], done.stderr


def fallback(work: Path) -> dict:
    plain, _ = run(work, "plain")
    first, said = run(work, "first", BROKEN_KERNEL="1")
    again, said_again = run(work, "again", BROKEN_KERNEL="1")
    of_it = lambda text: [t for t in text.splitlines() if "attention: broken" in t]  # noqa: E731
    assert first == plain == again, "the fallback changed a result"
    assert "meets this device" in said and "is left out" in said and "meets this device" not in said_again
    print("\n".join(of_it(said)))
    return {"metrics": "those of the run without it, bit by bit", "said": of_it(said), "said_again": of_it(said_again)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--vllm", help="an interpreter with vLLM and jaxrl's packages")
    parser.add_argument("--other-jax", type=Path)
    parser.add_argument("--parts", default="here,jax,broken,run,vllm", help="those that are left out keep their last result")
    args = parser.parse_args()
    parts, earlier = args.parts.split(","), RESULTS / "doctor.json"
    out = json.loads(earlier.read_text())["results"] if earlier.exists() else {}
    with tempfile.TemporaryDirectory() as work:
        work = Path(work)
        (work / "sitecustomize.py").write_text(BROKEN)
        if "here" in parts:
            out["here"] = doctor(work, "here")
        if "vllm" in parts and args.vllm:
            out["with vLLM"] = doctor(work, "vllm", "--skip=kernels,collectives", python=args.vllm)
        if "jax" in parts and args.other_jax:
            out["another jax"] = doctor(work, "jax", "--skip=vllm,collectives", path=[args.other_jax])
        if "broken" in parts:
            out["a broken kernel"] = doctor(work, "broken", "--skip=vllm,collectives", path=[work], BROKEN_KERNEL="1")
        if "run" in parts:
            out["a run on it"] = fallback(work)
    record("doctor", out)


if __name__ == "__main__":
    main()
