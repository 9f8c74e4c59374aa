"""Tiny checkpoints of transformers' models with a tower, and rows of text and images for both models."""

from __future__ import annotations

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np

from helpers.model_cases import QUICK
from helpers.tiny_models import SIZES
from jaxrl.data.images.resize import join
from jaxrl.models import build
from jaxrl.models.io import hf
from jaxrl.models.vision.positions import Placed, image_rows, token_positions

PAD = 90  # the image token
TEXT = {**SIZES, "model_type": "qwen3_vl_text", "num_hidden_layers": 3, "head_dim": 12,
        "rope_parameters": {"rope_type": "default", "rope_theta": 700.0, "mrope_section": [2, 2, 2], "mrope_interleaved": True}}
VISION = dict(model_type="qwen3_vl_vision", depth=5, hidden_size=24, num_heads=3, intermediate_size=20, patch_size=4, spatial_merge_size=2,
              temporal_patch_size=2, out_hidden_size=32, num_position_embeddings=25, deepstack_visual_indexes=[1, 3], initializer_range=0.2,
              rope_parameters={"rope_type": "axial", "rope_theta": 50.0})
GRIDS = ((4, 6), (2, 2), (8, 2), (2, 4))
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
ROPE = {"type": "mrope", "mrope_section": [1, 2, 1], "rope_theta": 700.0}
_TOWER = {k: v for k, v in VISION.items() if k not in ("num_position_embeddings", "deepstack_visual_indexes", "model_type")}
TOWER_2_5 = {**_TOWER, "hidden_act": "silu", "window_size": 16, "fullatt_block_indexes": [2]}  # windows of 2 x 2 tokens
TOWER_2 = {**{k: v for k, v in _TOWER.items() if k not in ("intermediate_size", "out_hidden_size")}, "embed_dim": 24, "hidden_size": 32,
           "mlp_ratio": 1}
GEMMA = {**SIZES, "model_type": "gemma3_text", "num_hidden_layers": 3, "head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 3,
         "sliding_window_pattern": 3, "rope_theta": 700.0, "rope_local_base_freq": 90.0}
SIGLIP = dict(model_type="siglip_vision_model", num_hidden_layers=3, hidden_size=24, num_attention_heads=4, intermediate_size=20, image_size=32,
              patch_size=4, vision_use_head=False)  # 8 x 8 patches, 2 x 2 tokens
KINDS = {  # model_type -> text_config, vision_config
    "qwen3_vl": (TEXT, VISION),
    "qwen3_vl_moe": ({**TEXT, "model_type": "qwen3_vl_moe_text", **EXPERTS}, {**VISION, "model_type": "qwen3_vl_moe_vision"}),
    "qwen2_5_vl": ({**SIZES, "num_hidden_layers": 3, "rope_scaling": ROPE}, TOWER_2_5),
    "qwen2_vl": ({**SIZES, "num_hidden_layers": 3, "rope_scaling": ROPE}, TOWER_2),
    "gemma3": (GEMMA, SIGLIP),
}
GEMMA_GRID = (8, 8)

TEXTS = ["qwen3_vl_text", "qwen3_vl_moe_text", "qwen2_5_vl_text", "qwen2_vl_text", "gemma3_vision_text"]


def config(text=None, vision=None, kind="qwen3_vl", **outer) -> dict:
    """The content of a config.json."""
    of_text, of_tower = KINDS[kind]
    if kind == "gemma3":
        return {"model_type": kind, "image_token_index": PAD, "boi_token_index": 92, "eoi_token_index": 93, "mm_tokens_per_image": 4,
                "tie_word_embeddings": False, **outer, "text_config": {**of_text, "tie_word_embeddings": False, **(text or {})},
                "vision_config": {**of_tower, **(vision or {})}}
    return {"model_type": kind, "image_token_id": PAD, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93,
            "tie_word_embeddings": False, **outer, "text_config": {**of_text, **(text or {})}, "vision_config": {**of_tower, **(vision or {})}}


def around(text: dict):
    """transformers' config of a model whose text model has the given one."""
    from transformers import AutoConfig
    kind = text["model_type"].removesuffix("_text")
    size = "hidden_size" if kind == "qwen2_vl" else "out_hidden_size"
    given = config(vision={size: text["hidden_size"]}, kind=kind, tie_word_embeddings=bool(text.get("tie_word_embeddings")))
    return AutoConfig.for_model(**copy.deepcopy({**given, "text_config": text}))


def make(directory=None, dtype="float32", **changes):
    """transformers' model with nothing left at a value that hides a mistake; saved where a directory is given."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.set_num_threads(1)
    given = config(**changes)
    made = AutoConfig.for_model(**copy.deepcopy(given))
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(made, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.ndim == 1:
                weight.normal_(0.0, 0.3)
                if ("norm" in name or "ln_q" in name) and name.endswith("weight"):
                    weight.add_(1.0)
            elif name.endswith("mm_input_projection_weight"):  # zeros at the start
                weight.normal_(0.0, 0.2)
    if directory is not None:
        model.to(getattr(torch, dtype)).save_pretrained(directory)
    return model


def ours(directory, scan_layers=False, dtype=jnp.float32, **options):
    found = hf.load_config(str(directory), images=True)
    model = build(found, compute_dtype=dtype, scan_layers=scan_layers, **options)
    return model, hf.load_params(model, str(directory), dtype=dtype)


def sequence(seed: int, pieces, merge=2):
    """(ids, first image tokens, grids) of text of so many tokens and images of these grids, by turns."""
    rng, ids, firsts, grids = np.random.default_rng(seed), [], [], []
    for piece in pieces:
        if isinstance(piece, int):
            ids += rng.integers(3, 89, piece).tolist()
        else:
            firsts.append(len(ids))
            grids.append(piece)
            ids += [PAD] * (piece[0] * piece[1] // merge**2)
    return np.array(ids, np.int32), firsts, grids


def pixels(seed: int, grid, patch=4):
    return np.random.default_rng([seed, *grid]).integers(0, 256, (grid[0] * grid[1], 3 * patch**2)).astype(np.uint8)


def theirs(model, ids, firsts, grids, patches, frames=2, grad=False):
    """Logits [L, V] of transformers' model."""
    import torch
    values = {}
    dtype = next(model.parameters()).dtype
    number = np.float64 if dtype == torch.float64 else np.float32
    if grids and model.config.model_type == "gemma3":
        merge = model.config.vision_config.image_size // model.config.vision_config.patch_size // int(model.config.mm_tokens_per_image**0.5)
        whole = np.stack([join(own, grid, merge) for own, grid in zip(patches, grids, strict=True)]).transpose(0, 3, 1, 2)
        values = {"pixel_values": torch.tensor((whole / number(255) - number(0.5)) / number(0.5), dtype=dtype),
                  "token_type_ids": torch.tensor((ids == PAD).astype(np.int64))[None]}
    elif grids:
        flat = np.concatenate(patches).reshape(-1, 3, 1, patches[0].shape[1] // 3) / number(255)
        flat = (np.broadcast_to((flat - number(0.5)) / number(0.5), (len(flat), 3, frames, flat.shape[3]))).reshape(len(flat), -1)
        kinds = (ids == PAD).astype(np.int64)
        values = {"pixel_values": torch.tensor(flat, dtype=dtype), "image_grid_thw": torch.tensor([(1, *g) for g in grids]),
                  "mm_token_type_ids": torch.tensor(kinds)[None]}
    with torch.set_grad_enabled(grad):
        out = model(input_ids=torch.tensor(ids)[None].long(), use_cache=False, **values).logits[0]
    return out if grad else out.numpy()


def rows(sequences, length=40, room=64, merge=2, rows=None, window=0, two_way=False):
    """Packs sequences (ids, firsts, grids, patches), of each the row it lies in (None: each its own), into
    (tokens, positions, segments, prefixes, Images) and places [(row, columns)]."""
    rows = range(len(sequences)) if rows is None else rows
    shape = max(rows) + 1, length
    tokens, positions, segments, of_tokens = (np.zeros(s, np.int32) for s in (shape, shape, shape, shape if two_way else (*shape, 3)))
    used, number, placed, places = np.zeros(shape[0], int), np.zeros(shape[0], int), [], []
    for row, (ids, firsts, grids, patches) in zip(rows, sequences, strict=True):
        columns = used[row] + np.arange(len(ids))
        number[row] += 1
        tokens[row, columns], positions[row, columns], segments[row, columns] = ids, np.arange(len(ids)), number[row]
        of_tokens[row, columns] = token_positions(two_way, len(ids), firsts, grids, merge)
        placed += [Placed(row, used[row] + f + np.arange(len(p) // merge**2), g, p) for f, g, p in zip(firsts, grids, patches, strict=True)]
        places.append((row, columns))
        used[row] += len(ids)
    width = next((p.shape[1] for *_, patches in sequences for p in patches), 48)
    return (tokens, positions, segments, np.zeros_like(tokens)), image_rows(placed, of_tokens, room, merge, width, window), places


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def logits(model, params, arrays, images):
    return model.logits(params, model.hidden(params, *arrays, images=images))


def stored_name(kind: str, name: str) -> str:
    """transformers' name of a parameter on disk."""
    return name if kind.startswith("qwen3") else name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")


PIECES = ([5, (4, 6), 3, (2, 2), 4], [9], [3, (8, 2), 6], [2, (2, 4), 1, (2, 4), 2])


def sequences(merge=2, patch=4, pieces=PIECES):
    out = []
    for i, own in enumerate(pieces):
        ids, firsts, grids = sequence(i, own, merge)
        out.append((ids, firsts, grids, [pixels(10 * i + k, grid, patch) for k, grid in enumerate(grids)]))
    return out


def rows_for(model, sequences, **options):
    tower = model.config.vision
    return rows(sequences, merge=tower.merge, window=tower.window, **options)


def value_and_gradients(model, params, arrays, images):
    """Of a function of all log-probabilities of all real tokens."""
    def loss(params):
        out = jax.nn.log_softmax(model.logits(params, model.hidden(params, *arrays, images=images)))
        return jnp.sum(jnp.where(jnp.asarray(arrays[2] > 0)[..., None], jnp.sin(out), 0))

    return jax.jit(jax.value_and_grad(loss), compiler_options=QUICK)(params)
