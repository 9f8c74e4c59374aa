"""Images that one processor core prepares a second: decoded, resized and cut into patches, beside transformers' Pillow class.

    python evidence/prepared_images.py      # a minute; writes evidence/results/prepared_images.json

Processor time of one thread, which other programs enter by sharing caches alone; medians of ROUNDS files of each kind, ours and theirs in
turns. Files are smooth pictures with a little noise. transformers' class does not rescale and normalise here, which jaxrl leaves to devices.
"""

from __future__ import annotations

import functools
import io
import os
import statistics
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np  # noqa: E402
from common import record, table  # noqa: E402
from PIL import Image, ImageOps  # noqa: E402

from jaxrl.data.images.decode import picture_of  # noqa: E402
from jaxrl.data.images.read import Image as Unread  # noqa: E402
from jaxrl.data.images.resize import rule_of  # noqa: E402

LIMIT, ROUNDS = 1 << 26, 9
FILES = {"JPEG, 640 x 480": ("JPEG", 640, 480), "JPEG, 1024 x 768": ("JPEG", 1024, 768), "PNG, 1024 x 768": ("PNG", 1024, 768),
         "JPEG, 4032 x 3024": ("JPEG", 4032, 3024)}


def encoded(kind: str, width: int, height: int, rng) -> bytes:
    coarse = Image.fromarray(rng.integers(0, 256, (height // 32 + 2, width // 32 + 2, 3)).astype(np.uint8)).resize((width, height), 2)
    pixels = np.clip(np.asarray(coarse, np.int16) + rng.integers(-8, 9, (height, width, 3), np.int16), 0, 255).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind, **({"quality": 90} if kind == "JPEG" else {}))
    return out.getvalue()


def prepared(file: bytes, rule):
    return picture_of(Unread(encoded=file), rule, LIMIT)


def theirs(rule):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    processor = Qwen2VLImageProcessorPil(patch_size=rule.patch, merge_size=rule.merge, temporal_patch_size=rule.frames,
                                         size={"shortest_edge": rule.least, "longest_edge": rule.most}, do_rescale=False, do_normalize=False)
    return lambda file: processor(ImageOps.exif_transpose(Image.open(io.BytesIO(file))).convert("RGB"), return_tensors="np")


def seconds(prepare, file: bytes) -> float:
    start = time.thread_time()
    prepare(file)
    return time.thread_time() - start


def main():
    rng, out, rows = np.random.default_rng(0), {}, []
    for family in ("qwen2_5_vl", "qwen3_vl"):
        rule = rule_of(family)
        prepare, other = functools.partial(prepared, rule=rule), theirs(rule)
        for name, kind in FILES.items():
            files = [encoded(*kind, rng) for _ in range(ROUNDS)]
            tokens = len(prepare(files[0]).patches) // rule.merge**2
            times = [(seconds(prepare, file), seconds(other, file)) for file in files]
            ours, their = (statistics.median(column) for column in zip(*times, strict=True))
            out[f"{family}, {name}"] = {"image_tokens": tokens, "seconds": ours, "seconds_transformers": their}
            rows.append([family, name, tokens, f"{1 / ours:.1f}", f"{1 / their:.1f}"])
    table(["family", "file", "image tokens", "a second", "transformers'"], rows)
    record("prepared_images", out)


if __name__ == "__main__":
    main()
