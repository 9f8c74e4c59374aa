"""Our logits beside those of transformers on the same checkpoint, in every way a token can be laid out."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from helpers.tiny_models import VOCAB
from jaxrl.models import build
from jaxrl.models.io import hf

LENGTH = 40  # longer than every window and every original rotary window of tiny_models
PROMPTS = (9, 14)  # prompt lengths of the decode case; decoding goes on to LENGTH
QUICK = {"xla_backend_optimization_level": 0}  # compiles in half the time
CASES = ("plain", "padded", "packed", "shared prompt", "decode")


@functools.cache
def batch():
    """One batch with a row per layout.

    Returns (tokens, positions, segments, prefixes), each [4, LENGTH], and checks: (case, row, columns, sequence), where
    `columns` of the row must have the logits the sequence alone has in its last len(columns) tokens.
    """
    rng = np.random.default_rng(3)
    shape = (4, LENGTH)
    tokens, positions, segments, prefixes = rng.integers(0, VOCAB, shape), *np.zeros((3, *shape), int)
    checks = []

    def put(case, row, start, length, segment, prompt=None):
        """A sequence, or an answer whose prompt is (first column, length, segment)."""
        columns = np.arange(start, start + length)
        segments[row, columns] = segment
        positions[row, columns] = np.arange(length)
        sequence = tokens[row, columns]
        if prompt is not None:
            first, size, of = prompt
            positions[row, columns] += size
            prefixes[row, columns] = of
            sequence = np.concatenate([tokens[row, first:first + size], sequence])
        checks.append((case, row, columns, sequence))

    put("plain", 0, 0, LENGTH, 1)
    put("padded", 1, 0, 23, 1)
    for start, length, segment in ((0, 7, 1), (7, 19, 2), (26, 11, 3)):
        put("packed", 2, start, length, segment)
    put("shared prompt", 3, 0, 10, 1)
    put("shared prompt", 3, 10, 13, 2, prompt=(0, 10, 1))
    put("shared prompt", 3, 23, 4, 3, prompt=(0, 10, 1))
    put("shared prompt", 3, 27, 9, 4, prompt=(0, 10, 1))
    return tuple(np.asarray(x, np.int32) for x in (tokens, positions, segments, prefixes)), checks


def loaded(path):
    """transformers' model: fp32, eager attention (the only one that has all soft-caps)."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)  # tiny matrices: threads only wait for each other
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()


def reference(path):
    """Logits of transformers' model (loaded). Remembers what it computed."""
    import torch

    model, known = loaded(path), {}

    def logits(sequence, mask=None):
        key = tuple(sequence), None if mask is None else tuple(mask)
        if key not in known:
            ids = torch.tensor(np.asarray(sequence))[None].long()
            with torch.no_grad():
                out = model(ids, attention_mask=None if mask is None else torch.tensor(mask)[None])
            known[key] = out.logits[0].numpy()
        return known[key]

    return logits


def ours(path, scan_layers, dtype=jnp.float32, **options):
    config = hf.load_config(path)
    model = build(config, compute_dtype=dtype, scan_layers=scan_layers, **options)
    return model, hf.load_params(model, path, dtype=dtype)


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def forward(model, params, tokens, positions, segments, prefixes):
    return model.logits(params, model.hidden(params, tokens, positions, segments, prefixes))


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def decoded(model, params, rows_2xL):
    """Two rows prefilled and decoded side by side in slots 2 and 0 of three; slot 1 idles beyond the cache.

    Returns logits [2, LENGTH, V]: row i is valid from its last prompt token on.
    """
    prompts, slots = np.array(PROMPTS), np.array([2, 0])
    real = np.arange(max(PROMPTS)) < prompts[:, None]
    last, kv = model.prefill(params, jnp.where(real, rows_2xL[:, :max(PROMPTS)], 5), prompts)
    cache = model.insert(model.init_cache(3, LENGTH, jnp.float32), kv, np.array([0, 1, 0]), np.array([2, 0, 3]))

    def step(cache, i):
        at = prompts - 1 + i  # as the engine does, from the last prompt token on; the row that ends first idles too
        tokens = jnp.zeros(3, jnp.int32).at[slots].set(rows_2xL[np.arange(2), jnp.minimum(at, LENGTH - 1)])
        positions = jnp.full(3, LENGTH).at[slots].set(at)
        hidden, cache = model.decode(params, tokens, positions, cache)
        return cache, hidden[slots]

    _, later = jax.lax.scan(step, cache, jnp.arange(LENGTH - min(PROMPTS) + 1))
    hidden = [jnp.zeros((LENGTH, last.shape[-1])).at[p - 1].set(last[i]).at[p:].set(later[1:LENGTH - p + 1, i])
              for i, p in enumerate(PROMPTS)]
    return model.logits(params, jnp.stack(hidden))


def differences(path, scan_layers, want=None) -> dict[str, float]:
    """case -> max absolute difference of our logits from transformers', over all its tokens."""
    want = want or reference(path)
    model, params = ours(path, scan_layers)
    arrays, checks = batch()
    got = np.asarray(forward(model, params, *arrays))
    out = dict.fromkeys(CASES, 0.0)
    for case, row, columns, sequence in checks:
        if case == "padded":
            expected = want(arrays[0][row], (arrays[2][row] > 0).astype(int))[columns]
        else:
            expected = want(sequence)[-len(columns):]
        out[case] = max(out[case], float(np.abs(got[row, columns] - expected).max()))
    rows = arrays[0][:2]
    for row, prompt, logits in zip(rows, PROMPTS, np.asarray(decoded(model, params, rows)), strict=True):
        out["decode"] = max(out["decode"], float(np.abs(logits - want(row))[prompt - 1:].max()))
    return out
