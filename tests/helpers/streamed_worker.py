# ruff: noqa: E402, I001
"""A tiny job with roles whose parameters stay in host memory, beside the same one on the devices; prints one JSON object.

    python streamed_worker.py DEVICES FOLDER OPTIONS.json ROLE ...

Differences are the largest of all arrays that a step leaves (parameters, optimizer states, critic, reference), each over the
largest number of its array.
"""

import json
import shutil
import sys
from pathlib import Path

import jax

jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
jax.config.update("jax_default_matmul_precision", "highest")
import numpy as np
from safetensors.numpy import load_file

from helpers.algorithm_runs import job, watched

from jaxrl.recipes import rl
from jaxrl.sharding import memory
from jaxrl.training import streaming

memory.WORTH_IT, streaming.PART_BYTES, streaming.TILE = 4096, 8192, 1


def difference(a, b):
    a, b = (jax.tree.leaves((x.after.policy, x.after.optimizer, x.after.critic, x.after.reference)) for x in (a, b))
    assert len(a) == len(b)
    scale = lambda y: max(float(np.max(np.abs(y))), 1e-30)  # noqa: E731
    return max(float(np.max(np.abs(x.astype(np.float64) - y))) / scale(y) for x, y in zip(a, b, strict=True) if x.size)


def main(folder, options, roles):
    folder, options = Path(folder), json.loads(options) | {"model.scan_layers": "true"}
    streamed = options | {"mesh.roles": {role: {"rest": "streamed"} for role in roles}}
    kinds, one_step = [], rl.one_step

    def look(parts):
        done = one_step(parts)
        state, critic, reference = parts.roles.policy.state, parts.roles.critic, parts.roles.reference
        held = {"policy": (state.trainable, state.frozen), "optimizer": state.opt_state,
                "critic": None if critic is None or critic.shared else vars(critic.state),
                "reference": None if reference is None else reference.state}
        kinds.append({name: {str(memory.worth_it(x)): x.sharding.memory_kind for x in jax.tree.leaves(tree)}
                      for name, tree in held.items()})
        return done

    rl.one_step = look
    runs = {name: watched(job(folder / name, given))[1] for name, given in (("plain", options), ("streamed", streamed))}
    out = {"first": difference(runs["plain"][0], runs["streamed"][0]), "kinds": kinds[-1]}
    for name, given in (("plain", streamed), ("streamed", options)):  # the last step again, the other way
        again = folder / f"{name}_again"
        shutil.copytree(folder / name, again)
        shutil.rmtree(again / "checkpoints" / "00000002")
        _, (step,), _ = watched(job(again, given))
        out[f"from {name}"] = difference(runs[name][-1], step)
    exported = [{p.name: load_file(p) for p in (folder / name / "export").glob("*.safetensors")} for name in runs]
    out["exports"] = max(float(np.max(np.abs(x - exported[1][file][name]))) for file, one in exported[0].items()
                         for name, x in one.items())
    print(json.dumps(out))


if __name__ == "__main__":
    main(sys.argv[2], sys.argv[3], sys.argv[4:])
