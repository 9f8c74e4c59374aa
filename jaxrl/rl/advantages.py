"""Advantages of a batch: turns scores into one number per loss token, on the host in float64.

`rl.step.prepare` calls `advantages`, or `advantages_by_source` where the data has sources; the formulas are in
jaxrl.algorithms. Nothing here touches a device.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from ml_collections import FrozenConfigDict

from jaxrl.algorithms import (
    ADVANTAGES,
    AdvantageInputs,
    adaptive_lambda,
    anchor_advantages,
    clip_advantages,
    gae,
    group_advantages,
    preferred_advantages,
    token_returns,
    token_rewards,
    turn_advantages,
    whiten,
)
from jaxrl.config.user_code import imported
from jaxrl.errors import ConfigError, type_of


class Advantages(NamedTuple):
    """Advantages of a batch of N trajectories and T tokens, and what else their estimator computes; `returns` is None
    but for gae.

    An estimator alone may leave numbers in `tokens` outside the loss mask and in trajectories without a score;
    `advantages` sets them to 0. zero_signal is decided before whitening and clipping: for turn, gigpo and dpo by the
    advantages; for the others by algorithms.group_advantages of the scores (of outcome and of a user's function less
    their KL), whatever the estimator makes of them."""

    tokens: np.ndarray  # [T] float64; of `advantages` 0 outside the loss mask and in trajectories without a score
    returns: np.ndarray | None  # [T] float64: targets of the critic; its own value where the score is absent
    zero_signal: np.ndarray  # [N] bool: trajectories of groups without signal
    metrics: Mapping[str, float] = {}  # of the estimator, by name


def advantages(options, traj, scores, *, baseline=None, kl=None, values=None, rewards=None, columns=None,
               user=None, scale=1.0, part=None) -> Advantages:
    """Computes one advantage per loss token with the estimator `algorithm.advantage`.

    With kl.placement=reward, kl.coef * KL is subtracted from each score. The score minus its baseline, over its scale,
    goes to the estimator:

        outcome  the sequence's value at each loss token (the KL of a sequence is the sum over its tokens; the same
                 holds for a user's function, which receives scores minus that KL)
        returns  reward to go: turn rewards if there are any, the remaining value at the last loss token, the KL at
                 each token
        gae      the same rewards with a critic
        turn     the same rewards of the raw score, summed from each turn on, minus that of the group's other members
        gigpo    outcome, plus anchor_coef times the same among the group's turns that were decided in one state
        dpo      of the best and the worst of a group, the advantages whose gradient is DPO's; the KL (k1) is its
                 log-ratios

    Sources: gae arXiv 1506.02438, gigpo arXiv 2505.10978, dpo arXiv 2402.04792 (OAIF); those of outcome stand at
    algorithms.group_advantages, with its divisors. With `whiten` the result is whitened over the loss tokens of
    sequences with a score (whiten_mean, whiten_std; algorithms.whiten); advantage_low and advantage_high then clip it.

    Args:
      options: the group `algorithm` of a Spec.
      traj: Trajectories with T tokens and N trajectories. The columns `reward`, `turn` and `anchor` are
        rewards, numbers and states of turns. Without them a trajectory is one turn without a state: `turn` is
        then the leave-one-out baseline.
      scores: [N] float64, NaN = absent.
      baseline: [N] float64, scores of greedy completions, NaN = absent; read with advantage_mean=greedy only.
      kl: [T] float64 in nats, or None if it is not subtracted from the reward; dpo needs it.
      values: [T] float of the critic, for gae.
      rewards, columns, user: passed on to a user's function.
      scale: reward.scale, which is in the scores already but not in the column `reward`.
      part: [N] bool, trajectories that an estimator's metrics are of; None = all.

    Returns:
      Advantages, 0 outside loss_mask and in sequences without a score.

    Raises:
      ConfigError: a user's function failed, or returned another shape or numbers that are not finite.
      ValueError: advantage_mean=greedy without a baseline.
    """
    inputs = EstimatorInputs(options, traj, scores, baseline, kl, values, rewards, columns, user, scale, part)
    result = ESTIMATORS.get(options.advantage, user_advantages)(inputs)
    present = inputs.present
    tokens = np.where(present, result.tokens, 0.0)
    if options.whiten:
        tokens = whiten(tokens, present, traj.spread(traj.group), options.whiten_mean, options.whiten_std)
    if (options.advantage_low, options.advantage_high) != (None, None):
        tokens = clip_advantages(tokens, options.advantage_low, options.advantage_high)
    return result._replace(tokens=np.where(present, tokens, 0.0))


def advantages_by_source(sources, of_N, options, traj, scores, **inputs) -> Advantages:
    """Computes `advantages` where data sources override options of `algorithm`.

    Trajectories of a source with a table `algorithm` take their statistics (group, batch, whitening) among themselves,
    all others among theirs; an estimator sees the scores of the rest as absent. The source's `coef` multiplies the
    advantages at the end, after whitening and clipping.

    Args:
      sources: data.sources. of_N: [N] source names of the trajectories.
      options, traj: the group `algorithm` of a Spec; Trajectories with T tokens.
      scores: [N] float64, NaN = absent. inputs: the keyword arguments of `advantages`.

    Returns:
      Advantages; an estimator's metrics are those of the last source, by name, that has any, over its own trajectories
      (all sources without a table count as the first one). If a source has a table, `returns` is None, whatever the
      estimator."""
    names = np.asarray(of_N, str)
    tables = {name: entry["algorithm"] for name, entry in sources.items() if entry.get("algorithm")}
    table_of_N = np.where(np.isin(names, list(tables)), names, "")
    if tables:
        result = Advantages(np.zeros(len(traj.tokens)), None, np.zeros(len(names), bool))  # every entry is set below
    else:
        result = advantages(options, traj, scores, **inputs)
    for name in np.unique(table_of_N) if tables else ():
        mine = table_of_N == name
        overridden = FrozenConfigDict({**options, **tables.get(name, {})})
        new = advantages(overridden, traj, np.where(mine, scores, np.nan), **inputs, part=mine)
        result = Advantages(np.where(traj.spread(mine), new.tokens, result.tokens), None,
                            np.where(mine, new.zero_signal, result.zero_signal), {**result.metrics, **new.metrics})
    coefs = np.array([sources[name].get("coef", 1.0) if name in sources else 1.0 for name in names])
    return result if (coefs == 1).all() else result._replace(tokens=result.tokens * traj.spread(coefs))


class EstimatorInputs(NamedTuple):
    """The inputs of an advantage estimator: the arguments of `advantages`, described there.

    scores and baseline are [N] float64, NaN = absent; kl (nats) and values are [T] float; N trajectories, T tokens of
    `traj`."""

    options: Any
    traj: Any
    scores: np.ndarray
    baseline: np.ndarray | None
    kl: np.ndarray | None
    values: np.ndarray | None
    rewards: dict | None
    columns: dict | None
    user: Any
    scale: float
    part: np.ndarray | None = None

    @property
    def present(self):
        """Loss tokens of the sequences whose score is finite: [T] bool."""
        return self.traj.spread(np.isfinite(self.scores)) & self.traj.loss_mask

    def scores_less_kl(self):
        """Returns [N] float64: each score minus kl.coef times the KL (nats) summed over the sequence's loss tokens. NaN
        stays NaN; without a KL the scores themselves."""
        if self.kl is None:
            return self.scores
        return self.scores - self.options.kl.coef * self.traj.total(self.kl)

    def relative_to_group(self, scores):
        """Computes `group_advantages` of scores [N] float64 with the job's advantage_mean and advantage_std.

        Returns ([N] float64, scores minus baseline over scale, 0 for absent scores; [N] bool, sequences of groups where
        all of these are 0)."""
        return group_advantages(scores, self.traj.group, mean=self.options.advantage_mean,
                                std=self.options.advantage_std, baseline_N=self.baseline)

    def token_rewards(self, values):
        """Returns rewards [T] float64 that add up to each sequence's entry in `values` [N] float64, minus kl.coef times
        the KL per token.

        See algorithms.token_rewards; sequences without a score or without loss tokens get 0."""
        traj, of_turns = self.traj, self.traj.columns.get("reward")
        return token_rewards(np.where(np.isfinite(self.scores), values, np.nan), traj.loss_mask, traj.spans, self.kl,
                             self.options.kl.coef, None if of_turns is None else self.scale * of_turns.astype(float))

    @property
    def turn_arguments(self) -> tuple:
        """The arguments that turn_advantages and anchor_advantages share: (mask_T bool, offsets [N+1] int, groups_N
        int, present_N bool, gamma)."""
        traj = self.traj
        return traj.loss_mask, traj.spans, traj.group, np.isfinite(self.scores), self.options.turn_gamma


def outcome(inputs: EstimatorInputs) -> Advantages:
    """Computes one advantage per sequence, at all its tokens: (score - kl.coef * summed KL - baseline) / scale,
    with the baseline and scale of algorithms.group_advantages. Absent scores give 0; `advantages` masks the tokens.
    """
    numbers, zero = inputs.relative_to_group(inputs.scores_less_kl())
    return Advantages(inputs.traj.spread(numbers), None, zero)


def returns(inputs: EstimatorInputs) -> Advantages:
    """Computes the discounted (gamma) sum of token rewards from each loss token to the trajectory's end, of scores
    relative to their groups (algorithms.token_returns). Nothing is divided by the number of tokens.

    The token rewards are the turns' (column `reward`), if there are any, the remainder of the score at the last loss
    token, and -kl.coef * KL at each loss token. Tokens outside the loss get 0.
    """
    numbers, zero = inputs.relative_to_group(inputs.scores)
    traj = inputs.traj
    tokens = token_returns(inputs.token_rewards(numbers), traj.loss_mask, traj.spans, inputs.options.gamma)
    return Advantages(tokens, None, zero)


def gae_with_critic(inputs: EstimatorInputs) -> Advantages:
    """Computes generalized advantage estimation (arXiv 1506.02438) with the critic's values (algorithms.gae).

    lam, or lam_alpha's length-adaptive lambda, is the advantages'; the critic's targets use critic_lam if it is set,
    else lam. Outside the loss tokens and in sequences without a score the targets are the critic's own values; the
    advantages of the latter take absent rewards as 0, and `advantages` masks them."""
    options, traj, values = inputs.options, inputs.traj, np.asarray(inputs.values)
    numbers, zero = inputs.relative_to_group(inputs.scores)
    steps = inputs.token_rewards(numbers), values, traj.loss_mask, traj.spans, options.gamma
    lam = adaptive_lambda(traj.total(), options.lam_alpha) if options.lam_alpha else options.lam
    of_critic = options.lam if options.critic_lam is None else options.critic_lam
    targets = np.where(inputs.present, gae(*steps, of_critic)[1], values)
    return Advantages(gae(*steps, lam)[0], targets, zero)


def turn_advantage(inputs: EstimatorInputs) -> Advantages:
    """Computes the rewards from each turn on, discounted by turn_gamma, minus the mean of the group's other members
    (algorithms.turn_advantages), at all loss tokens of the turn; 0 elsewhere.

    Rewards are those of the raw scores, not relative to the group; nothing is divided by a deviation.
    """
    rewards, number = inputs.token_rewards(inputs.scores), inputs.traj.columns.get("turn")
    tokens = turn_advantages(rewards, number, *inputs.turn_arguments)
    return Advantages(tokens, None, without_signal(inputs.traj, tokens))


def gigpo(inputs: EstimatorInputs) -> Advantages:
    """Computes GiGPO (arXiv 2505.10978): outcome advantages plus anchor_coef times the advantage among the group's
    turns in the same state.

    See algorithms.anchor_advantages. Metric: advantage/anchored_fraction, the share of the part's loss tokens with such
    an advantage."""
    options, traj = inputs.options, inputs.traj
    numbers, _ = inputs.relative_to_group(inputs.scores_less_kl())
    anchor = traj.columns.get("anchor", np.zeros(len(traj.tokens), np.int64))
    steps = anchor_advantages(inputs.token_rewards(inputs.scores), traj.columns.get("turn"), anchor,
                              *inputs.turn_arguments, mean=options.advantage_mean, std=options.advantage_std)
    tokens = traj.spread(numbers) + options.anchor_coef * steps
    own = traj.loss_mask if inputs.part is None else traj.loss_mask & traj.spread(inputs.part)
    share = float((steps[own] != 0).mean())
    return Advantages(tokens, None, without_signal(traj, tokens), {"advantage/anchored_fraction": share})


def dpo(inputs: EstimatorInputs) -> Advantages:
    """Computes advantages whose policy gradient is DPO's on the best and the worst completion of each group.

    Source: OAIF, arXiv 2402.04792.

    See algorithms.preferred_advantages; beta is kl.coef. Metrics: advantage/pairs_fraction (pairs over the part's
    groups) and advantage/pairs_margin (mean beta times the lead of the best, in nats)."""
    traj, beta = inputs.traj, inputs.options.kl.coef
    ratios = np.where(traj.total() > 0, traj.total(inputs.kl), np.nan)
    numbers, pairs = preferred_advantages(inputs.scores, traj.group, ratios, beta)
    tokens, margins = traj.spread(numbers), beta * (ratios[pairs[:, 0]] - ratios[pairs[:, 1]])
    own = traj.group if inputs.part is None else traj.group[inputs.part]
    metrics = {"advantage/pairs_fraction": len(pairs) / len(np.unique(own)),
               "advantage/pairs_margin": float(margins.mean()) if len(pairs) else 0.0}
    return Advantages(tokens, None, without_signal(traj, tokens), metrics)


def user_advantages(inputs: EstimatorInputs) -> Advantages:
    """Returns the advantages of a user's function (registered, or an import path), spread over tokens if it returns
    [N].

    The function gets AdvantageInputs whose scores have kl.coef * summed KL subtracted. zero_signal is by these scores,
    not by what it returns. Raises ConfigError if it fails, returns another shape than [N] or [T], or numbers at loss
    tokens, those of absent scores too, that are not finite.
    """
    name, traj, scores = inputs.options.advantage, inputs.traj, inputs.scores_less_kl()
    function = ADVANTAGES[name] if name in ADVANTAGES else imported(name)
    of_turns = {name: traj.columns[name] for name in ("turn", "reward", "anchor") if name in traj.columns}
    columns = {**(inputs.columns or {}), **of_turns}
    arguments = AdvantageInputs(scores, traj.group, traj.loss_mask, traj.spans, inputs.rewards or {}, columns,
                                inputs.user)
    try:
        result = function(arguments)
    except Exception as e:  # any error of the user's function
        at = traceback.extract_tb(e.__traceback__)[-1]
        message = f"{type(e).__name__}: {e}".splitlines()[0]
        raise ConfigError(f"algorithm.advantage={name!r}, {at.filename}:{at.lineno}, {at.line!r}: {message}; expected"
                          " one number per sequence or per token (docs/guides/extend.md)") from e
    return Advantages(spread_over_tokens(name, result, traj), None, inputs.relative_to_group(scores)[1])


ESTIMATORS = {"outcome": outcome, "returns": returns, "gae": gae_with_critic, "turn": turn_advantage, "gigpo": gigpo,
              "dpo": dpo}


def without_signal(traj, tokens) -> np.ndarray:
    """Returns [N] bool: sequences of groups in which no loss token has an advantage. tokens: [T] float advantages."""
    _, group = np.unique(traj.group, return_inverse=True)
    return np.bincount(group, traj.total(tokens != 0))[group] == 0


def spread_over_tokens(name: str, values, traj) -> np.ndarray:
    """Spreads the [N] or [T] numbers of a user's function over tokens, as [T] float64.

    name: of the function, for messages. values: its result.

    Raises ConfigError for what is no array of numbers or has another shape, and for numbers at loss tokens that are not
    finite."""
    try:
        values = np.asarray(values, np.float64)
    except (TypeError, ValueError) as e:
        raise ConfigError(f"algorithm.advantage={name!r} returned {type_of(values)} that is no array of numbers: "
                          f"{str(e).splitlines()[0]}; expected one number per sequence ({traj.num_trajectories}) or per"
                          f" token ({len(traj.tokens)})") from None
    if values.shape == (traj.num_trajectories,):
        values = traj.spread(values)
    if values.shape != (len(traj.tokens),):
        raise ConfigError(f"algorithm.advantage={name!r} returned shape {values.shape}: expected one number per "
                          f"sequence ({traj.num_trajectories}) or per token ({len(traj.tokens)})")
    if not np.isfinite(values[traj.loss_mask]).all():
        raise ConfigError(f"algorithm.advantage={name!r} returned numbers that are not finite")
    return values
