"""What a model is made of: the families as data, and one ModelConfig read from any HF config of theirs."""

from __future__ import annotations

import dataclasses
import functools
import math

from jaxrl.errors import ConfigError
from jaxrl.models.rope import KINDS, Rope
from jaxrl.names_elsewhere import not_yet


@dataclasses.dataclass(frozen=True)
class Layer:
    """What differs between the layers of one model."""

    rope: Rope
    window: int = 0  # positions a token sees, itself included; 0 = all
    mixer: str = "attention"   # rows of models.decoder.MIXERS and FEED_FORWARDS
    feed_forward: str = "mlp"


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer. Sizes are counts, soft-caps are 0 where there is none."""

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
    post_norms: bool        # norms after attention and MLP too (Gemma)
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
    norm_topk: bool = False       # the weights of a token's experts are made to add up to 1

    @functools.cached_property
    def period(self) -> int:
        """Length of the smallest block whose repetition gives all layers behind the prefix but a shorter rest."""
        layers = self.layers[self.prefix:]
        fits = (n for n in range(1, len(layers)) if all(layer == layers[i % n] for i, layer in enumerate(layers)))
        return next(fits, len(layers))

    @property
    def routes(self) -> int:
        """Expert ids of a token in all layers."""
        return self.num_expert_layers * self.experts_per_token

    @property
    def num_expert_layers(self) -> int:
        return sum(layer.feed_forward != "mlp" for layer in self.layers) if self.num_experts else 0

    @property
    def experts_share(self) -> float:
        """Of an expert layer's experts, those that compute one token."""
        return self.experts_per_token / self.num_experts

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def key_width(self) -> int:
        return self.num_kv_heads * self.head_dim

    def width(self, layer: Layer) -> int:
        """Inner numbers that the feed-forward of a layer computes per token."""
        if layer.feed_forward == "mlp" or not self.num_experts:
            return self.mlp_size
        return self.experts_per_token * self.expert_size + self.shared_expert_size

    @property
    def context(self) -> int:
        """Tokens of the longest sequence the model is made for: its window, stretched as its rotary scaling says (and
        as vLLM counts it). Gemma 3's and Llama 3's windows are given as stretched."""
        stretched = [0.0]
        for rope in {layer.rope for layer in self.layers} if self.family != "gemma3_text" else ():
            if rope.kind in ("linear", "yarn"):
                stretched.append(rope.factor * (rope.original_max if rope.kind == "yarn" else self.max_positions))
        return max(self.max_positions, int(max(stretched)))

    def beyond(self, longest: int) -> str:
        """What to say where prompt + completion may be longer than what the model is made for; else ""."""
        if longest <= self.context:
            return ""
        return (f"prompt + completion may be {longest} tokens (data.max_prompt_tokens + rollout.max_new_tokens, or "
                f"train.max_sequence_tokens), the model is made for {self.context} (max_position_embeddings="
                f"{self.max_positions} and its rotary scaling): shorten them, or extend the model with "
                "model.config.rope_scaling or model.config.max_position_embeddings")


@dataclasses.dataclass(frozen=True)
class Family:
    """How one HF model type becomes a ModelConfig. A string is the HF config key that decides."""

    architecture: str
    defaults: dict                       # HF's own defaults for keys that its config files may leave out
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    gemma: bool = False                  # post-norms, norms scale by 1 + weight, scaled embedding
    activation: str = "hidden_act"
    query_scalar: str = ""               # scores scale by this key's value ** -0.5; empty = head_dim
    attention_softcap: str = ""
    final_softcap: str = ""
    windows: str = "none"                # none | all | switched | from_layer | alternate | pattern
    local_rope: bool = False             # windowed layers have a rotary embedding of their own
    divides: bool = False                # transformers wants hidden_size to be a multiple of the heads, head_dim or not
    feed_forward: str = "mlp"            # a row of models.feed_forward.FEED_FORWARDS, of layers that are not dense
    qk_norm_whole: bool = False
    expert_size: str = ""                # experts' width by this key
    shared_expert_size: str = ""         # and that of the expert that every token has beside them; empty = there is none
    norm_topk: bool | str = False
    classifier_name: str = ""            # of its sequence classifier; empty = by the architecture's name

    @property
    def classifier(self) -> str:
        return self.classifier_name or self.architecture.replace("ForCausalLM", "ForSequenceClassification")


_SHARED = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "initializer_range": 0.02, "tie_word_embeddings": False,
           "max_position_embeddings": 32768, "rope_theta": 10000.0}
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "initializer_range": 0.02,
          "tie_word_embeddings": True, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096,
          "attention_bias": False, "num_key_value_heads": 4}
_QWEN_EXPERTS = {"use_sliding_window": False, "sliding_window": 4096, "decoder_sparse_step": 1, "mlp_only_layers": None,
                 "norm_topk_prob": False}

FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM", {**_SHARED, "max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False},
        qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias", divides=True),
    "mistral": Family(
        "MistralForCausalLM", {**_SHARED, "max_position_embeddings": 131072, "sliding_window": 4096,
                               "num_key_value_heads": 8}, windows="all"),
    "qwen2": Family(
        "Qwen2ForCausalLM", {**_SHARED, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
                             "num_key_value_heads": 32},
        qkv_bias=True, windows="from_layer"),
    "qwen3": Family(
        "Qwen3ForCausalLM", {**_SHARED, "head_dim": 128, "attention_bias": False, "use_sliding_window": False,
                             "sliding_window": 4096, "max_window_layers": 28, "num_key_value_heads": 32},
        qkv_bias="attention_bias", out_bias="attention_bias", qk_norm=True, windows="from_layer"),
    "gemma2": Family(
        "Gemma2ForCausalLM", {**_GEMMA, "max_position_embeddings": 8192, "rope_theta": 10000.0, "final_logit_softcapping": 30.0,
                              "attn_logit_softcapping": 50.0},
        qkv_bias="attention_bias", out_bias="attention_bias", gemma=True, activation="hidden_activation",
        query_scalar="query_pre_attn_scalar", attention_softcap="attn_logit_softcapping",
        final_softcap="final_logit_softcapping", windows="pattern", divides=True),
    "gemma3_text": Family(
        "Gemma3ForCausalLM", {**_GEMMA, "max_position_embeddings": 131072, "rope_theta": 1000000.0,
                              "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6,
                              "final_logit_softcapping": None},
        qkv_bias="attention_bias", out_bias="attention_bias", qk_norm=True, gemma=True,
        activation="hidden_activation", query_scalar="query_pre_attn_scalar",
        final_softcap="final_logit_softcapping", windows="pattern", local_rope=True,
        divides=True, classifier_name="Gemma3TextForSequenceClassification"),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", {**_SHARED, **_QWEN_EXPERTS, "attention_bias": False, "num_key_value_heads": 4,
                                "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128},
        qkv_bias="attention_bias", out_bias="attention_bias", qk_norm=True, windows="switched", feed_forward="experts",
        expert_size="moe_intermediate_size", norm_topk="norm_topk_prob"),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM", {**_SHARED, **_QWEN_EXPERTS, "qkv_bias": True, "num_key_value_heads": 16, "max_window_layers": 28,
                                "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4,
                                "num_experts": 60},
        qkv_bias="qkv_bias", windows="alternate", feed_forward="experts", expert_size="moe_intermediate_size",
        shared_expert_size="shared_expert_intermediate_size", norm_topk="norm_topk_prob"),
    "olmoe": Family(
        "OlmoeForCausalLM", {**_SHARED, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "attention_bias": False,
                             "num_experts_per_tok": 8, "num_experts": 64, "norm_topk_prob": False},
        qkv_bias="attention_bias", out_bias="attention_bias", qk_norm_whole=True, feed_forward="experts",
        expert_size="intermediate_size", norm_topk="norm_topk_prob"),
    "mixtral": Family(
        "MixtralForCausalLM", {**_SHARED, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 1000000.0,
                               "num_key_value_heads": 8, "num_experts_per_tok": 2, "num_experts": 8},
        windows="all", feed_forward="mixtral_experts", expert_size="intermediate_size", norm_topk=True),
}
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# Fields of other architectures: a config that uses one means a function that no family here computes, and transformers
# may read over it in silence. They pass where they say "not used": null, false, zero, empty, and 1 for a factor.
FOREIGN = {
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "num_routed_experts", "n_shared_experts",
                "num_shared_experts", "moe_num_experts", "moe_intermediate_size", "first_k_dense_replace", "decoder_sparse_step",
                "num_experts_per_tok", "num_experts_per_token", "moe_topk", "mlp_layer_types", "enable_moe_block", "mlp_only_layers",
                "shared_expert_intermediate_size", "norm_topk_prob", "moe_layer_freq", "expert_layer_period", "num_zero_experts"),
    "another router": ("router_jitter_noise", "input_jitter_noise", "routed_scaling_factor", "n_group", "topk_group", "topk_method",
                       "moe_router_enable_expert_bias", "router_bias", "router_logit_softcapping", "swiglu_limit", "capacity_factor",
                       "expert_capacity", "moe_expert_capacity_factor"),
    "latent attention": ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
    "another attention": ("attention_sinks", "attention_sink", "use_attention_sinks", "num_sink_tokens", "attention_chunk_size",
                          "use_qk_norm", "qk_norm", "qk_layernorm", "use_qk_layernorm", "clip_qkv", "attn_scale",
                          "attn_temperature_tuning", "attn_output_gate", "use_gated_attention", "index_topk", "nsa_config",
                          "sparse_attention_config", "parallel_attn", "use_parallel_residual", "parallel_residual",
                          "num_kv_shared_layers", "attention_k_eq_v", "cross_attention_layers", "add_cross_attention",
                          "use_differential_attention", "window_size", "local_attention"),
    "other positions": ("alibi", "use_alibi", "rotary_pct", "rotary_percent", "rope_interleaved", "rope_interleave",
                        "rotary_interleaved", "no_rope_layers", "no_rope_layer_interval", "nope_layer_interval", "mrope_section",
                        "use_mrope", "learnable_position_embeddings"),
    "other layers": ("linear_num_key_heads", "mamba_d_state", "ssm_cfg", "layer_group_size", "full_attention_interval",
                     "hidden_size_per_layer_input", "vocab_size_per_layer_input", "altup_num_inputs", "laurel_rank",
                     "activation_sparsity_pattern", "num_nextn_predict_layers", "per_layer_config", "block_configs",
                     "use_double_wide_mlp", "layer_scale", "use_layer_scale", "is_encoder_decoder"),
    "a factor": ("logit_scale", "logits_scaling", "logits_scale", "output_multiplier_scale", "lm_head_multiplier",
                 "embedding_multiplier", "embedding_multiplier_scale", "embedding_scale", "scale_emb", "residual_multiplier",
                 "scale_depth", "dim_model_base", "attention_multiplier", "mup_width_scale", "width_multiplier",
                 "mlp_multipliers", "key_multiplier", "attention_out_multiplier", "attention_in_multiplier"),
    "a soft-cap": ("logits_soft_cap", "attn_logit_softcap", "final_logit_softcap", "attn_logit_softcapping",
                   "final_logit_softcapping", "query_pre_attn_scalar"),
}
UNSCALED = ("rotary_pct", "rotary_percent", "routed_scaling_factor", "n_group", "topk_group", *FOREIGN["a factor"])  # 1 is as good as none


def model_config(hf_config: dict) -> ModelConfig:
    """Reads an HF config (a config.json, old or new spelling) as transformers reads it. Keys left out take the family's
    defaults.

    Raises ConfigError, naming the key and its value, for what no family here serves.
    """
    family = family_of(hf_config)
    hf = {**family.defaults, **hf_config}
    if family.expert_size:
        hf["num_experts"] = _expert_count(hf_config, family)
    _check(hf, family)
    heads, hidden = hf["num_attention_heads"], hf["hidden_size"]
    head_dim = hf.get("head_dim") or hidden // heads

    def flag(rule):
        return rule if isinstance(rule, bool) else hf[rule]

    def softcap(rule):
        return 0.0 if not rule or hf[rule] is None else float(_number(hf, rule, above=0))

    layers = _layers(hf, family)
    prefix = _prefix(layers)
    experts = family.expert_size and any(layer.feed_forward != "mlp" for layer in layers)
    routed = {} if not experts else dict(
        num_experts=hf["num_experts"], experts_per_token=hf["num_experts_per_tok"], expert_size=hf[family.expert_size],
        shared_expert_size=hf[family.shared_expert_size] if family.shared_expert_size else 0, norm_topk=flag(family.norm_topk))
    query = _number(hf, family.query_scalar, above=0, kind=int) if family.query_scalar else head_dim

    return ModelConfig(
        family=hf["model_type"], vocab_size=hf["vocab_size"], num_layers=hf["num_hidden_layers"], hidden_size=hidden,
        mlp_size=hf["intermediate_size"], num_heads=heads, num_kv_heads=hf.get("num_key_value_heads") or heads,
        head_dim=head_dim, layers=layers, prefix=prefix, tied=hf["tie_word_embeddings"],
        qkv_bias=flag(family.qkv_bias), out_bias=flag(family.out_bias), mlp_bias=flag(family.mlp_bias),
        qk_norm=family.qk_norm, post_norms=family.gemma, norm_offset=1.0 if family.gemma else 0.0,
        norm_eps=_number(hf, "rms_norm_eps", least=0), activation=hf[family.activation],
        embed_scale=hidden ** 0.5 if family.gemma else 1.0,
        query_scale=float(query) ** -0.5,
        attention_softcap=softcap(family.attention_softcap), final_softcap=softcap(family.final_softcap),
        max_positions=_number(hf, "max_position_embeddings", least=1, kind=int),
        init_std=_number(hf, "initializer_range", least=0), qk_norm_whole=family.qk_norm_whole, **routed)


def family_of(hf_config: dict) -> Family:
    """The family of a config, by `model_type`; ConfigError for one we do not have or another architecture of it."""
    known = ", ".join(FAMILIES)
    kind = hf_config.get("model_type")
    if kind not in FAMILIES:
        hint = " (the text-only Gemma 3 checkpoints have model_type gemma3_text)" if kind == "gemma3" else ""
        missing = f"; {not_yet(str(kind))}" if not_yet(str(kind)) else ""
        raise ConfigError(f"model_type={kind!r} is not supported{hint}; choose a checkpoint of: {known}{missing}")
    family = FAMILIES[kind]
    names = hf_config.get("architectures") or [family.architecture]
    if not {family.architecture, family.classifier} & set(names):
        raise ConfigError(f"architectures={names!r} is not supported; take a {family.architecture} checkpoint")
    return family


def _number(table, key, least=None, above=None, kind=float):
    """The number `table[key]`; ConfigError where it is none, not finite, or out of bounds."""
    value = table[key]
    numeric = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    low = -math.inf if least is None else least
    if not numeric or not math.isfinite(value) or value < low or (above is not None and value <= above):
        bound = f" of at least {least}" if least is not None else f" above {above}" if above is not None else ""
        raise ConfigError(f"model config: {key}={value!r}; give {'an integer' if kind is int else 'a number'}{bound}")
    return value


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
    activation = hf[family.activation]
    if activation not in ACTIVATIONS:
        raise ConfigError(f"model config: {family.activation}={activation!r}; choose {', '.join(ACTIVATIONS)}")
    if hf.get("use_bidirectional_attention") or hf.get("is_causal") is False:
        key = "use_bidirectional_attention" if hf.get("use_bidirectional_attention") else "is_causal"
        raise ConfigError(f"model config: {key}={hf[key]}; only causal models can generate")
    if hf.get("quantization_config"):
        raise ConfigError("model config: quantization_config is set; take the unquantized checkpoint, or dequantize it")
    _refuse_foreign(hf, family)


def _check_heads(hf, family):
    heads, hidden = hf["num_attention_heads"], hf["hidden_size"]
    if hf.get("num_key_value_heads") is not None:
        groups = _number(hf, "num_key_value_heads", least=1, kind=int)
        if heads % groups:
            raise ConfigError(f"model config: num_attention_heads={heads} is not a multiple of num_key_value_heads="
                              f"{groups}; change one of them (left out, the second is the family's default)")
    if hf.get("head_dim") is not None or "head_dim" in family.defaults:
        head_dim = _number(hf, "head_dim", least=2, kind=int)
    else:
        head_dim = hidden // heads
    if hidden % heads and (family.divides or hf.get("head_dim") is None):
        remedy = "" if family.divides else " or give head_dim"
        raise ConfigError(f"model config: hidden_size={hidden} is not a multiple of num_attention_heads={heads}; "
                          f"change one of them{remedy}")
    if head_dim % 2:
        raise ConfigError(f"model config: head_dim={head_dim}; rotary embeddings need an even head size")


def _refuse_foreign(hf, family):
    own = {family.query_scalar, family.attention_softcap, family.final_softcap}
    own |= {"use_qk_norm", "qk_norm", "qk_layernorm", "use_qk_layernorm"} if family.qk_norm or family.qk_norm_whole else set()
    own |= {"num_experts", "num_local_experts", *family.defaults} if family.expert_size else set()
    for what, keys in FOREIGN.items():
        for key in keys:
            if hf.get(key) and key not in own and not (key in UNSCALED and hf[key] == 1):
                raise ConfigError(f"model config: {key}={hf[key]!r} ({what}) is not supported for model_type="
                                  f"{hf['model_type']}; leave it out if the checkpoint does not need it")
    for key in ("scoring_func", "score_function", "scoring_function"):
        if hf.get(key) not in (None, "softmax"):
            raise ConfigError(f"model config: {key}={hf[key]!r} is not supported; the routers here are softmax over all "
                              "experts")
    if hf.get("position_embedding_type") not in (None, "rope", "rotary"):
        raise ConfigError(f"model config: position_embedding_type={hf['position_embedding_type']!r} is not supported; "
                          "the families here have rotary embeddings")


def _layers(hf, family) -> tuple[Layer, ...]:
    sliding, window = _windows(hf, family)
    full, local = _ropes(hf, family)
    kinds = _feed_forwards(hf, family)
    return tuple(Layer(local, window, feed_forward=kind) if windowed else Layer(full, feed_forward=kind)
                 for windowed, kind in zip(sliding, kinds, strict=True))


def _prefix(layers) -> int:
    """First layers that do not repeat: the dense ones before the first of experts, where the rest then has a shorter
    period."""
    dense = next((i for i, layer in enumerate(layers) if layer.feed_forward != "mlp"), 0)
    period = lambda rest: next((n for n in range(1, len(rest)) if all(  # noqa: E731
        layer == rest[i % n] for i, layer in enumerate(rest))), len(rest))
    return dense if period(layers[dense:]) < period(layers) else 0


def _expert_count(given, family) -> int:
    """Both names are in use, and transformers itself writes either."""
    found = {key: given[key] for key in ("num_experts", "num_local_experts") if given.get(key) is not None}
    if len(set(found.values())) > 1:
        raise ConfigError(f"model config: num_experts={found['num_experts']!r} beside num_local_experts="
                          f"{found['num_local_experts']!r}; leave one of them out")
    return next(iter(found.values()), family.defaults["num_experts"])


def _feed_forwards(hf, family) -> list[str]:
    """Which layers are dense and which have experts, by `mlp_only_layers` and `decoder_sparse_step` where the family has
    them."""
    count = hf["num_hidden_layers"]
    if not family.expert_size:
        return [family.feed_forward] * count
    _number(hf, family.expert_size, least=1, kind=int)
    if family.shared_expert_size:
        _number(hf, family.shared_expert_size, least=1, kind=int)
    experts, chosen = (_number(hf, key, least=least, kind=int) for key, least in (("num_experts", 0), ("num_experts_per_tok", 1)))
    step = _number(hf, "decoder_sparse_step", least=1, kind=int) if "decoder_sparse_step" in family.defaults else 1
    dense = hf.get("mlp_only_layers") or [] if "mlp_only_layers" in family.defaults else []
    if not isinstance(dense, list | tuple) or not all(type(i) is int for i in dense):
        raise ConfigError(f"model config: mlp_only_layers={dense!r}; give a list of layers' numbers from 0")
    kinds = [family.feed_forward if experts and i not in dense and (i + 1) % step == 0 else "mlp" for i in range(count)]
    if "decoder_sparse_step" not in family.defaults and not experts:
        raise ConfigError(f"model config: num_experts=0, but a {hf['model_type']} model has nothing beside experts")
    if experts and chosen > experts:
        raise ConfigError(f"model config: num_experts_per_tok={chosen} is more than num_experts={experts}")
    return kinds


def _windows(hf, family) -> tuple[list[bool], int]:
    """(which layers have a sliding window, its size): by `layer_types` where given, else by the family's older keys."""
    count, kinds, window = hf["num_hidden_layers"], hf.get("layer_types"), hf.get("sliding_window")
    if kinds is not None and (not isinstance(kinds, list | tuple) or len(kinds) != count
                              or set(kinds) - {"full_attention", "sliding_attention"}):
        raise ConfigError(f"model config: layer_types={kinds!r}; give {count} entries, each full_attention or "
                          "sliding_attention")
    if family.windows == "none" and window is not None and hf.get("use_sliding_window") is not False:
        raise ConfigError(f"model config: sliding_window={window!r}, but a {hf['model_type']} model has no windows; "
                          "leave it out")
    if family.windows == "none" or (family.windows in ("switched", "from_layer", "alternate")
                                    and not hf["use_sliding_window"]):
        window = None
    given = kinds and [kind == "sliding_attention" for kind in kinds]
    if family.windows in ("none", "all", "switched"):
        sliding = [window is not None] * count
        if given and given != sliding:
            raise ConfigError(f"model config: layer_types={kinds!r}: all layers of a {hf['model_type']} model are "
                              f"alike, here {'sliding' if sliding[0] else 'full'}_attention; leave it out")
    elif given:
        sliding = given
    elif family.windows == "from_layer":
        first = _number(hf, "max_window_layers", kind=int)
        sliding = [window is not None and i >= first for i in range(count)]
    elif family.windows == "alternate":
        first = _number(hf, "max_window_layers", kind=int)
        sliding = [window is not None and i % 2 == 0 and i < first for i in range(count)]
    else:
        sliding = [(i + 1) % _pattern(hf) != 0 for i in range(count)]
    if not any(sliding) and family.windows != "pattern":  # whose models ask for a window even where no layer uses it
        return sliding, 0
    if window is None and any(sliding):
        why = "use_sliding_window=False" if hf.get("use_sliding_window") is False else "sliding_window=None"
        raise ConfigError(f"model config: {'layer_types has' if given else 'the model has'} sliding_attention "
                          f"while {why}; give a window, or make all entries of layer_types full_attention")
    return sliding, _number(hf, "sliding_window", least=1, kind=int)


def _pattern(hf) -> int:
    """Every how many layers one sees everything."""
    if hf["model_type"] == "gemma3_text":
        return _number(hf, "sliding_window_pattern", least=1, kind=int)
    if hf.get("sliding_window_pattern", 2) != 2:
        raise ConfigError(f"model config: sliding_window_pattern={hf['sliding_window_pattern']!r}: transformers "
                          f"reads every second layer of a {hf['model_type']} model as windowed, whatever it says; say "
                          "it with layer_types")
    return 2


def _ropes(hf, family) -> tuple[Rope, Rope]:
    """The rotary embeddings of full and of windowed layers, from `rope_parameters` or from `rope_theta` and
    `rope_scaling`."""
    scaling, tables = hf.get("rope_scaling"), hf.get("rope_parameters")
    for key, value in (("rope_scaling", scaling), ("rope_parameters", tables)):
        if value is not None and not isinstance(value, dict):
            raise ConfigError(f"model config: {key}={value!r}; give a table")
    if not family.local_rope:
        table = {"rope_theta": hf["rope_theta"], **(scaling or tables or {})}
        if "original_max_position_embeddings" in hf:  # beside the table, it wins
            table["original_max_position_embeddings"] = hf["original_max_position_embeddings"]
        rope = _rope(hf, table, table.get("truncate", True))
        return rope, rope
    tables = tables or {}
    flat = sorted(set(tables) - {"full_attention", "sliding_attention", "truncate"})
    if flat:
        raise ConfigError(f"model config: rope_parameters has {', '.join(flat)} outside the tables full_attention and "
                          f"sliding_attention, where transformers does not look for a {hf['model_type']} model; put "
                          "them there")
    full = tables.get("full_attention") or {"rope_type": "default"}
    full = {"rope_theta": hf["rope_theta"], **full, **(scaling or {})}
    local = tables.get("sliding_attention") or {}
    if "rope_theta" not in local:
        local = {"rope_theta": _number(hf, "rope_local_base_freq", above=0), **local}
    truncate = tables.get("truncate", True)  # transformers looks for it beside the tables, not in them
    return _rope(hf, full, truncate), _rope(hf, local, truncate)


def _rope(hf, table, truncate) -> Rope:
    """The rotary embedding of one flat table."""
    nested = [key for key, value in table.items() if isinstance(value, dict)]
    if nested:
        raise ConfigError(f"model config: the rotary table has tables in it ({', '.join(nested)}), which a "
                          f"{hf['model_type']} model does not read; write one flat table")
    kinds = [table[key] for key in ("rope_type", "type") if table.get(key) is not None] or ["default"]
    if len(set(kinds)) > 1:
        raise ConfigError(f"model config: rope_type={kinds[0]!r} beside type={kinds[1]!r} in the rotary table, and "
                          "transformers reads the first; leave type out")
    kind = kinds[0]
    if kind not in KINDS:
        raise ConfigError(f"model config: rope_type={kind!r} is not supported; choose {', '.join(KINDS)}")
    if {table.get("partial_rotary_factor"), hf.get("partial_rotary_factor")} - {None, 1.0}:
        raise ConfigError("model config: partial_rotary_factor is not supported for this family; leave it at 1.0")
    table = {"original_max_position_embeddings": hf["max_position_embeddings"], **table}
    theta = float(_number(table, "rope_theta", above=0))
    if kind == "default":
        return Rope(theta=theta)
    if kind == "dynamic":  # its window is always the model's
        table["original_max_position_embeddings"] = hf["max_position_embeddings"]
    window = _number(table, "original_max_position_embeddings", least=1, kind=int)
    if kind == "yarn" and table.get("factor", 0) is None:
        table["factor"] = hf["max_position_embeddings"] / window
    needed = ("factor", "low_freq_factor", "high_freq_factor") if kind == "llama3" else ("factor",)
    missing = [name for name in needed if table.get(name) is None]
    if missing:
        raise ConfigError(f"model config: rope_type={kind} needs {', '.join(missing)} beside it")
    fields = {name: float(_number(table, name, above=0)) for name in needed}
    if kind == "yarn":
        fields |= _yarn_fields({**table, "rope_theta": theta}, truncate)
    return Rope(kind=kind, theta=theta, original_max=window, **fields)


def _yarn_fields(table, truncate) -> dict:
    if table["rope_theta"] == 1:
        raise ConfigError("model config: rope_theta=1 has no wavelengths for rope_type=yarn; give a larger one")
    found = {name: table[name] for name in ("beta_fast", "beta_slow") if table.get(name)}  # 0, too, is the default
    fields = {name: float(_number(found, name, above=0)) for name in found}
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
        if table.get(name) is not None:
            fields[name] = float(_number(table, name))
    return {**fields, "truncate": bool(truncate)}
