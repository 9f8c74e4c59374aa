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
    """What a family writes for an image: `start`, then `pad` once per image token, then `end`."""

    start: str
    pad: str
    end: str

    @property
    def text(self) -> str:
        return self.start + self.pad + self.end


QWEN = Tokens("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
TOKENS = {"qwen2_vl": QWEN, "qwen2_5_vl": QWEN, "qwen3_vl": QWEN, "qwen3_vl_moe": QWEN}


class Escaped(NamedTuple):
    """Messages in whose text a character stands in for the image token."""

    messages: list[dict]
    stand_in: str


def escape(messages: list[dict], tokens: Tokens) -> Escaped:
    """Replaces the image token where a message's text has it, so that in the rendered text it only stands for images.

    Args:
      messages: of read.split_prompt.
    """
    texts = [text for message in messages for text in _texts(message)]
    free = [c for c in STAND_INS if not any(c in text for text in texts)]
    if not free:
        raise PromptError("the messages use every character that could stand in for an image token")

    def clean(value) -> Any:
        if isinstance(value, str):
            return value.replace(tokens.pad, free[0])
        if isinstance(value, list):
            return [clean(one) for one in value]
        return {k: clean(v) for k, v in value.items()} if isinstance(value, dict) else value

    return Escaped([clean(message) for message in messages], free[0])


def _texts(value) -> list[str]:
    if isinstance(value, dict | list):
        return [text for one in (value.values() if isinstance(value, dict) else value) for text in _texts(one)]
    return [value] if isinstance(value, str) else []


def restore(rendered: str, stand_in: str, tokens: Tokens, images: int) -> tuple[str, list[bool]]:
    """Returns (the text as the tokenizer reads it, for each image token in it whether it is an image's).

    Raises ImageError if the template did not write every image once.
    """
    pieces = rendered.split(tokens.pad)
    if len(pieces) - 1 != images:
        raise ImageError(f"the chat template writes {len(pieces) - 1} of {images} images; give "
                         f"model.chat_template=FILE, one that writes {tokens.text} for a content part of type image")
    marks = []
    for i, piece in enumerate(pieces):
        marks += [True] * bool(i) + [False] * piece.count(stand_in)
    return rendered.replace(stand_in, tokens.pad), marks


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
