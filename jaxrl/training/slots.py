"""Builds Trajectories whose loss slots read a score behind given tokens, for reward models.

A loss slot is read at the token before it (`PackedBatch.sources`). So each sequence gets one more token at its end,
whose slot reads the last real token; no real token sees it. Packing, layout and shared prompts are unchanged.
"""

from __future__ import annotations

import numpy as np

from jaxrl.types import Trajectories


def scored_behind(prompts, completions, groups, reads=None, prefixes=None, pictures=None) -> Trajectories:
    """Builds N sequences prompt + completion + one token (0), with loss_mask True at each slot that is read.

    Log-probs are 0 and versions -1: nothing was sampled.

    Args:
      prompts, completions: N int arrays of token ids.
      groups: [N] int, sequences of one group stay in one optimizer step.
      reads: N ascending int arrays of indices into the completions, behind which a score is read (an empty one reads
        none); None: behind the last token of each sequence.
      prefixes: [N] int, equal for sequences that have equal prompts and may share one copy; None = the groups, whose
        sequences then have to have equal prompts.
      pictures: Pictures of the N sequences, or None.

    Raises ValueError for a sequence without tokens, and for prompts and completions of different numbers.
    """
    tokens, mask = [], []
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        tokens.append(np.concatenate([prompt, completion, [0]]).astype(np.int32))
        mask.append(np.zeros(len(tokens[-1]), bool))
        mask[-1][-1 if reads is None else len(prompt) + np.asarray(reads[i]) + 1] = True
    offsets, n = np.cumsum([0, *map(len, tokens)]), len(tokens)
    if (np.diff(offsets) < 2).any():
        raise ValueError("a sequence without tokens has no score: drop it, or give it a prompt")
    zeros = np.zeros(offsets[-1], np.float32)
    return Trajectories(
        tokens=np.concatenate(tokens), offsets=offsets, loss_mask=np.concatenate(mask), logprobs=zeros,
        versions=zeros.astype(np.int32) - 1, prompt_lengths=np.array([len(p) for p in prompts], np.int32),
        group=np.asarray(groups, np.int64), sample=np.zeros(n, np.int32), seed=np.zeros(n, np.uint32),
        finish=np.zeros(n, np.int8), prefix=None if prefixes is None else np.asarray(prefixes, np.int64),
        pictures=pictures)
