"""Finished images as vLLM's /inference/v1/generate takes them (`features`): hashes, places in the prompt, and the data
of each as msgpack in base64.

Sources: MultiModalFeatures in vllm/entrypoints/scale_out/token_in_token_out/protocol.py, v1/serial_utils.py and the
fields of Qwen's towers in model_executor/models/qwen2_vl.py of 0.32.
"""

from __future__ import annotations

import base64
import collections
import hashlib
import threading
from typing import NamedTuple

import msgpack
import numpy as np

from jaxrl.errors import ConfigError
from jaxrl.types import Pictures

RAW = 3  # vLLM's msgpack extension for the bytes of a tensor (CUSTOM_TYPE_RAW_VIEW)
KEPT_BYTES = 256_000_000  # of encoded images that were sent last: a group's requests show the same ones


class Item(NamedTuple):
    """One image: `digest` (hex) names it in the server's caches, `data` (msgpack in base64) is what its tower takes."""

    digest: str
    data: str


def encode(patches: np.ndarray, grid: tuple[int, int]) -> Item:
    """Returns an image's item. patches: [N, C * p * p] uint8, see data.images.resize.cut. grid: rows, columns, in
    patches."""
    digest = hashlib.blake2b(repr(grid).encode() + patches.tobytes(), digest_size=16).hexdigest()
    fields = {
        "pixel_values": {"data": _tensor(patches),
                         "field": ["flat", {"keep_on_cpu": False, "slices": [[0, len(patches), None]], "dim": 0}]},
        "image_grid_thw": {"data": _tensor(np.array([1, *grid])), "field": ["batched", {"keep_on_cpu": True}]},
    }
    return Item(digest, base64.b64encode(msgpack.Packer().pack(fields)).decode())


def _tensor(array: np.ndarray) -> list:
    return [array.dtype.name, list(array.shape), msgpack.ExtType(RAW, array.tobytes())]


class ItemWriter:
    """Makes the `features` of requests with images and keeps the most recently used encoded images. Threads may share
    it.

    limit: bytes of encoded images to keep; the last one stays even if it is larger."""

    def __init__(self, limit: int = KEPT_BYTES):
        self.limit = limit
        self.made = 0  # images encoded since the start
        self._lock, self._kept, self._bytes = threading.Lock(), collections.OrderedDict[tuple, Item](), 0

    def features(self, pictures: Pictures) -> dict:
        """Returns the JSON field `features` of a request whose prompt has these images: hashes, places and encoded
        patches. Raises ConfigError for videos, and what reading an image raises (RunStopped)."""
        if pictures.frames > 1:
            raise ConfigError("rollout.engine=vllm: jaxrl does not write items of videos for vLLM yet; set "
                              "rollout.engine=jax")
        items = [self._item(pictures, i) for i in range(len(pictures.numbers))]
        lengths = pictures.counts // pictures.merge**2
        places = [{"offset": int(first), "length": int(n)} for first, n in zip(pictures.firsts, lengths, strict=True)]
        return {"mm_hashes": {"image": [item.digest for item in items]}, "mm_placeholders": {"image": places},
                "kwargs_data": {"image": [item.data for item in items]}}

    def _item(self, pictures: Pictures, i: int) -> Item:
        height, width = pictures.grids[i].tolist()
        key = pictures.patches, int(pictures.numbers[i]), height, width
        with self._lock:  # whoever asks for the same one meanwhile waits for it
            if key not in self._kept:
                self._kept[key] = item = encode(pictures.patches(pictures.numbers[i:i + 1])[0], (height, width))
                self.made += 1
                self._bytes += len(item.data)
                while self._bytes > self.limit and len(self._kept) > 1:
                    self._bytes -= len(self._kept.popitem(last=False)[1].data)
            self._kept.move_to_end(key)
            return self._kept[key]
