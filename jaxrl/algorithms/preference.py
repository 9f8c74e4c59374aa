"""Preference losses: (loss, derivative) on [N] numbers, on the host in float64.

training.objective.sequence_weights turns the derivative into token weights. All are means over the whole step.

Notation: s = sum of a completion's log-probs under the policy, r = under the reference, in nats, |y| = its tokens;
x = s - r, m = s / |y|; of a pair c is the chosen completion, w the rejected, z = x_c - x_w, d = beta z; sp(a) =
log(1 + e^a) = -log sigmoid(-a); eps = label_smoothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

MAX_MEAN_LOGP = -1e-9  # odds are taken at most at this mean log-prob (a completion of probability 1 has infinite odds)


class Table(NamedTuple):
    """The pairs and labels of N completions.

    Attributes:
      chosen, rejected: [P] indices, one pair each.
      good: [N] bool, chosen or labelled as good.
    """

    chosen: np.ndarray
    rejected: np.ndarray
    good: np.ndarray


class PreferenceBatch(NamedTuple):
    """The inputs of a preference loss, and the symbols of the losses' docstrings.

    x = s - r, m = s / |y|, |y| = tokens of a completion; c is a pair's chosen completion, w its rejected one; beta, eps
    (label_smoothing) and others are options.

    Attributes:
      s: [N] float64, log-prob of each completion under the policy, summed over its tokens (nats).
      r: [N] float64, the same under the reference; 0 if the loss needs none.
      lengths: [N] float64, tokens of each completion.
      table: pairs and labels.
      z0: constant of `kto`, an estimate of KL(policy || reference) from mismatched completions, at least 0; 0
        elsewhere.
      options: all below `preference`.
    """

    s: np.ndarray
    r: np.ndarray
    lengths: np.ndarray
    table: Table
    z0: float
    options: Any

    @property
    def x(self):
        """Log-ratio of each completion to the reference, s - r, in nats: [N] float64."""
        return self.s - self.r

    def sides(self, values_N):
        """Returns ([P] values of the chosen completions, [P] values of the rejected ones), from values [N] by
        completion."""
        return values_N[self.table.chosen], values_N[self.table.rejected]

    def pairs(self, loss_P, slope_c, slope_w):
        """Returns (mean of the pairs' losses, 0 without pairs; its derivative by s, float64 [N]).

        Args:
          loss_P: [P] loss of each pair.
          slope_c, slope_w: [P] derivatives of a pair's loss by s of its chosen and of its rejected completion;
            divided by P here."""
        derivative, count = np.zeros(len(self.s)), max(len(loss_P), 1)
        np.add.at(derivative, self.table.chosen, np.broadcast_to(slope_c, loss_P.shape) / count)
        np.add.at(derivative, self.table.rejected, np.broadcast_to(slope_w, loss_P.shape) / count)
        return float(np.sum(loss_P) / count), derivative


def sp(a):
    """Returns softplus, log(1 + e^a), elementwise and without overflow."""
    return np.logaddexp(0.0, a)


def sigmoid(a):
    """Returns 1 / (1 + e^-a), elementwise and without overflow."""
    return np.exp(-sp(-a))


def _smoothed(d, eps):
    """Returns (1 - eps) sp(-d) + eps sp(d), and its derivative by d."""
    return (1 - eps) * sp(-d) + eps * sp(d), -(1 - eps) * sigmoid(-d) + eps * sigmoid(d)


def _of_difference(batch: PreferenceBatch, loss, slope):
    """Returns (mean, derivative [N]) of a loss of d, from its derivative by d."""
    return batch.pairs(loss, batch.options.beta * slope, -batch.options.beta * slope)


def _d(batch: PreferenceBatch):
    x_c, x_w = batch.sides(batch.x)
    return batch.options.beta * (x_c - x_w)


def dpo(batch: PreferenceBatch):
    """Computes DPO (arXiv 2305.18290, eq. 7): softplus(-d), d = beta (x_c - x_w); with label_smoothing eps > 0
    conservative DPO: (1 - eps) softplus(-d) + eps softplus(d).

    Returns (mean over pairs, its derivative by s, [N] float64); symbols: PreferenceBatch.
    """
    return _of_difference(batch, *_smoothed(_d(batch), batch.options.label_smoothing))


def robust(batch: PreferenceBatch):
    """Computes robust DPO (arXiv 2403.00409, eq. 12), unbiased where a share eps (label_smoothing) of the labels is
    flipped: ((1 - eps) softplus(-d) - eps softplus(d)) / (1 - 2 eps), d = beta (x_c - x_w). Returns (mean over pairs,
    its derivative by s, [N] float64); symbols: PreferenceBatch."""
    d, eps = _d(batch), batch.options.label_smoothing
    loss = ((1 - eps) * sp(-d) - eps * sp(d)) / (1 - 2 * eps)
    return _of_difference(batch, loss, (-(1 - eps) * sigmoid(-d) - eps * sigmoid(d)) / (1 - 2 * eps))


def hinge(batch: PreferenceBatch):
    """Computes SLiC's loss (arXiv 2305.10425) with log-ratios (arXiv 2309.06657): max(0, 1 - d), d = beta (x_c - x_w).

    Returns (mean over pairs, its derivative by s, [N] float64); symbols: PreferenceBatch.
    """
    d = _d(batch)
    return _of_difference(batch, np.maximum(1 - d, 0), -(d < 1).astype(float))


def ipo(batch: PreferenceBatch):
    """Computes IPO (arXiv 2310.12036, eq. 17): (x_c - x_w - 1 / (2 beta))^2. With ipo_mean each side's x is divided by
    its |y|.

    Returns (mean over pairs, its derivative by s, [N] float64); symbols: PreferenceBatch.
    """
    o, x = batch.options, batch.x
    per = batch.sides(1 / batch.lengths) if o.ipo_mean else (1.0, 1.0)
    x_c, x_w = batch.sides(x)
    error = x_c * per[0] - x_w * per[1] - 1 / (2 * o.beta)
    return batch.pairs(error**2, 2 * error * per[0], -2 * error * per[1])


def dpo_norm(batch: PreferenceBatch):
    """Computes DPO of means per token (arXiv 2411.15124, sec. 5.1.1): softplus(-beta (x_c / |c| - x_w / |w|)).

    Returns (mean over pairs, its derivative by s, [N] float64); symbols: PreferenceBatch.
    """
    o, (n_c, n_w) = batch.options, batch.sides(batch.lengths)
    x_c, x_w = batch.sides(batch.x)
    loss, slope = _smoothed(o.beta * (x_c / n_c - x_w / n_w), 0.0)
    return batch.pairs(loss, o.beta * slope / n_c, -o.beta * slope / n_w)


def exo(batch: PreferenceBatch):
    """Computes EXO for pairs (arXiv 2402.00856, eq. 16): KL of (sigmoid(d), sigmoid(-d)) to (1 - eps, eps).

    d = beta (x_c - x_w); eps = label_smoothing, between 0 and 1. Returns (mean over pairs, its derivative by s, [N]
    float64); symbols: PreferenceBatch.
    """
    d, eps = _d(batch), batch.options.label_smoothing
    q, other = sigmoid(d), sigmoid(-d)
    loss = q * (-sp(-d) - np.log1p(-eps)) + other * (-sp(d) - np.log(eps))
    return _of_difference(batch, loss, q * other * (d - np.log1p(-eps) + np.log(eps)))


def discopop(batch: PreferenceBatch):
    """Computes DiscoPOP's log-ratio modulated loss (arXiv 2406.08414, eq. 5): (1 - g) softplus(-d) + g e^-d, g =
    sigmoid(d / tau).

    d = beta (x_c - x_w); tau = discopop_tau. Returns (mean over pairs, its derivative by s, [N] float64); symbols:
    PreferenceBatch.
    """
    d, tau = _d(batch), batch.options.discopop_tau
    g, off = sigmoid(d / tau), sigmoid(-d / tau)
    power = np.exp(-d - sp(-d / tau))  # g e^-d
    slope = -off * sigmoid(-d) - power + off / tau * (power - g * sp(-d))
    return _of_difference(batch, off * sp(-d) + power, slope)


def _of_sides(batch: PreferenceBatch, loss, slope_a, slope_b):
    """Returns (mean, derivative [N]) of a loss of a = beta x_c and b = beta x_w."""
    return batch.pairs(loss, batch.options.beta * slope_a, batch.options.beta * slope_b)


def _a_b(batch: PreferenceBatch):
    return batch.sides(batch.options.beta * batch.x)


def nca(batch: PreferenceBatch):
    """Computes NCA for pairs (arXiv 2402.05369, eq. 12): softplus(-a) + softplus(a) / 2 + softplus(b) / 2, a = beta
    x_c, b = beta x_w.

    Returns (mean over pairs, its derivative by s, [N] float64); symbols: PreferenceBatch.
    """
    a, b = _a_b(batch)
    return _of_sides(batch, sp(-a) + (sp(a) + sp(b)) / 2, -sigmoid(-a) + sigmoid(a) / 2, sigmoid(b) / 2)


def bco(batch: PreferenceBatch):
    """Computes BCO for pairs (arXiv 2404.04656) with reward shift 0: softplus(-a) + softplus(b), a = beta x_c, b = beta
    x_w.

    Returns (mean over pairs, its derivative by s, [N] float64); symbols: PreferenceBatch.
    """
    a, b = _a_b(batch)
    return _of_sides(batch, sp(-a) + sp(b), -sigmoid(-a), sigmoid(b))


def apo_zero(batch: PreferenceBatch):
    """Computes APO-zero (arXiv 2408.06266, eq. 7): sigmoid(-a) + sigmoid(b), a = beta x_c, b = beta x_w.

    Returns (mean over pairs, its derivative by s, [N] float64); symbols: PreferenceBatch.
    """
    a, b = _a_b(batch)
    return _of_sides(batch, sigmoid(-a) + sigmoid(b), -sigmoid(a) * sigmoid(-a), sigmoid(b) * sigmoid(-b))


def apo_down(batch: PreferenceBatch):
    """Computes APO-down (arXiv 2408.06266, eq. 8): sigmoid(a) + sigmoid(b - a), a = beta x_c, b = beta x_w.

    Returns (mean over pairs, its derivative by s, [N] float64); symbols: PreferenceBatch.
    """
    a, b = _a_b(batch)
    lead = sigmoid(a - b) * sigmoid(b - a)
    return _of_sides(batch, sigmoid(a) + sigmoid(b - a), sigmoid(a) * sigmoid(-a) - lead, lead)


def sppo(batch: PreferenceBatch):
    """Computes SPPO with hard labels (arXiv 2405.00675, eq. 4.7): (x_c - 1 / (2 beta))^2 + (x_w + 1 / (2 beta))^2.

    Returns (mean over pairs, its derivative by s, [N] float64); symbols: PreferenceBatch.
    """
    (x_c, x_w), half = batch.sides(batch.x), 0.5 / batch.options.beta
    return batch.pairs((x_c - half)**2 + (x_w + half)**2, 2 * (x_c - half), 2 * (x_w + half))


def aot(batch: PreferenceBatch):
    """Computes paired AOT (arXiv 2406.05882): `dpo`'s loss of d = beta (a - b), a and b order statistics of s_c - s_w
    and of r_c - r_w over the step.

    The k-th smallest difference under the policy is compared with the k-th smallest under the reference: softplus(-d),
    with label_smoothing eps > 0 (1 - eps) softplus(-d) + eps softplus(d). Returns (mean over pairs, its derivative by
    s, [N] float64); symbols: PreferenceBatch.
    """
    ours, theirs = (np.subtract(*batch.sides(v)) for v in (batch.s, batch.r))
    order, beta = np.argsort(ours, kind="stable"), batch.options.beta
    loss, slope = _smoothed(beta * (ours[order] - np.sort(theirs)), batch.options.label_smoothing)
    by_pair = np.empty(len(order))
    by_pair[order] = beta * slope
    return batch.pairs(loss, by_pair, -by_pair)


def aot_unpaired(batch: PreferenceBatch):
    """Computes unpaired AOT (arXiv 2406.05882): `dpo`'s loss of d = beta (a - b), a and b order statistics of x_c and
    of x_w over the step.

    The k-th smallest x_c is compared with the k-th smallest x_w: softplus(-d), with label_smoothing eps > 0 (1 - eps)
    softplus(-d) + eps softplus(d). Returns (mean over pairs, its derivative by s, [N] float64); symbols:
    PreferenceBatch.
    """
    (x_c, x_w), beta = batch.sides(batch.x), batch.options.beta
    first, second = np.argsort(x_c, kind="stable"), np.argsort(x_w, kind="stable")
    loss, slope = _smoothed(beta * (x_c[first] - x_w[second]), batch.options.label_smoothing)
    slope_c, slope_w = np.empty(len(first)), np.empty(len(first))
    slope_c[first], slope_w[second] = beta * slope, -beta * slope
    return batch.pairs(loss, slope_c, slope_w)


def simpo(batch: PreferenceBatch):
    """Computes SimPO (arXiv 2405.14734, eq. 6): softplus(-d), d = beta (m_c - m_w) - gamma, m = s / |y|, gamma =
    simpo_gamma; with label_smoothing eps > 0: (1 - eps) softplus(-d) + eps softplus(d).

    No reference. Returns (mean over pairs, its derivative by s, [N] float64); symbols: PreferenceBatch.
    """
    o, (n_c, n_w) = batch.options, batch.sides(batch.lengths)
    s_c, s_w = batch.sides(batch.s)
    loss, slope = _smoothed(o.beta * (s_c / n_c - s_w / n_w) - o.simpo_gamma, o.label_smoothing)
    return batch.pairs(loss, o.beta * slope / n_c, -o.beta * slope / n_w)


def cpo(batch: PreferenceBatch):
    """Computes CPO's preference part (arXiv 2401.08417, eq. 3): softplus(-d), d = beta (s_c - s_w); with
    label_smoothing eps > 0: (1 - eps) softplus(-d) + eps softplus(d).

    No reference; the paper's other part is `nll`. Returns (mean over pairs, its derivative by s, [N] float64); symbols:
    PreferenceBatch.
    """
    s_c, s_w = batch.sides(batch.s)
    return _of_difference(batch, *_smoothed(batch.options.beta * (s_c - s_w), batch.options.label_smoothing))


def orpo(batch: PreferenceBatch):
    """Computes ORPO (arXiv 2403.07691, eq. 6): nll + beta softplus(o_w - o_c), o = m - log(1 - e^m), m = s / |y|.

    No reference; m is at most MAX_MEAN_LOGP, without gradient there. Returns (`nll`, a mean over the tokens of good
    completions, plus the mean over pairs; its derivative by s, [N] float64); symbols: PreferenceBatch.
    """
    beta, m = batch.options.beta, np.minimum(batch.s / batch.lengths, MAX_MEAN_LOGP)
    o_c, o_w = batch.sides(m - np.log(-np.expm1(m)))
    by_sum = np.where(m < MAX_MEAN_LOGP, -1 / np.expm1(m), 0.0) / batch.lengths  # do/ds
    slope = -beta * sigmoid(o_w - o_c)
    odds = batch.pairs(beta * sp(o_w - o_c), *(sign * slope * side for sign, side in zip(
        (1, -1), batch.sides(by_sum), strict=True)))
    return tuple(sum(both) for both in zip(nll(batch), odds, strict=True))


def nll(batch: PreferenceBatch):
    """Computes the negative log-likelihood per token of the good completions: -sum s / sum |y| over all of them, in
    nats.

    Returns (loss, its derivative by s, [N] float64: -1 / their tokens at good completions, else 0); symbols:
    PreferenceBatch."""
    good = batch.table.good
    tokens = max(batch.lengths[good].sum(), 1.0)
    return float(-batch.s[good].sum() / tokens), np.where(good, -1 / tokens, 0.0)


def _mean_unpaired(batch: PreferenceBatch, gain, slope):
    """Returns (mean over completions of weight (1 - gain), derivative), weight by label. slope: d gain / d s."""
    o = batch.options
    weight = np.where(batch.table.good, o.desirable_weight, o.undesirable_weight) / max(len(batch.s), 1)
    return float(np.sum(weight * (1 - gain))), -weight * slope


def kto(batch: PreferenceBatch):
    """Computes KTO (arXiv 2402.01306, eq. 8): the mean over completions of weight (1 - sigmoid(v)), v = beta (x - z0)
    for good completions and -beta (x - z0) for others, without gradient through z0.

    weight = desirable_weight for good completions, else undesirable_weight; the divisor is N, not the sum of weights.
    Returns (that mean, its derivative by s, [N] float64); symbols: PreferenceBatch.
    """
    signed = np.where(batch.table.good, batch.options.beta, -batch.options.beta)
    v = signed * (batch.x - batch.z0)
    return _mean_unpaired(batch, sigmoid(v), signed * sigmoid(v) * sigmoid(-v))


def apo_zero_unpaired(batch: PreferenceBatch):
    """Computes APO-zero of unpaired completions (arXiv 2408.06266): `kto` with z0 = 0, the mean over completions of
    weight (1 - sigmoid(v)), v = beta x for good completions and -beta x for others.

    weight = desirable_weight for good completions, else undesirable_weight; the divisor is N, not the sum of weights.
    Returns (that mean, its derivative by s, [N] float64); symbols: PreferenceBatch.
    """
    return kto(batch._replace(z0=0.0))


class Loss(NamedTuple):
    """A preference loss and what it reads: an entry of LOSSES.

    Attributes:
      function: PreferenceBatch -> (loss, dloss/ds [N] float64).
      unpaired: reads completions with labels (a pair counts as a good and a bad one); False = reads pairs.
      reference: reads r, the reference's log-probs.
      per_token: the reward that metrics show for it is divided by the completion's tokens.
      needs: the option below `preference` that must be on; "" = none.
      options: those below `preference` that it reads.
    """

    function: Callable
    unpaired: bool = False
    reference: bool = True
    per_token: bool = False
    needs: str = ""
    options: tuple[str, ...] = ("beta",)


_SMOOTHED = ("beta", "label_smoothing")
LOSSES: dict[str, Loss] = {
    "dpo": Loss(dpo, options=_SMOOTHED),
    "robust": Loss(robust, options=_SMOOTHED),
    "hinge": Loss(hinge),
    "ipo": Loss(ipo, options=("beta", "ipo_mean")),
    "dpo_norm": Loss(dpo_norm),
    "exo": Loss(exo, needs="label_smoothing", options=_SMOOTHED),
    "nca": Loss(nca),
    "bco": Loss(bco),
    "apo_zero": Loss(apo_zero),
    "apo_down": Loss(apo_down),
    "sppo": Loss(sppo),
    "aot": Loss(aot, options=_SMOOTHED),
    "aot_unpaired": Loss(aot_unpaired, options=_SMOOTHED),
    "discopop": Loss(discopop, options=("beta", "discopop_tau")),
    "kto": Loss(kto, unpaired=True, options=("beta", "desirable_weight", "undesirable_weight")),
    "apo_zero_unpaired": Loss(apo_zero_unpaired, unpaired=True,
                              options=("beta", "desirable_weight", "undesirable_weight")),
    "orpo": Loss(orpo, reference=False, per_token=True),
    "simpo": Loss(simpo, reference=False, per_token=True, options=(*_SMOOTHED, "simpo_gamma")),
    "cpo": Loss(cpo, reference=False, options=_SMOOTHED),
    "nll": Loss(nll, unpaired=True, reference=False, options=()),
}


def weighted(options) -> dict[str, float]:
    """Returns {name of a loss: its weight} for the options below `preference`.

    Weights are loss_weights, or 1 each if there are none; rpo_alpha is added to the weight of `nll`. Raises ValueError
    if loss_weights has another length than loss.
    """
    weights = options.loss_weights or (1.0,) * len(options.loss)
    out = dict(zip(options.loss, weights, strict=True))
    return out | ({"nll": out.get("nll", 0.0) + options.rpo_alpha} if options.rpo_alpha else {})


def needs_reference(options) -> bool:
    """Returns whether any loss of the options below `preference` reads the reference's log-probs."""
    return any(LOSSES[name].reference for name in options.loss)


def preference_loss(policy_N, reference_N, lengths_N, table: Table, options, z0: float = 0.0):
    """Computes the weighted sum of the losses that `options` name.

    Args:
      policy_N, reference_N: [N] s and r, a completion's log-probs under policy and reference summed over its tokens, in
        nats; reference_N is None if no loss reads it.
      lengths_N: [N] tokens of each; counted as at least 1.
      table: pairs and labels of the N completions.
      options: all below `preference` (schema), or an object with these attributes.
      z0: kto's, max(0, mean of x over prompts with completions of other prompts) of the step.

    Returns:
      (loss, dloss/ds [N] float64, metrics). The reward of a completion is the first loss's: beta x, of cpo and nll
      beta s, of simpo and orpo beta m. reward/chosen and reward/rejected are its means over good and other completions,
      absent where there are none. reward/margin is the mean difference over pairs; without pairs the difference of the
      two means, absent if one is. reward/accuracy is the share of pairs whose chosen completion has the larger reward,
      ties counting half; absent without pairs. With several losses loss/<name> is each one's value before its weight.
    """
    s = np.asarray(policy_N, np.float64)
    r = np.zeros(len(s)) if reference_N is None else np.asarray(reference_N, np.float64)
    batch = PreferenceBatch(s, r, np.maximum(np.asarray(lengths_N, np.float64), 1.0), table, float(z0), options)
    loss, derivative, metrics = 0.0, np.zeros(len(s)), {}
    parts = weighted(options)
    for name, weight in parts.items():
        value, slope = LOSSES[name].function(batch)
        loss, derivative = loss + weight * value, derivative + weight * slope
        metrics |= {f"loss/{name}": value} if len(parts) > 1 else {}
    return loss, derivative, metrics | _rewards(batch)


def _rewards(batch: PreferenceBatch) -> dict[str, float]:
    first, table = LOSSES[batch.options.loss[0]], batch.table
    reward = batch.options.beta * (batch.x if first.reference else batch.s)
    reward = reward / batch.lengths if first.per_token else reward
    out = {f"reward/{name}": float(reward[which].mean())
           for name, which in (("chosen", table.good), ("rejected", ~table.good)) if which.any()}
    if len(table.chosen):
        lead = np.subtract(*batch.sides(reward))
        return out | {"reward/margin": float(lead.mean()), "reward/accuracy": float((np.sign(lead) + 1).mean() / 2)}
    return out | ({"reward/margin": out["reward/chosen"] - out["reward/rejected"]} if len(out) == 2 else {})
