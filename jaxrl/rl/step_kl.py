"""train.max_step_kl: a step whose KL on its own batch is beyond a bound is scaled back, or refused.

    before  <- log-probs of the batch's tokens, and a copy of the parameters that train
    updates
    KL      <- k3 estimate of KL(before || after) per token, from the log-probs after them
    while it is beyond the bound: parameters <- before + scale (after - before), scale <- scale sqrt(bound / KL)

The KL of a short step grows with the square of its length, so that one scaling is mostly enough. The optimizer's state
stays what the updates made it: a refused step has moved the moments and nothing else.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

TRIES = 4      # scalings before a step is refused
MARGIN = 0.95  # of the way that the quadratic would allow


def k3(before, after, mask) -> float:
    """Mean over the masked tokens of r - 1 - log r, r = p_after / p_before (http://joschu.net/blog/kl-approx.html): an
    estimate of KL(before || after) on tokens that `before` drew. inf where a log-prob is not finite."""
    d = np.asarray(after, np.float64)[mask] - np.asarray(before, np.float64)[mask]
    if not np.isfinite(d).all():
        return float("inf")
    return float(np.mean(np.exp(np.clip(d, -50, 50)) - 1 - d)) if len(d) else 0.0


@jax.jit
def between(before: dict, after: dict, scale):
    """before + scale (after - before), in the dtype of each; `before` itself at 0."""
    def one(a, b):
        return jnp.where(scale == 0, a, (a + scale * (b.astype(jnp.float32) - a.astype(jnp.float32))).astype(a.dtype))

    return {name: one(before[name], after[name]) for name in before}


class StepLimit:
    """Around the updates of one step. Every process calls it; log-probs are the same on all.

    Args:
      columns: what the update reads; `support` and `routes` of it are scored with.
    """

    def __init__(self, policy, traj, layout, columns):
        self.policy, self.traj, self.layout = policy, traj, layout
        self.beside = {name: columns[name] for name in ("support", "routes") if name in columns} or None
        self.params = {name: jnp.copy(x) for name, x in policy.state.trainable.items()}
        self.before = self._logprobs()

    def _logprobs(self) -> np.ndarray:
        found = self.policy.score(self.traj, self.layout, self.beside)
        return found["logprob"] if isinstance(found, dict) else found

    def _kl(self) -> float:
        return k3(self.before, self._logprobs(), self.traj.loss_mask)

    def keep(self, limit: float) -> dict[str, float]:
        """Scales the step back until its KL is within the limit. Returns metrics."""
        asked, scale = self._kl(), 1.0
        made, after, where = asked, self.policy.state.trainable, None
        for _ in range(TRIES):
            if made <= limit:
                break
            scale = scale * MARGIN * (limit / made) ** 0.5 if np.isfinite(made) else scale / 10
            where = where or jax.tree.map(lambda x: x.sharding, after)
            self._take(after, scale, where)
            made = self._kl()
        if made > limit:
            scale = made = 0.0
            self._take(after, scale, where)
        return {"policy/step_kl": made, "policy/step_kl_asked": min(asked, 1e30), "policy/step_scale": scale}

    def _take(self, after, scale: float, where) -> None:
        found = jax.device_put(between(self.params, after, np.float32(scale)), where)
        self.policy.held = self.policy.state.replace(trainable=found)
