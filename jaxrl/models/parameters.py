"""Every parameter once, as data: logical axes, HF name, and how the HF tensor is laid out.

Our paths are joined by '/'. A layer's parameters live under `layer_<i>` (unrolled) or, stacked over the repetitions of
the model's repeating block, under `layers/sub_<j>`; layer i = repetition * period + j.
"""

from __future__ import annotations

import dataclasses
import math
import re


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One row of the table. `inputs` is the number of leading axes a linear map contracts; 0 = not a linear map.

    HF stores a linear map as [outputs, inputs], ours has the inputs first and heads as an axis of their own.
    """

    axes: tuple[str, ...]
    hf: str
    inputs: int = 0


_Q, _KV, _HEADS = ("embed", "heads", "head_dim"), ("embed", "kv_heads", "head_dim"), ("heads", "head_dim", "embed")

MODEL = {
    "embed/embedding": Parameter(("vocab", "embed"), "model.embed_tokens.weight"),
    "final_norm/scale": Parameter(("norm",), "model.norm.weight"),
    "head/kernel": Parameter(("embed", "vocab"), "lm_head.weight", 1),
}
LAYER = {
    "attention_norm/scale": Parameter(("norm",), "input_layernorm.weight"),
    "attention/query/kernel": Parameter(_Q, "self_attn.q_proj.weight", 1),
    "attention/query/bias": Parameter(_Q[1:], "self_attn.q_proj.bias"),
    "attention/key/kernel": Parameter(_KV, "self_attn.k_proj.weight", 1),
    "attention/key/bias": Parameter(_KV[1:], "self_attn.k_proj.bias"),
    "attention/value/kernel": Parameter(_KV, "self_attn.v_proj.weight", 1),
    "attention/value/bias": Parameter(_KV[1:], "self_attn.v_proj.bias"),
    "attention/out/kernel": Parameter(_HEADS, "self_attn.o_proj.weight", 2),
    "attention/out/bias": Parameter(("norm",), "self_attn.o_proj.bias"),
    "attention/query_norm/scale": Parameter(("norm",), "self_attn.q_norm.weight"),
    "attention/key_norm/scale": Parameter(("norm",), "self_attn.k_norm.weight"),
    "mlp_norm/scale": Parameter(("norm",), "post_attention_layernorm.weight"),
    "mlp/gate/kernel": Parameter(("embed", "mlp"), "mlp.gate_proj.weight", 1),
    "mlp/gate/bias": Parameter(("mlp",), "mlp.gate_proj.bias"),
    "mlp/up/kernel": Parameter(("embed", "mlp"), "mlp.up_proj.weight", 1),
    "mlp/up/bias": Parameter(("mlp",), "mlp.up_proj.bias"),
    "mlp/down/kernel": Parameter(("mlp", "embed"), "mlp.down_proj.weight", 1),
    "mlp/down/bias": Parameter(("norm",), "mlp.down_proj.bias"),
}
# Gemma has norms after attention and MLP, and HF's names shift.
POST_NORM_LAYER = {
    **LAYER,
    "attention_post_norm/scale": Parameter(("norm",), "post_attention_layernorm.weight"),
    "mlp_norm/scale": Parameter(("norm",), "pre_feedforward_layernorm.weight"),
    "mlp_post_norm/scale": Parameter(("norm",), "post_feedforward_layernorm.weight"),
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One of our arrays and the HF tensors it holds: one, or one per repetition of a stacked block."""

    path: tuple[str, ...]
    shape: tuple[int, ...]          # ours, with the stacked axis in front where there is one
    axes: tuple[str, ...]           # logical axis per dimension of `shape`
    hf_names: tuple[str, ...]       # in the order of the stacked axis
    hf_shape: tuple[int, ...]       # of each HF tensor
    inputs: int                     # as in Parameter
    stacked: bool

    @property
    def kind(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Shape and logical axes of one repetition."""
        return (self.shape[1:], self.axes[1:]) if self.stacked else (self.shape, self.axes)

    def from_hf(self, tensor):
        """HF tensor -> ours (one repetition): a view, so that slicing it copies only the slice."""
        shape = self.shape[1:] if self.stacked else self.shape
        if not self.inputs:
            return tensor.reshape(shape)
        outputs = shape[self.inputs:]
        tensor = tensor.reshape(*outputs, *shape[:self.inputs])
        return tensor.transpose(*range(len(outputs), len(shape)), *range(len(outputs)))

    def to_hf(self, array):
        """Ours (one repetition) -> HF tensor. numpy or jax."""
        if not self.inputs:
            return array.reshape(self.hf_shape)
        return array.reshape(self.hf_shape[::-1]).T


def entries(config, shapes: dict[tuple, tuple]) -> list[Entry]:
    """The table for one model. `shapes`: our path -> shape. Order: embedding, layers, final norm, head."""
    layer_table = POST_NORM_LAYER if config.post_norms else LAYER
    out = []
    for path, shape in shapes.items():
        layer = re.fullmatch(r"layer_(\d+)", path[0])
        stacked = path[0] == "layers"
        if stacked:
            row = layer_table["/".join(path[2:])]
            first, repetitions = int(path[1].removeprefix("sub_")), shape[0]
            numbers = [first + config.period * i for i in range(repetitions)]
        elif layer:
            row, numbers = layer_table["/".join(path[1:])], [int(layer[1])]
        else:
            row, numbers = MODEL["/".join(path)], None
        names = (row.hf,) if numbers is None else tuple(f"model.layers.{i}.{row.hf}" for i in numbers)
        plain = shape[1:] if stacked else shape
        if row.inputs:
            hf_shape = (math.prod(plain[row.inputs:]), math.prod(plain[:row.inputs]))
        else:
            hf_shape = plain if path[-1] != "bias" else (math.prod(plain),)
        axes = ("layers", *row.axes) if stacked else row.axes
        out.append(Entry(path, shape, axes, names, hf_shape, row.inputs, stacked))
    return out
