"""Batches on which claims are tested: small ones of plain numbers, the smallest first, and changes that must not
matter. Used by all modules of certify that test losses, advantages and updates.

Legend: N completions (trajectories), T tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxrl.types import FINISH, Trajectories

STOP, LENGTH = FINISH.index("stop"), FINISH.index("length")


class Case(NamedTuple):
    """A batch of N completions with scores and token columns. traj: the Trajectories, T tokens.

    columns: name -> [T] float64 at the sampled tokens, 0 elsewhere. baseline: None = there is none."""

    traj: Trajectories
    scores: np.ndarray             # [N] float64
    columns: dict[str, np.ndarray]
    baseline: np.ndarray | None = None  # [N] float64: score of the greedy completion of its prompt

    def summary(self) -> dict:
        """Returns the JSON-able description of the batch for a counterexample."""
        return {"groups": self.traj.group.tolist(), "scores": np.round(self.scores, 4).tolist(),
                "tokens of the answers": self.traj.total().tolist(),
                "tokens of the prompts": self.traj.prompt_lengths.tolist()}


def trajectories(prompts, answers, group, finish, turns: bool = False) -> Trajectories:
    """Builds Trajectories of one sequence each; the loss mask covers the completion, log-probs are 0.

    Args:
      prompts, answers: N sequences of int token ids: the prompt and the completion of each.
      group, finish: [N] int: its prompt group, and its index in types.FINISH.
      turns: each completion of two or more tokens has two turns with one token between them that was not sampled, and
        the columns `turn`, `reward` and `anchor` of episodes exist.
    """
    tokens, mask, offsets, turn = [], [], [0], []
    for prompt, answer in zip(prompts, answers, strict=True):
        answer, own, number = list(answer), [True] * len(answer), [0] * len(answer)
        if turns and len(answer) > 1:
            cut = (len(answer) + 1) // 2
            answer, own = answer[:cut] + answer[:1] + answer[cut:], own[:cut] + [False] + own[cut:]
            number = [0] * cut + [-1] + [1] * (len(number) - cut)
        tokens += [*prompt, *answer]
        mask += [False] * len(prompt) + own
        turn += [-1] * len(prompt) + number
        offsets.append(len(tokens))
    n, mask, turn = len(answers), np.array(mask, bool), np.array(turn, np.int32)
    columns = {"kept": np.zeros(len(mask), np.float32)}
    if turns:
        last = np.append(mask[:-1] & ((turn[1:] != turn[:-1]) | ~mask[1:]), mask[-1])
        columns |= {"turn": turn, "reward": np.where(last, 0.25 + 0.5 * turn, 0.0),
                    "anchor": np.where(mask, 7 + turn, 0).astype(np.int64)}
    return Trajectories(
        tokens=np.array(tokens, np.int32), offsets=np.array(offsets, np.int64), loss_mask=mask,
        logprobs=np.zeros(len(mask), np.float32), versions=np.where(mask, 0, -1).astype(np.int32),
        prompt_lengths=np.array([len(p) for p in prompts], np.int32), group=np.asarray(group, np.int64),
        sample=np.array([list(group[:i]).count(g) for i, g in enumerate(group)], np.int32),
        seed=np.arange(n, dtype=np.uint32), finish=np.asarray(finish, np.int8), columns=columns)


def batch(lengths, vocab: int, seed: int = 0, turns: bool = False, prompt: int = 3) -> Case:
    """Builds a Case of prompt groups whose completions have given lengths, with random tokens, scores and log-probs.

    All scores differ, and columns of log-probs (nats) differ a little, so that no ratio is 1. The last completion of
    every group but the first is truncated (finish LENGTH).

    Args:
      lengths: tokens of each completion by group, e.g. [[3, 1], [2, 2]].
      vocab: token ids are drawn from 1 ... vocab - 1.
      seed: of all random numbers.
      turns: completions of two or more tokens have two turns, with one token between them that was not sampled.
      prompt: prompts have 1 to `prompt` tokens; one prompt for each group.
    """
    random = np.random.default_rng(seed)
    prompts, answers, group, finish = [], [], [], []
    for g, sizes in enumerate(lengths):
        ids = random.integers(1, vocab, 1 + (g + 1) % prompt)
        for k, size in enumerate(sizes):
            prompts.append(ids)
            answers.append(random.integers(1, vocab, size))
            group.append(g)
            finish.append(LENGTH if k == len(sizes) - 1 and g else STOP)
    traj = trajectories(prompts, answers, group, finish, turns)
    scores = random.permutation(np.linspace(0, 1, len(group))) + 0.01 * random.random(len(group))
    base = np.where(traj.loss_mask, -1.0 - random.random(len(traj.tokens)), 0.0)
    near = lambda scale: np.where(traj.loss_mask, base + scale * random.normal(size=len(base)), 0.0)  # noqa: E731
    columns = {"logp": base, "old": near(0.1), "behaviour": near(0.1), "ref": near(0.5),
               "entropy": np.where(traj.loss_mask, 0.5 + random.random(len(base)), 0.0),
               "value": near(0.2), "return": near(0.2), "old_value": near(0.2), "staleness": np.zeros(len(base))}
    return Case(traj, scores, columns, 0.3 + 0.1 * np.asarray(group, float))


def select_completions(case: Case, order) -> tuple[Case, np.ndarray]:
    """Selects M completions of a Case, with their scores, columns and baseline.

    Args:
      order: [M] int indices of completions, in the wanted order.

    Returns:
      (Case of the M completions, [T'] int64: the index in the given Case of each of their tokens)."""
    traj = case.traj
    where = np.concatenate([np.arange(int(traj.offsets[i]), int(traj.offsets[i + 1])) for i in order])
    order = np.asarray(order)
    own = {name: getattr(traj, name)[where] for name in ("tokens", "loss_mask", "logprobs", "versions")}
    each = {name: getattr(traj, name)[order] for name in ("prompt_lengths", "group", "sample", "seed", "finish")}
    new = Trajectories(**own, **each, offsets=np.append(0, np.cumsum(traj.lengths[order])),
                       columns={name: column[where] for name, column in traj.columns.items()})
    columns = {name: column[where] for name, column in case.columns.items()}
    return Case(new, case.scores[order], columns, None if case.baseline is None else case.baseline[order]), where


def orders(traj: Trajectories) -> dict[str, list[int]]:
    """Returns name -> [N] indices: orders of the N completions that must not change results. Groups stay together, as
    in a run."""
    groups = list(dict.fromkeys(traj.group.tolist()))
    members = {g: np.flatnonzero(traj.group == g).tolist() for g in groups}
    return {"groups in reverse": [i for g in reversed(groups) for i in members[g]],
            "answers of each group in reverse": [i for g in groups for i in reversed(members[g])]}


SMALLEST = ([[1, 1]], [[2, 1]], [[2, 3]], [[1, 1], [1, 1]], [[2, 1], [1, 3]], [[3, 2, 1], [4, 1, 2]],
            [[3, 5, 1, 2], [2, 2, 4, 1], [1, 6, 2, 3]])  # answers by their tokens, by group
