"""The control's reward: the right scores of a batch, dealt out to its answers at random."""

import random
import zlib

from jaxrl.rewards.builtin import boxed_reward


def shuffled(prompts, completions, answer, **columns):
    """Scores of `boxed`, permuted over the whole batch; the permutation depends on the answers alone."""
    scores = [boxed_reward(p, c, a) for p, c, a in zip(prompts, completions, answer, strict=True)]
    random.Random(zlib.crc32("\n".join(completions).encode())).shuffle(scores)
    return scores
