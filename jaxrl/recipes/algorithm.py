"""What the algorithm options come to: the loss, who scores what, the models beside the policy, and the advantages."""

from __future__ import annotations

import functools
import logging
import math
import traceback
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import FrozenConfigDict

from jaxrl import parameters, training
from jaxrl.algorithms import (
    ADVANTAGES,
    AdvantageInputs,
    adaptive_lambda,
    anchor_advantages,
    clip_advantages,
    gae,
    group_advantages,
    kl_value,
    preferred_advantages,
    token_returns,
    token_rewards,
    turn_advantages,
    whiten,
)
from jaxrl.config.user_code import imported
from jaxrl.errors import ConfigError
from jaxrl.models import adapters
from jaxrl.processes.exchange import put
from jaxrl.recipes.critic import Critic
from jaxrl.recipes.rollouts import stale_buckets
from jaxrl.roles import Role
from jaxrl.rollout import engine_of
from jaxrl.sharding import memory
from jaxrl.training.score import cast_params, make_score

log = logging.getLogger("jaxrl")


class Algorithm:
    """What the options of a job's algorithm need per step: the loss, the scorer, the reference, the critic."""

    def __init__(self, job, total_steps: int):
        c = self.config = job.config
        vocab = job.model.config.vocab_size
        if c.algorithm.sampled_support and c.rollout.top_k > vocab:
            raise ConfigError(f"rollout.top_k={c.rollout.top_k}: the vocabulary has {vocab} tokens; lower it")
        if c.algorithm.routes != "own" and not job.model.config.routes:
            raise ConfigError(f"algorithm.routes={c.algorithm.routes}: the model has no experts; leave it out")
        self.updates_per_step = math.prod(c.updates)
        self.old_source = c.algorithm.old_logprobs
        self.score = self.scorer(job, "policy")
        self.loss = training.PolicyGradient(
            options=FrozenConfigDict({**c.algorithm, "user": c.user}), temperature=trained_at(c),
            staleness=stale_buckets(c.rollout) if c.ahead else (), value_clip=c.critic.value_clip,
            value_coef=c.critic.coef if c.shares_trunk else 0.0, **precision(job))
        self.critic = Critic(job, total_steps) if c.needs_critic else None
        self.reference = None
        if c.needs_reference:
            kind = Reference if job.model.adapter is None or c.reference.path else BaseReference
            self.reference = kind(job, self.scorer(job, "reference"))

    def scorer(self, job, role: str):
        """score(params, traj, layout) -> [T] log-probs, on a role's devices: of the policy with its adapters, of others
        without."""
        model = job.model if role == "policy" else job.model.base
        scored = job.config.algorithm.routes == "scored"
        if role != "policy" and job.mesh_of(role) is job.mesh and model is job.model and not scored:
            return self.score
        return make_score(model, temperature=trained_at(job.config), chunk=job.config.train.logprob_chunk,
                          put=functools.partial(job.put, role=role), routes=scored and role == "policy")

    def meet(self, policy) -> None:
        """Tells the parts whom they stand beside, before they start."""
        if isinstance(self.reference, BaseReference):
            self.reference.policy = policy

    @property
    def parts(self) -> list:
        """What a checkpoint holds beside the policy."""
        return [part for part in (self.critic, self.reference) if part is not None]

    def begin(self, s, engine) -> None:
        """Says what was decided and is not in the row."""
        mismatch = self.config.algorithm.mismatch
        if mismatch.correction == "none" and engine.info.quantized:
            raise ConfigError("algorithm.mismatch.correction=none with a quantised engine: it samples from another "
                              "policy than the one that is trained; use token_tis")
        if mismatch.correction == "none" and self.config.ahead and self.old_source != "rollout":
            log.warning("algorithm.mismatch.correction=none with rollout.max_staleness=%d, sync_every=%d: nothing "
                        "corrects for completions of older weights; set token_tis, or "
                        "algorithm.preset=decoupled_ppo", self.config.rollout.max_staleness,
                        self.config.rollout.sync_every)
        if mismatch.correction != "none":
            s.say(f"mismatch correction: {mismatch.correction}, cap {mismatch.cap:g}")
        if self.old_source == "recompute" and self.updates_per_step == 1:
            s.say("old log-probs are scored at every step, which one optimizer step per batch would not need")

    def columns(self, policy, traj, layout) -> dict[str, np.ndarray]:
        """Token columns [T] of log-probs that the loss or the reward reads; and `routes` [T, n * K], where the update
        is to replay them: sampled ones are replayed by the scoring of old log-probs, too, scored ones are its own."""
        out = {"behaviour": traj.logprobs}
        if "support" in traj.columns:  # every log-prob is then of the distribution cut to it, as the tokens were drawn
            out = {"behaviour": traj.logprobs - traj.columns["kept"], "support": traj.columns["support"]}
        routes = self.config.algorithm.routes
        if routes == "sampled":
            nothing = np.full((len(traj.tokens), policy.job.model.config.routes), -1, np.int16)
            out["routes"] = traj.columns.get("routes", nothing)
        if self.old_source == "recompute" and routes == "scored":
            found = policy.score(traj, layout)
            out |= {"old": found["logprob"], "routes": found["routes"]}
        elif self.old_source == "recompute":
            out["old"] = policy.score(traj, layout, {n: out[n] for n in ("support", "routes") if n in out} or None)
        elif self.old_source == "rollout":
            out["old"] = out["behaviour"]
        if self.reference is not None:
            out["ref"] = self.reference.score(traj, layout)
        return out

    def operations(self, step: int, count, traj) -> dict[str, float]:
        """flops/<phase> of the step that has just been done, on the completions it learnt from (a
        server's sampling is its own)."""
        epochs, shared = self.config.algorithm.ppo_epochs, self.config.train.share_prompts
        passes = (self.old_source == "recompute") + (self.reference is not None)
        score = passes * count.scoring(traj, shared)
        updates = step > self.config.critic.warmup_steps or self.critic is None
        update = updates * epochs * count.update(traj, shared)
        if self.critic is not None:
            score += count.scoring(traj, shared, head=False)
            update += (not self.critic.shared) * epochs * count.update(traj, shared, head=False)
        out = {"flops/score": score, "flops/update": update}
        return out | ({"flops/rollout": count.generation(traj)} if engine_of(self.config).on_mesh else {})

    def kl(self, columns):
        """[T] KL that is subtracted from the reward, or None."""
        c = self.config
        return kl_value(columns["old"], columns["ref"], c.algorithm.kl.estimator) if c.kl_in_reward else None


def trained_at(config) -> float:
    """The temperature of the trainer's log-probs."""
    return config.algorithm.temperature or config.rollout.temperature


def precision(job) -> dict:
    """The options of every objective of a job."""
    c = job.config
    fp16 = job.compute_dtype == jnp.float16
    return dict(chunk=c.train.logprob_chunk, max_grad_norm=c.optimizer.max_grad_norm, fp16=fp16,
                router_balance=c.train.router_balance, router_z=c.train.router_z,
                router_bias_rate=c.train.router_bias_rate,
                loss_scale=training.LossScale(**c.train.loss_scale))


class Reference(Role):
    """The frozen policy that the KL pulls towards. It is a part of the checkpoint only where it is reset on the way;
    else it can be made again. See Session.restore for what a part is."""

    def __init__(self, job, score=None):
        super().__init__("reference", job, score)
        self.options = job.config.reference
        self.dtype = parameters.DTYPES[self.options.dtype]
        self.moves = bool(self.options.reset_steps or self.options.reset_epochs)
        self.epochs = 0.0

    def abstract(self):
        if not self.moves:
            return {}
        shapes = jax.eval_shape(self.job.model.base.init, jax.random.key(0))
        placed = lambda s, where: jax.ShapeDtypeStruct(s.shape, self.dtype, sharding=where)  # noqa: E731
        found = jax.tree.map(placed, shapes, self._place())
        return memory.kept(found) if self.streams else found

    def start(self, arrays, host: dict | None) -> None:
        if host and self.moves:
            self.held, self.epochs = arrays, host["epochs"]
        elif self.job.here(self.name):
            with self.on():
                path, revision = self.options.path, self.options.revision
                start = parameters.initial_params(self.job, path, role=self.name, revision=revision)
                self.held = self._cast(start)
        self.rest()

    def _cast(self, params):
        """A copy in the reference's dtype; of one that streams, made array by array."""
        if not self.streams:
            return cast_params(params, self.dtype)
        cast = functools.partial(cast_params, dtype=self.dtype)
        return jax.tree.map(lambda x: memory.to_host(cast(x)) if memory.worth_it(x) else cast(x), params)

    def _place(self):
        return parameters.param_shardings(self.job, tree=self.job.model.base, role=self.name)

    def arrays(self):
        return self.held if self.moves else {}

    def host(self) -> dict | None:
        return {"epochs": self.epochs} if self.moves else None

    def after_step(self, s, policy) -> dict[str, float]:
        """Resets where it is due; called when the step counts."""
        if not self.moves:
            return {}
        steps, passes, epoch = self.options.reset_steps, self.options.reset_epochs, s.stream.epoch(s.progress.cursor)
        due = bool(steps and s.step % steps == 0)
        if passes and epoch - self.epochs >= passes - 1e-9:
            due, self.epochs = True, self.epochs + passes * int((epoch - self.epochs + 1e-9) / passes)
        if due:
            self.take(policy)
            if self.options.reset_optimizer:
                policy.restart_optimizer()
        return {"policy/reference_reset": float(due)}

    def take(self, policy) -> None:
        """Becomes the policy."""
        self.held = self._cast(policy.weights())
        if self.job.mesh_of(self.name) is not self.job.mesh:
            self.held = memory.moved(self.held, self._place())
        self.rest()


class BaseReference(Reference):
    """The reference of a policy that trains adapters: its own frozen base, so that there is no second copy. Scored by
    the model without adapters on the policy's layout, it is bitwise the model that the base was read from (on CPUs).

    Where the policy does not begin as its base (lora.path, modules that train whole), or where the reference moves, the
    few arrays that train are kept as they were then and scored with the same base; a checkpoint holds them.
    """

    policy = None  # set by Algorithm.meet

    def __init__(self, job, score):
        super().__init__(job, score)
        self.place = "policy"
        self.alone = not (self.moves or job.config.lora.path or job.model.adapter.saved)
        if not self.alone:
            self._score = make_score(job.model, temperature=trained_at(job.config),
                                     chunk=job.config.train.logprob_chunk, put=self.put)

    def abstract(self):
        return {} if self.alone else _of_model(self.policy.abstract()["trainable"])

    def start(self, arrays, host: dict | None) -> None:
        if self.alone:
            return
        if host is None:
            self.take(self.policy)
        else:
            self.held, self.epochs = arrays, host["epochs"]

    def take(self, policy) -> None:
        copy = lambda x: parameters.settled(cast_params(x, x.dtype)) if memory.rests(x) else jnp.copy(x)  # noqa: E731
        self.held = jax.tree.map(copy, _of_model(policy.state.trainable))

    def params(self):
        frozen = self.policy.state.frozen
        if self.alone:
            return adapters.without(parameters.policy_params({}, frozen))
        return parameters.policy_params(self.held, frozen)

    def arrays(self):
        return {} if self.alone else self.held

    def host(self) -> dict | None:
        return None if self.alone else {"epochs": self.epochs}


def _of_model(flat: dict) -> dict:
    """The leaves that are not a value head's."""
    return {name: x for name, x in flat.items() if not name.startswith("value/")}


def start_of_step(state):
    """The state with the flag of an early stop cleared."""
    def cleared(stats):
        flag = stats["stopped"]
        return {**stats, "stopped": put(np.zeros((), flag.dtype), flag.sharding)}

    if training.several.is_several(state):
        return state.replace(stats={name: cleared(stats) for name, stats in state.stats.items()})
    return state.replace(stats=cleared(state.stats))


# ---- scores -> one advantage per scored token, on the host in float64


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
                          " one number per sequence or per token (docs/extend.md)") from e
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
