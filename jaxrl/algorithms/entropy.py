"""Adaptive coefficient of the entropy bonus."""

from __future__ import annotations

import jax.numpy as jnp


def adaptive_entropy_coef(coef, entropy, target, rate, highest):
    """Computes one optimizer step of Skywork-OR1's adaptive entropy control (arXiv 2505.22312).

    The carried coefficient grows by `rate` while the entropy is below its target and falls by it while above, within
    [0, highest]. It is applied only while entropy <= target.

    Args:
      coef: [] carried coefficient.
      entropy: [] mean entropy of the policy per token, in nats, at this step.
      target: nats. rate: change per step. highest: largest coefficient.

    Returns:
      (next_coef, applied): what to carry on, and the coefficient of this step's bonus (`coef` or 0)."""
    applied = jnp.where(entropy <= target, coef, 0)
    return jnp.clip(coef + rate * jnp.sign(target - entropy), 0, highest), applied
