"""Loss weights per token: a weight is 1/denominator where the token counts, else 0.

The loss is then a plain sum of weight * token loss, so micro-batches, packing, padding and the number of data shards
cannot change it. Denominators belong to one optimizer step and are known on the host.

Legend: N trajectories of one optimizer step (the papers' sequences).
"""

from __future__ import annotations

import numpy as np


def _token_mean(counts, n, groups, max_tokens, chunk):
    if not chunk:
        return max(counts.sum(), 1.0)
    part = np.maximum(np.cumsum(counts > 0) - 1, 0) // chunk
    tokens, size = np.bincount(part, weights=counts), np.bincount(part, weights=counts > 0)
    return n * (np.maximum(tokens, 1.0) / np.maximum(size, 1.0))[part]


def _prompt_mean(counts, n, groups, max_tokens, chunk):
    _, prompt = np.unique(np.asarray(groups), return_inverse=True)
    tokens = np.bincount(prompt, weights=counts)
    return (max(np.count_nonzero(tokens), 1) * np.maximum(tokens, 1.0))[prompt]


AGGREGATIONS = {  # name -> what a token's loss is divided by
    "token_mean": _token_mean,
    "sequence_mean": lambda counts, n, groups, max_tokens, chunk: n * np.maximum(counts, 1.0),
    "sequence_sum": lambda counts, n, groups, max_tokens, chunk: n,
    "constant": lambda counts, n, groups, max_tokens, chunk: n * max_tokens,
    "prompt_mean": _prompt_mean,
}


def aggregation_weights(counts_N, aggregation: str, *, groups_N=None, max_tokens=None, chunk=0):
    """Returns the weight of each loss token of a trajectory, float64 [N]; 0 without loss tokens.

        token_mean      1 / sum_j |y_j|                      DAPO (arXiv 2503.14476)
        sequence_mean   1 / (n * |y_i|)                      GRPO (arXiv 2402.03300), GSPO
        sequence_sum    1 / n                                REINFORCE, RLOO, ReMax
        constant        1 / (n * max_tokens)                 Dr.GRPO (arXiv 2503.20783)
        prompt_mean     1 / (P * tokens of its prompt)       mean over prompts of their token means

    `chunk` = k takes token means over consecutive chunks c of k trajectories (the last may be smaller) and averages
    them with weight m, the number of trajectories in c: m / (n * sum_{j in c} |y_j|). This reproduces systems that
    average tokens per micro-batch of k sequences; k = 1 is sequence_mean, k >= n token_mean.

    n = trajectories with loss tokens, P = prompts with at least one loss token. Tokens that are filtered later
    (truncated completions, sequences the mismatch correction drops ...) keep their place in the denominators.

    Args:
      counts_N: loss tokens |y_i| per trajectory of the optimizer step; a trajectory with 0 is not counted in n.
      aggregation: one of the above.
      groups_N: prompt id per trajectory, for prompt_mean.
      max_tokens: the constant of Dr.GRPO: the longest completion that may be sampled, never a width of this batch.
      chunk: trajectories with loss tokens in one token mean; 0 = all. Read by token_mean alone.

    Raises ValueError for other names, and if groups_N or max_tokens is missing."""
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"aggregation={aggregation!r}: expected {', '.join(AGGREGATIONS)}")
    if aggregation == "constant" and not max_tokens:
        raise ValueError("aggregation='constant' needs max_tokens, the length that tokens are divided by")
    if aggregation == "prompt_mean" and groups_N is None:
        raise ValueError("aggregation='prompt_mean' needs groups_N, the prompt of each trajectory")
    counts = np.asarray(counts_N, np.float64)
    denominator = AGGREGATIONS[aggregation](counts, max(np.count_nonzero(counts), 1), groups_N, max_tokens, chunk)
    return np.where(counts > 0, 1.0 / denominator, 0.0)
