"""Rows longer than the limits: dropped, cut, or split into several."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Limits(NamedTuple):
    """Length limits in tokens and the policies for longer rows.

    Attributes:
      prompt, target: most tokens of a prompt (data.max_prompt_tokens), of a completion (rollout.max_new_tokens).
      total: most tokens of both together (train.max_sequence_tokens); 0 for prompt + target.
      policy: data.overlong_prompt; with truncate_left a long prompt is accepted.
      completion: data.overlong_completion: filter, truncate or split.
    """

    prompt: int
    target: int
    total: int
    policy: str
    completion: str = "filter"

    def room(self, prompt: int) -> int:
        """Returns the largest number of completion tokens that fit after a prompt of `prompt` tokens; 0 or less if the
        prompt alone fills the row."""
        return min(self.target, self.total - prompt) if self.total else self.target

    def overlong(self, prompt, target, what: str = "completion") -> str | None:
        """Returns why a row is too long, as text, or None if it is not.

        With data.overlong_prompt=truncate_left a long prompt is accepted.

        Args:
          prompt, target: token ids; target None = a prompt alone. what: name of the target in the text."""
        if len(prompt) > self.prompt and self.policy != "truncate_left":
            return f"the prompt has {len(prompt)} tokens, data.max_prompt_tokens={self.prompt}"
        if target is None:
            return None
        if len(target) > self.target:
            return f"the {what} has {len(target)} tokens, rollout.max_new_tokens={self.target}"
        total = min(len(prompt), self.prompt) + len(target)
        if 0 < self.total < total:
            return f"prompt and {what} have {total} tokens, train.max_sequence_tokens={self.total}"
        return None


class Piece(NamedTuple):
    """One training row cut from a row that is too long.

    Attributes:
      prompt: ids of the context.
      target: [C] int32 ids after it.
      trained: [C] bool, which target ids are trained on; None for all."""

    prompt: list[int]
    target: np.ndarray
    trained: np.ndarray | None


def fit_completion(limits: Limits, prompt: list[int], target, trained) -> list[Piece]:
    """Cuts or splits a row whose completion is too long, according to data.overlong_completion.

    truncate: keeps the first tokens that fit. split: each target token is in exactly one piece, after as many of the
    preceding tokens as a prompt may have (at most half a row if train.max_sequence_tokens bounds it).

    Args:
      limits: of the job.
      prompt, target: token ids.
      trained: [C] bool, which target ids are trained on; None = all.

    Returns:
      The pieces that have a trained token, in order. [] with data.overlong_completion=filter, if there is no room
      after the prompt, if the prompt is too long and may not be cut, and if no piece has a trained token."""
    room = limits.room(min(len(prompt), limits.prompt))
    if room <= 0 or limits.completion == "filter" or (len(prompt) > limits.prompt and limits.policy != "truncate_left"):
        return []
    target = np.asarray(target, np.int32)
    pieces = [Piece(prompt, target[:room], None if trained is None else trained[:room])]
    if limits.completion == "split":
        whole, before = np.concatenate([prompt, target]).astype(np.int32), len(prompt)
        context = min(limits.prompt, max(1, limits.total // 2)) if limits.total else limits.prompt
        size, at = limits.room(context), room
        while at < len(target):
            piece = slice(at, at + size)
            pieces.append(Piece(whole[max(0, before + at - context):before + at].tolist(), target[piece],
                                None if trained is None else trained[piece]))
            at += size
    return [piece for piece in pieces if piece.trained is None or piece.trained.any()]
