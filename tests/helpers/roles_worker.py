# ruff: noqa: E402, I001
"""PPO with critic and reference on eight simulated devices, all roles on one mesh and each on a part of its own. Run by
test_roles.py; prints one JSON line per layout.

Usage: roles_worker.py FOLDER
"""

import json
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)  # six programs per layout, and nothing here is about speed
import numpy as np
from helpers.algorithm_runs import job, watched

from jaxrl.recipes import rl

OPTIONS = {"algorithm.preset": "ppo", "algorithm.kl.coef": 0.1, "reference.reset_steps": 2, "reference.dtype": "fp32", "train.steps": 3,
           "mesh.fsdp": 4, "mesh.dp": 1, "train.tokens_per_microbatch": 256, "run.compile_cache": ""}
HALVES = {"policy": {"devices": "0-3"}, "critic": {"devices": "4-7", "fsdp": 4}, "reference": {"devices": "4-7", "fsdp": 2, "dp": 2},
          "sampler": {"devices": "6,7", "dp": 2, "fsdp": 1}}
RESTS = {"policy": {"devices": "0-3", "rest": "host"}, "critic": {"devices": "4-7", "rest": "host"},
         "reference": {"devices": "4-7", "rest": "host"}, "sampler": {"devices": "0-3", "rest": "none"}}
LAYOUTS = {"shared": {role: {"devices": "0-3"} for role in ("policy", "critic", "reference", "sampler")}, "halves": HALVES,
           "rests": RESTS}


def devices(tree):
    return sorted({d.id for x in jax.tree.leaves(tree) for d in x.sharding.device_set})


def main():
    folder, first = sys.argv[1], None
    for name, roles in LAYOUTS.items():
        places, one_step = {}, rl.one_step

        def look(parts, places=places, one_step=one_step):
            out, roles = one_step(parts), parts.roles
            places.update(policy=devices(roles.policy.state), critic=devices(roles.critic.state), reference=devices(roles.reference.state),
                          sampler=devices(parts.job.engine._params), kinds=sorted({
                              x.sharding.memory_kind for x in jax.tree.leaves((roles.critic.state, roles.reference.state))}))
            return out

        rl.one_step = look
        try:
            _, steps, _ = watched(job(f"{folder}/{name}", OPTIONS | {"mesh.roles": roles}))
        finally:
            rl.one_step = one_step
        first = first or steps
        worst = {}
        for key in ("policy", "critic", "reference"):
            pairs = zip(jax.tree.leaves(getattr(first[-1].after, key)), jax.tree.leaves(getattr(steps[-1].after, key)), strict=True)
            worst[key] = max(float(np.abs(a - b).max()) for a, b in pairs if a.dtype == np.float32)
        tokens = [bool(np.array_equal(a.batch.traj.tokens, b.batch.traj.tokens)) for a, b in zip(first, steps, strict=True)]
        print(json.dumps({"layout": name, "roles": roles, "worst": worst, "tokens": tokens, "places": places,
                          "loss": [s.metrics["loss"] for s in steps], "value": [s.metrics["value/loss"] for s in steps]}), flush=True)


if __name__ == "__main__":
    main()
