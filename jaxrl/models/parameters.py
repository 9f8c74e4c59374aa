"""The parameter table: shape, initial values, logical axes, HF name and HF layout of every parameter, as data.

Initialisation, shardings, checkpoints in HF's format, counts of parameters and of operations follow from these rows and
nothing else. Our paths are joined by '/'. A layer's parameters live under `layer_<i>` (unrolled) or, stacked over the
repetitions of the model's repeating block, under `layers/sub_<j>`; see models.decoder.spans.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict

Flat = dict[str, Any]  # 'layer_0/attention/query/kernel' -> array, shape or sharding


def flattened(tree) -> Flat:
    """Returns the leaves of a nested tree of parameters by flat name; nodes are joined by '/'."""
    return flatten_dict(tree, sep="/")


@dataclasses.dataclass(frozen=True)
class Row:
    """One parameter of a layer, or of the model around its layers.

    HF stores a linear map as [outputs, inputs], ours has the inputs first and heads as an axis of their own.
    """

    path: str
    axes: tuple[str | None, ...]  # logical axis of each dimension; decides the size too, but where `sizes` is given
    hf: str                       # HF's name, in a layer behind its number; {} = number on a stacked axis; "" = none;
                                  # of a part, its place in brackets follows in Entry.hf_names
    inputs: int = 0               # axes that a linear map contracts, first after the stacked ones; 0 = no linear map
    init: str = "normal"          # normal (times init_std) | zero | one (norms then scale by one) | unit | rates | steps
    sizes: tuple[int | str, ...] = ()  # numbers, or fields of ModelConfig
    when: str = ""                # flag of ModelConfig that a model must have, or "not" and one it must not have
    stacked: int = 0              # leading axes along which HF has tensors of their own (experts)
    share: float | str = 1        # of the numbers, what one token is multiplied with; or the field that says it
    adapts: bool = True           # whether a linear map can have an adapter
    by_name: bool = False         # it gets one by its name alone, not by lora.targets=all-linear
    exact: bool = False           # a few columns that decide, or of a tower: never in few bits
    fixed: bool = False           # numbers that choose and do not weigh: without gradient, and in fp32 wherever they are
    wide: bool = False            # in fp32 wherever they are, and trained
    straight: bool = False        # HF's tensor of a linear map has the inputs first, as ours
    whole: bool = False           # HF's tensor of a linear map keeps every axis, outputs first (a convolution's patches)
    part: tuple[int | str, int] | tuple[()] = ()  # (groups, place): `hf` is one tensor of several rows, see models.io.parts

    def of(self, config) -> bool:
        """Whether a model has this parameter."""
        return not self.when or bool(getattr(config, self.when.removeprefix("not "))) != self.when.startswith("not ")

    def shape(self, config) -> tuple[int, ...]:
        """Returns the shape of the row's array in a model with this config, without stacked axes."""
        sizes = self.sizes or [SIZES[axis] for axis in self.axes]
        return tuple(getattr(config, size) if isinstance(size, str) else size for size in sizes)


SIZES: dict[str | None, str] = {"vocab": "vocab_size", "embed": "hidden_size", "heads": "num_heads", "kv_heads": "num_kv_heads",
         "head_dim": "head_dim", "mlp": "mlp_size", "norm": "hidden_size"}
_Q, _KV, _OUT = ("embed", "heads", "head_dim"), ("embed", "kv_heads", "head_dim"), ("heads", "head_dim", "embed")

MODEL = (
    Row("embed/embedding", ("vocab", "embed"), "model.embed_tokens.weight"),
    Row("final_norm/scale", ("norm",), "model.norm.weight", init="one"),
    Row("head/kernel", ("embed", "vocab"), "lm_head.weight", 1, when="not tied"),
)
VALUE = (  # a critic's head; HF's name is that of sequence classifiers, which is how reward models are stored
    Row("value/kernel", ("norm",), "score.weight", 1, init="zero"),
    Row("value/bias", (), "", init="zero"),
)


def _norms(**names: str) -> tuple[Row, ...]:
    """Returns the rows of a layer's norms, by HF's names."""
    return tuple(Row(f"{path}/scale", ("norm",), f"{name}.weight", init="one") for path, name in names.items())


NORMS = {  # Layer.norms: before attention and MLP, behind both, or both; HF's names shift
    "pre": _norms(attention_norm="input_layernorm", mlp_norm="post_attention_layernorm"),
    "sandwich": _norms(attention_norm="input_layernorm", attention_post_norm="post_attention_layernorm",
                       mlp_norm="pre_feedforward_layernorm", mlp_post_norm="post_feedforward_layernorm"),
    "glm4": _norms(attention_norm="input_layernorm", attention_post_norm="post_self_attn_layernorm",
                   mlp_norm="post_attention_layernorm", mlp_post_norm="post_mlp_layernorm"),
    "post": _norms(attention_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm"),
    "falcon_h1": _norms(attention_norm="input_layernorm", mlp_norm="pre_ff_layernorm"),
    "mixer": _norms(attention_norm="norm"), "feed_forward": _norms(mlp_norm="norm"),  # of layers of one part
}
ATTENTION = (
    Row("attention/query/kernel", _Q, "self_attn.q_proj.weight", 1),
    Row("attention/query/bias", _Q[1:], "self_attn.q_proj.bias", init="zero", when="qkv_bias"),
    Row("attention/key/kernel", _KV, "self_attn.k_proj.weight", 1),
    Row("attention/key/bias", _KV[1:], "self_attn.k_proj.bias", init="zero", when="qkv_bias"),
    Row("attention/value/kernel", _KV, "self_attn.v_proj.weight", 1),
    Row("attention/value/bias", _KV[1:], "self_attn.v_proj.bias", init="zero", when="qkv_bias"),
    Row("attention/out/kernel", _OUT, "self_attn.o_proj.weight", 2),
    Row("attention/out/bias", ("norm",), "self_attn.o_proj.bias", init="zero", when="out_bias"),
    Row("attention/sinks", ("heads",), "self_attn.sinks", when="sinks"),
    Row("attention/query_norm/scale", ("norm",), "self_attn.q_norm.weight", init="one", sizes=("head_dim",), when="qk_norm"),
    Row("attention/key_norm/scale", ("norm",), "self_attn.k_norm.weight", init="one", sizes=("head_dim",), when="qk_norm"),
    Row("attention/query_norm/scale", ("norm",), "self_attn.query_layernorm.weight", init="one", sizes=("head_dim",), when="qk_norm_late"),
    Row("attention/key_norm/scale", ("norm",), "self_attn.key_layernorm.weight", init="one", sizes=("head_dim",), when="qk_norm_late"),
    Row("attention/query_norm/scale", ("norm",), "self_attn.q_norm.weight", init="one", sizes=("query_width",), when="qk_norm_whole"),
    Row("attention/key_norm/scale", ("norm",), "self_attn.k_norm.weight", init="one", sizes=("key_width",), when="qk_norm_whole"),
)
def _part(row: Row, groups: int | str, place: int) -> Row:
    """Returns the row as the part at `place` of each group of outputs of HF's tensor; groups=0: as the whole tensor."""
    return dataclasses.replace(row, part=(groups, place) if groups else ())


def _gated_attention() -> tuple[Row, ...]:
    """Returns the rows of attention whose output is gated by a sigmoid; HF stores a head's query and gate
    one after the other.
    """
    out = []
    for row in ATTENTION:
        if row.path.startswith("attention/query/"):
            gate = dataclasses.replace(row, path=row.path.replace("query", "gate"))
            out += [_part(row, "num_heads", 0), _part(gate, "num_heads", 1)]
        else:
            out.append(row)
    return tuple(out)


def _packed(rows: tuple[Row, ...], when: str, hf: str, *names: str) -> tuple[Row, ...]:
    """The rows, of which those of `names` are parts of one HF tensor in the models that have the flag `when`."""
    parts = [dataclasses.replace(_part(row, 1, names.index(row.path)), hf=hf, when=when) for row in rows if row.path in names]
    return (*(dataclasses.replace(row, when=f"not {when}") if row.path in names else row for row in rows), *parts)


GATED_ATTENTION = _gated_attention()
ATTENTION = _packed(ATTENTION, "packed_qkv", "self_attn.qkv_proj.weight", *(f"attention/{x}/kernel" for x in ("query", "key", "value")))
_KEYS, _VALUES = ("linear_key_heads", "linear_key_size"), ("linear_value_heads", "linear_value_size")


def _gated_delta(names: dict[str, tuple[str, int | str, int]]) -> tuple[Row, ...]:
    """Returns the rows of models.recurrent, by HF's name, groups and place of each map of the hidden states."""
    def of_hidden(name, sizes, axes):
        hf, groups, place = names[name]
        few = len(axes) == 1
        row = Row(f"recurrent/{name}/kernel", ("embed", *axes), f"linear_attn.{hf}.weight", 1, sizes=("hidden_size", *sizes), by_name=few, exact=few)
        return _part(row, groups, place)

    def taps(name, sizes, place):
        row = Row(f"recurrent/{name}_taps/weight", ("heads", "head_dim", None), "linear_attn.conv1d.weight", sizes=(*sizes, "linear_taps"))
        return _part(row, 1, place)

    heads, each = ("heads", "head_dim"), ("linear_value_heads",)
    return (*(of_hidden(name, sizes, heads) for name, sizes in (("query", _KEYS), ("key", _KEYS), ("value", _VALUES), ("gate", _VALUES))),
            *(of_hidden(name, each, ("heads",)) for name in ("beta", "decay")),
            taps("query", _KEYS, 0), taps("key", _KEYS, 1), taps("value", _VALUES, 2),
            Row("recurrent/rate", ("heads",), "linear_attn.A_log", init="rates", sizes=each, wide=True),
            Row("recurrent/shift", ("heads",), "linear_attn.dt_bias", init="unit", sizes=each),
            Row("recurrent/norm/scale", ("norm",), "linear_attn.norm.weight", init="unit", sizes=("linear_value_size",)),
            Row("recurrent/out/kernel", _OUT, "linear_attn.out_proj.weight", 2, sizes=(*_VALUES, "hidden_size")))


GATED_DELTA = _gated_delta({
    "query": ("in_proj_qkv", 1, 0), "key": ("in_proj_qkv", 1, 1), "value": ("in_proj_qkv", 1, 2), "gate": ("in_proj_z", 0, 0),
    "beta": ("in_proj_b", 0, 0), "decay": ("in_proj_a", 0, 0)})
GATED_DELTA_BY_HEAD = _gated_delta({  # Qwen3-Next: by key head
    **{name: ("in_proj_qkvz", "linear_key_heads", i) for i, name in enumerate(("query", "key", "value", "gate"))},
    **{name: ("in_proj_ba", "linear_key_heads", i) for i, name in enumerate(("beta", "decay"))}})


def _mamba2(module: str, adapts_out: bool = True) -> tuple[Row, ...]:
    """Returns the rows of models.recurrent.mamba2, by HF's name of the module. Its maps of the hidden states are one
    tensor, and its convolution is another. adapts_out: whether PEFT has adapters on the map of the output."""
    each, hf = ("linear_value_heads",), f"{module}.in_proj"
    parts = {"gate": _VALUES, "value": _VALUES, "key": _KEYS, "query": _KEYS, "step": each}

    def of_hidden(place, name, sizes):
        axes = ("heads", "head_dim")[:len(sizes)]
        kernel = Row(f"recurrent/{name}/kernel", ("embed", *axes), f"{hf}.weight", 1, sizes=("hidden_size", *sizes), exact=len(axes) == 1)
        bias = Row(f"recurrent/{name}/bias", axes, f"{hf}.bias", init="zero", sizes=sizes, when="recurrent_in_bias")
        return _part(kernel, 1, place), _part(bias, 1, place)

    def taps(place, name):
        weight = Row(f"recurrent/{name}_taps/weight", ("heads", "head_dim", None), f"{module}.conv1d.weight", sizes=(*parts[name], "linear_taps"))
        bias = Row(f"recurrent/{name}_taps/bias", ("heads", "head_dim"), f"{module}.conv1d.bias", init="zero", sizes=parts[name],
                   when="convolution_bias")
        return _part(weight, 1, place), _part(bias, 1, place)

    return (*(row for place, part in enumerate(parts.items()) for row in of_hidden(place, *part)),
            *(row for place, name in enumerate(("value", "key", "query")) for row in taps(place, name)),
            Row("recurrent/rate", ("heads",), f"{module}.A_log", init="rates", sizes=each, wide=True),
            Row("recurrent/shift", ("heads",), f"{module}.dt_bias", init="steps", sizes=each),
            Row("recurrent/skip", ("heads",), f"{module}.D", init="unit", sizes=each),
            Row("recurrent/norm/scale", ("norm",), f"{module}.norm.weight", init="unit", sizes=("linear_value_width",),
                when="recurrent_norm"),
            Row("recurrent/out/kernel", _OUT, f"{module}.out_proj.weight", 2, sizes=(*_VALUES, "hidden_size"),
                by_name=not adapts_out),
            Row("recurrent/out/bias", ("norm",), f"{module}.out_proj.bias", init="zero", when="recurrent_out_bias"))


def _renamed(rows: tuple[Row, ...], old: str, new: str) -> tuple[Row, ...]:
    """Returns the rows with another HF name of their module."""
    return tuple(dataclasses.replace(row, hf=row.hf.replace(f"{old}.", f"{new}.", 1)) for row in rows)


MAMBA2, NEMOTRON_MAMBA2 = _mamba2("mamba"), _mamba2("mixer", adapts_out=False)
FALCON_H1 = ATTENTION + _mamba2("mamba", adapts_out=False)
NEMOTRON_ATTENTION = _renamed(ATTENTION, "self_attn", "mixer")
_UP = ("embed", "heads", "head_dim")  # the few numbers that it reads are split as the hidden ones are
LATENT_ATTENTION = (  # models.latent
    Row("attention/query/kernel", _Q, "self_attn.q_proj.weight", 1, when="not query_rank"),
    Row("attention/query_down/kernel", ("embed", None), "self_attn.q_a_proj.weight", 1, sizes=("hidden_size", "query_rank"), when="query_rank"),
    Row("attention/query_down/bias", (None,), "self_attn.q_a_proj.bias", init="zero", sizes=("query_rank",), when="query_down_bias"),
    Row("attention/query_norm/scale", ("norm",), "self_attn.q_a_layernorm.weight", init="one", sizes=("query_rank",), when="query_rank"),
    Row("attention/query_up/kernel", _UP, "self_attn.q_b_proj.weight", 1, sizes=("query_rank", "num_heads", "head_dim"), when="query_rank"),
    Row("attention/latent/kernel", ("embed", None), "self_attn.kv_a_proj_with_mqa.weight", 1, sizes=("hidden_size", "latent_width")),
    Row("attention/latent/bias", (None,), "self_attn.kv_a_proj_with_mqa.bias", init="zero", sizes=("latent_width",), when="qkv_bias"),
    Row("attention/latent_norm/scale", ("norm",), "self_attn.kv_a_layernorm.weight", init="one", sizes=("latent_size",)),
    Row("attention/expand/kernel", _UP, "self_attn.kv_b_proj.weight", 1, sizes=("latent_size", "num_heads", "expanded_size")),
    Row("attention/out/kernel", _OUT, "self_attn.o_proj.weight", 2, sizes=("num_heads", "value_width", "hidden_size")),
    Row("attention/out/bias", ("norm",), "self_attn.o_proj.bias", init="zero", when="out_bias"),
)
MLP = (
    Row("mlp/gate/kernel", ("embed", "mlp"), "mlp.gate_proj.weight", 1),
    Row("mlp/gate/bias", ("mlp",), "mlp.gate_proj.bias", init="zero", when="mlp_bias"),
    Row("mlp/up/kernel", ("embed", "mlp"), "mlp.up_proj.weight", 1),
    Row("mlp/up/bias", ("mlp",), "mlp.up_proj.bias", init="zero", when="mlp_bias"),
    Row("mlp/down/kernel", ("mlp", "embed"), "mlp.down_proj.weight", 1),
    Row("mlp/down/bias", ("norm",), "mlp.down_proj.bias", init="zero", when="mlp_bias"),
)
FALCON_MLP = _renamed(MLP, "mlp", "feed_forward")
NEMOTRON_MLP = _renamed(tuple(row for row in MLP if "/gate/" not in row.path), "mlp", "mixer")
MLP = _packed(MLP, "packed_mlp", "mlp.gate_up_proj.weight", "mlp/gate/kernel", "mlp/up/kernel")
JOINED = {  # linear maps of one input -> the name of the one that gives all their outputs (models.unstacked)
    ("query", "key", "value"): "query_key_value",
    ("gate", "up"): "gate_up",
}
PARTS = {name: parts for parts, name in JOINED.items()}
ROUTER, ROUTER_BIAS = "mlp/router/kernel", "mlp/router/bias"


def _experts(module: str, gate: str, up: str, down: str, router: str = "gate") -> tuple[Row, ...]:
    """Returns the rows of a layer of experts, by HF's name of the module and of an expert's matrices (gate: "" = there
    is none). Those of all experts are one array; the router stays whole over tp and, like vectors, in full precision where it is used.
    """
    def one(path, axes, sizes, name):
        return Row(f"mlp/experts/{path}/kernel", ("expert", *axes), f"{module}.experts.{{}}.{name}.weight", 1,
                   sizes=("num_experts", *sizes), stacked=1, share="experts_share", adapts=False)

    into, out = (("expert_embed", "mlp"), ("expert_inputs", "expert_size")), (("mlp", "expert_embed"), ("expert_size", "expert_inputs"))
    return (Row(ROUTER, ("embed", None), f"{module}.{router}.weight", 1, sizes=("hidden_size", "num_experts"), adapts=False),
            *((one("gate", *into, gate),) if gate else ()), one("up", *into, up), one("down", *out, down))


def _shared(module: str) -> tuple[Row, ...]:
    """Returns the rows of the expert that every token has, by HF's name."""
    beside = ("hidden_size", "shared_expert_size")
    return (Row("mlp/shared/gate/kernel", ("embed", "mlp"), f"{module}.gate_proj.weight", 1, sizes=beside, when="shared_expert_size"),
            Row("mlp/shared/up/kernel", ("embed", "mlp"), f"{module}.up_proj.weight", 1, sizes=beside, when="shared_expert_size"),
            Row("mlp/shared/down/kernel", ("mlp", "embed"), f"{module}.down_proj.weight", 1, sizes=beside[::-1],
                when="shared_expert_size"))


EXPERTS = (
    *_experts("mlp", "gate_proj", "up_proj", "down_proj"),
    *_shared("mlp.shared_expert"),
    Row("mlp/shared_gate/kernel", ("embed", None), "mlp.shared_expert_gate.weight", 1, sizes=("hidden_size", 1),
        when="shared_expert_size", exact=True),
)
CORRECTION = "mlp/router/correction"
DEEPSEEK_EXPERTS = (
    *_experts("mlp", "gate_proj", "up_proj", "down_proj"),
    Row(CORRECTION, (None,), "mlp.gate.e_score_correction_bias", init="zero", sizes=("num_experts",), fixed=True),
    *_shared("mlp.shared_experts"),
)
MIXTRAL_EXPERTS = _experts("block_sparse_moe", "w1", "w3", "w2")
MINIMAX_EXPERTS = (
    *MIXTRAL_EXPERTS,
    Row(CORRECTION, (None,), "block_sparse_moe.e_score_correction_bias", init="zero", sizes=("num_experts",), fixed=True),
)


def _granite(module: str, size: str) -> tuple[Row, ...]:
    """Returns the rows of Granite 4's dense feed-forward, which is that of all tokens where there are experts, too."""
    up, down = "shared_mlp.input_linear.weight", "shared_mlp.output_linear.weight"
    into: Any = dict(sizes=("hidden_size", size))
    return (_part(Row(f"{module}/gate/kernel", ("embed", "mlp"), up, 1, **into), 1, 0),
            _part(Row(f"{module}/up/kernel", ("embed", "mlp"), up, 1, **into), 1, 1),
            Row(f"{module}/down/kernel", ("mlp", "embed"), down, 1, sizes=(size, "hidden_size")))


GRANITE_MLP = _granite("mlp", "mlp_size")
GRANITE_EXPERTS = (  # on a disk experts lie together, see models.io.fused
    *_experts("block_sparse_moe", "gate_proj", "up_proj", "down_proj", router="router.layer"), *_granite("mlp/shared", "shared_expert_size"))


def _nemotron_experts() -> tuple[Row, ...]:
    """Returns the rows of experts without a gate, which may work on fewer numbers than the hidden size."""
    few = "hidden_size", "expert_latent"
    up, down = (Row(f"mlp/{name}/kernel", axes, f"mixer.{hf}.weight", 1, sizes=sizes, when="expert_latent") for name, hf, axes, sizes in (
        ("latent_down", "fc1_latent_proj", ("embed", None), few), ("latent_up", "fc2_latent_proj", (None, "embed"), few[::-1])))
    shared = [row for row in _shared("mixer.shared_experts") if "/gate/" not in row.path]
    biases = [Row(f"mlp/{name}/bias", (axis,), f"mixer.{hf}.bias", init="zero", sizes=(size,), when=when) for name, hf, axis, size, when in (
        ("shared/up", "shared_experts.up_proj", "mlp", "shared_expert_size", "mlp_bias"),
        ("shared/down", "shared_experts.down_proj", "norm", "hidden_size", "mlp_bias"),
        ("latent_down", "fc1_latent_proj", None, "expert_latent", "latent_bias"),
        ("latent_up", "fc2_latent_proj", "norm", "hidden_size", "latent_bias"))]
    correction = Row(CORRECTION, (None,), "mixer.gate.e_score_correction_bias", init="zero", sizes=("num_experts",), fixed=True)
    return (*_experts("mixer", "", "up_proj", "down_proj"), correction, *shared, up, down, *biases)


NEMOTRON_EXPERTS = _nemotron_experts()


def _expert_bias(name: str, axis: str, size: str) -> Row:
    return Row(f"mlp/experts/{name}/bias", ("expert", axis), f"mlp.experts.{{}}.{name}_proj.bias", init="zero",
               sizes=("num_experts", size), stacked=1, share="experts_share", when="expert_bias")


GPT_OSS_EXPERTS = (  # on a disk experts lie together, see models.io.fused
    *_experts("mlp", "gate_proj", "up_proj", "down_proj", router="router"),
    Row(ROUTER_BIAS, (None,), "mlp.router.bias", init="zero", sizes=("num_experts",), when="router_bias"),
    _expert_bias("gate", "mlp", "expert_size"), _expert_bias("up", "mlp", "expert_size"), _expert_bias("down", "norm", "hidden_size"),
)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One of our arrays and the HF tensors it holds: one for each index of its stacked axes. A row of the parameter
    table of one model; `row` says what the array is, the other fields where it lies in the tree and in HF's files.
    """

    row: Row
    path: tuple[str, ...]
    shape: tuple[int, ...]          # ours, with the stacked axes in front
    axes: tuple[str | None, ...]    # logical axis per dimension of `shape`
    hf_names: tuple[str, ...]       # in the order of the stacked axes, the last one fastest
    stacked: int                    # leading axes: repetitions of the block, experts

    @property
    def inputs(self) -> int:
        """Number of axes that a linear map contracts, first after the stacked ones; 0 = it is no linear map."""
        return self.row.inputs

    @property
    def kind(self) -> tuple[tuple[int, ...], tuple[str | None, ...]]:
        """Returns shape and logical axes of our array for one HF tensor: those behind the stacked axes."""
        return self.shape[self.stacked:], self.axes[self.stacked:]

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """Shape of one HF tensor: (outputs, inputs) of a linear map; every axis, outputs first, if its row is `whole`;
        a bias flat; else that of our array, as of a linear map that is `straight`.
        """
        shape, inputs = self.kind[0], self.inputs
        if self.row.straight:
            return shape
        if self.row.whole:
            return *shape[inputs:], *shape[:inputs]
        if inputs:
            return math.prod(shape[inputs:]), math.prod(shape[:inputs])
        return (math.prod(shape),) if self.path[-1] == "bias" else shape

    @property
    def indices(self) -> list[tuple[int, ...]]:
        """Returns the indices of the tensors of `hf_names` along the stacked axes."""
        return list(itertools.product(*map(range, self.shape[:self.stacked])))

    @property
    def active(self) -> int:
        """Returns the count of numbers that take part in computing one token: the array's, times the row's `share`,
        rounded.
        """
        return round(math.prod(self.shape) * float(self.row.share))

    @property
    def multiplied(self) -> int:
        """Returns the count of numbers that one token is multiplied with; 0 if it is no matrix product."""
        return self.active if self.inputs else 0

    def dtype(self, wanted):
        """Returns this array's dtype if parameters have the dtype `wanted`: at least fp32 for rows that are `fixed` or
        `wide`.
        """
        return np.promote_types(wanted, np.float32) if self.row.fixed or self.row.wide else np.dtype(wanted)

    def of(self, tree):
        """Returns this entry's leaf of a tree."""
        for name in self.path:
            tree = tree[name]
        return tree

    def from_hf(self, tensor):
        """Converts an HF tensor to ours (at one index), from `hf_shape` to the shape of `kind`: a view, so that slicing
        it copies only the slice.
        """
        shape = self.kind[0]
        if not self.inputs or self.row.straight:
            return tensor.reshape(shape)
        outputs = shape[self.inputs:]
        tensor = tensor.reshape(*outputs, *shape[:self.inputs])
        return tensor.transpose(*range(len(outputs), len(shape)), *range(len(outputs)))

    def to_hf(self, array):
        """Converts our array (at one index of the stacked axes) to the HF tensor, of `hf_shape`. numpy or jax."""
        if not self.inputs or self.row.straight:
            return array.reshape(self.hf_shape)
        if self.row.whole:
            return array.transpose(*range(self.inputs, array.ndim), *range(self.inputs))
        return array.reshape(self.hf_shape[::-1]).T


def entries(config, rows, place: tuple[str, ...] = (), layers=None, repeats: int = 0,
            within: str = "model.layers") -> list[Entry]:
    """Returns the entries of some rows of the parameter table.

    Args:
      config: ModelConfig, or what else has the rows' fields.
      rows: those whose `when` fits are taken.
      place: groups above the rows' paths.
      layers: numbers of the layers that the rows are of; None = of no layer.
      repeats: > 0: the arrays are stacked over so many `layers`; 0: they are of one layer or none.
      within: HF's name of the list of layers.
    """
    out = []
    for row in rows:
        if not row.of(config):
            continue
        if isinstance(row.share, str):
            row = dataclasses.replace(row, share=getattr(config, row.share))
        shape, lead = row.shape(config), (repeats,) * bool(repeats)
        name = f"{row.hf}[{row.part[1]}]" if row.part else row.hf
        names = [name] * bool(row.hf) if layers is None else [f"{within}.{i}.{name}" for i in layers]
        numbers = list(itertools.product(*map(range, shape[:row.stacked])))
        out.append(Entry(row, (*place, *row.path.split("/")), lead + shape, ("layers",) * len(lead) + row.axes,
                         tuple(name.format(*n) for name in names for n in numbers), len(lead) + row.stacked))
    return out


def tree(entries, function):
    """Returns the nested parameter tree with `function(entry)` at the path of every Entry of `entries`."""
    out = {}
    for entry in entries:
        *groups, leaf = entry.path
        node = out
        for name in groups:
            node = node.setdefault(name, {})
        node[leaf] = function(entry)
    return out
