"""Per-token losses, not aggregated: the step's loss is the sum of weight * token loss (see aggregation.py).

Notation: logp = log-prob under the current policy (with gradient), old = under the proximal policy, A = advantage, all
of one shape [...], nats, fp32 or better; r = exp(logp - old). sg = stop-gradient.

Every policy loss returns (loss, stats): loss is 0 where masked, and finite in value and gradient whatever the inputs
are there; stats are per-token arrays without gradient, 0 where masked: `ratio`, the r that was used, and `clipped`,
1 where a bound removed (CISPO, TOPR: changed) the token's gradient; dual_clip and delta have a flag of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.algorithms.numerics import masked_exp, sequence_sum
from jaxrl.algorithms.ratios import geometric_log_ratio
from jaxrl.algorithms.ratios import log_ratio as ratio_of
from jaxrl.algorithms.tokens import Tokens

DPPO_MAX_RATIO = 20.0


def _stats(ratio, mask, clipped, **more):
    """Stats by name, without gradient, in the ratio's dtype, 0 where masked."""
    flags = {name: (flag & mask).astype(ratio.dtype) for name, flag in {"clipped": clipped, **more}.items()}
    return {"ratio": jax.lax.stop_gradient(ratio), **flags}


def clipped_policy_loss(
    logp, old, advantage, mask, clip_low, clip_high, *, log_ratio=None, dual_clip=0.0, delta=0.0
):
    """Computes PPO's clipped surrogate of each token, max(-A r, -A clip(r, 1-clip_low, 1+clip_high)), 0 where masked.

    Schulman et al. 2017 (arXiv 1707.06347), eq. 7, with separate bounds (DAPO, arXiv 2503.14476).

    Args:
      logp, old: current and proximal log-probs in nats, r = exp(logp - old), linear above 20 nats.
      advantage, mask: A and bool (loss tokens), of the same shape.
      clip_low, clip_high: distances of the bounds of r from 1.
      log_ratio: [...] log r to use instead of logp - old (sequence levels, see ratios.py); None = that difference.
      dual_clip: c > 1: where A < 0 the loss is at most -c A (dual-clip PPO, arXiv 1912.09729); 0 = off.
      delta: r of the first branch is min(r, delta), delta >= 1 + clip_high (INTELLECT-2, arXiv 2505.07291); 0 = off.

    Returns:
      (loss, stats): stats has `ratio`, which is r, and flags of 1 or 0: `clipped_low` (A < 0, r below its bound),
        `clipped_high` (A > 0, r above), whose sum is `clipped`, and, where dual_clip or delta is on, `dual_clipped` (A
        < 0 and r above that bound: no gradient).
    """
    advantage = jnp.where(mask, advantage, 0)
    ratio = masked_exp(logp - old if log_ratio is None else log_ratio, mask)
    bounded = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    loss = jnp.maximum(-advantage * (jnp.minimum(ratio, delta) if delta else ratio), -advantage * bounded)
    if dual_clip:
        loss = jnp.where(advantage < 0, jnp.minimum(loss, -dual_clip * advantage), loss)
    low, high = (advantage < 0) & (ratio < 1 - clip_low), (advantage > 0) & (ratio > 1 + clip_high)
    more = {"clipped_low": low, "clipped_high": high}
    if dual_clip or delta:
        more["dual_clipped"] = (advantage < 0) & (ratio > min(b for b in (dual_clip, delta) if b))
    return jnp.where(mask, loss, 0), _stats(ratio, mask, low | high, **more)


def gmpo_loss(logp, old, advantage, mask, sequences, clip_low, clip_high):
    """Computes GMPO's loss of each token (arXiv 2507.20673): -A times the geometric mean of its sequence's clipped
    token ratios, 0 where masked.

    If A differs by token, aggregation=sequence_mean gives -mean(A) * geometric mean. Only sequence_mean gives the
    paper's loss.

    Args:
      logp, old: [R, S] current and proximal log-probs in nats. advantage, mask: [R, S] A and bool (loss tokens).
      sequences: [R, S] int, id of the slot's sequence within its row, 0 = unused.
      clip_low, clip_high: bounds on a token's log-ratio in nats (the paper: 0.4): at most clip_high where A > 0, at
        least -clip_low where A < 0.

    Returns:
      (loss, stats): `ratio` is the geometric mean; `clipped_low`, `clipped_high` are 1 where the token is at a bound;
        `clipped` is their sum.
    """
    advantage = jnp.where(mask, advantage, 0)
    log_mean, low, high = geometric_log_ratio(logp, old, advantage, mask, sequences, clip_low, clip_high)
    ratio = masked_exp(log_mean, mask)
    return -advantage * ratio, _stats(ratio, mask, low | high, clipped_low=low, clipped_high=high)


def cispo_loss(logp, old, advantage, mask, max_ratio, min_ratio, *, log_ratio=None):
    """Computes CISPO's loss of each token (arXiv 2506.13585): -sg(clip(r, min_ratio, max_ratio)) * A * logp, 0 where
    masked.

    No token loses its gradient. With old = the sampler's log-prob this is AIPO (LlamaRL, arXiv 2505.24034).

    Args:
      logp, old: current and proximal log-probs in nats, r = exp(logp - old), linear above 20 nats.
      advantage, mask: A and bool (loss tokens), of the same shape.
      max_ratio, min_ratio: absolute ratios (TRL's epsilon_high; verl, SkyRL and slime count theirs from 1). The paper
        has no lower bound (min_ratio 0).
      log_ratio: log r in place of logp - old; None = that difference.

    Returns:
      (loss, stats): stats["ratio"] is r before the bounds, stats["clipped"] marks tokens whose weight is a bound.
    """
    advantage = jnp.where(mask, advantage, 0)
    ratio = masked_exp(logp - old if log_ratio is None else log_ratio, mask)
    weight = jax.lax.stop_gradient(jnp.clip(ratio, min_ratio, max_ratio))
    loss = -weight * advantage * jnp.where(mask, logp, 0)
    return loss, _stats(ratio, mask, (ratio > max_ratio) | (ratio < min_ratio))


def sapo_loss(logp, old, advantage, mask, tau_pos, tau_neg, *, log_ratio=None):
    """Returns SAPO's loss of each token (arXiv 2511.20347), -A * (4 / tau) * sigmoid(tau * (r - 1)), and its stats.

    tau = tau_pos where A > 0, else tau_neg; both must be positive. A soft gate: the gradient is that of -A r times 4 s
    (1 - s), s the sigmoid: 1 at r = 1, falling on both sides. Nothing is clipped.

    Args:
      logp, old: current and proximal log-probs in nats, r = exp(logp - old), linear above 20 nats.
      advantage, mask: A and bool (loss tokens), of the same shape.
      tau_pos, tau_neg: temperatures of the gate.
      log_ratio: log r in place of logp - old; None = that difference.

    Returns:
      (loss, stats): loss with the shape of logp, 0 where mask is false; stats["ratio"] is r, stats["clipped"] is 0."""
    advantage = jnp.where(mask, advantage, 0)
    ratio = masked_exp(logp - old if log_ratio is None else log_ratio, mask)
    tau = jnp.where(advantage > 0, tau_pos, tau_neg).astype(ratio.dtype)
    loss = -advantage * (4 / tau) * jax.nn.sigmoid(tau * (ratio - 1))
    return loss, _stats(ratio, mask, jnp.zeros_like(mask))


def dppo_loss(logp, old, advantage, mask, low, high):
    """Computes DPPO's loss of each token with binary total variation (arXiv 2602.04879): -A * sg(min(r, 20)) * logp, 0
    outside the trust region and where masked.

    With p = exp(logp), a token is left out where A > 0 and p - p_old > high, or A <= 0 and p - p_old < -low: bounds on
    probabilities, not on ratios. The gradient is that of the paper's -A r on the other tokens, with r capped at 20 as
    in its authors' code. The paper's old is the sampler's log-prob.

    Args:
      logp, old: current and proximal log-probs in nats, r = exp(logp - old), linear above 20 nats.
      advantage, mask: A and bool (loss tokens), of the same shape.
      low, high: largest fall and rise of the token's probability.

    Returns:
      (loss, stats): stats["ratio"] is r without its cap, stats["clipped"] marks tokens left out.
    """
    advantage = jnp.where(mask, advantage, 0)
    ratio = masked_exp(logp - old, mask)
    logp = jnp.where(mask, logp, 0)
    moved = jax.lax.stop_gradient(masked_exp(logp, mask) - masked_exp(old, mask))
    out = mask & jnp.where(advantage > 0, moved > high, moved < -low)
    weight = jax.lax.stop_gradient(jnp.where(out, 0, jnp.minimum(ratio, DPPO_MAX_RATIO)))
    return -weight * advantage * logp, _stats(ratio, mask, out)


def topr_loss(logp, old, advantage, mask, sequences, by_token):
    """Computes TOPR's loss of each token (arXiv 2503.14286, eq. 8): -A * logp where A > 0, else -sg(min(r, 1)) * A *
    logp, 0 where masked.

    Tokens with A > 0 get the SFT gradient at any ratio; the others are weighted by min(r, 1), so unlikely ones are
    pushed down less.

    Args:
      logp, old: [R, S] current log-probs and, as in the paper, the sampler's, in nats.
      advantage, mask: [R, S] A and bool (loss tokens).
      sequences: [R, S] int, id of the slot's sequence within its row, 0 = unused; not read with by_token.
      by_token: False = r is the ratio of whole completions, the product of their token ratios, as in the paper;
        True = of tokens, as in ROLL.

    Returns:
      (loss, stats): stats["ratio"] is r, stats["clipped"] marks tokens with A <= 0 whose r is above 1.
    """
    advantage = jnp.where(mask, advantage, 0)
    x = jnp.where(mask, logp - old, 0)
    ratio = masked_exp(x if by_token else sequence_sum(x, sequences), mask)
    weight = jax.lax.stop_gradient(jnp.where(advantage > 0, 1, jnp.minimum(ratio, 1)))
    return -weight * advantage * jnp.where(mask, logp, 0), _stats(ratio, mask, (advantage <= 0) & (ratio > 1))


def policy_gradient_loss(logp, advantage, mask, *, old=None):
    """Returns the REINFORCE loss of each token, -A * logp (Williams 1992), and its stats. No ratio, no clipping.

    Args:
      logp, advantage: one per token, any one shape; not read where mask is false, where the loss is 0.
      old: proximal log-probs in nats, for the stats only; None = the current ones.

    Returns:
      (loss, stats): stats["ratio"] is exp(logp - old), linear above 20 nats, 1 without old and 0 where masked;
        stats["clipped"] is 0."""
    logp = jnp.where(mask, logp, 0)
    ratio = masked_exp(jnp.zeros_like(logp) if old is None else logp - old, mask)
    return -jnp.where(mask, advantage, 0) * logp, _stats(ratio, mask, jnp.zeros_like(mask))


def nll_loss(logp, mask):
    """Returns the negative log-likelihood -logp of each token, in nats, with the shape of logp; 0 where mask is false.

    VAPO's loss on positive examples (arXiv 2504.05118); the caller's weights divide by the number of their tokens."""
    return -jnp.where(mask, logp, 0)


def value_loss(values, old_values, returns, mask, clip):
    """Computes PPO's critic loss of each token, 0.5 * max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2), 0
    where masked.

    Arrays have one shape.

    Args:
      values, old_values: v now (with gradient) and before the step.
      returns: the targets R.
      mask: bool, the loss tokens.
      clip: largest change of v; None or 0: the loss is 0.5 * (v - R)^2, old_values is not read.

    Returns:
      (loss, {"clipped"}): 1 where the clipped branch won, so that the token has no gradient.
    """
    error = jnp.where(mask, values - returns, 0)
    if not clip:
        return 0.5 * jnp.square(error), {"clipped": jnp.zeros_like(error)}
    moved = jnp.where(mask, values - old_values, 0)
    bounded = jnp.where(mask, old_values - returns, 0) + jnp.clip(moved, -clip, clip)
    won = (jnp.abs(moved) > clip) & (jnp.square(bounded) > jnp.square(error))
    return 0.5 * jnp.square(jnp.where(won, bounded, error)), {"clipped": won.astype(error.dtype)}


def explained_variance(values_T, returns_T, mask_T) -> float:
    """Returns 1 - var(R - v) / var(R) over the tokens where mask is true; 1 = perfect, 0 if var(R) is 0 or there is no
    token.

    Host numpy, float64; variances have ddof 0.

    Args:
      values_T, returns_T: [T] the critic's values v and its targets R.
      mask_T: [T] bool."""
    mask = np.asarray(mask_T, bool)
    returns = np.asarray(returns_T, np.float64)[mask]
    error = returns - np.asarray(values_T, np.float64)[mask]
    spread = returns.var() if len(returns) else 0.0
    return float(1 - error.var() / spread) if spread > 0 else 0.0


def _log_ratio(t: Tokens, cfg):
    return ratio_of(t.logp, t.old, t.mask, t.sequences, cfg.ratio)


def _clip(t: Tokens, cfg):
    if cfg.ratio == "geometric":
        if cfg.dual_clip or cfg.delta:
            raise ValueError("ratio='geometric' clips tokens before their mean: dual_clip and delta have no meaning "
                             "with it")
        return gmpo_loss(t.logp, t.old, t.advantage, t.mask, t.sequences, cfg.clip_low, cfg.clip_high)
    bounds = cfg.clip_low, cfg.clip_high
    return clipped_policy_loss(t.logp, t.old, t.advantage, t.mask, *bounds, log_ratio=_log_ratio(t, cfg),
                               dual_clip=cfg.dual_clip, delta=cfg.delta)


def _cispo(t: Tokens, cfg):
    bounds = cfg.cispo_max_ratio, cfg.cispo_min_ratio
    return cispo_loss(t.logp, t.old, t.advantage, t.mask, *bounds, log_ratio=_log_ratio(t, cfg))


def _sapo(t: Tokens, cfg):
    taus = cfg.sapo_tau_pos, cfg.sapo_tau_neg
    return sapo_loss(t.logp, t.old, t.advantage, t.mask, *taus, log_ratio=_log_ratio(t, cfg))


def _dppo(t: Tokens, cfg):
    return dppo_loss(t.logp, t.old, t.advantage, t.mask, cfg.dppo_low, cfg.dppo_high)


def _topr(t: Tokens, cfg):
    return topr_loss(t.logp, t.old, t.advantage, t.mask, t.sequences, cfg.ratio == "token")


def _pg(t: Tokens, cfg):
    return policy_gradient_loss(t.logp, t.advantage, t.mask, old=t.old)


class PolicyLoss(NamedTuple):
    """A policy loss and what it may be configured with: an entry of POLICY_LOSSES. Calling it calls `function`.

    Attributes:
      function: f(tokens: Tokens, cfg) -> (loss, stats), see `register_policy_loss`.
      ratios: values of algorithm.ratio that it takes; () = all.
      options: names below `algorithm` that this loss reads and others may not (metrics also read clip_low and
        clip_high). None = unknown: no option is refused.
      unbiased: on-policy, its gradient is that of the expected reward, as certify shows.
    """

    function: Callable
    ratios: tuple[str, ...] = ()
    options: tuple[str, ...] | None = None
    unbiased: bool = False

    def __call__(self, tokens: Tokens, cfg):
        """Returns (loss [R, S] of each token, not aggregated, 0 where masked; stats: name -> [R, S]).

        cfg: the options below `algorithm`. Raises ValueError if cfg.ratio is none of `ratios`, and `clip` also for
        dual_clip or delta with ratio geometric."""
        if self.ratios and cfg.ratio not in self.ratios:
            raise ValueError(f"ratio={cfg.ratio!r}: this policy loss takes {' or '.join(self.ratios)}")
        return self.function(tokens, cfg)


_BY_SEQUENCE = ("token", "sequence", "sequence_token")
POLICY_LOSSES: dict[str, PolicyLoss] = {
    "clip": PolicyLoss(_clip, options=("dual_clip", "delta"), unbiased=True),
    "cispo": PolicyLoss(_cispo, _BY_SEQUENCE, ("cispo_max_ratio", "cispo_min_ratio"), unbiased=True),
    "sapo": PolicyLoss(_sapo, _BY_SEQUENCE, ("sapo_tau_pos", "sapo_tau_neg"), unbiased=True),
    "dppo": PolicyLoss(_dppo, ("token",), ("dppo_low", "dppo_high"), unbiased=True),
    "topr": PolicyLoss(_topr, ("token", "sequence"), ()),
    "pg": PolicyLoss(_pg, ("token",), (), unbiased=True),
}


def register_policy_loss(name: str):
    """Returns a decorator that registers a policy loss as `name`, with the signature of the built-in ones:

        @register_policy_loss("sft_like")
        def sft_like(tokens: Tokens, cfg):
            positive = tokens.mask & (tokens.advantage > 0)
            loss = -jnp.where(positive, tokens.logp, 0)
            return loss, {"positive": positive.astype(loss.dtype)}

    `tokens` is a Tokens, cfg has the attributes clip_low, clip_high, dual_clip, delta, ratio, cispo_max_ratio,
    cispo_min_ratio, sapo_tau_pos, sapo_tau_neg, dppo_low, dppo_high, and user, the table config.user. The loss returns
    per-token (loss, stats), 0 where masked, not aggregated. Mask before exp, log and division (jnp.where(mask, x, 0)):
    masked entries of the arrays are undefined. The decorator returns the function; it raises ValueError if another
    function, a built-in one too, has the name.
    """

    def register(function):
        if POLICY_LOSSES.setdefault(name, PolicyLoss(function)).function is not function:
            raise ValueError(f"policy loss {name!r} exists already")
        return function

    return register


def policy_loss(name: str) -> PolicyLoss:
    """Returns the policy loss registered as `name`: f(tokens, cfg) -> (loss, stats). Raises ValueError if unknown."""
    if name not in POLICY_LOSSES:
        raise ValueError(f"policy_loss={name!r}: expected {', '.join(sorted(POLICY_LOSSES))}")
    return POLICY_LOSSES[name]
