"""A layer of experts compiled ahead of time for TPUs, by libtpu: kernels in the program and temporaries, by tokens.

python evidence/experts_memory.py        (wants libtpu: pip install -e '.[plan]')

One layer in bf16, forward and with the gradients of tokens, gates and weights, on one device. Memory depends on no routing: there is one
program for all. Of the temporaries with gradients, `sums` are the weights' gradients in fp32, which no implementation is without.
"""

import os
import sys
import time

sys.path.insert(0, os.path.dirname(__file__))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import kernels_memory  # noqa: E402 sets what libtpu reads
import numpy as np  # noqa: E402
from common import commit, record, table  # noqa: E402
from jax.sharding import AxisType, Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from jaxrl.kernels.experts import experts  # noqa: E402
from jaxrl.models.feed_forward import GATED  # noqa: E402

CHIPS = {"v5p": "v5p:2x2x1", "v5e": "v5e:2x2", "v6e": "v6e:2x2"}
MODELS = {  # experts on the device, slots of a token, hidden size, width
    "Qwen3-30B-A3B": (128, 8, 2048, 768),
    "DeepSeek-V3, a 32nd": (8, 8, 7168, 2048),
    "gpt-oss-20b, an 8th": (4, 4, 2880, 2880),
}
CASES = [("v5p", "Qwen3-30B-A3B", 8192, "tpu"), ("v5p", "Qwen3-30B-A3B", 8192, "blocks"), ("v5p", "DeepSeek-V3, a 32nd", 8192, "tpu"),
         ("v5p", "gpt-oss-20b, an 8th", 8192, "tpu"), ("v5e", "Qwen3-30B-A3B", 8192, "tpu"), ("v6e", "Qwen3-30B-A3B", 8192, "tpu"),
         ("v5p", "Qwen3-30B-A3B", 32768, "tpu"), ("v5p", "Qwen3-30B-A3B", 32768, "blocks")]


def mesh_of(chip: str) -> Mesh:
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip]).devices[:1]
    return Mesh(np.array(devices), ("one",), axis_types=(AxisType.Auto,))


def one(chip: str, model: str, tokens: int, name: str) -> list:
    count, slots, size, width = MODELS[model]
    mesh, low = mesh_of(chip), jnp.bfloat16
    shapes = [((tokens, size), low), ((tokens, slots), jnp.int32), ((tokens, slots), jnp.float32),
              ((count, size, width), low), ((count, size, width), low), ((count, width, size), low)]

    def loss(x, ids, gates, *weights):
        return experts(x, ids, gates, *weights, activation=GATED["silu"], implementation=name).astype(jnp.float32).sum()

    out = [chip, model, tokens, name]
    for function in (loss, jax.grad(loss, (0, 2, 3, 4, 5))):
        started, whole = time.monotonic(), NamedSharding(mesh, P())
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            lowered = jax.jit(function).lower(*(jax.ShapeDtypeStruct(s, d, sharding=whole) for s, d in shapes))
        compiled = lowered.compile()
        out += [lowered.as_text().count("@tpu_custom_call"), round(compiled.memory_analysis().temp_size_in_bytes / kernels_memory.MIB, 1),
                round(time.monotonic() - started, 1)]
    return [*out, round(4 * 3 * count * size * width / kernels_memory.MIB, 1)]


def main():
    header = ["chip", "model", "tokens", "implementation", "kernels", "MiB", "compiled in s", "kernels with gradients", "MiB", "s", "sums"]
    rows, at = [], commit()
    for case in CASES:
        rows.append(one(*case))
        print(rows[-1], flush=True)
        record("experts_memory", {"header": header, "rows": rows}, at)
    table(header, rows)


if __name__ == "__main__":
    main()
