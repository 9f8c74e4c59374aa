"""Turns one image token per image, as chat templates write it, into as many as the image has.

Which tokens are an image's is a table of (first token, count), never a token id: a user's text and a policy may write
the same token, and there it is text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl.data.chat_template import PromptError
from jaxrl.data.images.read import ImageError

STAND_INS = tuple(map(chr, range(0xFDD0, 0xFDF0)))  # noncharacters, of which no text has a meaning


class Tokens(NamedTuple):
    """What a family writes for an image: `start`, then `pad` once per image token, then `end`.

    marker: what a chat template writes for an image, which becomes the whole; "" = the template writes the whole
    itself, with one `pad`.
    video: the pad of a video, of which the template writes one in place of the image's; "" = the family reads none.
    """

    start: str
    pad: str
    end: str
    marker: str = ""
    video: str = ""

    @property
    def pads(self) -> tuple[str, ...]:
        """The tokens that stand for features: of an image and, if the family reads videos, of a video."""
        return (self.pad, self.video) if self.video else (self.pad,)

    @property
    def text(self) -> str:
        """An image of one image token: start, pad, end."""
        return self.start + self.pad + self.end

    @property
    def written(self) -> str:
        """What stands once for each image in the text that a chat template writes: the marker, or pad without one."""
        return self.marker or self.pad

    @property
    def expanded(self) -> str:
        """What replaces `written` before the tokenizer reads the text: start, pad and end for a marker, else pad."""
        return self.text if self.marker else self.pad


QWEN = Tokens("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", video="<|video_pad|>")
GEMMA = Tokens("\n\n<start_of_image>", "<image_soft_token>", "<end_of_image>\n\n", "<start_of_image>")
TOKENS = {"qwen2_vl": QWEN, "qwen2_5_vl": QWEN, "qwen3_vl": QWEN, "qwen3_vl_moe": QWEN, "gemma3": GEMMA}


class Escaped(NamedTuple):
    """Messages in whose text characters stand in for the image token and for what a template writes for an image: the
    same one where these are the same; and for the token of a video.

    Attributes:
      messages: with the characters in their texts.
      stand_ins: (of the image token, of what a template writes for an image) and, if the family reads videos, of the
        video token."""

    messages: list[dict]
    stand_ins: tuple[str, ...]


def escape(messages: list[dict], tokens: Tokens) -> Escaped:
    """Replaces the image token, and what a template writes for an image, where a message's text has it, so that in the
    rendered text it only stands for images.

    Args:
      messages: of read.split_prompt. Texts anywhere in them count, also in tool calls.
      tokens: what the family writes for an image.

    Raises PromptError if the messages leave fewer than three characters that could stand in.
    """
    texts = [text for message in messages for text in _texts(message)]
    free = [c for c in STAND_INS if not any(c in text for text in texts)]
    if len(free) < 3:
        raise PromptError("the messages use every character that could stand in for an image token")
    of_pad, of_marker = (free[0], free[1] if tokens.marker else free[0])
    of_video = [(tokens.video, free[2])] if tokens.video else []

    def clean(value) -> Any:
        if isinstance(value, str):
            for token, stand_in in ((tokens.pad, of_pad), (tokens.written, of_marker), *of_video):
                value = value.replace(token, stand_in)
            return value
        if isinstance(value, list):
            return [clean(one) for one in value]
        return {k: clean(v) for k, v in value.items()} if isinstance(value, dict) else value

    return Escaped([clean(message) for message in messages], (of_pad, of_marker, *(char for _, char in of_video)))


def _texts(value) -> list[str]:
    if isinstance(value, dict | list):
        return [text for one in (value.values() if isinstance(value, dict) else value) for text in _texts(one)]
    return [value] if isinstance(value, str) else []


def restore(rendered: str, stand_ins: tuple[str, ...], tokens: Tokens, images: int,
            videos: Sequence[str] = ()) -> tuple[str, list[bool]]:
    """Returns (the text as the tokenizer reads it, for each image or video token in it whether it is a picture's).

    Args:
      rendered: what the chat template wrote of escaped messages.
      stand_ins: of Escaped. tokens: what the family writes for an image.
      images: number of images in the messages.
      videos: of each video what its token becomes: one video token for each group of frames, and text between them.

    Raises ImageError if the template did not write every image and every video once.
    """
    of_pad, _, *of_video = stand_ins
    patterns = {tokens.written: images} | ({tokens.video: len(videos)} if tokens.video else {})
    pieces = re.split("(" + "|".join(map(re.escape, patterns)) + ")", rendered)
    for (token, wanted), kind in zip(patterns.items(), ("image", "video"), strict=False):
        if (count := pieces[1::2].count(token)) != wanted:
            whole = tokens.start + token + tokens.end if kind == "video" else tokens.marker or tokens.text
            raise ImageError(f"the chat template writes {count} of {wanted} {kind}s; give "
                             f"model.chat_template=FILE, one that writes {whole} for a content part of type {kind}")
    marks, left = [], iter(videos)
    for i, piece in enumerate(pieces):
        if i % 2 == 0:
            marks += [False] * sum(piece.count(char) for char in (of_pad, *of_video))
        elif piece == tokens.written:
            marks.append(True)
        else:
            pieces[i] = next(left)
            marks += [True] * pieces[i].count(tokens.video)
    return spelled("".join(pieces), stand_ins, tokens), marks


def spelled(rendered: str, stand_ins: tuple[str, ...], tokens: Tokens) -> str:
    """Returns what a chat template wrote of escaped messages as the tokenizer reads it: what stands for an image
    becomes Tokens.expanded, with one image token, and stand-ins become the texts that they replaced.

    stand_ins: of Escaped. tokens: what the family writes for an image."""
    of_pad, of_marker, *of_video = stand_ins
    whole = rendered.replace(tokens.written, tokens.expanded).replace(of_pad, tokens.pad)
    for char in of_video:
        whole = whole.replace(char, tokens.video)
    return whole.replace(of_marker, tokens.written)


def expand(ids, marks: list[bool], counts: list[int], pads: Sequence[int]) -> tuple[list[int], list[int]]:
    """Returns (ids with an image's token repeated, index of the first token of each image).

    Args:
      ids: of the text of `restore`.
      marks: whether each id that is one of `pads` is an image's, in their order.
      counts: image tokens of each image.
      pads: ids of the image token and of the video token.

    Raises ImageError if the tokenizer did not make one id of each image token.
    """
    at = np.flatnonzero(np.isin(np.asarray(ids), pads))
    if len(at) != len(marks) or sum(marks) != len(counts):
        raise ImageError(f"the tokenizer makes {len(at)} image tokens (id {', '.join(map(str, pads))}) of "
                         f"{len(marks)}; the image token must be one special token of it")
    out, firsts, begin, left = [], [], 0, iter(counts)
    for place, is_image in zip(at.tolist(), marks, strict=True):
        out += ids[begin:place]
        firsts += [len(out)] * is_image
        out += [ids[place]] * (next(left) if is_image else 1)
        begin = place + 1
    return [*out, *ids[begin:]], firsts
