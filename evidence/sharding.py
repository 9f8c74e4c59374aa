"""Showings 1, 2 (roles) and 5 of sharding: ten meshes of eight simulated devices, roles on devices of their own, the lint.

    python evidence/sharding.py          # about 10 quiet minutes; the TPU figures need pip's libtpu and are left out without it
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [os.path.dirname(__file__), *map(str, (TESTS, TESTS / "sharding"))]

import numpy as np  # noqa: E402
from common import commit, record, table  # noqa: E402
from helpers.collective_cases import CASES, budget, found, over  # noqa: E402
from test_collectives import RULES, with_broken  # noqa: E402
from test_sharding import MESHES, on_eight, relative  # noqa: E402

FSDP_MESHES = ("8,1,1", "2,4,1", "1,8,1", "4,1,2", "2,2,2", "1,4,2")
ON_TPU = """
import sys
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh
import jax, json
from helpers import sharded_layouts
devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
def mesh_of(shape):
    dp, fsdp, tp = shape
    mesh = Mesh(np.array(devices).reshape(dp, fsdp, 1, 1, tp), ("dp", "fsdp", "cp", "ep", "tp"), axis_types=(AxisType.Auto,) * 5)
    jax.set_mesh(mesh)
    return mesh
sharded_layouts.mesh_of = mesh_of
for text in sys.argv[1:]:
    print(json.dumps([text, sharded_layouts.memory("", tuple(map(int, text.split(","))))["temporaries"]]))
"""


def on_tpu() -> dict[str, int]:
    """Temporaries of the same gradient compiled for eight TPU v5e chips; empty without libtpu."""
    if importlib.util.find_spec("libtpu") is None:
        return {}
    env = {**os.environ, "TPU_SKIP_MDS_QUERY": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", ON_TPU, *FSDP_MESHES], capture_output=True, text=True, env=env, check=True)
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


def numbers(folder: Path) -> list[dict]:
    of, stderr = on_eight("numbers", folder, *MESHES)
    steps, more = on_eight("steps", folder, *MESHES)
    arrays = {mesh: dict(np.load(folder / f"{mesh}.npz")) for mesh in MESHES}
    kinds, rows = {}, []
    for mesh in MESHES:
        dp, fsdp, tp = map(int, mesh.split(","))
        like = kinds.setdefault((dp * fsdp, tp), mesh)
        equal = all(np.array_equal(value, arrays[like][name]) for name, value in arrays[mesh].items())
        worst = max(float(relative(value, arrays[MESHES[0]][name])) for name, value in arrays[mesh].items())
        rows.append({"mesh": mesh, "like": like, "bitwise": equal, "worst": worst, "share": of[mesh]["share"],
                     "moments": of[mesh]["moments"], "gap": steps[mesh]["gap"], "loss": steps[mesh]["loss"],
                     "reward": steps[mesh]["reward"]})
    return rows + [{"rematerialisations": (stderr + more).count("rematerialization")}]


def main():
    at = commit()
    with tempfile.TemporaryDirectory(prefix="sharding") as folder:
        *meshes, warned = numbers(Path(folder))
        memory, _ = on_eight("memory", folder, *FSDP_MESHES)
    tpu = on_tpu()
    lint = {case: over(*found(case)[:1], budget(case)) for case in CASES} | {rule: with_broken(rule) for rule in RULES}
    roles = subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", "slow", "tests/recipes/test_roles.py"],
                           capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    table(["dp,fsdp,tp", "bitwise as", "is", "worst relative L2 from 8,1,1", "share of matrices", "of moments", "GRPO step: gap", "reward"],
          [[r["mesh"], r["like"], r["bitwise"], f"{r['worst']:.1e}", f"{r['share']:.4f}", f"{r['moments']:.4f}", f"{r['gap']:.1e}",
            f"{r['reward']:.3f}"] for r in meshes])
    print(f"involuntary rematerialisations: {warned['rematerialisations']}\n")
    layer = memory["8,1,1"]["layer"] / 1e6
    table(["dp,fsdp,tp", "temporaries on the CPU, MB", "compiled for TPU v5e, MB", "one of twelve layers, MB"],
          [[m, f"{memory[m]['temporaries'] / 1e6:.1f}", f"{tpu[m] / 1e6:.1f}" if m in tpu else "", f"{layer / int(m[-1]):.1f}"]
           for m in FSDP_MESHES])
    print("\nover the budget of collectives, per case and per rule broken on purpose:")
    for name, lines in lint.items():
        print(f"  {name}: {len(lines)}", *(f"    {line}" for line in lines[:3]), sep="\n")
    print("roles on devices of their own, bitwise:", roles.stdout.splitlines()[-1])
    record("sharding", {"meshes": meshes, **warned, "memory": memory, "tpu_temporaries": tpu, "lint": lint,
                        "roles": roles.stdout.splitlines()[-1].split(" in ")[0]}, at)
    good = all(bool(lines) == (name in RULES) for name, lines in lint.items()) and not warned["rematerialisations"]
    good = good and all(r["bitwise"] and r["worst"] < 1e-5 for r in meshes)
    return 0 if good and not roles.returncode else 1


if __name__ == "__main__":
    sys.exit(main())
