"""How far pixels, and a policy's log-probs, move where an image is resized by transformers' torchvision class in place of its Pillow class.

    python evidence/torchvision_pixels.py runs/vision_sft/export      (wants torch and torchvision)

Pixels: random pictures at the published bounds. Log-probs: the held-out pictures of configs/vision_sft.py, enlarged to random squares, which
both classes resize to the job's 24 x 24 pixels; of the right completion, in fp32. Writes evidence/results/torchvision_pixels.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import io
import os
import sys
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np  # noqa: E402
import pyarrow.parquet  # noqa: E402
import torch  # noqa: E402
from common import record, table  # noqa: E402
from PIL import Image  # noqa: E402
from shapes_data import FOLDER  # noqa: E402

from jaxrl import training  # noqa: E402
from jaxrl.config import load_config  # noqa: E402
from jaxrl.data.images.decode import picture_of  # noqa: E402
from jaxrl.data.images.read import Image as Unread  # noqa: E402
from jaxrl.data.images.resize import rule_of  # noqa: E402
from jaxrl.recipes.sft import demonstrations  # noqa: E402
from jaxrl.resolve.spec import resolve  # noqa: E402
from jaxrl.roles import parameters  # noqa: E402
from jaxrl.run.python_api import PythonInputs  # noqa: E402
from jaxrl.run.session import Session  # noqa: E402
from jaxrl.run.setup import open_run  # noqa: E402

ROWS, LIMIT = 300, 1 << 24
SQUARES = {"data.image_min_pixels": 24 * 24, "data.image_max_pixels": 30 * 30}  # by which every larger square becomes one of 24 x 24


def torchvision_class():
    """Imports transformers' class. Operators of torchvision's plain wheel are for CUDA; beside torch for CPUs it imports if two are declared."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    return Qwen2VLImageProcessor


def processor_of(rule):
    return torchvision_class()(patch_size=rule.patch, merge_size=rule.merge, temporal_patch_size=rule.frames,
                               size={"shortest_edge": rule.least, "longest_edge": rule.most}, do_rescale=False, do_normalize=False)


def patches_of(processor, pixels: np.ndarray) -> np.ndarray:
    """uint8 [N, 3 * patch * patch], as jaxrl.data.images.resize.cut, by transformers' torchvision class."""
    raw = processor(Image.fromarray(pixels), return_tensors="pt")["pixel_values"].numpy()
    side = processor.patch_size
    frames = raw.reshape(len(raw), 3, processor.temporal_patch_size, side * side)
    assert frames.dtype == np.uint8 and (frames == frames[:, :, :1]).all()
    return np.ascontiguousarray(frames[:, :, 0]).reshape(len(raw), -1)


def apart(differences: list[np.ndarray]) -> dict:
    flat = np.abs(np.concatenate([d.ravel() for d in differences]))
    return {"values": len(flat), "share_that_differs": float((flat > 0).mean()), "mean": float(flat.mean()), "max": float(flat.max())}


def pixels_apart(family: str, noise: int, pictures: int = 20) -> dict:
    """Of smooth pictures to whose pixels up to `noise` is added or of which it is taken."""
    rule, rng, out = rule_of(family), np.random.default_rng(0), []
    processor = processor_of(rule)
    for _ in range(pictures):
        height, width = (int(side) for side in rng.integers(100, 1300, 2))
        coarse = Image.fromarray(rng.integers(0, 256, (height // 16 + 2, width // 16 + 2, 3)).astype(np.uint8)).resize((width, height), 2)
        pixels = np.clip(np.asarray(coarse, int) + rng.integers(-noise, noise + 1, (height, width, 3)), 0, 255).astype(np.uint8)
        out.append(picture_of(Unread(pixels=pixels), rule, LIMIT).patches.astype(int) - patches_of(processor, pixels))
    return apart(out)


def enlarged() -> list[dict]:
    """The first held-out rows with their right completion; of each picture a larger square, of a random side."""
    rng, out = np.random.default_rng(0), []
    for row in pyarrow.parquet.read_table(FOLDER / "test.parquet").to_pylist()[:ROWS]:
        side = int(rng.integers(30, 200))
        small = Image.open(io.BytesIO(row["image"]["bytes"])).convert("RGB")
        picture = small.resize((side, side), Image.Resampling.LANCZOS)
        out.append({"images": [np.asarray(picture)], "prompt": row["prompt"], "completion": f"\\boxed{{{row['answer']}}}"})
    return out


def logprobs_apart(export: str, folder: str) -> dict:
    rows = enlarged()
    c = load_config("vision_sft", {
        "run.dir": folder, "model.path": export, "model.init": "pretrained", "model.config": {}, "model.tokenizer": "", "eval.sets": (),
        "eval.controls": (), **SQUARES, "log.console": "off", "log.tensorboard": False})
    with Session(resolve(c), PythonInputs(data=rows)) as s:
        job = open_run(s, with_engine=False)
        dataset = job.stream.dataset
        traj = demonstrations([dataset[i] for i in range(len(rows))], range(len(rows)), False, job.images)
        processor, places = processor_of(job.images.rule), traj.pictures
        own = dict(zip(places.numbers.tolist(), places.patches(places.numbers), strict=True))
        other = {number: patches_of(processor, rows[sequence]["images"][0])
                 for number, sequence in zip(places.numbers.tolist(), places.sequences.tolist(), strict=True)}
        layout = training.make_layout(traj.sizes, job.row_shapes, share_prompts=False)
        score = training.make_score(job.model, temperature=1.0, chunk=job.config.train.logprob_chunk, put=job.put)
        params = parameters.initial_policy(job)

        def under(patches):
            shown = places._replace(patches=lambda numbers: [patches[int(n)] for n in numbers])
            return score(params, dataclasses.replace(traj, pictures=shown), layout)[traj.loss_mask].astype(np.float64)

        first, second = under(own), under(other)
    return {"pixels": apart([own[n].astype(int) - other[n] for n in own]), "logprob": apart([first - second]),
            "nll": float(-first.mean()), "nll_torchvision": float(-second.mean())}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("export")
    export = os.path.abspath(parser.parse_args().export)
    pixels = {f"{family}, noise {noise}": pixels_apart(family, noise) for family in ("qwen2_5_vl", "qwen3_vl") for noise in (8, 255)}
    with tempfile.TemporaryDirectory() as folder:
        policy = logprobs_apart(export, folder)
    columns = ("values", "share_that_differs", "mean", "max")
    table(["difference of", *columns], [[name, *(found[key] for key in columns)] for name, found in (
        *pixels.items(), ("the policy's pixels", policy["pixels"]), ("its log-probs, nats", policy["logprob"]))])
    versions = {name: importlib.metadata.version(name) for name in ("torch", "torchvision", "pillow")}
    record("torchvision_pixels", {"pixels": pixels, "policy": policy, "versions": versions})


if __name__ == "__main__":
    main()
