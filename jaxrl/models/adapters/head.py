"""An adapter on the output matrix: logits = x W + (scale * x A) B, A [D, r], B [r, V].

Its leaves are `head/lora/{a, b, scale}`, also where the output matrix is the embedding: W is the embedding then, and
what is looked up stays as it is (as PEFT's, whose adapter on `lm_head` has the tied W beside it). The product is not
added to W, nor is the gradient of W formed: kernels.logprob takes scale * x A and B beside the head.

In a bank (models.adapters.bank) B is [K, r, V], and each row of tokens has that of its own adapter.

Called by models.model and training.score. Legend: D hidden size, V vocabulary, r rank, K adapters, B rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.models.adapters import NODE, bank
from jaxrl.models.placement import gathered
from jaxrl.models.product import product

AXES = {"a": ("embed", None), "b": (None, "vocab")}


class LowRank(NamedTuple):
    """What is added to the logits of hidden states: few [..., r] times `more`, [r, V] or of each row [B, r, V].

    few: scale * x A. more: B. Both are in the compute dtype.
    """

    few: Any
    more: Any


def has_one(params) -> bool:
    """Whether parameters have an adapter on the output matrix."""
    return NODE in params.get("head", {})


def low_rank(params, hidden, dtype, whose_BxL=None) -> LowRank | None:
    """Returns what an adapter adds to the logits of hidden states [..., D], in `dtype`; None without one.

    whose_BxL: int32 adapter number of each token, read in a bank alone; hidden are [B, ..., D] then, and all tokens of
    a row have one adapter.
    """
    if not has_one(params):
        return None
    leaves = params["head"][NODE]
    acc = jnp.promote_types(dtype, jnp.float32)
    scale, banked = leaves["scale"].astype(acc), leaves["scale"].ndim == 1
    a, b = (gathered(leaves[name], ((None,) if banked else ()) + AXES[name], dtype) for name in ("a", "b"))
    if not banked:
        return LowRank((product(hidden, a, 1).astype(acc) * scale).astype(dtype), b)
    numbers = bank.numbers_of_rows(whose_BxL)
    few = bank.scaled(bank.product(hidden, a, numbers, 1).astype(acc), scale, numbers)
    return LowRank(few.astype(dtype), b[numbers])


def added_to(logits, own: LowRank):
    """Returns logits [..., V] plus few @ more of one adapter, in the logits' dtype; not for a bank."""
    contract = (((own.few.ndim - 1,), (0,)), ((), ()))
    return logits + jax.lax.dot_general(own.few, own.more, contract, preferred_element_type=logits.dtype)
