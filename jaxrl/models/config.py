"""ModelConfig, the architecture of a model, read from any HF config of models.families."""

from __future__ import annotations

import dataclasses
import functools
import math

from jaxrl.errors import ConfigError
from jaxrl.models.families import (
    ACTIVATIONS,
    FOREIGN,
    IMAGES,
    NEXT_TOKENS,
    REQUIRED,
    SCORES,
    UNSCALED,
    family_of,
    number,
    text_part,
)
from jaxrl.models.io import scaled
from jaxrl.models.layer_config import Layer, expert_count, layers_of, listed_parts, prefix_of
from jaxrl.models.rope import Rope, score_factor
from jaxrl.models.rope_config import rotary_size
from jaxrl.models.vision.config import VisionConfig, vision_config


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The architecture of a decoder-only language model.

    `family` is a key of families.FAMILIES, `activation` one of feed_forward.ACTIVATIONS, and `layers` has the Layer of
    each layer in order; num_heads, num_kv_heads and head_dim are those of attention. Sizes are counts, soft-caps are 0
    where there is none, and a *_bias says whether these linear maps have biases.
    """

    family: str
    vocab_size: int
    num_layers: int
    hidden_size: int
    mlp_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[Layer, ...]
    tied: bool              # the head is the embedding transposed
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool           # RMS norm over each query and key head
    norm_offset: float      # norms scale by offset + weight
    norm_eps: float
    activation: str
    embed_scale: float      # factor on the embedding, rounded to the compute dtype
    query_scale: float      # factor on attention scores
    attention_softcap: float
    final_softcap: float
    max_positions: int      # context window of the checkpoint
    init_std: float
    prefix: int = 0         # first layers that do not repeat (dense ones before experts)
    qk_norm_whole: bool = False   # RMS norm over all query heads together, and over all key heads
    num_experts: int = 0          # of a layer whose feed_forward is "experts" or like it
    experts_per_token: int = 0
    expert_size: int = 0          # width of one expert, as mlp_size of a dense layer
    shared_expert_size: int = 0   # width of the expert that every token has beside those; 0 = none
    shared_gate: bool = True      # and whether its output is times a sigmoid of its own
    norm_topk: bool = False       # the weights of a token's experts are made to add up to 1
    router: str = "softmax"       # over all experts; or sigmoid, each by itself, chosen among with a correction of each
    router_groups: int = 1        # sigmoid: experts lie in so many equal groups,
    router_groups_taken: int = 1  # of which a token's experts are in these, best by the sum of their best two
    routed_scale: float = 1.0     # factor on the weights
    next_tokens: int = 0          # layers on disk behind the last one that are not read
    rotary_size: int = 0          # first dimensions of a head, which the rotary embedding turns; 0 = all
    sinks: bool = False           # a score per head beside those of the keys, see kernels.attention.sinks
    router_bias: bool = False     # added to the router's logits
    expert_bias: bool = False     # of each expert's three products
    gate_alpha: float = 0.0       # gates are clamped ones (feed_forward.clamped) of this factor and limit; 0 = by activation
    gate_limit: float = 0.0
    vision: VisionConfig | None = None  # the tower, where it is read

    @functools.cached_property
    def period(self) -> int:
        """Length of the smallest block whose repetition gives all layers after the prefix, except a shorter remainder:
        their number if no shorter block does, 1 if there are none.
        """
        layers = self.layers[self.prefix:]
        fits = (n for n in range(1, len(layers)) if all(layer == layers[i % n] for i, layer in enumerate(layers)))
        return next(fits, max(len(layers), 1))  # all layers may be in the prefix

    @property
    def routes(self) -> int:
        """Number of expert ids of a token in all layers: layers with experts times experts per token."""
        return self.num_expert_layers * self.experts_per_token

    @property
    def num_expert_layers(self) -> int:
        """Number of layers with experts; 0 if num_experts is 0."""
        return sum(layer.has_experts for layer in self.layers) if self.num_experts else 0

    @property
    def experts_share(self) -> float:
        """Share of an expert layer's experts that compute one token; ZeroDivisionError in a model without experts."""
        return self.experts_per_token / self.num_experts

    gated_attention: bool = False  # attention's output is times a sigmoid
    linear_key_heads: int = 0     # of layers with a recurrence (models.recurrent); 0 = there are none
    linear_value_heads: int = 0
    linear_key_size: int = 0
    linear_value_size: int = 0
    linear_taps: int = 0          # tokens that their convolution reads
    is_mamba: bool = False        # Mamba-2, no delta rule
    convolution_bias: bool = False
    recurrent_in_bias: bool = False   # of the maps of the hidden states, and of the map of the output
    recurrent_out_bias: bool = False
    step_limits: tuple[float, float] = (0.0, math.inf)  # of Mamba-2's steps
    recurrent_norm: bool = True   # Mamba-2's output is normed,
    norm_then_gate: bool = False  # before it is gated
    # factors on: the hidden states that a recurrence reads, its gate, C, B, x, steps, what it returns; () = 1 each
    recurrent_factors: tuple[float, ...] = ()
    attention_factors: tuple[float, float, float] = (1.0, 1.0, 1.0)  # the same of attention, keys, what it returns
    mlp_factors: tuple[float, float] = (1.0, 1.0)  # on the gate before its activation, and on what the MLP returns
    expert_gate: bool = True      # an expert is down(activation(gate) * up), or down(activation(up))
    expert_latent: int = 0        # numbers of a token that its experts compute with; 0 = the hidden size

    @property
    def expert_inputs(self) -> int:
        """Length of the vector that an expert reads and returns for one token: expert_latent, or the hidden size."""
        return self.expert_latent or self.hidden_size

    @property
    def latent_bias(self) -> bool:
        """Whether the maps to and from the numbers that experts compute with (expert_latent) have a bias; False without
        these maps.
        """
        return bool(self.expert_latent) and self.mlp_bias

    @property
    def recurrent_heads(self) -> int:
        """Number of heads that cp times tp of a mesh must divide to split recurrent layers: key heads, or value heads
        where one key head serves all; 0 = there are no such layers.
        """
        return self.linear_key_heads if self.linear_key_heads > 1 else self.linear_value_heads

    @property
    def linear_value_width(self) -> int:
        """Length of a token's values over all value heads of a recurrence together."""
        return self.linear_value_heads * self.linear_value_size

    @property
    def windows(self) -> tuple[int, ...]:
        """Window of each layer with attention, in positions that a token sees, itself included; 0 = none."""
        return tuple(layer.window for layer in self.layers if layer.attends)

    @property
    def num_recurrent(self) -> int:
        """Number of layers with a recurrence."""
        return sum(layer.recurs for layer in self.layers)

    def state_bytes(self, width: int) -> int:
        """Returns the bytes that the sampler stores per sequence and recurrent layer: the state in fp32, the
        convolution's last inputs in numbers of `width` bytes.
        """
        keys, values = self.linear_key_heads * self.linear_key_size, self.linear_value_heads * self.linear_value_size
        return 4 * self.linear_key_size * values + (self.linear_taps - 1) * (2 * keys + values) * width

    latent_size: int = 0          # numbers that keys and values are expanded from (models.latent); 0 = there are none
    query_rank: int = 0           # and those of queries; 0 = they are made at once
    value_size: int = 0           # a value's, where it is not head_dim's
    rope_interleaved: bool = False
    qk_norm_late: bool = False    # RMS norm over each query and key head, after they are rotated
    residual_scale: float = 1.0   # factor on what a branch adds
    logits_divisor: float = 1.0   # the last hidden states are divided by it
    packed_qkv: bool = False      # query, key and value are one HF tensor
    packed_mlp: bool = False      # gate and up are one HF tensor

    @property
    def ropes(self) -> list[Rope]:
        """Returns the distinct rotary embeddings, in the order of the layers."""
        return list(dict.fromkeys(layer.rope for layer in self.layers if layer.rope))

    @property
    def value_width(self) -> int:
        """Size of one value head."""
        return self.value_size or self.head_dim

    @property
    def row_head_size(self) -> int:
        """Head size for attention within rows: the larger one of keys and values, since kernels take one size."""
        return max(self.head_dim, self.value_width)

    @property
    def latent_width(self) -> int:
        """Length of a token's entry in the latent cache: the latent and the rotary part of the key."""
        return self.latent_size + self.rotary_size

    @property
    def expanded_size(self) -> int:
        """Size that one head is expanded to: a value, and its key without the part that all heads share."""
        return self.head_dim - self.rotary_size + self.value_width

    @property
    def query_down_bias(self) -> bool:
        """Whether the map to the queries' latents has a bias."""
        return bool(self.query_rank) and self.qkv_bias

    @property
    def cache_widths(self) -> dict[str, int]:
        """Length of a token's entry in each array of a layer's cache, by the array's name: latent, or k and v."""
        return {"latent": self.latent_width} if self.latent_size else {"k": self.key_width, "v": self.key_width}

    @property
    def cache_heads(self) -> int:
        """Heads of the cache: 1 for latents, else the key-value heads."""
        return 1 if self.latent_size else self.num_kv_heads

    @property
    def pair_flops(self) -> int:
        """FLOPs of one layer's attention, scores and values, for one token and one position that it sees; a multiply
        and an add are two.
        """
        return 2 * self.num_heads * (self.head_dim + self.value_width)

    @property
    def corrected(self) -> bool:
        """Whether the router adds an untrained number per expert (the correction) to the scores that experts are chosen
        by.
        """
        return self.router == "sigmoid"

    @property
    def query_width(self) -> int:
        """Length of a token's queries over all heads together."""
        return self.num_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Length of a token's keys over all key-value heads together."""
        return self.num_kv_heads * self.head_dim

    def width(self, layer: Layer) -> int:
        """Returns the inner width of a layer's feed-forward per token: of a layer with experts that of the chosen ones
        and of the shared expert together; 0 without a feed-forward.
        """
        if layer.feed_forward == "none":
            return 0
        if not layer.has_experts or not self.num_experts:
            return self.mlp_size
        return self.experts_per_token * self.expert_size + self.shared_expert_size

    @property
    def context(self) -> int:
        """Tokens of the longest sequence the model is made for (as vLLM counts it): its window max_positions, or more
        where linear or yarn rotary scaling stretches it; at most Rope.window (longrope).

        Gemma 3's and Llama 3's windows are given as stretched.
        """
        stretched = [0.0]
        for rope in self.ropes if not self.family.startswith("gemma3") else ():
            if rope.kind in ("linear", "yarn"):
                stretched.append(rope.factor * (rope.original_max if rope.kind == "yarn" else self.max_positions))
        longest = max(self.max_positions, int(max(stretched)))
        return min([longest, *(rope.window for rope in self.ropes if rope.window)])

    def beyond(self, longest: int, made_of: str) -> str:
        """Returns a warning if prompt + completion may be longer than the model's context; else "". made_of: the
        options that set the lengths.
        """
        if longest <= self.context:
            return ""
        return (f"prompt + completion may be {longest} tokens ({made_of}), the model is made for {self.context} "
                f"(max_position_embeddings={self.max_positions} and its rotary scaling): lower them, set "
                "train.max_sequence_tokens, or extend the model with model.config.rope_scaling or "
                "model.config.max_position_embeddings")


# sizes of recurrent layers: their key heads, value heads, key size, value size, taps; see Family.sizes
SIZES = ("linear_key_heads", "linear_value_heads", "linear_key_size", "linear_value_size", "linear_taps")


def model_config(hf_config: dict) -> ModelConfig:
    """Reads an HF config (a config.json, old or new spelling) as transformers reads it. Keys left out take the family's
    defaults. The tower of a model with images is read if the entry IMAGES holds its vision_config (hf.load_config),
    else `vision` is None.

    Raises ConfigError, naming the key and its value, for what no family here serves.
    """
    hf_config = text_part(hf_config)
    family = family_of(hf_config)
    hf = _with_defaults(hf_config, family)
    _check(hf, family)
    heads, hidden = hf["num_attention_heads"], hf["hidden_size"]
    head_dim = hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"] if family.latent else hf.get("head_dim") or hidden // heads

    def flag(rule):
        return rule if isinstance(rule, bool) else hf[rule]

    def softcap(rule):
        return 0.0 if not rule or hf[rule] is None else float(number(hf, rule, above=0))

    layers = layers_of(hf, family)
    prefix = prefix_of(layers)
    experts = family.expert_size and any(layer.has_experts for layer in layers)
    routed = {} if not experts else {"norm_topk": flag(family.norm_topk), **_routed(hf, family)}
    if family.latent:
        routed |= dict(latent_size=hf["kv_lora_rank"], query_rank=hf["q_lora_rank"] or 0, value_size=hf["v_head_dim"],
                       rope_interleaved=hf["rope_interleave"])
    if family.recurrent:
        routed |= _recurrent(hf, family)
    if family.clamped:
        routed |= {f"gate_{k}": float(number(hf, f"swiglu_{k}", above=0)) for k in ("alpha", "limit")}
    if family.vision and IMAGES in hf:
        routed["vision"] = tower = vision_config(hf[IMAGES], family.vision, hidden, len(layers))
        prefix = max(prefix, len(tower.taps))  # layers behind which features are added
    factor = lambda key: float(number(hf, key, above=0)) if key else 1.0  # noqa: E731
    query = number(hf, family.query_scalar, above=0, kind=int) if family.query_scalar else head_dim
    rope = next((layer.rope for layer in layers if layer.rope), None)
    query_scale = float(query) ** -0.5 * (score_factor(rope) if family.latent and rope else 1.0)
    query_scale = factor(family.attention_factor) if family.attention_factor else query_scale

    return ModelConfig(
        family=hf["model_type"], vocab_size=hf["vocab_size"], num_layers=hf["num_hidden_layers"], hidden_size=hidden,
        mlp_size=hf[family.mlp_size], num_heads=heads,
        num_kv_heads=heads if family.latent else hf.get("num_key_value_heads") or heads,
        head_dim=head_dim, layers=layers, prefix=prefix, tied=hf["tie_word_embeddings"],
        qkv_bias=flag(family.qkv_bias), out_bias=flag(family.out_bias), mlp_bias=flag(family.mlp_bias),
        qk_norm=flag(family.qk_norm), norm_offset=1.0 if family.zero_centred else 0.0,
        norm_eps=number(hf, family.norm_eps, least=0), activation=family.activations.get(hf[family.activation], hf[family.activation]),
        embed_scale=hidden ** 0.5 if family.gemma else factor(family.embed_factor), qk_norm_late=family.qk_norm_late,
        residual_scale=factor(family.residual_factor),
        query_scale=query_scale,
        attention_softcap=softcap(family.attention_softcap), final_softcap=softcap(family.final_softcap),
        max_positions=number(hf, "max_position_embeddings", least=1, kind=int),
        init_std=number(hf, "initializer_range", least=0), qk_norm_whole=family.qk_norm_whole,
        rotary_size=_rotary(hf, family, head_dim), sinks=family.sinks, router_bias=family.router_bias,
        expert_bias=family.expert_bias,
        packed_qkv=family.packed_qkv, packed_mlp=family.packed_mlp,
        next_tokens=_next_tokens(hf_config, family), **{
            "rope_interleaved": family.rope_interleaved, "logits_divisor": factor(family.logits_divisor), **routed})


def _with_defaults(hf_config: dict, family) -> dict:
    newer = {new: hf_config[old] for old, new in family.renamed.items() if old in hf_config}
    hf = {**family.defaults, **hf_config, **newer}
    if family.expert_size:
        hf[family.experts_count] = expert_count(hf_config, family)
    if family.one_part:
        hf["num_hidden_layers"] = len(listed_parts(hf))
    if hf.get("mamba_d_head") == "auto":
        hf["mamba_d_head"] = _inner(hf) // number(hf, "mamba_n_heads", least=1, kind=int)
    return hf


def _inner(hf) -> int:
    """Returns the numbers of a token's values over all heads of Mamba-2, as Granite 4 and Falcon-H1 say it."""
    given = hf.get("mamba_d_ssm")
    return number(hf, "mamba_expand", least=1, kind=int) * hf["hidden_size"] if given is None else given


def _recurrent(hf, family) -> dict:
    """Returns the fields of ModelConfig about recurrent layers."""
    out = {ours: hf[theirs] for ours, theirs in zip(SIZES, family.sizes, strict=True)}
    if family.is_mamba:
        out |= dict(is_mamba=True, convolution_bias=hf[family.convolution_bias], recurrent_in_bias=hf[family.recurrent_bias],
                    recurrent_out_bias=hf[family.recurrent_out_bias or family.recurrent_bias],
                    step_limits=_limits(hf, "time_step_limit"))
        if family.scaled:
            out |= _factors(hf)
        if not family.one_part:
            return out
        out |= dict(step_limits=(float(number(hf, "time_step_min", least=0)), math.inf))
        if _limits(hf, "time_step_limit") != NO_LIMITS:
            raise ConfigError(f"model config: time_step_limit={hf['time_step_limit']!r} is not supported; {hf['model_type']} "
                              "models are computed with time_step_min and no upper limit")
    return out


def _factors(hf) -> dict:
    """Returns the fields of ModelConfig about Falcon-H1's factors and norm."""
    def listed(key, count):
        given = [1.0] * count if hf[key] is None else hf[key]
        if not isinstance(given, list | tuple) or len(given) != count:
            raise ConfigError(f"model config: {key}={given!r}; give {count} numbers")
        return [float(number({key: x}, key)) for x in given]

    one = lambda key: float(number(hf, key))  # noqa: E731
    gate, x, b, c, step = listed("ssm_multipliers", 5)
    attention = tuple(map(one, ("attention_in_multiplier", "key_multiplier", "attention_out_multiplier")))
    return dict(recurrent_factors=(one("ssm_in_multiplier"), gate, c, b, x, step, one("ssm_out_multiplier")),
                attention_factors=attention, mlp_factors=tuple(listed("mlp_multipliers", 2)), recurrent_norm=hf["mamba_rms_norm"],
                norm_then_gate=hf["mamba_norm_before_gate"] and hf["mamba_rms_norm"],
                logits_divisor=1 / float(number(hf, "lm_head_multiplier", above=0)))


NO_LIMITS = (0.0, math.inf)


def _limits(hf, key: str) -> tuple[float, float]:
    """Returns two numbers, of which the upper one may be infinity, as Python or as transformers 5 writes it."""
    given = hf.get(key)
    if given is None:
        return NO_LIMITS
    ends = [math.inf if end == {"__float__": "Infinity"} else end for end in given] if isinstance(given, list | tuple) else []
    if len(ends) != 2 or not all(isinstance(end, int | float) and not isinstance(end, bool) for end in ends) or not (
            0 <= ends[0] < ends[1]):
        raise ConfigError(f"model config: {key}={given!r}; give two numbers, from 0, the second one above the first")
    return float(ends[0]), float(ends[1])


def _rotary(hf, family, head_dim: int) -> int:
    return hf["qk_rope_head_dim"] if family.latent else rotary_size(hf, family, head_dim) if family.partial_rotary else 0


def _next_tokens(hf, family) -> int:
    """Layers that predict more than the next token lie behind the others on disk, and nothing here computes them."""
    keys = [key for key in NEXT_TOKENS if hf.get(key) is not None] if family.next_tokens else []
    return max((number(hf, key, least=0, kind=int) for key in keys), default=int(family.next_tokens))


def _routed(hf, family) -> dict:
    """Returns the fields of ModelConfig about experts and their router."""
    size = hf[family.expert_size]
    out = dict(num_experts=hf[family.experts_count], experts_per_token=hf["num_experts_per_tok"], expert_size=size)
    if family.shared_expert_size:
        out["shared_expert_size"] = hf[family.shared_expert_size]
    if hf.get("moe_latent_size") is not None:
        out["expert_latent"] = number(hf, "moe_latent_size", least=1, kind=int)
    out |= {} if family.shared_gate else {"shared_gate": False}
    out |= {"expert_gate": False} if family.one_part else {}
    if family.shared_experts:
        out |= {"shared_expert_size": size * hf[family.shared_experts], "shared_gate": False}
    if family.router == "sigmoid":
        out |= dict(router="sigmoid")
    if family.router == "sigmoid" and "n_group" in family.defaults:
        out |= dict(router_groups=hf["n_group"], router_groups_taken=hf["topk_group"],
                    routed_scale=float(number(hf, "routed_scaling_factor", above=0)))
    return out


def _check(hf, family):
    missing = [key for key in REQUIRED if hf.get(key) is None]
    if missing:
        raise ConfigError(f"model config: {', '.join(missing)} missing; a {hf['model_type']} config needs them")
    for key in REQUIRED:
        if not isinstance(hf[key], int) or isinstance(hf[key], bool) or hf[key] < 1:
            raise ConfigError(f"model config: {key}={hf[key]!r}; give a positive integer")
    for key, default in family.defaults.items():
        if isinstance(default, bool) and not isinstance(hf[key], bool):
            raise ConfigError(f"model config: {key}={hf[key]!r}; give true or false")
    _check_heads(hf, family)
    if family.recurrent:
        _check_recurrent(hf, family)
    activation = hf[family.activation]
    if activation not in (*ACTIVATIONS, *family.activations):
        raise ConfigError(f"model config: {family.activation}={activation!r}; choose {', '.join(ACTIVATIONS)}")
    if family.clamped and activation != family.defaults[family.activation]:
        raise ConfigError(f"model config: {family.activation}={activation!r} is not what the gates of {hf['model_type']} "
                          "models are made with, and transformers does not read it; leave it out")
    if hf.get("use_bidirectional_attention") or hf.get("is_causal") is False:
        key = "use_bidirectional_attention" if hf.get("use_bidirectional_attention") else "is_causal"
        raise ConfigError(f"model config: {key}={hf[key]}; only causal models can generate")
    if hf.get("quantization_config") and family.few_bits:
        scaled.check(hf["quantization_config"], family.few_bits)
    elif hf.get("quantization_config"):
        raise ConfigError("model config: quantization_config is set; take the unquantized checkpoint, or dequantize it")
    _refuse_foreign(hf, family)


def _check_latent(hf, family):
    """Raises ConfigError for bad sizes of latent attention; a head's key is
    qk_nope_head_dim + qk_rope_head_dim wide.
    """
    for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        number(hf, key, least=1, kind=int)
    if hf["q_lora_rank"] is not None:
        number(hf, "q_lora_rank", least=1, kind=int)
    stands, turns, heads = hf["qk_nope_head_dim"], hf["qk_rope_head_dim"], hf["num_attention_heads"]
    if turns % 2:
        raise ConfigError(f"model config: qk_rope_head_dim={turns}; rotary embeddings need an even size")
    wanted = {"head_dim": turns, "qk_head_dim": stands + turns, "num_key_value_heads": heads}
    for key, value in wanted.items():
        if hf.get(key) not in (None, value):
            raise ConfigError(f"model config: {key}={hf[key]!r}; a {hf['model_type']} model of these sizes has {value}; "
                              "leave it out")


def _check_recurrent(hf, family):
    """Raises ConfigError for bad sizes of recurrent layers and for fields whose other values mean another function."""
    for key in family.sizes:
        number(hf, key, least=1, kind=int)
    keys, values, _, size, _ = family.sizes
    if hf[values] % hf[keys]:
        raise ConfigError(f"model config: {values}={hf[values]} is not a multiple of {keys}={hf[keys]}; change one of "
                          "them")
    if "mamba_expand" in family.defaults and hf[values] * hf[size] != (inner := _inner(hf)):
        raise ConfigError(f"model config: {size}={hf[size]} times {values}={hf[values]} is not {inner}, the inner size of "
                          "the model; leave it out")
    if hf.get("sliding_window") is not None and hf.get("use_sliding_window") is not False:
        raise ConfigError(f"model config: sliding_window={hf['sliding_window']!r}, but a {hf['model_type']} model has no "
                          "windows; leave it out")
    own = ("hidden_act", "silu") if family.activation == "hidden_act" else ("mamba_hidden_act", "silu")
    for key, wanted in (own, ("attn_output_gate", True), ("output_gate_type", "silu"),
                        ("mamba_ssm_dtype", "float32"), ("mamba_ssm_cache_dtype", "float32")):
        names = (None, wanted, *(["swish"] if wanted == "silu" else []))  # one function; Qwen3.8's configs have swish
        if hf.get(key) not in names:
            raise ConfigError(f"model config: {key}={hf[key]!r} is not supported; {hf['model_type']} models are computed "
                              f"with {wanted!r}")


def _check_heads(hf, family):
    if family.latent:
        return _check_latent(hf, family)
    heads, hidden = hf["num_attention_heads"], hf["hidden_size"]
    if hf.get("num_key_value_heads") is not None:
        groups = number(hf, "num_key_value_heads", least=1, kind=int)
        if heads % groups:
            raise ConfigError(f"model config: num_attention_heads={heads} is not a multiple of num_key_value_heads="
                              f"{groups}; change one of them (left out, the second is the family's default)")
    if hf.get("head_dim") is not None or "head_dim" in family.defaults:
        head_dim = number(hf, "head_dim", least=2, kind=int)
    else:
        head_dim = hidden // heads
    if hidden % heads and (family.divides or hf.get("head_dim") is None):
        remedy = "" if family.divides else " or give head_dim"
        raise ConfigError(f"model config: hidden_size={hidden} is not a multiple of num_attention_heads={heads}; "
                          f"change one of them{remedy}")
    if hf.get("attention_head_dim") not in (None, head_dim):
        raise ConfigError(f"model config: attention_head_dim={hf['attention_head_dim']!r} beside head_dim={head_dim}, which "
                          "transformers reads; make them equal")
    if family.mrope == "runs" and head_dim != hidden // heads:
        raise ConfigError(f"model config: head_dim={head_dim}, but heads of a {hf['model_type']} model are hidden_size / "
                          f"num_attention_heads = {hidden // heads} wide whatever it says; leave it out")
    if head_dim % 2 and not family.one_part:
        raise ConfigError(f"model config: head_dim={head_dim}; rotary embeddings need an even head size")


def _refuse_foreign(hf, family):
    own = {family.query_scalar, family.attention_softcap, family.final_softcap, family.embed_factor, family.residual_factor,
           family.attention_factor, family.logits_divisor}
    if (family.qk_norm or family.qk_norm_late or family.qk_norm_whole) and "use_qk_norm" not in family.defaults:
        own |= {"use_qk_norm", "qk_norm", "qk_layernorm", "use_qk_layernorm"}
    own |= {"no_rope_layers", "no_rope_layer_interval"} if family.no_rope else set()
    for key, value in family.says.items():
        if hf.get(key) not in (None, value):
            raise ConfigError(f"model config: {key}={hf[key]!r} is not supported; {hf['model_type']} models are computed "
                              f"with {value!r}")
    own |= set(family.says)
    kinds = hf.get("attn_type_list")
    own |= {"attn_type_list"} if isinstance(kinds, list | tuple) and set(kinds) == {1} else set()
    own |= set(NEXT_TOKENS) if family.next_tokens else set()
    own |= {"first_k_dense_replace"} if family.listed_kinds else set()
    own |= {"experts_per_token"} if hf.get("experts_per_token") == hf.get("num_experts_per_tok") else set()
    own |= {family.experts_count, "num_local_experts", *family.defaults} if family.expert_size else set()
    own |= {*family.defaults, "attn_output_gate", "full_attention_interval"} if family.recurrent else set()
    for what, keys in FOREIGN.items():
        for key in keys:
            if hf.get(key) and key not in own and not (key in UNSCALED and hf[key] == 1):
                raise ConfigError(f"model config: {key}={hf[key]!r} ({what}) is not supported for model_type="
                                  f"{hf['model_type']}; leave it out if the checkpoint does not need it")
    for key in SCORES:
        if hf.get(key) not in (None, family.router):
            raise ConfigError(f"model config: {key}={hf[key]!r} is not supported; the routers of {hf['model_type']} "
                              f"models are {family.router} over all experts")
    if hf.get("position_embedding_type") not in (None, "rope", *(("nope",) if family.may_turn else ("rotary",))):
        raise ConfigError(f"model config: position_embedding_type={hf['position_embedding_type']!r} is not supported; "
                          "the families here have rotary embeddings")
