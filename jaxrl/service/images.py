"""Images in the inputs of requests: from the bytes of an image chunk to image tokens and the picture they stand for.

An image chunk stands for as many tokens as the model has features of the image; the client's text around it has the
model's marks of begin and end. The tokens in its place have the id of the image token, and what is read there is the
picture, never that id.

Called by service.bodies. Legend: N tokens, I images.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxrl.data.images.decode import size_of
from jaxrl.data.images.read import Image, ImageError
from jaxrl.service.refusals import Refused
from jaxrl.service.wire import ImageChunk
from jaxrl.types import Pictures, Places


class Sight:
    """Turns image chunks of requests into image tokens and the pictures that they stand for.

    Args:
      source: data.images.source.ImageSource.
      most: image tokens that a sequence may have.
    """

    def __init__(self, source, most: int):
        self.source, self.most = source, most
        self.pad = source.tokenizer.convert_tokens_to_ids(source.tokens.pad)

    def expand(self, text_N: np.ndarray, chunks: tuple[ImageChunk, ...], where: str) -> tuple[np.ndarray, Places]:
        """Returns (tokens [N'] int32 with those of the images in their places, Places of the I images).

        Args:
          text_N: [N] int32 token ids without the images. chunks: the images, by position in the text.
          where: prefix of error messages.

        Raises Refused (422) for an image that cannot be read, has other than the expected tokens, or does not fit
        `most`."""
        parts, firsts, grids, numbers, kept, begin, length = [], [], [], [], [], 0, 0
        for k, chunk in enumerate(chunks):
            number, grid, image = self._picture(chunk, f"{where}: image {k}")
            count = int(np.prod(grid)) // self.source.merge**2
            if chunk.expected not in (None, count):
                raise Refused(422, f"{where}: image {k} has {count} tokens here, the client expects {chunk.expected}; "
                              "leave expected_tokens out, or count with this model's processor")
            parts += [text_N[begin:chunk.at], np.full(count, self.pad, np.int32)]
            begin, length = chunk.at, length + chunk.at - begin
            firsts.append(length)
            length += count
            for into, one in ((grids, grid), (numbers, number), (kept, image)):
                into.append(one)
        counts = sum(len(part) for part in parts[1::2])
        if counts > self.most:
            raise Refused(422, f"{where} has {counts} image tokens: this server has room for {self.most}; send fewer "
                          "or smaller images, or start it with a larger --image-tokens")
        tokens = np.concatenate([*parts, text_N[begin:]]).astype(np.int32)
        return tokens, Places(np.array(firsts, np.int64), np.array(grids, np.int64).reshape(-1, 2),
                              np.array(numbers, np.int64), tuple(kept))

    def _picture(self, chunk: ImageChunk, where: str) -> tuple[int, tuple[int, int], Any]:
        """Returns (number, rows and columns of patches, what keeps it)."""
        try:
            image = Image(encoded=chunk.data)
            tokens = self.source.rule.tokens(self.source.rule.grid(*size_of(image, self.source.limit)))
            if tokens > self.most:  # before its pixels are made
                raise Refused(422, f"{where} has {tokens} tokens: this server has room for {self.most}; send a smaller "
                              "one, or start the server with a larger --image-tokens")
            number, kept = self.source.hold(image)
            return number, self.source.grid(number), kept
        except ImageError as e:
            raise Refused(422, f"{where}: {e}") from None

    def pictures(self, places) -> Pictures | None:
        """Returns the images of sequences from the Places of each (None: it has none); None if there is none."""
        return Pictures.of(places, self.source)


def expanded(text_N: np.ndarray, chunks: tuple[ImageChunk, ...], sight: Sight | None,
             where: str) -> tuple[np.ndarray, Places | None]:
    """Returns (tokens [N'] int32, Places of the images; None without images): `Sight.expand` where there are images.

    sight: None on a server that reads text. where: prefix of error messages. Raises Refused (422) for images
    that are not served."""
    if not chunks:
        return text_N, None
    if sight is None:
        raise Refused(422, f"{where} has an image, and this server reads text; start it with a model that has a tower "
                      "for images and --image-tokens=1024 (those of a sequence)")
    return sight.expand(text_N, chunks, where)
