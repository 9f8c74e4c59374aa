"""Per-token losses. Inputs are arrays of one shape [...]; results are not aggregated.

Notation: logp = log-prob under the current policy (with gradient), old = under the proximal policy, ref = under the
reference, behaviour = as sampled. All in nats, fp32 or better.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

MAX_LOG = 20.0  # exponents are bounded here; beyond, ratios have lost all meaning


def masked_exp(x, mask):
    """exp(x) where mask, else 0, with finite value and gradient whatever x holds where masked.

    The mask is applied before exp (0 * inf in a gradient is NaN). Above MAX_LOG the function continues linearly, so
    that its gradient does not vanish where it is needed most.
    """
    x = jnp.where(mask, x, 0)
    bounded = jnp.minimum(x, MAX_LOG)
    return jnp.where(mask, jnp.exp(bounded) * (1 + x - bounded), 0)


def clipped_policy_loss(logp, old, advantage, mask, clip_low, clip_high):
    """PPO's clipped surrogate per token, max(-A r, -A clip(r, 1-clip_low, 1+clip_high)), r = exp(logp - old).

    Schulman et al. 2017 (arXiv 1707.06347), eq. 7, with separate bounds (DAPO, arXiv 2503.14476).

    Returns:
      (loss, stats): loss is 0 where masked; stats has per-token `ratio` and `clipped` (1 where the clip removes the
      gradient: r above its bound with A > 0, or below with A < 0).
    """
    advantage = jnp.where(mask, advantage, 0)
    ratio = masked_exp(logp - old, mask)
    bounded = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    loss = jnp.maximum(-advantage * ratio, -advantage * bounded)
    clipped = jnp.where(advantage > 0, ratio > 1 + clip_high, (advantage < 0) & (ratio < 1 - clip_low))
    return jnp.where(mask, loss, 0), {"ratio": ratio, "clipped": (clipped & mask).astype(ratio.dtype)}


def kl_penalty(logp, ref, old, mask, estimator):
    """KL(current || reference) per token, as a loss term. With d = logp - ref:

        k2            d^2 / 2                    gradient: that of KL(current || reference), on-policy
        k3            exp(-d) + d - 1            gradient: that of KL(reference || current)
        k3_unbiased   r * (exp(-d) + d - 1)      gradient: that of KL(current || reference); flows through
                                                 r = exp(logp - old) (DeepSeek-V3.2, arXiv 2512.02556)

    k1 is not offered: as a loss its expected gradient is 0. Estimators: http://joschu.net/blog/kl-approx.html
    Value of k2 and k3 is 0 where masked.
    """
    d = jnp.where(mask, logp - ref, 0)
    if estimator == "k2":
        return 0.5 * jnp.square(d)
    k3 = jnp.where(mask, masked_exp(-d, mask) + d - 1, 0)
    if estimator == "k3":
        return k3
    if estimator == "k3_unbiased":
        return masked_exp(logp - old, mask) * k3
    raise ValueError(f"kl.estimator={estimator!r}: expected k2, k3 or k3_unbiased")


def mismatch_weight(old, behaviour, mask, cap):
    """Truncated importance sampling per token, min(exp(old - behaviour), cap), without gradient.

    Corrects that answers were drawn by the sampler's arithmetic, not the trainer's (https://fengyao.notion.site/off-policy-rl).
    Multiplies the policy loss only; denominators stay. 0 where masked.
    """
    return jax.lax.stop_gradient(jnp.minimum(masked_exp(old - behaviour, mask), cap))
