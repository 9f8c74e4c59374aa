"""Random batches full of corner cases, for the tests of jaxrl.algorithms.

Log-probs are multiples of 2^-10, so that fp32 holds them and their differences exactly and a comparison with the float64
oracle measures the formula, not the rounding of its inputs.
"""

import dataclasses

import numpy as np

ROWS, SLOTS = 3, 8
EXTREMES = (-1e4, -30.0, -18.0, -2.0**-10, 0.0)


@dataclasses.dataclass
class Batch:
    """Packed slots [ROWS, SLOTS], float64: clean numbers, and where they do not count `junk` may be put."""

    logp: np.ndarray
    old: np.ndarray
    behaviour: np.ndarray
    ref: np.ndarray
    advantage: np.ndarray
    mask: np.ndarray
    sequences: np.ndarray
    weights: np.ndarray

    def junk(self, value):
        """The same batch with `value` in all float arrays wherever a slot does not count."""
        dirty = {
            f.name: np.where(self.mask, getattr(self, f.name), value)
            for f in dataclasses.fields(self)
            if f.name in ("logp", "old", "behaviour", "ref", "advantage")
        }
        return dataclasses.replace(self, **dirty)


def grid(x):
    return np.round(np.asarray(x) * 1024) / 1024


def batch(seed, extremes=True):
    """Rows with several sequences, unused slots at their end, an empty row, sequences masked throughout, single tokens."""
    rng = np.random.default_rng(seed)
    shape = ROWS, SLOTS
    sequences = np.zeros(shape, np.int32)
    for r in range(ROWS):
        used = rng.integers(0, SLOTS + 1) if r else SLOTS
        sequences[r, :used] = np.sort(rng.integers(1, 5, used))
        sequences[r, :used] = np.unique(sequences[r, :used], return_inverse=True)[1] + 1
    mask = (sequences > 0) & (rng.random(shape) < 0.85)
    mask &= ~((sequences == 2) & (rng.random((ROWS, 1)) < 0.3))  # a sequence that does not count at all
    logp = grid(-rng.exponential(1.5, shape))
    spreads = {"old": 0.3, "behaviour": 0.2, "ref": 0.6}
    columns = {name: np.minimum(grid(logp + rng.normal(0, s, shape)), 0) for name, s in spreads.items()}
    columns["logp"] = logp
    if extremes:
        for name in columns:
            columns[name] = np.where(rng.random(shape) < 0.06, rng.choice(EXTREMES, shape), columns[name])
    advantage = rng.normal(size=shape)
    if rng.random() < 0.5:  # one per sequence
        advantage = np.take_along_axis(advantage, sequences, axis=1)
    advantage = grid(np.where(rng.random(shape) < 0.05, 0, advantage))
    weights = grid(rng.uniform(0.1, 1, shape)) * mask
    return Batch(**columns, advantage=advantage, mask=mask, sequences=sequences, weights=weights)


@dataclasses.dataclass
class Ragged:
    """Host arrays of N sequences and T tokens."""

    offsets: np.ndarray
    mask: np.ndarray
    rewards: np.ndarray
    values: np.ndarray
    kl: np.ndarray
    prompts: np.ndarray
    tokens: np.ndarray
    scores: np.ndarray
    baseline: np.ndarray
    groups: np.ndarray


def ragged(seed):
    """Groups of unequal size in any order, missing scores, groups of equal scores, empty and fully masked sequences."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(0, 12)) if seed else 0
    prompts = rng.integers(0, 3, n)
    lengths = prompts + rng.integers(0, 7, n)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    total = int(offsets[-1])
    position = np.arange(total) - np.repeat(offsets[:-1], lengths)
    answer = position >= np.repeat(prompts, lengths)
    mask = answer & (rng.random(total) < 0.7) & np.repeat(rng.random(n) < 0.9, lengths)
    scores = rng.choice([0.0, 1.0, 0.3, 0.1 + 0.2, np.nan, -2.5], n)
    groups = rng.integers(0, 4, n) * 7 - 3
    return Ragged(
        offsets=offsets,
        mask=mask,
        rewards=rng.normal(size=total),
        values=rng.normal(size=total),
        kl=np.where(mask, rng.exponential(size=total), np.nan),
        prompts=prompts,
        tokens=rng.integers(0, 2, total),
        scores=scores,
        baseline=rng.choice([0.0, 0.5, np.nan, 1.0], n),
        groups=groups,
    )
