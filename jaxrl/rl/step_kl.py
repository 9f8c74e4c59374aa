"""Bounds the KL of a step on its own batch (train.max_step_kl): scales a step back, or rejects it.

    before  <- log-probs of the batch's tokens, and a copy of the parameters that train
    updates
    KL      <- k3 estimate of KL(before || after) per token, from the log-probs after the updates
    while KL > bound: parameters <- before + scale (after - before), scale <- scale sqrt(bound / KL)

The KL of a short step grows with the square of its length, so one scaling is mostly enough. The optimizer's state stays
as the updates left it: a rejected step changes the moments and nothing else. rl.step.learn calls it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

TRIES = 4      # scalings before a step is rejected
MARGIN = 0.95  # of the step length that a quadratic KL would allow


def k3(before, after, mask) -> float:
    """Estimates KL(before || after) in nats per token on tokens that `before` drew.

    The mean over mask of r - 1 - log r, r = p_after / p_before (http://joschu.net/blog/kl-approx.html); log r is
    bounded to +-50 in r alone.

    Args:
      before, after: [T] float, log-probs in nats, not read outside mask. mask: [T] bool.

    Returns:
      The estimate; inf if a log-prob is not finite, 0 for an empty mask.
    """
    d = np.asarray(after, np.float64)[mask] - np.asarray(before, np.float64)[mask]
    if not np.isfinite(d).all():
        return float("inf")
    return float(np.mean(np.exp(np.clip(d, -50, 50)) - 1 - d)) if len(d) else 0.0


@jax.jit
def interpolate(before: dict, after: dict, scale):
    """Returns before + scale (after - before), computed in fp32 and returned in each array's dtype; exactly `before` at
    scale 0.

    before, after: flat dicts of parameters with the same names. scale: a scalar."""
    def one(a, b):
        return jnp.where(scale == 0, a, (a + scale * (b.astype(jnp.float32) - a.astype(jnp.float32))).astype(a.dtype))

    return {name: one(before[name], after[name]) for name in before}


class StepLimit:
    """Bounds the KL of one step: made before its updates, applied after them by `enforce`.

    Collective: every process calls it and gets the same log-probs. The constructor scores the batch, and copies the
    parameters that train on their devices.

    Args:
      policy: roles.role.Policy. traj: Trajectories of the batch. layout: training.Layout to score in.
      columns: token columns of the update, of which scoring reads `support` and `routes`.
    """

    def __init__(self, policy, traj, layout, columns):
        self.policy, self.traj, self.layout = policy, traj, layout
        self.scoring_columns = {name: columns[name] for name in ("support", "routes") if name in columns} or None
        self.params = {name: jnp.copy(x) for name, x in policy.state.trainable.items()}
        self.before = self._logprobs()

    def _logprobs(self) -> np.ndarray:
        found = self.policy.score(self.traj, self.layout, self.scoring_columns)
        return found["logprob"] if isinstance(found, dict) else found

    def _kl(self) -> float:
        return k3(self.before, self._logprobs(), self.traj.loss_mask)

    def enforce(self, limit: float) -> dict[str, float]:
        """Scales the step back until its KL is at most `limit` nats per token, or undoes it after TRIES attempts.

        Returns the metrics policy/step_kl (KL of the step that was kept), policy/step_kl_unscaled (of the whole step,
        at most 1e30) and policy/step_scale (share that was kept; 0 = undone)."""
        before, scale = self._kl(), 1.0
        made, after, where = before, self.policy.state.trainable, None
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
        return {"policy/step_kl": made, "policy/step_kl_unscaled": min(before, 1e30), "policy/step_scale": scale}

    def _take(self, after, scale: float, where) -> None:
        found = jax.device_put(interpolate(self.params, after, np.float32(scale)), where)
        self.policy.state = self.policy.state.replace(trainable=found)
