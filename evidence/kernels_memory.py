"""Memory of attention and of log-probs, forward and backward: compiled temporaries, on the CPU and, with libtpu, for a TPU v5e.

python evidence/kernels_memory.py

Attention: one packed row of 4k to 32k tokens in bf16 with the heads of Qwen2.5-1.5B (12 over 2 of size 128; two of them over one
where the CPU compiles the reference). Linear means that a row twice as long takes twice as much. Log-probs: twice the vocabulary,
and twice the tokens, beside the bytes of the logits themselves.
"""

import os
import sys

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
sys.path.insert(0, os.path.dirname(__file__))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from common import record, table  # noqa: E402
from jax.sharding import AxisType, Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from jaxrl.kernels.attention import attention  # noqa: E402
from jaxrl.kernels.logprob import logprob_and_entropy  # noqa: E402
from jaxrl.planning.compiling import has_libtpu  # noqa: E402

LENGTHS = (4096, 8192, 16384, 32768)
HEADS, GROUPS, SIZE = 12, 2, 128
TOKENS, HIDDEN, VOCAB, CHUNK = 8192, 1536, 75968, 1024
MIB = 2**20


def tpu():
    """A TPU v5e as a mesh of one device, of which only the compiler is here."""
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[:1]
    return Mesh(np.array(devices), ("one",), axis_types=(AxisType.Auto,))


def temporaries(function, shapes, mesh) -> float:
    """MiB."""
    mesh = mesh or jax.make_mesh((1,), ("one",), axis_types=(AxisType.Auto,))
    whole = NamedSharding(mesh, P())
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(function).lower(*(jax.ShapeDtypeStruct(s, d, sharding=whole) for s, d in shapes))
    return lowered.compile().memory_analysis().temp_size_in_bytes / MIB


def ours(implementation):
    def loss(q, k, v, positions, segments, prefixes):
        out = attention(q, k, v, positions, positions, segments, segments, prefixes, implementation=implementation)
        return out.astype(jnp.float32).sum()
    return loss


def splash(q, k, v, positions, segments, prefixes):
    """jax's own TPU kernel, which skips by a static causal mask and knows segments, but no shared prompts."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    mask = masks.MultiHeadMask([masks.CausalMask((q.shape[1], q.shape[1])) for _ in range(HEADS // GROUPS)])
    run = kernel.make_splash_mqa_single_device(mask)
    by_group = q[0].swapaxes(0, 1).reshape(GROUPS, HEADS // GROUPS, q.shape[1], SIZE) * SIZE ** -0.5
    ids = kernel.SegmentIds(segments[0], segments[0])
    out = jax.vmap(run, in_axes=(0, 0, 0, None))(by_group, k[0].swapaxes(0, 1), v[0].swapaxes(0, 1), ids)
    return out.astype(jnp.float32).sum()


def attention_row(name, loss, mesh, heads=HEADS, groups=GROUPS, lengths=LENGTHS):
    out = [name]
    for length in lengths:
        shapes = [((1, length, n, SIZE), jnp.bfloat16) for n in (heads, groups, groups)] + [((1, length), jnp.int32)] * 3
        forward, both = temporaries(loss, shapes, mesh), temporaries(jax.grad(loss, (0, 1, 2)), shapes, mesh)
        out.append(f"{forward:.1f} / {both:.1f}")
    return out + ["-"] * (len(LENGTHS) - len(lengths))


def logprob_rows(mesh):
    rows = []
    for tokens, vocab in ((TOKENS, VOCAB), (TOKENS, 2 * VOCAB), (2 * TOKENS, VOCAB)):
        shapes = [((1, tokens, HIDDEN), jnp.bfloat16), ((HIDDEN, vocab), jnp.bfloat16), ((1, tokens), jnp.int32)]

        def loss(hidden, head, targets):
            logp, entropy = logprob_and_entropy(hidden, head, targets, chunk=CHUNK, implementation="chunked")
            return jnp.sum(logp) + jnp.sum(entropy)

        gradients = 2 * HIDDEN * (tokens + vocab) / MIB
        rows.append([tokens, vocab, round(temporaries(loss, shapes, mesh), 1),
                     round(temporaries(jax.grad(loss, (0, 1)), shapes, mesh), 1), round(gradients, 1), round(tokens * vocab * 4 / MIB)])
    return rows


def main():
    found = {}
    where = [("cpu", None)] + ([("tpu v5e", tpu())] if has_libtpu() else [])
    for name, mesh in where:
        if mesh is None:
            rows = [attention_row("reference, 2 heads over 1", ours("reference"), mesh, 2, 1, LENGTHS[:3]),
                    attention_row("blockwise", ours("blockwise"), mesh)]
        else:
            rows = [attention_row("blockwise", ours("blockwise"), mesh), attention_row("tpu", ours("tpu"), mesh),
                    attention_row("splash", splash, mesh)]
        print(f"\nattention, {name}: MiB of temporaries, forward / forward and backward")
        table(["implementation", *map(str, LENGTHS)], rows)
        heads = logprob_rows(mesh)
        print(f"\nlog-prob and entropy in chunks of {CHUNK} tokens, hidden {HIDDEN}, {name}: MiB")
        table(["tokens", "vocabulary", "forward", "forward and backward", "gradients", "logits in fp32"], heads)
        found[name] = {"attention": rows, "logprob": heads}
    record("kernels_memory", found)


if __name__ == "__main__":
    main()
