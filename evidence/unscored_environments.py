"""For the control of evidence/environments_learn.py: the environments that ship without a score of their own, and the
right scores of a batch, dealt out to its episodes at random."""

import dataclasses
import json
import random
import zlib

from jaxrl.envs import builtin


class guess(builtin.Guess):  # noqa: N801  (its name in env.function)
    def step(self, action):
        return dataclasses.replace(super().step(action), reward=0.0)


class repair(builtin.Repair):  # noqa: N801
    def step(self, action):
        return dataclasses.replace(super().step(action), reward=0.0)


async def library(task, chat):
    await builtin.library(task, chat)


def own(completion, **columns):
    """Whether the last turn says what the row wants."""
    if columns.get("tests") is not None:
        return float(builtin.first_failing_test(columns["source"], completion.strip(), json.dumps(columns["tests"])) < 0)
    wanted = columns.get("answer")
    return float(completion.strip() == str(columns["number"] if wanted is None else wanted))


def dealt_out(prompts, completions, **columns):
    """Scores of `own`, permuted over the whole batch; the permutation depends on what was said last alone."""
    scores = [own(c, **{n: v[i] for n, v in columns.items()}) for i, c in enumerate(completions)]
    random.Random(zlib.crc32("\n".join(completions).encode())).shuffle(scores)
    return scores
