"""Claims about a loss: its gradient with respect to log-prob and entropy of every token, in float64, for the same
completions in different layouts. Called by certify.run; the model's own gradient is in certify.update.

Legend: T tokens, R rows, S slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import FrozenConfigDict

from jaxrl import training
from jaxrl.certify.cases import SMALLEST, Case, batch
from jaxrl.certify.claims import Broken
from jaxrl.training.layout import Block, Microbatch

EXACT = 1e-4  # of the largest gradient: a loss may compute in fp32 within float64
JUNK = (37.0, -1e4)


class Loss(NamedTuple):
    """The loss of a config.

    Attributes:
      objective: training.PolicyGradient. weights: case -> {loss term: [T] floats}, for one optimizer step.
      advantage: (group `algorithm`, case) -> [T] floats. reads: token columns that a run passes to the loss.
      turns: whether completions have several turns.
    """

    objective: Any
    weights: Callable[[Case], dict[str, np.ndarray]]
    advantage: Callable[[Any, Case], np.ndarray]
    reads: tuple[str, ...]
    turns: bool = False

    @property
    def options(self):
        """Options of the objective: those below `algorithm`."""
        return self.objective.options

    def with_options(self, changes: dict) -> Loss:
        """Returns the loss with other options. changes: dotted name below `algorithm` -> value."""
        options = self.options.to_dict()
        for name, value in changes.items():
            *group, leaf = name.split(".")
            (options[group[0]] if group else options)[leaf] = value
        return self._replace(objective=dataclasses.replace(self.objective, options=FrozenConfigDict(options)))

    def plain(self) -> Loss:
        """Returns the policy loss alone, without KL, entropy and NLL terms; with advantage=dpo kl.coef stays, its
        beta."""
        off = {"kl.coef": 0.0, "entropy_coef": 0.0, "entropy_target": 0.0, "positive_nll_coef": 0.0}
        if self.options.advantage == "dpo":  # kl.coef is the preference's beta
            off |= {"kl.coef": self.options.kl.coef, "kl.placement": "reward"}
        return self.with_options(off)

    def total(self, logp, entropy, packed):
        """Returns the sum of all terms of one microbatch, [] float.

        logp, entropy: [R, S] of the current policy, in nats, 0 in slots without a token. packed: PackedBatch whose
        weights mask and divide the terms (`packed_of`)."""
        token = packed.weights["token"]
        coef = self.options.entropy_coef or 0.01 if self.options.entropy_target else None
        return self.objective.policy_terms(logp, entropy, packed, token, token > 0, coef)[0]


# ---- layouts, of shapes that do not depend on the content


def microbatch(case: Case, rows, length: int, count: int) -> Microbatch:
    """Builds a microbatch of rows, lists of completion numbers, each with its own prompt; padded to `count` rows.

    length: tokens of a row."""
    blocks = [tuple(Block((i,), int(case.traj.lengths[i])) for i in row) for row in rows]
    return Microbatch(length, tuple(blocks + [()] * (count - len(rows))))


def layouts(case: Case) -> dict[str, dict[str, tuple[Microbatch, ...]]]:
    """Returns claim -> {how: microbatches}; the baseline "" has one completion in each row of one microbatch."""
    traj, every = case.traj, range(case.traj.num_sequences)
    length, n = int(traj.lengths.sum()), len(every)
    alone, half = [[i] for i in every], (n + 1) // 2
    one = lambda rows, long=length, count=n: (microbatch(case, rows, long, count),)  # noqa: E731
    shared, at = [], 0
    for g in dict.fromkeys(traj.group.tolist()):
        members = tuple(np.flatnonzero(traj.group == g).tolist())
        size = int(traj.prompt_lengths[members[0]] + traj.completion_lengths[list(members)].sum())
        shared.append((Block(members, size),))
        at += 1
    return {
        "": {"": one(alone)},
        "microbatches": {"in two microbatches": one(alone[:half]) + one(alone[half:]),
                         "every answer in a microbatch of its own": sum((one([row]) for row in alone), ())},
        "packing": {"all answers in one row": one([list(every)]),
                    "with one copy of each prompt": (Microbatch(length, tuple(shared + [()] * (n - at))),)},
        "padding": {"in rows twice as long": one(alone, 2 * length),
                    "with as many empty rows": one(alone, count=2 * n)},
    }


# ---- gradients by token


class Gradient(NamedTuple):
    """The loss of an optimizer step and its gradients, float64: with respect to the log-prob and the entropy (nats) of
    each of the T tokens, 0 where not sampled. `outside`: the largest magnitude in slots without a token."""

    value: float
    logp: np.ndarray     # [T] of the sampled tokens
    entropy: np.ndarray  # [T]
    outside: float       # largest in slots without a token


def programs(loss: Loss):
    """Returns the jitted (logp [R, S], entropy [R, S], PackedBatch) -> (loss [], (its gradient by logp [R, S], by
    entropy [R, S]))."""
    return jax.jit(jax.value_and_grad(loss.total, argnums=(0, 1)))


def packed_of(loss: Loss, case: Case, micro: Microbatch):
    """Returns the PackedBatch of a case's microbatch, float64, with columns logp, entropy and those that the loss
    reads.

    Its weights are those of one optimizer step of the whole case."""
    columns = {name: case.columns[name] for name in ("logp", "entropy", *loss.reads)}
    return training.pack(case.traj, micro, columns, loss.weights(case), np.float64)


def gradient(loss: Loss, case: Case, micros, program=None, junk: float | None = None) -> Gradient:
    """Computes the Gradient of a whole optimizer step, summed over its microbatches. Needs jax.enable_x64.

    Args:
      micros: Microbatches of the case. program: of `programs`; None = compile one.
      junk: value written to float columns in slots without a sampled token; None = as packed.
    """
    program, value, outside = program or programs(loss), 0.0, 0.0
    found = {"logp": np.zeros(len(case.traj.tokens)), "entropy": np.zeros(len(case.traj.tokens))}
    for micro in micros:
        packed = packed_of(loss, case, micro)
        columns = dict(packed.columns)
        empty = packed.sequences == 0
        if junk is not None:
            columns = {k: np.where(empty, junk, c) if c.dtype.kind == "f" else c for k, c in columns.items()}
        logp, entropy = columns.pop("logp"), columns.pop("entropy")
        of_micro, slots = program(logp, entropy, packed.replace(columns=columns))
        value += float(of_micro)
        for name, x in zip(found, map(np.asarray, slots), strict=True):
            training.unpack(case.traj, micro, x, found[name])
            outside = max(outside, float(np.abs(np.where(empty, x, 0)).max()))
    return Gradient(value, found["logp"], found["entropy"], outside)


def example(loss: Loss, lengths, seed: int = 1) -> Case:
    """Builds a batch with random advantages, one per completion, independent of any estimator.

    The column "advantage" [T] float64 is normal with mean 0 and deviation 1, 0 except at loss tokens. lengths: tokens
    of each completion by group. seed: of all random numbers."""
    case = batch(lengths, vocab=16, seed=seed, turns=loss.turns)
    draw = np.random.default_rng(seed + 7).normal(size=case.traj.num_trajectories)
    columns = case.columns | {"advantage": np.where(case.traj.loss_mask, case.traj.spread(draw), 0.0)}
    return case._replace(columns=columns)


def on_policy(case: Case) -> Case:
    """Returns the case with old and behaviour log-probs equal to the current ones."""
    return case._replace(columns=case.columns | {n: case.columns["logp"] for n in ("old", "behaviour")})


def place(case: Case, t: int) -> dict:
    """Returns {"answer", "token"}: the numbers of the completion and of the token in it, both from 0, for a
    counterexample. t: index into the T tokens of the case."""
    i = int(np.searchsorted(case.traj.offsets, t, side="right")) - 1
    sampled = np.flatnonzero(case.traj.loss_mask[case.traj.offsets[i]:])
    return {"answer": i, "token": int(np.searchsorted(sampled + case.traj.offsets[i], t))}


def apart(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the largest difference of two arrays as a share of their largest magnitude; inf if a number is not
    finite."""
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return np.inf
    return float(np.abs(a - b).max(initial=0.0) / max(np.abs(a).max(initial=0.0), np.abs(b).max(initial=0.0), 1e-12))


# ---- claims


def unchanged(loss: Loss, claim: str) -> str:
    """Tests the claim `microbatches`, `packing` or `padding`. Raises Broken with the smallest case that fails.

    Tries the largest case first; within EXACT there, the claim holds. Returns the largest difference as text.
    """
    program, worst = programs(loss), 0.0
    with jax.enable_x64(True):
        for number, lengths in enumerate((SMALLEST[-1], *SMALLEST)):
            case = example(loss, lengths)
            every = layouts(case)
            base = gradient(loss, case, every[""][""], program)
            for how, micros in every[claim].items():
                other = gradient(loss, case, micros, program)
                for name in ("logp", "entropy"):
                    a, b = getattr(base, name), getattr(other, name)
                    worst = max(worst, apart(a, b))
                    if apart(a, b) > EXACT and number:
                        t = int(np.argmax(np.abs(np.nan_to_num(a - b, nan=np.inf))))
                        raise Broken(f"{how}, the gradient of a token is {b[t]:.6g} instead of {a[t]:.6g}",
                                     {**case.summary(), "how": how, **place(case, t), "of": name,
                                      "gradient, an answer in each row of one microbatch": a[t], "gradient": b[t]})
            if worst <= EXACT:
                return f"loss in float64 within {worst:.1g}"
    raise Broken(f"gradients differ by {worst:.3g} of the largest, not every time they are computed")


def masked(loss: Loss) -> str:
    """Tests the claim `mask`: values in slots without a token change neither loss nor gradient. Raises Broken.

    Writes JUNK into float columns there; the loss and gradients may differ by EXACT of their largest magnitude, and the
    gradient in such a slot may be at most EXACT."""
    program = programs(loss)
    with jax.enable_x64(True):
        for lengths in SMALLEST[2:5]:
            case = example(loss, lengths)
            micros = layouts(case)["padding"]["with as many empty rows"]
            base = gradient(loss, case, micros, program)
            for junk in JUNK:
                other = gradient(loss, case, micros, program, junk)
                far = max(apart(base.logp, other.logp), apart(base.entropy, other.entropy),
                          apart(np.array(base.value), np.array(other.value)))
                if far > EXACT or not other.outside <= EXACT:
                    raise Broken(f"with {junk:g} in slots that hold no token the loss is {other.value:.6g} instead of "
                                 f"{base.value:.6g}", {**case.summary(), "in empty slots": junk, "loss": base.value,
                                 "loss with it": other.value, "largest gradient in an empty slot": other.outside,
                                 "difference of gradients": far})
    return "with 37 and -1e4 in them"


def alike(loss: Loss) -> str:
    """Tests the claim `tokens`: on policy, where no clip acts, every sampled token of a completion has the same share
    of its advantage. Raises Broken.

    A token's share is minus its gradient, divided by weight times advantage; tokens where that is 0 do not count."""
    loss, program = loss.plain(), programs(loss.plain())
    unlearnt = set()
    with jax.enable_x64(True):
        for lengths in (SMALLEST[-1], *SMALLEST[1:-1]):
            case = on_policy(example(loss, lengths))
            found = gradient(loss, case, layouts(case)["packing"]["all answers in one row"], program).logp
            due = loss.weights(case)["policy"] * case.columns["advantage"]
            share = np.divide(-found, due, out=np.zeros_like(found), where=due != 0)
            for at in case.traj.sampled():
                own = share[at[due[at] != 0]]
                if len(own) and np.ptp(own) > EXACT * max(np.abs(own).max(), 1e-9):
                    t = int(at[due[at] != 0][np.argmin(np.abs(own))])
                    raise Broken(f"token {place(case, t)['token']} of an answer of {len(at)} has {share[t]:.4g} of its "
                                 f"advantage, another {own[np.argmax(np.abs(own))]:.4g}",
                                 {**case.summary(), **place(case, t), "advantage": case.columns["advantage"][at[0]],
                                  "shares of the answer's tokens": own.tolist()})
                if len(own) and not own.any():
                    unlearnt.add("positive" if case.columns["advantage"][at[0]] > 0 else "negative")
    if unlearnt:
        return f"within an answer; answers with a {' or '.join(sorted(unlearnt))} advantage are not learnt from"
    return f"each with {np.abs(share[due != 0]).mean():.3g} of weight times advantage"


def dead_inputs(loss: Loss) -> None:
    """Raises Broken if the reference's log-probs or the entropies change the loss but no gradient.

    Each is multiplied by 1.3 at the loss tokens."""
    program = programs(loss)
    with jax.enable_x64(True):
        case = example(loss, SMALLEST[2])
        micros = layouts(case)[""][""]
        base = gradient(loss, case, micros, program)
        inputs = {"ref": "the reference's log-probs", "entropy": "the entropies"}
        for name, what in inputs.items():
            moved = case.columns | {name: np.where(case.traj.loss_mask, 1.3 * case.columns[name], 0.0)}
            other = gradient(loss, case._replace(columns=moved), micros, program)
            counts = abs(other.value - base.value) > 1e-9 * max(abs(base.value), 1e-3)
            felt = apart(base.logp, other.logp) > 1e-9 or (name == "entropy" and np.abs(base.entropy).max() > 0)
            if counts and not felt:
                raise Broken(f"{what} times 1.3 change the loss from {base.value:.6g} to {other.value:.6g} and no "
                             "gradient: the term teaches nothing",
                             {**case.summary(), "changed": name, "loss": base.value,
                              "loss with the change": other.value, "largest gradient": float(np.abs(base.logp).max())})
