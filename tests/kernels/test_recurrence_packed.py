"""Recurrence and convolution of rows drawn at random: every sequence has the bits that it has alone."""

import jax
import numpy as np
from helpers.tiers import first_cases

from jaxrl.kernels.recurrence import chunks_of, convolution, recurrence, room

ROWS, LENGTH, HEADS, REPEATS, KEY, VALUE, TAPS = 4, 96, 2, 2, 4, 3, 4
SHAPES = {"q": (HEADS, KEY), "k": (HEADS, KEY), "v": (HEADS * REPEATS, VALUE), "g": (HEADS * REPEATS,), "beta": (HEADS * REPEATS,)}


def drawn(rng):
    """[ROWS, LENGTH, ...] fp32 of every input."""
    arrays = {n: rng.normal(size=(ROWS, LENGTH, *shape)).astype(np.float32) for n, shape in SHAPES.items()}
    arrays["k"] /= np.linalg.norm(arrays["k"], axis=-1, keepdims=True)
    return arrays | {"g": -np.exp(arrays["g"]), "beta": 1 / (1 + np.exp(-arrays["beta"]))}


def packed(rng):
    """(segments, prefixes, sequences) of rows: prompts of 1 to 30 tokens with none to three completions, gaps of padding between.
    A sequence: (row, places of its prompt and itself, own tokens)."""
    segments, prefixes, sequences = np.zeros((ROWS, LENGTH), np.int32), np.zeros((ROWS, LENGTH), np.int32), []
    for row in range(ROWS):
        at, segment, chunks = int(rng.integers(0, 4)), 0, 0
        while True:
            sizes, before = rng.integers(1, 31, 1 + rng.integers(0, 4)), []
            chunks += sum(-(-n // 16) for n in sizes)
            if at + sizes.sum() > LENGTH or chunks > room(LENGTH):
                break
            for i, n in enumerate(sizes):
                own, segment = np.arange(at, at + n), segment + 1
                segments[row, own], prefixes[row, own] = segment, segment - i if i else 0
                before = own if i == 0 else before
                sequences.append((row, np.concatenate([before, own]) if i else own, int(n)))
                at += n
            at += int(rng.integers(0, 3))
    return segments, prefixes, sequences


@jax.jit
def both(arrays, raw, taps, segments, prefixes, weights):
    """((outputs of the rule, of the convolution), gradients of their sums with `weights` by inputs)."""
    def outputs(arrays, raw):
        chunks = chunks_of(segments, prefixes)
        return recurrence(*(arrays[n] for n in SHAPES), chunks)[0], convolution(raw, taps, chunks)

    found, pull = jax.vjp(outputs, arrays, raw)
    return found, pull(tuple(weights))


def alone(rng, sequence, arrays, weights):
    """The arrays of one sequence by itself, at a place of its own in a row of its own, NaN elsewhere; and where its tokens are."""
    row, at, own = sequence
    target, first = int(rng.integers(0, ROWS)), int(rng.integers(0, LENGTH - len(at) + 1))
    there = np.arange(first, first + len(at))
    moved = [np.full_like(a, np.nan) for a in arrays]
    asked = [np.zeros_like(w) for w in weights]
    for a, b in zip(moved, arrays, strict=True):
        a[target, there] = b[row, at]
    for a, b in zip(asked, weights, strict=True):
        a[target, there[-own:]] = b[row, at[-own:]]
    segments, prefixes = np.zeros((ROWS, LENGTH), np.int32), np.zeros((ROWS, LENGTH), np.int32)
    segments[target, there], segments[target, there[-own:]] = 1, 2
    prefixes[target, there[-own:]] = int(own < len(at))
    return moved, segments, prefixes, asked, (target, there)


@first_cases(1, "seed", range(12), full=3)
def test_rows_drawn_at_random(seed):
    """fp32, one program: outputs of rule and convolution, each by itself, and the gradients of one sequence's loss."""
    rng = np.random.default_rng(seed)
    (segments, prefixes, sequences), arrays = packed(rng), drawn(rng)
    raw = rng.normal(size=(ROWS, LENGTH, 3, 2)).astype(np.float32)
    taps = rng.normal(size=(3, 2, TAPS)).astype(np.float32)
    weights = [rng.normal(size=(ROWS, LENGTH, HEADS * REPEATS, VALUE)).astype(np.float32), rng.normal(size=raw.shape).astype(np.float32)]
    outputs, _ = jax.device_get(both(arrays, raw, taps, segments, prefixes, weights))
    assert len(sequences) > 8 and any(len(at) > own for _, at, own in sequences)
    for sequence in sequences:
        row, at, own = sequence
        (*moved, moved_raw), new, shared, asked, (target, there) = alone(rng, sequence, [*arrays.values(), raw], weights)
        found, grads = jax.device_get(both(dict(zip(SHAPES, moved, strict=True)), moved_raw, taps, new, shared, asked))
        for a, b in zip(found, outputs, strict=True):
            np.testing.assert_array_equal(a[target, there[-own:]], b[row, at[-own:]])
        only = [np.zeros_like(w) for w in weights]
        for a, b in zip(only, weights, strict=True):
            a[row, at[-own:]] = b[row, at[-own:]]
        _, theirs = jax.device_get(both(arrays, raw, taps, segments, prefixes, only))
        for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_array_equal(a[target, there], b[row, at])


def test_a_neighbour_that_is_not_kept_apart_is_seen():
    """The control: with one segment for two sequences, both the rule and the convolution differ."""
    rng = np.random.default_rng(0)
    arrays, raw = drawn(rng), rng.normal(size=(ROWS, LENGTH, 3, 2)).astype(np.float32)
    taps, segments = rng.normal(size=(3, 2, TAPS)).astype(np.float32), np.ones((ROWS, LENGTH), np.int32)
    weights = [np.zeros((ROWS, LENGTH, HEADS * REPEATS, VALUE), np.float32), np.zeros_like(raw)]
    apart = segments + (np.arange(LENGTH) >= 32)
    one, two = (jax.device_get(both(arrays, raw, taps, s, 0 * s, weights))[0] for s in (segments, apart))
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a[:, :32], b[:, :32])
        assert np.abs(a[:, 32] - b[:, 32]).max() > 0.1
