"""Rows of text, images and videos for models of Qwen's towers, here and in transformers."""

from __future__ import annotations

import numpy as np

from helpers import vision_cases as cases
from jaxrl.models.vision.positions import Placed, image_rows, rotary_positions
from jaxrl.types import Pictures, Trajectories

PAD, FRAMES, PATCH, MERGE = 91, 2, 4, 2  # the video token; frames of a patch


class Video:
    """A piece of a row: `count` groups of frames of a grid, `interval` positions apart in time (Qwen2-VL, Qwen2.5-VL)."""

    def __init__(self, grid, count: int, interval: float = 1.0):
        self.grid, self.count, self.interval = grid, count, interval

    def __repr__(self):
        return f"{self.count} x {self.grid} by {self.interval}"


def sequence(seed: int, pieces, timed: bool):
    """(ids, first tokens, grids, delays, kinds, patches) of text of so many tokens, images of these grids and videos. timed: a video's
    groups of frames have a few words before each (Qwen3-VL), else they follow each other. kinds: "image" or the Video."""
    rng, ids, firsts, grids, delays, kinds, patches = np.random.default_rng(seed), [], [], [], [], [], []

    def show(grid, delay, kind, pad):
        firsts.append(len(ids))
        ids.extend([pad] * (grid[0] * grid[1] // MERGE**2))
        shape = grid[0] * grid[1], 3, FRAMES if kind != "image" else 1, PATCH**2
        pixels = np.broadcast_to(rng.integers(0, 256, shape).astype(np.uint8), (shape[0], 3, FRAMES, PATCH**2))
        for into, one in ((grids, grid), (delays, delay), (kinds, kind), (patches, pixels.reshape(len(pixels), -1))):
            into.append(one)

    for piece in pieces:
        if isinstance(piece, int):
            ids += rng.integers(3, 89, piece).tolist()
        elif isinstance(piece, Video):
            for k in range(piece.count):
                if timed:
                    ids += rng.integers(3, 89, 2).tolist()
                show(piece.grid, -1 if timed or not k else int(k * piece.interval), piece, PAD)
        else:
            show(piece, -1, "image", cases.PAD)
    return np.array(ids, np.int32), firsts, grids, np.array(delays, np.int64), kinds, patches


def inputs(one, number=np.float32, dtype=None):
    """What transformers' model takes of a sequence, but for its positions."""
    import torch
    ids, _, grids, _, kinds, patches = one
    videos = list({id(kind): kind for kind in kinds if kind != "image"}.values())

    def pixels(wanted):
        flat = [p for p, kind in zip(patches, kinds, strict=True) if (kind == "image") == (wanted == "image")]
        return torch.tensor((np.concatenate(flat) / number(255) - number(0.5)) / number(0.5), dtype=dtype)

    out = {"input_ids": torch.tensor(ids)[None].long(),
           "mm_token_type_ids": torch.tensor(np.where(ids == cases.PAD, 1, np.where(ids == PAD, 2, 0)))[None]}
    if "image" in kinds:
        out |= {"pixel_values": pixels("image"), "image_grid_thw": torch.tensor([(1, *g) for g, k in zip(grids, kinds, strict=True) if k == "image"])}
    if videos:
        out |= {"pixel_values_videos": pixels("video"), "video_grid_thw": torch.tensor([(v.count, *v.grid) for v in videos])}
    return out


def positions(one):
    """[3, 1, L] positions of a sequence."""
    import torch
    ids, firsts, grids, delays, *_ = one
    return torch.tensor(rotary_positions(len(ids), firsts, grids, MERGE, delays).T.copy()).long()[:, None]


def theirs(model, one, grad=False):
    """Logits [L, V] of transformers' model, at our positions."""
    import torch
    dtype = next(model.parameters()).dtype
    values = inputs(one, np.float64 if dtype == torch.float64 else np.float32, dtype)
    with torch.set_grad_enabled(grad):
        out = model(**values, position_ids=positions(one), use_cache=False).logits[0]
    return out if grad else out.numpy()


def rows(sequences, window=0, rows=None, length=64, room=96):
    """Packs sequences into (tokens, positions, segments, prefixes, Images) and places [(row, columns)], as vision_cases.rows does."""
    rows = range(len(sequences)) if rows is None else rows
    shape = max(rows) + 1, length
    tokens, at, segments, of_tokens = (np.zeros(s, np.int32) for s in (shape, shape, shape, (*shape, 3)))
    used, number, placed, places = np.zeros(shape[0], int), np.zeros(shape[0], int), [], []
    for row, (ids, firsts, grids, delays, _, patches) in zip(rows, sequences, strict=True):
        columns = used[row] + np.arange(len(ids))
        number[row] += 1
        tokens[row, columns], at[row, columns], segments[row, columns] = ids, np.arange(len(ids)), number[row]
        of_tokens[row, columns] = rotary_positions(len(ids), firsts, grids, MERGE, delays)
        placed += [Placed(row, used[row] + f + np.arange(len(p) // MERGE**2), g, p) for f, g, p in zip(firsts, grids, patches, strict=True)]
        places.append((row, columns))
        used[row] += len(ids)
    images = image_rows(placed, of_tokens, room, MERGE, 3 * FRAMES * PATCH**2, window)
    return (tokens, at, segments, np.zeros_like(tokens)), images, places


PIECES = ([3, Video((4, 6), 3, 2.0), 4], [2, (2, 2), 1, Video((2, 4), 2, 0.5), 3], [7])


def sequences(kind: str, pieces=PIECES):
    return [sequence(i, own, kind.startswith("qwen3")) for i, own in enumerate(pieces)]


def trajectories(kind: str, window: int, group: int = 3) -> Trajectories:
    """Groups of completions of text of each of PIECES: a video; an image and a video; text alone."""
    rng, tokens, prompts, parts, patches = np.random.default_rng(0), [], [], [], {}
    for g, (ids, firsts, grids, delays, _, own) in enumerate(sequences(kind)):
        shown = {10 * g + k: p for k, p in enumerate(own)}
        patches.update(shown)
        for _ in range(group):
            tokens.append(np.concatenate([ids, rng.integers(3, 89, int(rng.integers(2, 6))).astype(np.int32)]))
            prompts.append(len(ids))
            parts.append(Pictures(np.zeros(len(firsts), int), np.array(firsts), np.array(grids), np.array(list(shown)), MERGE, 3 * FRAMES * PATCH**2,
                                  lambda numbers: [patches[int(n)] for n in numbers], frames=FRAMES, delays=delays) if firsts else None)
    n, offsets = len(tokens), np.cumsum([0, *map(len, tokens)])
    mask = np.concatenate([np.arange(len(t)) >= size for t, size in zip(tokens, prompts, strict=True)])
    total = int(offsets[-1])
    return Trajectories(np.concatenate(tokens), offsets, mask, np.zeros(total, np.float32), np.zeros(total, np.int32), np.array(prompts),
                        np.arange(n) // group, np.arange(n), np.zeros(n, np.uint32), np.zeros(n, np.int8),
                        pictures=Pictures.of(parts, parts[0]._replace(window=window)))


def ours(directory, **options):
    """(model, parameters) of a job with videos."""
    import jax.numpy as jnp

    from jaxrl.models import build
    from jaxrl.models.families import IMAGES
    from jaxrl.models.io import hf
    dtype = options.pop("dtype", jnp.float32)
    found = hf.load_config(str(directory), images=True)
    found[IMAGES] = {**found[IMAGES], "video": True}
    model = build(found, compute_dtype=dtype, scan_layers=False, **options)
    return model, hf.load_params(model, str(directory), dtype=dtype)
