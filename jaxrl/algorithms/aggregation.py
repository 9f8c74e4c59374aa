"""Loss weights per token: a weight is 1/denominator where the token counts, else 0.

The loss is then a plain sum of weight * token loss, so micro-batches, packing, padding and the number of data shards
cannot change it. Denominators belong to one optimizer step and are known on the host.

Legend: N sequences of one optimizer step, T their tokens.
"""

from __future__ import annotations

import numpy as np


def aggregation_weights(counts_N, aggregation: str):
    """Weight of each scored token of a sequence, float64 [N].

        token_mean      1 / sum_j |y_j|
        sequence_mean   1 / (n * |y_i|),  n = sequences with at least one scored token

    Tokens that are filtered later (truncated answers ...) keep their place in the denominators.

    Args:
      counts_N: scored tokens |y_i| per sequence of the optimizer step; 0 = a sequence that does not count.
      aggregation: "token_mean" or "sequence_mean".
    """
    counts = np.asarray(counts_N, np.float64)
    if aggregation == "token_mean":
        return np.where(counts > 0, 1.0 / max(counts.sum(), 1.0), 0.0)
    if aggregation == "sequence_mean":
        return np.where(counts > 0, 1.0 / (max((counts > 0).sum(), 1) * np.maximum(counts, 1.0)), 0.0)
    raise ValueError(f"aggregation={aggregation!r}: expected token_mean or sequence_mean")
