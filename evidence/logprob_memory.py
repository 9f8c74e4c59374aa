"""Showing 6: peak memory of log-prob and entropy, forward and backward, with and without chunks (compiled figures).

python evidence/logprob_memory.py
"""

import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, os.path.dirname(__file__))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from common import record, table  # noqa: E402

from jaxrl.kernels.logprob import logprob_and_entropy  # noqa: E402

TOKENS, HIDDEN, VOCAB = 32768, 1536, 151936  # 32k tokens of a Qwen2.5-1.5B head


def peak_gib(implementation: str, chunk: int, dtype=jnp.bfloat16) -> float:
    def loss(hidden, head, targets):
        logp, entropy = logprob_and_entropy(hidden, head, targets, chunk=chunk, implementation=implementation)
        return jnp.sum(logp) + jnp.sum(entropy)

    shapes = (
        jax.ShapeDtypeStruct((1, TOKENS, HIDDEN), dtype),
        jax.ShapeDtypeStruct((HIDDEN, VOCAB), dtype),
        jax.ShapeDtypeStruct((1, TOKENS), jnp.int32),
    )
    memory = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes).compile().memory_analysis()
    return (memory.temp_size_in_bytes + memory.output_size_in_bytes) / 2**30


def main():
    rows = [["full logits", "-", peak_gib("reference", 1)]]
    rows += [["chunked", chunk, peak_gib("chunked", chunk)] for chunk in (4096, 1024, 256)]
    rows = [[a, b, round(c, 2)] for a, b, c in rows]
    print(
        f"log-prob + entropy, forward and backward, {TOKENS} tokens, hidden {HIDDEN}, vocabulary {VOCAB}, bf16; temporaries + gradients"
    )
    table(["implementation", "tokens per chunk", "GiB"], rows)
    record("logprob_memory", {"tokens": TOKENS, "hidden": HIDDEN, "vocab": VOCAB, "rows": rows})


if __name__ == "__main__":
    main()
