"""What a policy loss sees of the scored tokens of one microbatch."""

from __future__ import annotations

from typing import Any, NamedTuple


class Tokens(NamedTuple):
    """Arrays [R, S] over packed slots (R rows, S scored slots per row); log-probs in nats. Junk is allowed where masked.

    Only `logp` and `entropy` carry a gradient.
    """

    logp: Any  # log-prob under the current policy
    old: Any  # log-prob under the proximal policy, around which ratios are taken
    behaviour: Any  # log-prob as sampled, or None
    ref: Any  # log-prob under the reference, or None
    advantage: Any
    mask: Any  # bool: the slot holds a token that counts
    sequences: Any  # int32, id of the slot's sequence within its row, 1..K, 0 = unused (see numerics.py)
    entropy: Any  # entropy of the current policy at the token, or None
    columns: dict[str, Any]  # name -> further token columns
