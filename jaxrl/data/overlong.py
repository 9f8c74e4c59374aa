"""Rows that are longer than a run takes: left out, cut, or split into several."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Limits(NamedTuple):
    """Tokens of a prompt, of a target, of both (0: as the two say); data.overlong_prompt, data.overlong_completion."""

    prompt: int
    target: int
    total: int
    policy: str
    completion: str = "filter"

    def room(self, prompt: int) -> int:
        """Most tokens of a target behind a prompt of so many."""
        return min(self.target, self.total - prompt) if self.total else self.target

    def overlong(self, prompt, target, what: str = "completion") -> str | None:
        """Why a row is too long, or None. A prompt may be cut on the left where data.overlong_prompt says so."""
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
    """Of a row: ids of what is read, ids behind it, [C] bool which of those are trained on (None: all)."""

    prompt: list[int]
    target: np.ndarray
    trained: np.ndarray | None


def fitted(limits: Limits, prompt: list[int], target, trained) -> list[Piece]:
    """What is trained on of a row whose completion is too long, as data.overlong_completion says; [] where that leaves
    nothing (no room behind the prompt, nothing trained in what is kept).

    truncate: the first tokens that fit. split: each token of the target is in exactly one piece, behind as many of the
    tokens before it as a prompt may have (half of a row at most where train.max_sequence_tokens bounds it).
    """
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
