"""What a TPU's compiler is given of a published tower, and that it takes it: the gradient of its features, for four v5p.

    python evidence/tower_programs.py [--compile] [model ...]     # wants libtpu: pip install -e '.[plan]'

Counts of the lowered program, which no other program on the machine changes: loops over layers, attention kernels (forward, forward again,
gradients of queries and of keys and values) and matrix products. --compile: processor seconds at the least effort (as a plan's) and
temporaries of a device, too: minutes each. Two rows a device, each with an image of 768 tokens; bf16, every layer recomputed.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from types import SimpleNamespace

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "JAX_EXEC_TIME_OPTIMIZATION_EFFORT": "-1"}

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from common import record, table  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from migrate_plans import SHAPES  # noqa: E402

from jaxrl import sharding  # noqa: E402
from jaxrl.models import build  # noqa: E402
from jaxrl.models.io import hf  # noqa: E402
from jaxrl.models.vision import tower  # noqa: E402
from jaxrl.types import Images  # noqa: E402

MODELS = ("qwen2.5-vl-7b", "qwen3-vl-30b-a3b")
CHIPS, ROWS, TOKENS = 4, 8, 768
COUNTED = {"loops": "stablehlo.while", "attention kernels": "tpu_custom_call", "matrix products": "dot_general"}


def lowered(name: str, mesh):
    """Returns the tower's gradient for a mesh, a jax.stages.Lowered."""
    shape = next(shape for pattern, shape in SHAPES if re.search(pattern, name))
    model = build(hf.load_config("", overrides=shape, images=True), compute_dtype=jnp.bfloat16, scan_layers=True, remat="full")
    own, patches = model.config.vision, TOKENS * model.config.vision.merge**2
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(sharding.mesh.DATA_AXES))
    array = lambda dtype, *more: jax.ShapeDtypeStruct((ROWS, *more), dtype, sharding=rows)  # noqa: E731
    images = Images(array(jnp.uint8, patches, own.patch_numbers), array(jnp.int32, patches, 4), array(jnp.int32, patches),
                    array(jnp.int32, 2 * TOKENS), windows=array(jnp.int32, patches) if own.window else None)

    def total(params, images):
        seen = tower.see(model, {"vision": params}, images)
        return sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in (seen.features, *seen.taps))

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        tree = model.tree(lambda entry: jax.ShapeDtypeStruct(entry.shape, jnp.float32))
        placed = sharding.param_shardings(mesh, model.logical_axes(), tree)
        params = jax.tree.map(lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), tree, placed)
        return jax.jit(jax.grad(total)).lower(params["vision"], images)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x1").devices
    mesh, results = sharding.make_mesh(SimpleNamespace(dp=1, fsdp=CHIPS, cp=1, ep=1, tp=1), devices), {}
    for name in args.models:
        program = lowered(name, mesh)
        text = program.as_text()
        results[name] = {what: text.count(word) for what, word in COUNTED.items()}
        if args.compile:
            since = time.process_time()
            memory = program.compile().memory_analysis()
            results[name] |= {"processor seconds": round(time.process_time() - since),
                              "temporaries, GiB": round(memory.temp_size_in_bytes / 2**30, 2)}
        print(name, results[name], flush=True)
    record("tower_programs", results)
    table(["model", *next(iter(results.values()))], [[name, *row.values()] for name, row in results.items()])


if __name__ == "__main__":
    main()
