"""Per-token estimates of KL(current || reference), in the loss (`kl_penalty`) or in the reward (`kl_value`).

With d = logp - ref, of a token drawn from the policy p, q the reference (http://joschu.net/blog/kl-approx.html):

    k1 = d    abs = |d|    k2 = d^2 / 2    k3 = exp(-d) + d - 1    low_var = min(k3 of d within +-20, 10)

The table gives the expected gradient of each estimator, which need not be that of its expected value. K(s) = KL(p
|| q), K'(s) = KL(q || p) at a state s, gradients at the states visited (their distribution is not
differentiated), samples from p:

    estimator     in the loss                        in the reward (as score, REINFORCE with the reward to go)
    k1            0 (refused)                        of KL(p || q) of whole sequences: states' distribution included
    abs           sum_a |p - q| = 2 TV(p, q)         other
    k2            K                                  other
    k3            K', the other direction            KL(p || q) of whole sequences, minus K'
    k3_unbiased   K, also when samples are from old  - (in the reward nothing flows through the ratio; take k1)
    low_var       K' over tokens within the bounds,  as k3 within the bounds
                  nothing from those outside

Off-policy (samples from old, p has moved), only k3_unbiased keeps its gradient; k2, k3, abs and low_var do not.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxrl.algorithms.numerics import MAX_LOG, masked_exp, masked_expm1

LOW_VAR_CAP = 10.0
LOSS_ESTIMATORS = ("k2", "k3", "k3_unbiased", "abs", "low_var")

def _k3(d):
    return np.expm1(-d) + d


REWARD_ESTIMATORS = {
    "k1": lambda d: d,
    "abs": np.abs,
    "k2": lambda d: 0.5 * d * d,
    "k3": _k3,
    "low_var": lambda d: np.minimum(_k3(np.clip(d, -MAX_LOG, MAX_LOG)), LOW_VAR_CAP),
}


def kl_penalty(logp, ref, old, mask, estimator):
    """Computes KL(current || reference) of each token as a loss term, 0 where masked. d = logp - ref, r = exp(logp -
    old):

        k2            d^2 / 2                    gradient, on-policy: that of KL(current || reference)
        k3            exp(-d) + d - 1            gradient, on-policy: that of KL(reference || current)
        k3_unbiased   r * (exp(-d) + d - 1)      gradient: that of KL(current || reference), with samples from old; it
                                                 flows through r (DeepSeek-V3.2, arXiv 2512.02556)
        abs           |d|                        gradient, on-policy: that of sum_a |current - reference|
        low_var       k3 of d clipped to +-20,   gradient: as k3 within the bounds, 0 outside: the penalty vanishes
                      clipped to 10              where it is needed most (as RLinf and SkyRL compute it)

    exp continues linearly above 20 (masked_exp), except in low_var.

    Arrays have one shape, which the result has.

    Args:
      logp, ref: log-probs in nats under the current policy and the reference.
      old: log-probs under the proximal policy, read by k3_unbiased only.
      mask: bool, the loss tokens.
      estimator: a row of the table.

    Raises ValueError for k1, whose expected gradient is 0, and for unknown names.
    """
    d = jnp.where(mask, logp - ref, 0)
    if estimator == "k2":
        return 0.5 * jnp.square(d)
    if estimator == "abs":
        return d * jnp.sign(d)  # the gradient at 0, where every run starts, is 0; jnp.abs has 1 there
    if estimator == "low_var":
        bounded = jnp.clip(d, -MAX_LOG, MAX_LOG)
        return jnp.minimum(jnp.expm1(-bounded) + bounded, LOW_VAR_CAP)
    if estimator == "k3":
        return masked_expm1(-d, mask) + d
    if estimator == "k3_unbiased":
        return masked_exp(logp - old, mask) * (masked_expm1(-d, mask) + d)
    if estimator == "k1":
        raise ValueError("kl.estimator='k1': as a loss its expected gradient is 0, it would do nothing; use "
                         "k3_unbiased or k2 in the loss, or k1 with kl.placement=reward")
    raise ValueError(f"kl.estimator={estimator!r}: expected {', '.join(LOSS_ESTIMATORS)}")


def kl_value(logp, ref, estimator):
    """Returns the estimate of KL(current || reference) per token, to subtract from rewards; host numpy, float64, any
    shape.

    With d = logp - ref in nats: k1 = d, abs = |d|, k2 = d^2 / 2, k3 = exp(-d) + d - 1, low_var = min(k3 of d within
    +-20, 10). Of k1 the expected gradient is that of KL(current || reference) of whole sequences; the others' are in
    the module's table. k3 overflows to inf below d = -709.

    Raises ValueError for k3_unbiased and unknown names."""
    if estimator not in REWARD_ESTIMATORS:
        raise ValueError(f"kl.estimator={estimator!r}: expected {', '.join(REWARD_ESTIMATORS)} with "
                         "kl.placement=reward")
    return REWARD_ESTIMATORS[estimator](np.asarray(logp, np.float64) - np.asarray(ref, np.float64))
