"""The inputs of a policy loss (loss tokens of one microbatch) and of an advantage (one step's completions)."""

from __future__ import annotations

from typing import Any, NamedTuple


class Tokens(NamedTuple):
    """The inputs of a policy loss: arrays [R, S] over packed slots (R rows, S loss slots per row).

    Log-probs are in nats, float32, of the sampled token. Anything may stand where `mask` is false: mask before
    arithmetic. Only `logp` and `entropy` (nats) carry a gradient. `advantage` is one number per token, whitened and
    clipped already if the config says so.
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


class AdvantageInputs(NamedTuple):
    """The inputs of an advantage function: host numpy arrays of one step, N trajectories and T tokens.

    Trajectory i owns tokens [offsets[i], offsets[i+1]), prompt and observations included: only tokens where `mask` is
    true were sampled. Log-probs are in nats, of the sampled tokens. With kl.placement=reward, kl.coef times the KL of a
    trajectory is subtracted from its score.
    """

    scores: Any  # [N] float64, shaped rewards; NaN = absent
    groups: Any  # [N] prompt of the trajectory
    mask: Any  # [T] bool: the policy sampled the token
    offsets: Any  # [N+1]
    rewards: dict[str, Any]  # name -> [N] raw values of one reward, NaN = absent
    columns: dict[str, Any]  # name -> [T] log-probs: behaviour, and old and ref where they are scored; in runs with
    # episodes also turn (number, from 0), reward (a turn's, at its last token) and anchor (id of the state, 0 = none)
    user: Any  # config.user
