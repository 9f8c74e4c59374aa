"""Images in the messages of episodes: which there are, their tokens among rendered ids, and the pictures of a request.

`rollout.episodes` calls it. No jax here.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from jaxrl.data.chat_template import PromptError
from jaxrl.errors import RunStopped
from jaxrl.rollout.protocol import Request, TurnImage

if TYPE_CHECKING:  # it imports jax
    from jaxrl.types import Pictures

NO_TOWER = "the model has no tower for images (or data.image_column='')"
NO_ROOM = "env.image_tokens=0 leaves no room for it: set it to the most image tokens that an episode shows"


class TurnImages:
    """Reads the images of an environment's messages.

    Args:
      source: the job's ImageSource; None: messages are text.
      env: the options below `env`.
    """

    def __init__(self, source, env):
        self.source, self.env = source, env
        name = next((name for name in ("function", "program", "tools") if env[name]), "mcp")
        self._environment = f"env.{name}={env[name]!r}"

    def found(self, messages: list[dict]) -> tuple[list[dict], list]:
        """Returns (messages whose contents are text or lists of parts, their images in order), as ImageSource.shown
        does: None for a part that brings none, which stands for the row's next image. (messages, []) without images.

        Raises RunStopped if there are images and the model has no tower, or env.image_tokens is 0, and what
        ImageSource.shown raises (ImageError)."""
        if not any(isinstance(part, dict) and part.get("type") in ("image", "image_url") for m in messages
                   if isinstance(m.get("content"), list) for part in m["content"]):
            return messages, []
        if self.source is None or not self.env.image_tokens:
            why = NO_TOWER if self.source is None else NO_ROOM
            raise RunStopped(f"{self._environment}: an episode shows an image, and {why}")
        return self.source.shown(messages)

    def expanded(self, ids, at, found, request: Request, shown: int) -> tuple[np.ndarray, tuple[TurnImage, ...]]:
        """Returns (ids [n] with one image token for each feature, their TurnImages, `first` counted in these ids).

        Args:
          ids: [n] int token ids with one image token for each image. at: [I] int, the index of each of these.
          found: the images, as `found` returns them; None = the row's next one.
          request: of the episode. shown: how many of its row's images stand before them.

        Raises PromptError for an image that cannot be read, naming it, and where the row has no further image.
        """
        if not len(at):
            return ids, ()
        rows, repeats, images = iter(images_of_row(request.pictures)[shown:]), np.ones(len(ids), int), []
        for number, (place, image) in enumerate(zip(at.tolist(), found, strict=True)):
            if image is not None:
                images.append(self._held(image, number, getattr(request.task, "grey", False)))
            elif (own := next(rows, None)) is not None:
                images.append(own)
            else:
                raise PromptError("a part of type image brings none, and the row has no further one")
            repeats[place] = self.tokens(images[-1:])
        firsts = (np.cumsum(repeats) - repeats)[at].tolist()
        return np.repeat(ids, repeats), tuple(i._replace(first=k) for i, k in zip(images, firsts, strict=True))

    def _held(self, image, place: int, grey: bool) -> TurnImage:
        try:
            number, held = self.source.hold(image, grey)
            return TurnImage(0, self.source.grid(number), number, held)
        except (PromptError, OSError) as e:
            raise PromptError(f"image {place + 1}: {e}") from None

    def tokens(self, images) -> int:
        """Returns the number of tokens that these TurnImages take in a sequence; needs a source."""
        return sum(math.prod(image.grid) for image in images) // self.source.merge**2

    def have_room(self, images, first: bool) -> bool:
        """Returns whether a sequence may hold these images, at most env.image_tokens tokens. Raises RunStopped if those
        of a `first` turn are too many.
        """
        if (count := self.tokens(images)) <= self.env.image_tokens:
            return True
        if first:
            raise RunStopped(f"{self._environment}: turn 1 shows images of {count} tokens, and an episode has room for "
                             f"{self.env.image_tokens}: set env.image_tokens to the most that an episode shows")
        return False

    def pictures(self, images) -> Pictures | None:
        """Returns the Pictures of a request's prompt with these TurnImages; None if there is none."""
        return self.source.pictures([self.source.places_of(images)]) if images else None


def images_of_row(pictures: Pictures | None) -> tuple[TurnImage, ...]:
    """Returns the TurnImages of a row's prompt; () without images."""
    if pictures is None:
        return ()
    return tuple(TurnImage(int(first), tuple(grid), int(number)) for first, grid, number in zip(
        pictures.firsts, pictures.grids.tolist(), pictures.numbers, strict=True))


def sequence_images(before, known: int, opens: bool, images) -> list[TurnImage]:
    """Returns the images of a sequence that holds those of a turn.

    Args:
      before: of the sequence so far, which has `known` tokens. opens: whether the turn opens a new sequence.
      images: of the turn, `first` counted from its first token; in the result from that of the sequence.
    """
    return list(images) if opens else [*before, *(i._replace(first=i.first + known) for i in images)]
