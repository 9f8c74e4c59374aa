"""Tests what a loss optimises: compares its expected gradient, enumerated over every batch that a policy can draw, with
the exact gradient of the quantity that it should optimise. Called by certify.run.

The policy is a table theta [3, 3] of logits over the tokens {end, 1, 2} in the states "", "1" and "2". A completion has
at most two tokens, so there are seven, and 343 groups of three completions of the one prompt. Everything is float64.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl import training
from jaxrl.algorithms import POLICY_LOSSES
from jaxrl.certify.cases import STOP, Case, trajectories
from jaxrl.certify.claims import Broken
from jaxrl.certify.loss import Loss, dead_inputs
from jaxrl.training.layout import Block, Microbatch

VOCAB, PROMPT = 3, 3
ANSWERS = [(0,), *itertools.product((1, 2), range(VOCAB))]
STATES = {(): 0, (1,): 1, (2,): 2}
AT = [[STATES[answer[:k]] for k in range(len(answer))] for answer in ANSWERS]
COUNTS = np.zeros((len(ANSWERS), len(STATES), VOCAB))  # how often a completion takes a token in a state
for _i, _answer in enumerate(ANSWERS):
    COUNTS[_i, AT[_i], _answer] = 1.0
GROUP = 3
SLOTS = GROUP * 3  # tokens of the longest group in a row
SEEDS = (0, 1, 2)
UNBIASED = {"advantage": ("outcome", "returns", "turn"), "advantage_std": ("none",), "whiten": (False,),
            "advantage_mean": ("none", "group", "leave_one_out", "greedy"), "advantage_low": (None,),
            "advantage_high": (None,), "aggregation": ("sequence_sum", "constant"), "gamma": (1.0,),
            "turn_gamma": (1.0,), "shared_prefix_tokens": (0,),
            "policy_loss": tuple(name for name, row in POLICY_LOSSES.items() if row.unbiased)}


class Policy(NamedTuple):
    """A policy of three tokens by state, its reference (logits, float64), and the scores (float64) of the seven
    completions ANSWERS."""

    theta: np.ndarray   # [3, 3]
    ref: np.ndarray     # [3, 3]
    scores: np.ndarray  # [7] of the answers

    def summary(self) -> dict:
        """Returns the JSON-able description of the policy for a counterexample."""
        scores = {" ".join(map(str, a)): round(float(s), 3) for a, s in zip(ANSWERS, self.scores, strict=True)}
        return {"logits in the states '', 1, 2 of the tokens end, 1, 2": np.round(self.theta, 3).tolist(),
                "scores": scores}


def policy(seed: int) -> Policy:
    """Returns a random Policy of a seed."""
    draw = np.random.default_rng(seed)
    return Policy(draw.normal(size=(3, 3)), draw.normal(size=(3, 3)), draw.random(len(ANSWERS)))


def log_softmax(theta):
    """Returns log-probs (nats) of logits over the last axis, numpy, in the shape and dtype of `theta`."""
    return theta - np.logaddexp.reduce(theta, axis=-1, keepdims=True)


def log_probs(theta):
    """Returns [7] log-probs (nats) of the completions, from logits theta [3, 3] (jax)."""
    return jnp.einsum("nsa,sa->n", COUNTS, jax.nn.log_softmax(theta))


def visits(theta):
    """Returns [3] visit probabilities of the states "", "1" and "2" under logits theta [3, 3], without gradient."""
    first = jax.lax.stop_gradient(jax.nn.softmax(theta[0]))
    return jnp.array([1.0, first[1], first[2]])


# ---- possible purposes of a term: functions of theta


def score(p: Policy):
    """Returns a function of theta [3, 3]: the expected score of a completion drawn from it, a scalar."""
    return lambda theta: jnp.sum(jnp.exp(log_probs(theta)) * p.scores)


def kl_of_answers(p: Policy):
    """Returns a function of theta [3, 3]: KL(policy || reference) of whole completions, in nats."""
    return lambda theta: jnp.sum(jnp.exp(log_probs(theta)) * (log_probs(theta) - log_probs(p.ref)))


def kl_at_states(p: Policy, reverse: bool = False):
    """Returns a function of theta [3, 3]: the sum over states of visit probability times KL(policy || reference) there,
    in nats. reverse: KL(reference || policy). Visits have no gradient."""
    def of(theta):
        own, ref = jax.nn.log_softmax(theta), jax.nn.log_softmax(p.ref)
        own, ref = (ref, own) if reverse else (own, ref)
        return jnp.sum(visits(theta)[:, None] * jnp.exp(own) * (own - ref))
    return of


def entropy(theta):
    """Returns the entropy of the policy theta [3, 3] in nats, summed over states by their visit probabilities; these
    have no gradient."""
    table = jax.nn.log_softmax(theta)
    return -jnp.sum(visits(theta)[:, None] * jnp.exp(table) * table)


def passed(p: Policy, mark: float):
    """Returns the purpose of the NLL term, a function of theta [3, 3]: the sum over completions that pass of
    probability times log-prob (nats). The probabilities have no gradient. mark: least score of a completion that
    passes."""
    fixed = jax.lax.stop_gradient
    return lambda theta: jnp.sum(jnp.exp(fixed(log_probs(theta))) * (p.scores >= mark) * log_probs(theta))


# ---- expectation


def case_of(p: Policy, drawn, turns: bool) -> tuple[Case, np.ndarray]:
    """Returns (Case of a group of completions drawn from the policy, [T] int64 the state of each token).

    Values are the exact ones of the policy; current, old and behaviour log-probs are equal, in float64.

    Args:
      drawn: numbers of the completions in ANSWERS. turns: add the columns of an episode with one turn.
    """
    table, ref = log_softmax(p.theta), log_softmax(p.ref)
    chance = np.exp(table)
    value = np.zeros(3)  # exact, of the policy
    for s in (1, 2):
        value[s] = sum(chance[s, a] * p.scores[ANSWERS.index((s, a))] for a in range(VOCAB))
    value[0] = chance[0, 0] * p.scores[0] + chance[0, 1] * value[1] + chance[0, 2] * value[2]
    answers = [ANSWERS[i] for i in drawn]
    traj = trajectories([[PROMPT]] * len(answers), answers, [0] * len(answers), [STOP] * len(answers))
    state, at = np.zeros(len(traj.tokens), np.int64), traj.loss_mask
    state[at] = np.concatenate([AT[i] for i in drawn])
    read = lambda table: np.where(at, table[state, np.where(at, traj.tokens, 0)], 0.0)  # noqa: E731
    own = read(table)
    columns = {"logp": own, "old": own, "behaviour": own, "ref": read(ref), "staleness": 0 * own,
               "value": np.where(at, value[state], 0.0), "return": 0 * own, "old_value": 0 * own}
    if turns:  # one turn each, decided in the state the prompt leads to
        traj.columns |= {"turn": np.where(at, 0, -1), "anchor": at.astype(np.int64), "reward": 0 * own}
    greedy, answer = p.theta.argmax(-1), ()
    while answer not in ANSWERS:
        answer += (int(greedy[STATES[answer]]),)
    baseline = np.full(len(drawn), p.scores[ANSWERS.index(answer)])
    return Case(traj, p.scores[list(drawn)], columns, baseline), state


def expected(loss: Loss, p: Policy) -> np.ndarray:
    """Returns the [3, 3] float64 gradient of the loss with respect to theta, expected over groups of GROUP completions
    drawn from theta.

    Every group is enumerated and weighted by its probability, which has no gradient itself. Needs jax.enable_x64."""
    draws = list(itertools.product(range(len(ANSWERS)), repeat=GROUP))
    batches = []
    for drawn in draws:
        case, state = case_of(p, drawn, loss.turns)
        case.columns["advantage"] = loss.advantage(loss.options, case)
        columns = {name: case.columns[name] for name in loss.reads} | {"state": state}
        blocks = tuple(Block((i,), int(size)) for i, size in enumerate(case.traj.lengths))
        batches.append(training.pack(case.traj, Microbatch(SLOTS, (blocks,)), columns, loss.weights(case), np.float64))
    every = jax.tree.map(lambda *x: np.stack(x), *batches)
    chance = np.exp(np.einsum("nsa,sa->n", COUNTS, log_softmax(p.theta)))
    return np.asarray(program(loss.objective)(p.theta, every, np.prod(chance[np.array(draws)], axis=1)))


@functools.lru_cache(maxsize=8)
def program(objective):
    """Returns jitted (theta [3, 3], batches, [B] their probabilities) -> [3, 3] gradient, cached for an objective.

    batches: PackedBatch with an axis B in front of every array; its column "state" has the state of each slot."""
    loss = Loss(objective, None, None, ())

    def of(theta, every, weight):
        table = jax.nn.log_softmax(theta)
        entropies = -jnp.sum(jnp.exp(table) * table, axis=-1)

        def one(packed):
            mask, state = packed.weights["token"] > 0, packed.columns["state"]
            return loss.total(jnp.where(mask, table[state, packed.targets], 0), jnp.where(mask, entropies[state], 0),
                              packed)

        return jnp.sum(weight * jax.vmap(one)(every))

    return jax.jit(jax.grad(of))


def slope(f, theta) -> np.ndarray:
    """Returns the [3, 3] gradient of a scalar function of theta (such as `score(p)`) at theta [3, 3]."""
    return np.asarray(jax.jit(jax.grad(f))(theta))


def cosine(a, b) -> float:
    """Returns the cosine of the angle between two arrays of one shape; 0 if one of them is all zeros."""
    return float(np.sum(a * b) / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-300))


# ---- claims


def objective(loss: Loss, promised: bool) -> str:
    """Tests the claim `objective`: the expected gradient of the policy loss raises the expected score.

    promised: the options are those of an unbiased estimator (UNBIASED), so the cosine must be 1 within 1e-6; else it
    must be above 0.

    Returns what was found. Raises Broken with the policy of the smallest cosine."""
    plain, scales = loss.plain(), []
    worst: tuple = (2.0,)
    with jax.enable_x64(True):
        for seed in SEEDS:
            p = policy(seed)
            step, exact = -expected(plain, p), slope(score(p), p.theta)
            worst = min(worst, (cosine(step, exact), seed, step, exact), key=lambda w: w[0])
            scales.append(np.linalg.norm(step) / np.linalg.norm(exact))
    least, seed, step, exact = worst
    case = {**policy(seed).summary(), "expected step": np.round(step, 5).tolist(),
            "gradient of the expected score": np.round(exact, 5).tolist(), "cosine": least}
    if not least > 0.0:
        raise Broken(f"the expected step has the cosine {least:.3f} with the gradient of the expected score", case)
    if promised and least < 1 - 1e-6:
        raise Broken("these options promise the gradient of the expected score itself; the cosine is "
                     f"{least:.6f}", case)
    if least > 1 - 1e-6:
        return f"its gradient itself, times {np.mean(scales):.3g}"
    return f"cosine at least {least:.3f} with its gradient"


def is_promised(options) -> bool:
    """Returns whether these options promise an unbiased gradient (UNBIASED)."""
    return all(options[name] in values for name, values in UNBIASED.items())


def terms(loss: Loss, mark: float) -> str:
    """Tests the claim `terms`: the expected gradient of each further term serves its purpose. Raises Broken.

    A term's part is the difference of expected gradients with and without it; its cosine with the exact gradient of its
    purpose must be above 0. mark: reward.pass_mark.

    Returns the names of the terms tested."""
    for part_of in (loss, loss.plain()):
        dead_inputs(part_of)
    plain, o, p, found = loss.plain(), loss.options, policy(SEEDS[0]), ["policy"]
    none = {"kl.coef": 0.0, "entropy_coef": 0.0, "entropy_target": 0.0, "positive_nll_coef": 0.0}

    def needs(what: str, step, *purposes):
        """Raises Broken unless the step of a term raises one of its purposes."""
        size, ways = np.abs(step).max(), [cosine(step, slope(f, p.theta)) for f in purposes]
        if size < 1e-9 or max(ways) <= 0:
            told = "has no expected gradient" if size < 1e-9 else f"pulls the wrong way (cosine {max(ways):.3f})"
            raise Broken(f"{what} {told}", {**p.summary(), "its part of the expected step": np.round(step, 7).tolist()})
        found.append(what)

    with jax.enable_x64(True):
        base = expected(plain, p)
        if np.abs(base).max() < 1e-9:
            raise Broken("the policy loss has no expected gradient", p.summary())
        minus = lambda f: lambda theta: -f(theta)  # noqa: E731
        with_only = lambda keep: loss.with_options({k: v for k, v in none.items() if k not in keep})  # noqa: E731
        part = lambda keep: base - expected(with_only(keep), p)  # noqa: E731
        if o.kl.coef and o.kl.placement == "loss":
            needs(f"KL ({o.kl.estimator}, in the loss)", part(("kl.coef",)), minus(kl_at_states(p)),
                  minus(kl_at_states(p, reverse=True)))
        elif o.kl.coef and o.advantage != "dpo":
            alone = p._replace(scores=np.zeros(len(ANSWERS)))
            needs(f"KL ({o.kl.estimator}, in the reward)", -expected(with_only(("kl.coef",)), alone),
                  minus(kl_of_answers(p)))
        if o.entropy_coef or o.entropy_target:
            needs("entropy", part(("entropy_coef", "entropy_target")), entropy)
        if o.positive_nll_coef:
            needs("log-prob of passing answers", part(("positive_nll_coef",)), passed(p, mark))
    return ", ".join(found)
