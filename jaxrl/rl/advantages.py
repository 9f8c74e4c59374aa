"""Advantages of a batch: scores to one number per scored token, on the host in float64."""

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
from jaxrl.errors import ConfigError


class Advantages(NamedTuple):
    tokens: np.ndarray  # [T] float64, 0 where not scored and where the score is absent
    returns: np.ndarray | None  # [T] float64: what the critic learns; its own value where the score is absent
    zero_signal: np.ndarray  # [N] bool: sequences of groups whose scores carry no signal
    metrics: Mapping[str, float] = {}  # of the estimator


def advantages(options, traj, scores, *, baseline=None, kl=None, values=None, rewards=None, columns=None,
               user=None, scale=1.0) -> Advantages:
    """Advantages as the group `algorithm` of a Spec says.

    Score, less kl.coef * KL where it is placed in the reward; less its baseline, over its scale; then the estimator:

        outcome  the sequence's number at each scored token (the KL of a sequence is the sum over its tokens; so it is
                 for a function of the user's own, which sees scores less that KL)
        returns  reward to go: rewards of turns where they are, the rest of the number at the last scored token, the KL
                 at each
        gae      the same rewards with a critic
        turn     the same rewards of the score itself, to go from each turn, less what the group's others have to go
        gigpo    outcome, plus anchor_coef times the same among the turns of a group that were decided in one state
        dpo      of the best and the worst of a group, what makes it DPO's gradient; the KL (k1) is its log-ratios

    then whitened over all tokens of sequences with a score, then clipped.

    Rewards, numbers and states of turns are the columns `reward`, `turn` and `anchor` of traj. Without them a
    trajectory is one turn, in no state: `turn` is then the leave-one-out baseline.

    Args:
      scores: [N], NaN = absent. baseline: [N] greedy scores. kl: [T] or None. values: [T] for gae.
      rewards, columns, user: for a function of the user's own.
      scale: reward.scale, which is in the scores already and is not in the column `reward`.
    """
    given = Given(options, traj, scores, baseline, kl, values, rewards, columns, user, scale)
    found = ESTIMATORS.get(options.advantage, users)(given)
    present = given.present
    tokens = np.where(present, found.tokens, 0.0)
    if options.whiten:
        tokens = whiten(tokens, present)
    tokens = clip_advantages(tokens, options.advantage_low, options.advantage_high)
    return found._replace(tokens=np.where(present, tokens, 0.0))


def advantages_by_source(options, sources, of_N, traj, scores, **given) -> Advantages:
    """`advantages`, where sources of data have entries of their own over `options`.

    Trajectories of a source with a table `algorithm` have their statistics (of group, batch and whitening) among
    themselves, all others among theirs; to an estimator the scores of the rest are absent. Advantages are multiplied
    with the source's `coef` in the end, after whitening and bounds.

    Args:
      options: the group `algorithm` of a Spec. sources: data.sources. of_N: [N] names of the trajectories' sources.
      given: as for `advantages`. Metrics of an estimator are those of the last source, by name, that has any.
    """
    names = np.asarray(of_N, str)
    tables = {name: own["algorithm"] for name, own in sources.items() if own.get("algorithm")}
    found = None if tables else advantages(options, traj, scores, **given)
    told = np.where(np.isin(names, list(tables)), names, "")
    for name in np.unique(told) if tables else ():
        mine = told == name
        own = FrozenConfigDict({**options, **tables.get(name, {})})
        new = advantages(own, traj, np.where(mine, scores, np.nan), **given)
        found = found or new
        found = Advantages(np.where(traj.spread(mine), new.tokens, found.tokens), None,
                           np.where(mine, new.zero_signal, found.zero_signal), {**found.metrics, **new.metrics})
    coefs = np.array([sources[name].get("coef", 1.0) if name in sources else 1.0 for name in names])
    return found if (coefs == 1).all() else found._replace(tokens=found.tokens * traj.spread(coefs))


class Given(NamedTuple):
    """The arguments of `advantages`."""

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

    @property
    def present(self):
        """[T] scored tokens of sequences with a score."""
        return self.traj.spread(np.isfinite(self.scores)) & self.traj.loss_mask

    def less_kl(self):
        """[N] scores less the KL of their sequences."""
        if self.kl is None:
            return self.scores
        return self.scores - self.options.kl.coef * self.traj.total(self.kl)

    def numbers(self, scores):
        """([N] scores less baseline, over scale; [N] bool, those of groups without signal)."""
        return group_advantages(scores, self.traj.group, mean=self.options.advantage_mean,
                                std=self.options.advantage_std, baseline_N=self.baseline)

    def per_token(self, numbers):
        """[T] rewards that add up to the numbers."""
        traj, of_turns = self.traj, self.traj.columns.get("reward")
        return token_rewards(np.where(np.isfinite(self.scores), numbers, np.nan), traj.loss_mask, traj.spans, self.kl,
                             self.options.kl.coef, None if of_turns is None else self.scale * of_turns.astype(float))

    @property
    def turns(self) -> tuple:
        """How `turns.py` wants to hear of them."""
        traj = self.traj
        return traj.loss_mask, traj.spans, traj.group, np.isfinite(self.scores), self.options.turn_gamma


def outcome(given: Given) -> Advantages:
    numbers, zero = given.numbers(given.less_kl())
    return Advantages(given.traj.spread(numbers), None, zero)


def returns(given: Given) -> Advantages:
    numbers, zero = given.numbers(given.scores)
    traj = given.traj
    tokens = token_returns(given.per_token(numbers), traj.loss_mask, traj.spans, given.options.gamma)
    return Advantages(tokens, None, zero)


def critics(given: Given) -> Advantages:
    options, traj, values = given.options, given.traj, given.values
    numbers, zero = given.numbers(given.scores)
    steps = given.per_token(numbers), values, traj.loss_mask, traj.spans, options.gamma
    lam = adaptive_lambda(traj.total(), options.lam_alpha) if options.lam_alpha else options.lam
    of_critic = options.lam if options.critic_lam is None else options.critic_lam
    learnt = np.where(given.present, gae(*steps, of_critic)[1], values)
    return Advantages(gae(*steps, lam)[0], learnt, zero)


def by_turn(given: Given) -> Advantages:
    rewards, number = given.per_token(given.scores), given.traj.columns.get("turn")
    tokens = turn_advantages(rewards, number, *given.turns)
    return Advantages(tokens, None, without_signal(given.traj, tokens))


def gigpo(given: Given) -> Advantages:
    options, traj = given.options, given.traj
    numbers, _ = given.numbers(given.less_kl())
    anchor = traj.columns.get("anchor", np.zeros(len(traj.tokens), np.int64))
    steps = anchor_advantages(given.per_token(given.scores), traj.columns.get("turn"), anchor, *given.turns,
                              mean=options.advantage_mean, std=options.advantage_std)
    tokens = traj.spread(numbers) + options.anchor_coef * steps
    share = float((steps[traj.loss_mask] != 0).mean())
    return Advantages(tokens, None, without_signal(traj, tokens), {"advantage/anchored_fraction": share})


def preferred(given: Given) -> Advantages:
    traj, beta = given.traj, given.options.kl.coef
    ratios = np.where(traj.total() > 0, traj.total(given.kl), np.nan)
    numbers, pairs = preferred_advantages(given.scores, traj.group, ratios, beta)
    tokens, margins = traj.spread(numbers), beta * (ratios[pairs[:, 0]] - ratios[pairs[:, 1]])
    told = {"advantage/pairs_fraction": len(pairs) / len(np.unique(traj.group)),
            "advantage/pairs_margin": float(margins.mean()) if len(pairs) else 0.0}
    return Advantages(tokens, None, without_signal(traj, tokens), told)


def users(given: Given) -> Advantages:
    """By a function of the user's, registered or by its path."""
    name, traj, scores = given.options.advantage, given.traj, given.less_kl()
    function = ADVANTAGES[name] if name in ADVANTAGES else imported(name)
    of_turns = {name: traj.columns[name] for name in ("turn", "reward", "anchor") if name in traj.columns}
    columns = {**(given.columns or {}), **of_turns}
    inputs = AdvantageInputs(scores, traj.group, traj.loss_mask, traj.spans, given.rewards, columns, given.user)
    try:
        found = function(inputs)
    except Exception as e:  # whatever a function of the user's may raise
        at = traceback.extract_tb(e.__traceback__)[-1]
        said = f"{type(e).__name__}: {e}".splitlines()[0]
        raise ConfigError(f"algorithm.advantage={name!r}, {at.filename}:{at.lineno}, {at.line!r}: {said}; expected is"
                          " one number per sequence or per token (docs/guides/extend.md)") from e
    return Advantages(spread(name, found, traj), None, given.numbers(scores)[1])


ESTIMATORS = {"outcome": outcome, "returns": returns, "gae": critics, "turn": by_turn, "gigpo": gigpo,
              "dpo": preferred}


def without_signal(traj, tokens) -> np.ndarray:
    """[N] bool: the sequences of groups without any advantage."""
    _, group = np.unique(traj.group, return_inverse=True)
    return np.bincount(group, traj.total(tokens != 0))[group] == 0


def spread(name: str, found, traj) -> np.ndarray:
    """[N] or [T] numbers of a user's function -> [T]. Raises ConfigError for other shapes, and where not finite."""
    found = np.asarray(found, np.float64)
    if found.shape == (traj.num_trajectories,):
        found = traj.spread(found)
    if found.shape != (len(traj.tokens),):
        raise ConfigError(f"algorithm.advantage={name!r} returned shape {found.shape}: expected one number per "
                          f"sequence ({traj.num_trajectories}) or per token ({len(traj.tokens)})")
    if not np.isfinite(found[traj.loss_mask]).all():
        raise ConfigError(f"algorithm.advantage={name!r} returned numbers that are not finite")
    return found
