"""What a model is made of: the families as data, and one ModelConfig read from any HF config of theirs."""

from __future__ import annotations

import dataclasses

from jaxrl.config import ConfigError
from jaxrl.models.rope import KINDS, Rope


@dataclasses.dataclass(frozen=True)
class Layer:
    """What differs between the layers of one model."""

    rope: Rope
    window: int = 0  # positions a token sees, itself included; 0 = all


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
    period: int             # layers of the repeating block: layers[i] == layers[i % period] in all whole blocks
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
    windows: str = "none"                # none | all | from_layer | pattern
    local_rope: bool = False             # windowed layers have a rotary embedding of their own


_SHARED = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "initializer_range": 0.02, "tie_word_embeddings": False,
           "max_position_embeddings": 32768, "rope_theta": 10000.0}
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "initializer_range": 0.02,
          "tie_word_embeddings": True, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096,
          "attention_bias": False}

FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM", {**_SHARED, "max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False},
        qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": Family(
        "MistralForCausalLM", {**_SHARED, "max_position_embeddings": 131072, "sliding_window": 4096,
                               "num_key_value_heads": 8}, windows="all"),
    "qwen2": Family(
        "Qwen2ForCausalLM", {**_SHARED, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
        qkv_bias=True, windows="from_layer"),
    "qwen3": Family(
        "Qwen3ForCausalLM", {**_SHARED, "head_dim": 128, "attention_bias": False, "use_sliding_window": False,
                             "sliding_window": 4096, "max_window_layers": 28},
        qkv_bias="attention_bias", out_bias="attention_bias", qk_norm=True, windows="from_layer"),
    "gemma2": Family(
        "Gemma2ForCausalLM", {**_GEMMA, "max_position_embeddings": 8192, "rope_theta": 10000.0,
                              "sliding_window_pattern": 2, "final_logit_softcapping": 30.0,
                              "attn_logit_softcapping": 50.0},
        qkv_bias="attention_bias", out_bias="attention_bias", gemma=True, activation="hidden_activation",
        query_scalar="query_pre_attn_scalar", attention_softcap="attn_logit_softcapping",
        final_softcap="final_logit_softcapping", windows="pattern"),
    "gemma3_text": Family(
        "Gemma3ForCausalLM", {**_GEMMA, "max_position_embeddings": 131072, "rope_theta": 1000000.0,
                              "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6,
                              "final_logit_softcapping": None},
        qkv_bias="attention_bias", out_bias="attention_bias", qk_norm=True, gemma=True,
        activation="hidden_activation", query_scalar="query_pre_attn_scalar",
        final_softcap="final_logit_softcapping", windows="pattern", local_rope=True),
}
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def model_config(hf_config: dict) -> ModelConfig:
    """Reads an HF config (a config.json, old or new spelling). Keys left out take the family's defaults.

    Raises ConfigError, naming the key and its value, for what no family here serves.
    """
    family = family_of(hf_config)
    hf = {**family.defaults, **hf_config}
    _check(hf, family)
    heads, hidden = hf["num_attention_heads"], hf["hidden_size"]
    head_dim = hf.get("head_dim") or hidden // heads
    layers = _layers(hf, family)

    def flag(rule):
        return rule if isinstance(rule, bool) else bool(hf[rule])

    return ModelConfig(
        family=hf["model_type"], vocab_size=hf["vocab_size"], num_layers=hf["num_hidden_layers"], hidden_size=hidden,
        mlp_size=hf["intermediate_size"], num_heads=heads, num_kv_heads=hf.get("num_key_value_heads") or heads,
        head_dim=head_dim, layers=layers, period=_period(layers), tied=bool(hf["tie_word_embeddings"]),
        qkv_bias=flag(family.qkv_bias), out_bias=flag(family.out_bias), mlp_bias=flag(family.mlp_bias),
        qk_norm=family.qk_norm, post_norms=family.gemma, norm_offset=1.0 if family.gemma else 0.0,
        norm_eps=hf["rms_norm_eps"], activation=hf[family.activation],
        embed_scale=hidden ** 0.5 if family.gemma else 1.0,
        query_scale=float(hf[family.query_scalar] if family.query_scalar else head_dim) ** -0.5,
        attention_softcap=float(hf[family.attention_softcap] or 0) if family.attention_softcap else 0.0,
        final_softcap=float(hf[family.final_softcap] or 0) if family.final_softcap else 0.0,
        max_positions=hf["max_position_embeddings"], init_std=hf["initializer_range"])


def family_of(hf_config: dict) -> Family:
    """The family of a config, by `model_type`; ConfigError for one we do not have or another architecture of it."""
    known = ", ".join(FAMILIES)
    kind = hf_config.get("model_type")
    if kind not in FAMILIES:
        hint = " (the text-only Gemma 3 checkpoints have model_type gemma3_text)" if kind == "gemma3" else ""
        raise ConfigError(f"model_type={kind!r} is not supported{hint}; choose a checkpoint of: {known}")
    family = FAMILIES[kind]
    names = hf_config.get("architectures") or [family.architecture]
    if family.architecture not in names:
        raise ConfigError(f"architectures={names!r} is not supported; take a {family.architecture} checkpoint")
    return family


def _check(hf, family):
    missing = [key for key in REQUIRED if hf.get(key) is None]
    if missing:
        raise ConfigError(f"model config: {', '.join(missing)} missing; a {hf['model_type']} config needs them")
    for key in REQUIRED:
        if not isinstance(hf[key], int) or hf[key] < 1:
            raise ConfigError(f"model config: {key}={hf[key]!r}; give a positive integer")
    heads, groups = hf["num_attention_heads"], hf.get("num_key_value_heads") or hf["num_attention_heads"]
    if heads % groups:
        raise ConfigError(f"model config: num_attention_heads={heads} is not a multiple of num_key_value_heads="
                          f"{groups}; change one of them")
    if not hf.get("head_dim") and hf["hidden_size"] % heads:
        raise ConfigError(f"model config: hidden_size={hf['hidden_size']} is not a multiple of num_attention_heads="
                          f"{heads}; change one of them or give head_dim")
    head_dim = hf.get("head_dim") or hf["hidden_size"] // heads
    if head_dim % 2:
        raise ConfigError(f"model config: head_dim={head_dim}; rotary embeddings need an even head size")
    for key, default in family.defaults.items():
        number = isinstance(default, int | float) and not isinstance(default, bool)
        if number and not isinstance(hf[key], int | float | None):
            raise ConfigError(f"model config: {key}={hf[key]!r}; give a number")
    activation = hf[family.activation]
    if activation not in ACTIVATIONS:
        raise ConfigError(f"model config: {family.activation}={activation!r}; choose {', '.join(ACTIVATIONS)}")
    if hf.get("use_bidirectional_attention"):
        raise ConfigError("model config: use_bidirectional_attention=True; only causal models can generate")
    if hf.get("quantization_config"):
        raise ConfigError("model config: quantization_config is set; take the unquantized checkpoint, or dequantize it")


def _layers(hf, family) -> tuple[Layer, ...]:
    windows = _windows(hf, family)
    full = _rope(hf, "full_attention" if family.local_rope else "")
    local = _local_rope(hf) if family.local_rope else full
    return tuple(Layer(local if sliding else full, hf["sliding_window"] if sliding else 0) for sliding in windows)


def _windows(hf, family) -> list[bool]:
    """Which layers have a sliding window: by `layer_types` where given, else by the family's older keys."""
    count = hf["num_hidden_layers"]
    if family.windows == "none" or not hf.get("sliding_window"):
        return [False] * count
    if family.windows == "all":
        return [True] * count
    if family.windows == "from_layer" and not hf["use_sliding_window"]:
        return [False] * count
    kinds = hf.get("layer_types")
    if kinds:
        unknown = set(kinds) - {"full_attention", "sliding_attention"}
        if len(kinds) != count or unknown:
            raise ConfigError(f"model config: layer_types={kinds!r}; give {count} entries, each full_attention or "
                              "sliding_attention")
        return [kind == "sliding_attention" for kind in kinds]
    if family.windows == "from_layer":
        return [i >= hf["max_window_layers"] for i in range(count)]
    return [(i + 1) % hf["sliding_window_pattern"] != 0 for i in range(count)]


def _period(layers) -> int:
    """Length of the smallest block whose repetition gives all layers but a remainder shorter than the block."""
    for period in range(1, len(layers)):
        if all(layer == layers[i % period] for i, layer in enumerate(layers)):
            return period
    return len(layers)


def _rope(hf, key) -> Rope:
    """The rotary embedding from `rope_parameters` (whole, or its entry `key`), or `rope_theta` and `rope_scaling`."""
    given = hf.get("rope_parameters") or {}
    given = given.get(key) or given
    if hf.get("rope_scaling"):
        given = {**(given if key else {}), **hf["rope_scaling"]}
    given = {"rope_theta": hf["rope_theta"], **given}
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in KINDS:
        raise ConfigError(f"model config: rope_type={kind!r} is not supported; choose {', '.join(KINDS)}")
    if given.get("partial_rotary_factor", 1.0) != 1.0 or hf.get("partial_rotary_factor") not in (None, 1.0):
        raise ConfigError("model config: partial_rotary_factor is not supported for this family; leave it at 1.0")
    window = given.get("original_max_position_embeddings") or hf["max_position_embeddings"]
    if kind == "default":
        return Rope(theta=float(given["rope_theta"]))
    factor = given.get("factor") or (hf["max_position_embeddings"] / window if kind == "yarn" else None)
    needed = {"factor": factor}
    if kind == "llama3":
        needed |= {name: given.get(name) for name in ("low_freq_factor", "high_freq_factor")}
    missing = [name for name, value in needed.items() if value is None]
    if missing:
        raise ConfigError(f"model config: rope_type={kind} needs {', '.join(missing)} beside it")
    optional = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "truncate", "attention_factor",
                "mscale", "mscale_all_dim")
    fields = {name: given[name] for name in optional if given.get(name) is not None}
    return Rope(kind=kind, theta=float(given["rope_theta"]), factor=float(factor), original_max=int(window), **fields)


def _local_rope(hf) -> Rope:
    if "sliding_attention" in (hf.get("rope_parameters") or {}):
        hf = {**hf, "rope_theta": hf["rope_local_base_freq"], "rope_scaling": None}
        return _rope(hf, "sliding_attention")
    return Rope(theta=float(hf["rope_local_base_freq"]))
