"""Turns one image token per image, as chat templates write it, into as many as the image has.

Which tokens are an image's is a table of (first token, count), never a token id: a user's text and a policy may write
the same token, and there it is text.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jaxrl.data.chat_template import PromptError
from jaxrl.data.images.read import ImageError

STAND_INS = tuple(map(chr, range(0xFDD0, 0xFDF0)))  # noncharacters, of which no text has a meaning


class Tokens(NamedTuple):
    """What a family writes for an image: `start`, then `pad` once per image token, then `end`.

    marker: what a chat template writes for an image, which becomes the whole; "" = the template writes the whole
    itself, with one `pad`.
    """

    start: str
    pad: str
    end: str
    marker: str = ""

    @property
    def text(self) -> str:
        return self.start + self.pad + self.end

    @property
    def written(self) -> str:
        """What stands once for each image in the text that a chat template writes."""
        return self.marker or self.pad

    @property
    def expanded(self) -> str:
        """What the tokenizer reads in its place."""
        return self.text if self.marker else self.pad


QWEN = Tokens("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
GEMMA = Tokens("\n\n<start_of_image>", "<image_soft_token>", "<end_of_image>\n\n", "<start_of_image>")
TOKENS = {"qwen2_vl": QWEN, "qwen2_5_vl": QWEN, "qwen3_vl": QWEN, "qwen3_vl_moe": QWEN, "gemma3": GEMMA}


class Escaped(NamedTuple):
    """Messages in whose text characters stand in for the image token and for what a template writes for an image: the
    same one where these are the same."""

    messages: list[dict]
    stand_ins: tuple[str, str]


def escape(messages: list[dict], tokens: Tokens) -> Escaped:
    """Replaces the image token, and what a template writes for an image, where a message's text has it, so that in the
    rendered text it only stands for images.

    Args:
      messages: of read.split_prompt.
    """
    texts = [text for message in messages for text in _texts(message)]
    free = [c for c in STAND_INS if not any(c in text for text in texts)]
    if len(free) < 2:
        raise PromptError("the messages use every character that could stand in for an image token")
    of_pad, of_marker = (free[0], free[1] if tokens.marker else free[0])

    def clean(value) -> Any:
        if isinstance(value, str):
            return value.replace(tokens.pad, of_pad).replace(tokens.written, of_marker)
        if isinstance(value, list):
            return [clean(one) for one in value]
        return {k: clean(v) for k, v in value.items()} if isinstance(value, dict) else value

    return Escaped([clean(message) for message in messages], (of_pad, of_marker))


def _texts(value) -> list[str]:
    if isinstance(value, dict | list):
        return [text for one in (value.values() if isinstance(value, dict) else value) for text in _texts(one)]
    return [value] if isinstance(value, str) else []


def restore(rendered: str, stand_ins: tuple[str, str], tokens: Tokens, images: int) -> tuple[str, list[bool]]:
    """Returns (the text as the tokenizer reads it, for each image token in it whether it is an image's).

    Raises ImageError if the template did not write every image once.
    """
    pieces, (of_pad, _) = rendered.split(tokens.written), stand_ins
    if len(pieces) - 1 != images:
        raise ImageError(f"the chat template writes {len(pieces) - 1} of {images} images; give "
                         f"model.chat_template=FILE, one that writes {tokens.marker or tokens.text} for a content part "
                         "of type image")
    marks = []
    for i, piece in enumerate(pieces):
        marks += [True] * bool(i) + [False] * piece.count(of_pad)
    return spelled(rendered, stand_ins, tokens), marks


def spelled(rendered: str, stand_ins: tuple[str, str], tokens: Tokens) -> str:
    """Returns what a chat template wrote of escaped messages as the tokenizer reads it."""
    of_pad, of_marker = stand_ins
    whole = rendered.replace(tokens.written, tokens.expanded).replace(of_pad, tokens.pad)
    return whole.replace(of_marker, tokens.written)


def expand(ids, marks: list[bool], counts: list[int], pad_id: int) -> tuple[list[int], list[int]]:
    """Returns (ids with an image's token repeated, index of the first token of each image).

    Args:
      ids: of the text of `restore`.
      marks: whether each id that is `pad_id` is an image's, in their order.
      counts: image tokens of each image.
      pad_id: id of the image token.

    Raises ImageError if the tokenizer did not make one id of each image token.
    """
    at = np.flatnonzero(np.asarray(ids) == pad_id)
    if len(at) != len(marks) or sum(marks) != len(counts):
        raise ImageError(f"the tokenizer makes {len(at)} image tokens (id {pad_id}) of {len(marks)}; the image token "
                         "must be one special token of it")
    out, firsts, begin, left = [], [], 0, iter(counts)
    for place, is_image in zip(at.tolist(), marks, strict=True):
        out += ids[begin:place]
        firsts += [len(out)] * is_image
        out += [pad_id] * (next(left) if is_image else 1)
        begin = place + 1
    return [*out, *ids[begin:]], firsts
