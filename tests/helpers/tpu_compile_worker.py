"""Compiles the TPU kernels of attention and of recurrent layers for a chip that is not here, alone and, attention, inside
the programs of a sharded job.

    python tpu_compile_worker.py v5e:2x2        (needs libtpu; prints one JSON object)

In a process of its own: libtpu is told where it is before jax starts.
"""

import json
import os
import re
import sys

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from helpers import tiny_job
from jaxrl.kernels.attention import Shared, attention, cached_attention, share
from jaxrl.kernels.attention.cached.shared import WIDTH
from jaxrl.kernels.recurrence import chunks_of, recurrence
from jaxrl.planning import compiling, programs

# rows, queries, query heads, key-value heads, head size, dtype, options
ROWS = [(2, 640, 4, 2, 128, "bfloat16", {}), (1, 300, 6, 2, 64, "float32", {"softcap": 5.0, "window": 100}),
        (1, 512, 7, 1, 64, "bfloat16", {}), (1, 512, 4, 4, 80, "float32", {}), (1, 512, 4, 2, 96, "bfloat16", {}),
        (1, 512, 2, 1, 256, "bfloat16", {"softcap": 50.0}), (1, 512, 2, 1, 256, "float32", {}),
        (1, 512, 8, 2, 64, "bfloat16", {"sinks_H": np.arange(8.0, dtype=np.float32), "window": 128})]
# layers, slots, cache length, then as above
CACHES = [(3, 8, 1100, 12, 2, 128, "bfloat16", {"window": 300}), (2, 8, 520, 14, 2, 64, "bfloat16", {}),
          (2, 8, 528, 8, 4, 256, "float32", {"softcap": 5.0}), (2, 8, 70, 8, 8, 80, "float32", {}),
          (28, 256, 1536, 12, 2, 128, "bfloat16", {}), (2, 64, 2048, 32, 8, 128, "bfloat16", {}),
          (2, 8, 528, 14, 2, 64, "bfloat16", {"sinks_H": np.arange(14.0, dtype=np.float32)})]
# rows, tokens, key heads, value heads of each, key size, value size, dtype of values, delta
RECURRENCES = [(1, 2048, 2, 2, 128, 128, "bfloat16", True), (2, 200, 1, 3, 40, 24, "float32", True),
               (1, 1100, 1, 8, 128, 64, "bfloat16", False)]
JOB = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 9,
       "max_position_embeddings": 2048}  # scanned: more than 8 layers


def compiled(function, shapes, mesh):
    """A program of one device of the mesh, traced for it. Its temporaries in bytes."""
    one = Mesh(mesh.devices.reshape(-1)[:1], ("one",), axis_types=(AxisType.Auto,))
    whole = NamedSharding(one, P())
    with jax.sharding.use_abstract_mesh(one.abstract_mesh):
        lowered = jax.jit(function).lower(*(jax.ShapeDtypeStruct(s, d, sharding=whole) for s, d in shapes))
    assert "tpu_custom_call" in lowered.as_text()
    return lowered.compile().memory_analysis().temp_size_in_bytes


def rows(case, mesh):
    batch, length, heads, groups, size, dtype, options = case

    def loss(q, k, v, positions, segments, prefixes):
        out = attention(q, k, v, positions, positions, segments, segments, prefixes, **options)
        return out.astype(jnp.float32).sum()

    ids = [((batch, length), jnp.int32)] * 3
    return compiled(jax.grad(loss, (0, 1, 2)), [((batch, length, n, size), dtype) for n in (heads, groups, groups)] + ids, mesh)


def caches(case, mesh):
    layers, slots, length, heads, groups, size, dtype, options = case
    cache = ((layers, slots, length, groups * size), dtype)
    tiles = [(x.shape, jnp.int32) for x in share([None] * slots, [0] * slots)]

    def run(q, k, v, positions, layer, *tiles):
        return cached_attention(q, k, v, positions, layer, shared=Shared(*tiles) if tiles else None, **options)

    shapes = [((slots, 1, heads, size), dtype), cache, cache, ((slots, 1), jnp.int32), ((), jnp.int32)]
    return [compiled(run, shapes + more, mesh) for more in ([], tiles)]


def recurrences(case, mesh):
    batch, length, heads, repeats, key, value, dtype, delta = case
    by_key, by_value = (batch, length, heads, key), (batch, length, heads * repeats)

    def loss(q, k, v, g, beta, segments, prefixes):
        out, state = recurrence(q, k, v, g, beta, chunks_of(segments, prefixes), delta=delta)
        return out.astype(jnp.float32).sum() + state.sum()

    shapes = [(by_key, "float32")] * 2 + [((*by_value, value), dtype)] + [(by_value, "float32")] * 2
    return compiled(jax.grad(loss, (0, 1, 2, 3, 4)), shapes + [((batch, length), jnp.int32)] * 2, mesh)


def job(mesh, name):
    """A job of fsdp 2 x tp 2 in bf16 with head size 64: the kernels of its programs by name, and their temporaries."""
    config = tiny_job.get_config()
    config.run.mode, config.plan.target, config.model.config = "plan", name, {**tiny_job.MODEL, **JOB}
    config.mesh.fsdp, config.mesh.tp, config.rollout.max_new_tokens = 2, 2, 900
    config.train.compute_dtype, config.model.remat, config.model.scan_layers = "bf16", "full", "true"
    low = programs.lower(config, config.model.config.to_dict(), mesh, mesh, wanted={"update", "prefill", "decode"})
    out = {}
    for program, lowered in low.programs.items():
        kernels = sorted(set(re.findall(r'kernel_name = "(\w+)"', lowered.as_text())))
        out[program] = {"kernels": kernels, "temporaries": lowered.compile().memory_analysis().temp_size_in_bytes,
                        "shared_prompts": re.search(rf"@main\(.*tensor<\d+x{WIDTH}xi32>", lowered.as_text()) is not None}
    out["cache"] = programs.device_bytes(low.live["rollout_cache"])
    return out


def main(name):
    chip, _, topology = name.partition(":")
    mesh = compiling._tpu_mesh(chip, tuple(map(int, topology.split("x"))), {"dp": 1, "fsdp": 2, "tp": 2})
    assert np.prod(list(mesh.shape.values())) == 4
    print(json.dumps({"rows": [rows(case, mesh) for case in ROWS], "caches": [caches(case, mesh) for case in CACHES],
                      "recurrences": [recurrences(case, mesh) for case in RECURRENCES],
                      "job": job(mesh, name)}))


if __name__ == "__main__":
    main(sys.argv[1])
