"""The families of models as data: how one HF model type becomes a ModelConfig, and fields that no family here computes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, overload

from jaxrl.config.suggest import not_yet
from jaxrl.errors import ConfigError
from jaxrl.models.rope import KINDS


@dataclasses.dataclass(frozen=True)
class Family:
    """How one HF model type becomes a ModelConfig. Sizes, counts, factors, soft-caps, biases, listed_kinds, activation
    and norm_eps name the key of the HF config that decides, and so does every field that may be a flag or a number and
    is a text. The others hold their value.
    """

    architecture: str
    defaults: dict                       # HF's own defaults for keys that its config files may leave out
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool | str = False
    qk_norm_late: bool = False           # ModelConfig.qk_norm_late
    embed_factor: str = ""               # factors by these keys: on the embedding,
    attention_factor: str = ""           # on the scores, in place of head_dim ** -0.5,
    residual_factor: str = ""            # on what a branch adds,
    logits_divisor: str = ""             # and what logits are divided by
    norms: str = "pre"                   # row of models.parameters.NORMS
    gemma: bool = False                  # norms scale by 1 + weight, scaled embedding
    activation: str = "hidden_act"
    activations: dict = dataclasses.field(default_factory=dict)  # names of it that mean another one
    query_scalar: str = ""               # scores scale by this key's value ** -0.5; empty = head_dim
    attention_softcap: str = ""
    final_softcap: str = ""
    windows: str = "none"                # none | all | switched | from_layer | alternate | pattern | no_rope
    pattern: int | str = 2               # of windows "pattern": every how many layers one sees everything
    local_theta: float | str = ""        # base of a rotary embedding that windowed layers have of their own; empty = none
    no_rope: bool = False                # no_rope_layers, no_rope_layer_interval: 1 = a layer with rotary embedding
    rope_interleaved: bool = False       # a head turns in pairs (2i, 2i + 1)
    rope_kinds: dict = dataclasses.field(default_factory=lambda: KINDS)  # rope_type -> models.rope.Rope.kind
    rope_alpha: bool = False             # rope_type=dynamic with alpha is a larger base
    packed_qkv: bool = False             # query, key and value are one tensor on disk, qkv_proj
    packed_mlp: bool = False             # and gate and up are, gate_up_proj
    query_growth: bool = False           # llama_4_scaling_beta of the rotary table (models.rope.growth)
    divides: bool = False                # transformers wants hidden_size to be a multiple of the heads, head_dim or not
    feed_forward: str = "mlp"            # a row of models.feed_forward.FEED_FORWARDS, of layers that are not dense
    qk_norm_whole: bool = False
    expert_size: str = ""                # experts' width by this key
    experts_count: str = "num_experts"   # their number; num_local_experts is read as the same
    shared_expert_size: str = ""         # width of the expert that every token has beside them; empty = there is none
    shared_experts: str = ""             # how many of an expert's width that one is wide, and it has no gate
    dense_first: str = ""                # how many first layers have no experts
    router: str = "softmax"              # ModelConfig.router
    norm_topk: bool | str = False
    partial_rotary: bool = False         # partial_rotary_factor is read
    listed_kinds: str = ""               # or a list that calls every layer dense or sparse
    latent: bool = False                 # models.latent
    says: dict = dataclasses.field(default_factory=dict)  # fields that say of a model, by this value, what it is anyhow
    next_tokens: bool = False            # further layers on disk predict tokens behind the next one, and are not read
    classifies: bool = True              # transformers has a sequence classifier of it
    few_bits: str = ""                   # fp8 or mxfp4, see models.io.scaled: checkpoints in which are read
    sinks: bool = False                  # ModelConfig.sinks
    router_bias: bool = False            # ModelConfig.router_bias
    expert_bias: bool = False            # ModelConfig.expert_bias
    clamped: bool = False                # gates by swiglu_alpha and swiglu_limit, whatever hidden_act says
    interleaved: bool = False            # gate and up take turns there, see models.io.fused
    transposed: bool = False             # or they may lie transposed there
    recurrent: str = ""                  # mixer of the layers that full_attention_interval or layer_types leave without attention
    is_mamba: bool = False               # and it is Mamba-2, with these flags:
    convolution_bias: str = ""
    recurrent_bias: str = ""             # of the maps of the hidden states, and of the output where this names no other:
    recurrent_out_bias: str = ""
    scaled: bool = False                 # and Falcon-H1's factors, see config._factors
    may_turn: bool = False               # attention sees positions by position_embedding_type=rope alone
    sizes: tuple[str, ...] = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
                              "linear_conv_kernel_dim")  # of recurrent layers, in the order of config.SIZES
    mlp_size: str = "intermediate_size"
    dense: str = ""                      # feed-forward where the number of experts is 0; empty = there must be some
    shared_gate: bool = True             # ModelConfig.shared_gate
    fused_in: str = "mlp.experts"        # HF's module of the tensors of all experts, see models.io.fused
    fused_only: bool = False             # and experts lie on a disk so, and in no other way
    one_part: bool = False               # a layer is a mixer or a feed-forward, by layer_config.listed_parts, and sees no positions
    norm_eps: str = "rms_norm_eps"
    renamed: dict = dataclasses.field(default_factory=dict)  # older names of fields
    spelled: tuple = ()                  # (beginning of a tensor's name on disk, ours)
    stored_type: str = ""                # model_type of its text_config on disk, where several families have the same
    tower: str = r"(model\.)?visual\..*"  # pattern of the names of a tower's tensors on disk
    of_tower: tuple[str, ...] = ()       # fields of the config around vision_config that are read with it
    vision: str = ""                     # tower for images beside it on disk, a row of models.vision.rows.TABLES; read where asked for
    mrope: str = ""                      # a token has three positions (Rope.axes), which frequencies read in "turns" or in "runs"
    within: tuple = (("model.language_model.", "model."),)  # names in a model of several parts begin so, and so alone
    unread: str = ""                     # pattern of further tensors on disk that belong to parts not computed here
    unwritten: str = ""                  # and of those among them that an export leaves out
    vllm_assumes: dict = dataclasses.field(default_factory=dict)  # fields that vLLM does not read; a tuple is of layers in turns
    classifier_name: str = ""            # of its sequence classifier; empty = by the architecture's name

    @property
    def zero_centred(self) -> bool:
        """Whether norms scale by 1 + weight."""
        return self.gemma or bool(self.recurrent) and not self.is_mamba

    @property
    def merged_only(self) -> str:
        """Returns the parts, in words for messages, of which vLLM is not known to serve adapters apart from their base:
        experts, recurrent layers, a tower, or matrices that share one tensor, the first of these that the family has;
        "" = none.
        """
        packed = self.packed_qkv or self.packed_mlp
        return "experts" if self.expert_size else "recurrent layers" if self.recurrent else (
            "a tower for images" if self.vision else "matrices that share one tensor" if packed else "")

    @property
    def classifier(self) -> str:
        """Name of transformers' sequence classifier of this family: classifier_name, else the architecture with
        ForCausalLM replaced by ForSequenceClassification (one of another ending unchanged), whether transformers has it
        (`classifies`) or not.
        """
        return self.classifier_name or self.architecture.replace("ForCausalLM", "ForSequenceClassification")


_SHARED = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "initializer_range": 0.02, "tie_word_embeddings": False,
           "max_position_embeddings": 32768, "rope_theta": 10000.0}
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "initializer_range": 0.02,
          "tie_word_embeddings": True, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096,
          "attention_bias": False, "num_key_value_heads": 4}
_QWEN_EXPERTS = {"use_sliding_window": False, "sliding_window": 4096, "decoder_sparse_step": 1, "mlp_only_layers": None,
                 "norm_topk_prob": False}
_SIGMOID = {"num_experts_per_tok": 8, "n_shared_experts": 1, "norm_topk_prob": True}
_DEEPSEEK: dict[str, Any] = dict(feed_forward="deepseek_experts", expert_size="moe_intermediate_size", experts_count="n_routed_experts",
                 shared_experts="n_shared_experts", dense_first="first_k_dense_replace", norm_topk="norm_topk_prob", router="sigmoid",
                 says={"topk_method": "noaux_tc", "moe_layer_freq": 1}, next_tokens=True, few_bits="fp8")
_HYBRID = {"head_dim": 256, "attention_bias": False, "partial_rotary_factor": 0.25, "full_attention_interval": 4,
           "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
           "linear_conv_kernel_dim": 4}
_MAMBA = {"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_head": "auto", "mamba_d_conv": 4, "mamba_expand": 2,
          "mamba_conv_bias": True, "mamba_proj_bias": False}
_MAMBA_SIZES = ("mamba_n_groups", "mamba_n_heads", "mamba_d_state", "mamba_d_head", "mamba_d_conv")
_UNLIMITED = {"time_step_limit": [0.0, math.inf]}
_MTP = r"model\.mtp_layers\..*"  # MiMo's
TOWER = Family.tower
GEMMA_TOWER = r"(model\.)?(vision_tower|multi_modal_projector)\..*"
_BESIDE = r"mtp\..*|" + TOWER
_GLM = {**_SHARED, "rms_norm_eps": 1.5625e-07, "max_position_embeddings": 131072, "head_dim": 128, "num_key_value_heads": 2,
        "attention_bias": True, "partial_rotary_factor": 0.5}
_GLM_LAYERS: dict[str, Any] = dict(qkv_bias="attention_bias", partial_rotary=True, rope_interleaved=True, packed_mlp=True)
_SEES: dict[str, Any] = dict(unread=TOWER, classifies=False, within=(("model.language_model.", "model."), ("model.", "model.")))
_QWEN2_VL = {**_SHARED, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "num_key_value_heads": 8, "use_sliding_window": False,
             "sliding_window": 4096, "max_window_layers": 80}
_QWEN2_VL_LAYERS: dict[str, Any] = dict(qkv_bias=True, windows="from_layer", mrope="runs", rope_kinds={**KINDS, "mrope": "default"},
                                        divides=True, vllm_assumes={"use_sliding_window": False}, **_SEES)
_LATENT = {"attention_bias": False, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "rope_interleave": True}
_LATENT_ATTENTION: dict[str, Any] = dict(latent=True, qkv_bias="attention_bias", out_bias="attention_bias", vllm_assumes={
    "rope_interleave": True, "attention_bias": False, "tie_word_embeddings": False})

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
        qkv_bias=True, windows="from_layer", unread=_MTP, unwritten=_MTP, vllm_assumes={"use_sliding_window": False}),
    "qwen3": Family(
        "Qwen3ForCausalLM", {**_SHARED, "head_dim": 128, "attention_bias": False, "use_sliding_window": False,
                             "sliding_window": 4096, "max_window_layers": 28, "num_key_value_heads": 32},
        qkv_bias="attention_bias", out_bias="attention_bias", qk_norm=True, windows="from_layer",
        vllm_assumes={"use_sliding_window": False, "attention_bias": False}),
    "seed_oss": Family(
        "SeedOssForCausalLM", {**_SHARED, "max_position_embeddings": 524288, "head_dim": 128, "num_key_value_heads": 8,
                               "attention_bias": True, "attention_out_bias": False, "mlp_bias": False},
        qkv_bias="attention_bias", out_bias="attention_out_bias", mlp_bias="mlp_bias"),
    "gemma": Family(
        "GemmaForCausalLM", {**_SHARED, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "head_dim": 256,
                             "max_position_embeddings": 8192, "attention_bias": False, "num_key_value_heads": 16},
        qkv_bias="attention_bias", out_bias="attention_bias", gemma=True, activations={"gelu": "gelu_pytorch_tanh"},
        divides=True, vllm_assumes={"tie_word_embeddings": True, "attention_bias": False}),
    "gemma2": Family(
        "Gemma2ForCausalLM", {**_GEMMA, "max_position_embeddings": 8192, "rope_theta": 10000.0, "final_logit_softcapping": 30.0,
                              "attn_logit_softcapping": 50.0},
        qkv_bias="attention_bias", out_bias="attention_bias", norms="sandwich", gemma=True, activation="hidden_activation",
        query_scalar="query_pre_attn_scalar", attention_softcap="attn_logit_softcapping",
        final_softcap="final_logit_softcapping", windows="pattern", divides=True, vllm_assumes={"tie_word_embeddings": True}),
    "gemma3_text": Family(
        "Gemma3ForCausalLM", {**_GEMMA, "max_position_embeddings": 131072, "rope_theta": 1000000.0,
                              "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6,
                              "final_logit_softcapping": None},
        qkv_bias="attention_bias", out_bias="attention_bias", qk_norm=True, norms="sandwich", gemma=True,
        activation="hidden_activation", query_scalar="query_pre_attn_scalar",
        final_softcap="final_logit_softcapping", windows="pattern", pattern="sliding_window_pattern", local_theta="rope_local_base_freq",
        divides=True, classifier_name="Gemma3TextForSequenceClassification"),
    "olmo2": Family(
        "Olmo2ForCausalLM", {**_SHARED, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "attention_bias": False},
        qkv_bias="attention_bias", out_bias="attention_bias", norms="post", qk_norm_whole=True,
        vllm_assumes={"attention_bias": False, "hidden_act": "silu"}),
    "olmo3": Family(
        "Olmo3ForCausalLM", {**_SHARED, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "rope_theta": 500000.0,
                             "attention_bias": False, "sliding_window": 4096},
        qkv_bias="attention_bias", out_bias="attention_bias", norms="post", qk_norm_whole=True, windows="pattern", pattern=4,
        local_theta=500000.0, vllm_assumes={"attention_bias": False, "hidden_act": "silu"}),
    "smollm3": Family(
        "SmolLM3ForCausalLM", {**_SHARED, "tie_word_embeddings": True, "rope_theta": 2000000.0, "num_key_value_heads": 4,
                               "attention_bias": False, "mlp_bias": False, "use_sliding_window": False,
                               "no_rope_layers": None, "no_rope_layer_interval": 4},
        qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias", windows="no_rope", no_rope=True, divides=True),
    "ministral3": Family(
        "Ministral3ForCausalLM", {**_SHARED, "rms_norm_eps": 1e-5, "max_position_embeddings": 262144, "head_dim": 128,
                                  "num_key_value_heads": 8, "rope_theta": 1000000.0, "rope_parameters": {
                                      "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0,
                                      "original_max_position_embeddings": 16384, "mscale": 1.0, "mscale_all_dim": 1.0,
                                      "llama_4_scaling_beta": 0.1}},
        windows="all", query_growth=True, within=(("language_model.", ""), ("model.language_model.", "model.")),
        unread=r"(model\.)?(vision_tower|multi_modal_projector)\..*"),
    "glm": Family("GlmForCausalLM", _GLM, **_GLM_LAYERS),
    "glm4": Family("Glm4ForCausalLM", _GLM, norms="glm4", **_GLM_LAYERS),
    "phi3": Family(
        "Phi3ForCausalLM", {**_SHARED, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "partial_rotary_factor": 1.0,
                            "original_max_position_embeddings": 4096},
        windows="all", partial_rotary=True, packed_qkv=True, packed_mlp=True,
        rope_kinds={"default": "default", **dict.fromkeys(("longrope", "su", "yarn"), "longrope")}),
    "granite": Family(
        "GraniteForCausalLM", {**_SHARED, "max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False,
                               "embedding_multiplier": 1.0,
                               "logits_scaling": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0},
        qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias", embed_factor="embedding_multiplier",
        residual_factor="residual_multiplier", attention_factor="attention_multiplier", logits_divisor="logits_scaling",
        divides=True, classifies=False),
    "ernie4_5": Family(
        "Ernie4_5ForCausalLM", {**_SHARED, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 500000.0, "head_dim": 128,
                                "tie_word_embeddings": True, "num_key_value_heads": 2, "use_bias": False},
        qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias", rope_interleaved=True, classifies=False,
        vllm_assumes={"use_bias": False}),
    "hunyuan_v1_dense": Family(
        "HunYuanDenseV1ForCausalLM", {**_SHARED, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "attention_bias": False},
        qkv_bias="attention_bias", out_bias="attention_bias", qk_norm_late=True, rope_alpha=True),
    "minimax_m2": Family(
        "MiniMaxM2ForCausalLM", {**_SHARED, "max_position_embeddings": 196608, "rope_theta": 5000000.0, "head_dim": 128,
                                 "num_key_value_heads": 8, "num_experts_per_tok": 8, "num_local_experts": 256,
                                 "partial_rotary_factor": None, "rotary_dim": None},
        qk_norm_whole=True, partial_rotary=True, feed_forward="minimax_experts", expert_size="intermediate_size",
        experts_count="num_local_experts", norm_topk=True, router="sigmoid", few_bits="fp8", classifies=False,
        says={"use_routing_bias": True}, vllm_assumes={"hidden_act": "silu"}),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", {**_SHARED, **_QWEN_EXPERTS, "attention_bias": False, "num_key_value_heads": 4,
                                "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128},
        qkv_bias="attention_bias", out_bias="attention_bias", qk_norm=True, windows="switched", feed_forward="experts",
        expert_size="moe_intermediate_size", norm_topk="norm_topk_prob",
        vllm_assumes={"use_sliding_window": False, "attention_bias": False, "hidden_act": "silu"}),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM", {**_SHARED, **_QWEN_EXPERTS, "qkv_bias": True, "num_key_value_heads": 16, "max_window_layers": 28,
                                "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4,
                                "num_experts": 60},
        qkv_bias="qkv_bias", windows="alternate", feed_forward="experts", expert_size="moe_intermediate_size",
        shared_expert_size="shared_expert_intermediate_size", norm_topk="norm_topk_prob",
        vllm_assumes={"use_sliding_window": False, "qkv_bias": True, "hidden_act": "silu"}),
    "olmoe": Family(
        "OlmoeForCausalLM", {**_SHARED, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "attention_bias": False,
                             "num_experts_per_tok": 8, "num_experts": 64, "norm_topk_prob": False},
        qkv_bias="attention_bias", out_bias="attention_bias", qk_norm_whole=True, feed_forward="experts",
        expert_size="intermediate_size", norm_topk="norm_topk_prob", vllm_assumes={
            "rms_norm_eps": 1e-5, "norm_topk_prob": False, "attention_bias": False, "hidden_act": "silu", "tie_word_embeddings": False}),
    "mixtral": Family(
        "MixtralForCausalLM", {**_SHARED, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 1000000.0,
                               "num_key_value_heads": 8, "num_experts_per_tok": 2, "num_experts": 8},
        windows="all", feed_forward="mixtral_experts", expert_size="intermediate_size", norm_topk=True,
        vllm_assumes={"hidden_act": "silu"}),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM", {**_SHARED, **_SIGMOID, **_LATENT, "max_position_embeddings": 4096, "moe_intermediate_size": 2048,
                                  "n_routed_experts": 256, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
                                  "first_k_dense_replace": 3, "q_lora_rank": 1536, "v_head_dim": 128, "qk_nope_head_dim": 128},
        **_LATENT_ATTENTION, **_DEEPSEEK),
    "glm4_moe_lite": Family(
        "Glm4MoeLiteForCausalLM", {**_SHARED, **_SIGMOID, **_LATENT, "rms_norm_eps": 1e-5, "max_position_embeddings": 202752,
                                   "moe_intermediate_size": 1536, "n_routed_experts": 64, "n_group": 1, "topk_group": 1,
                                   "routed_scaling_factor": 1.8, "num_experts_per_tok": 4, "mlp_layer_types": None,
                                   "q_lora_rank": 768, "v_head_dim": 256, "qk_nope_head_dim": 192},
        listed_kinds="mlp_layer_types", classifies=False, **_LATENT_ATTENTION, **{**_DEEPSEEK, "dense_first": ""}),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM", {**_SHARED, **_SIGMOID, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "attention_bias": False,
                               "num_key_value_heads": 8, "moe_intermediate_size": 1408, "n_routed_experts": 128, "n_group": 1,
                               "topk_group": 1, "routed_scaling_factor": 1.0, "first_k_dense_replace": 1, "use_qk_norm": False,
                               "partial_rotary_factor": 0.5},
        qkv_bias="attention_bias", qk_norm="use_qk_norm", partial_rotary=True, classifies=False, vllm_assumes={"tie_word_embeddings": False},
        **_DEEPSEEK),
    "gpt_oss": Family(
        "GptOssForCausalLM", {**_SHARED, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 150000.0,
                              "rope_parameters": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                                                  "truncate": False, "original_max_position_embeddings": 4096},
                              "head_dim": 64, "attention_bias": True, "num_key_value_heads": 8, "sliding_window": 128,
                              "num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        qkv_bias="attention_bias", out_bias="attention_bias", windows="pattern", feed_forward="gpt_oss_experts",
        expert_size="intermediate_size", experts_count="num_local_experts", norm_topk=True, sinks=True, router_bias=True,
        expert_bias=True, clamped=True, interleaved=True, fused_only=True, few_bits="mxfp4",
        vllm_assumes={"rms_norm_eps": 1e-5, "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "attention_bias": True, "tie_word_embeddings": False,
                      "layer_types": ("sliding_attention", "full_attention")}),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM", {**_SHARED, **_HYBRID, "num_key_value_heads": 4}, qkv_bias="attention_bias", out_bias="attention_bias",
        qk_norm=True, recurrent="gated_delta", partial_rotary=True, unread=_BESIDE,
        vllm_assumes={"attention_bias": False}, classifier_name="Qwen3_5TextForSequenceClassification"),
    "nemotron_h": Family(
        "NemotronHForCausalLM", {
            **{k: v for k, v in _SHARED.items() if k not in ("hidden_act", "rms_norm_eps", "rope_theta")}, **_SIGMOID,
            "mlp_hidden_act": "relu2", "layer_norm_epsilon": 1e-5, "max_position_embeddings": 4096, "intermediate_size": 21504, "head_dim": 128,
            "num_key_value_heads": 8, "mlp_bias": False, "use_bias": False, "use_conv_bias": True, "n_groups": 8, "mamba_num_heads": 128,
            "ssm_state_size": 128, "mamba_head_dim": 64, "conv_kernel": 4, "time_step_min": 0.001, "n_routed_experts": 8, "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688, "n_group": 1, "topk_group": 1,
            "routed_scaling_factor": 1.0, "moe_latent_size": None, "num_nextn_predict_layers": 0},
        mlp_bias="mlp_bias", activation="mlp_hidden_act", activations={"relu2": "relu2"}, norm_eps="layer_norm_epsilon", one_part=True,
        recurrent="nemotron_mamba2", is_mamba=True, convolution_bias="use_conv_bias", recurrent_bias="use_bias",
        sizes=("n_groups", "mamba_num_heads", "ssm_state_size", "mamba_head_dim", "conv_kernel"), fused_in="mixer.experts", shared_gate=False,
        feed_forward="nemotron_experts", expert_size="moe_intermediate_size", experts_count="n_routed_experts",
        shared_expert_size="moe_shared_expert_intermediate_size", norm_topk="norm_topk_prob", router="sigmoid",
        says={"attention_bias": False, "mamba_proj_bias": False, "residual_in_fp32": False, "tie_word_embeddings": False,
              "n_shared_experts": 1},
        renamed={"mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias", "mamba_dt_min": "time_step_min",
                 "mamba_dt_limit": "time_step_limit"},
        within=(("backbone.", "model."), ("model.", "model.")), unread=r"mtp\..*", classifies=False,
        spelled=(("model.embeddings.", "model.embed_tokens."), ("model.norm_f.", "model.norm."))),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM", {
            **_SHARED, **_MAMBA, "max_position_embeddings": 2048, "attention_bias": False, "embedding_multiplier": 1.0, "logits_scaling": 1.0,
            "residual_multiplier": 1.0, "attention_multiplier": 1.0, "num_local_experts": 8, "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024, "position_embedding_type": None},
        qkv_bias="attention_bias", out_bias="attention_bias", embed_factor="embedding_multiplier", residual_factor="residual_multiplier",
        attention_factor="attention_multiplier", logits_divisor="logits_scaling", divides=True, recurrent="mamba2", is_mamba=True,
        convolution_bias="mamba_conv_bias", recurrent_bias="mamba_proj_bias", may_turn=True, sizes=_MAMBA_SIZES,
        mlp_size="shared_intermediate_size", dense="granite_mlp", feed_forward="granite_experts", expert_size="intermediate_size",
        experts_count="num_local_experts", shared_expert_size="shared_intermediate_size", shared_gate=False, norm_topk=True,
        fused_in="block_sparse_moe", fused_only=True, classifies=False, vllm_assumes=_UNLIMITED),
    "falcon_h1": Family(
        "FalconH1ForCausalLM", {
            **_SHARED, **_MAMBA, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "num_key_value_heads": 8, "attention_bias": False,
            "mlp_bias": False, "projectors_bias": False, "mamba_d_ssm": 1024, "mamba_norm_before_gate": True, "mamba_rms_norm": False,
            "embedding_multiplier": 1.0, "lm_head_multiplier": 1.0, "key_multiplier": 1.0, "attention_in_multiplier": 1.0,
            "attention_out_multiplier": 1.0, "ssm_in_multiplier": 1.0, "ssm_out_multiplier": 1.0, "ssm_multipliers": None, "mlp_multipliers": None},
        qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias", embed_factor="embedding_multiplier", norms="falcon_h1",
        feed_forward="falcon_mlp", recurrent="falcon_h1", is_mamba=True, convolution_bias="mamba_conv_bias", recurrent_bias="mamba_proj_bias",
        recurrent_out_bias="projectors_bias", scaled=True, sizes=_MAMBA_SIZES, classifies=False, within=(("model.", "model."),),
        spelled=(("model.final_layernorm.", "model.norm."),), vllm_assumes={
            "attention_bias": False, "mlp_bias": False, "projectors_bias": False, "mamba_proj_bias": False, "mamba_rms_norm": False,
            **_UNLIMITED}),
    "qwen3_vl_text": Family(
        "Qwen3VLForConditionalGeneration", {**_SHARED, "head_dim": 128, "attention_bias": False, "max_position_embeddings": 128000,
                                            "rope_theta": 500000.0, "num_key_value_heads": 32},
        qkv_bias="attention_bias", out_bias="attention_bias", qk_norm=True, vision="qwen3", mrope="turns",
        vllm_assumes={"attention_bias": False}, **_SEES),
    "qwen3_vl_moe_text": Family(
        "Qwen3VLMoeForConditionalGeneration", {
            **_SHARED, "attention_bias": False, "max_position_embeddings": 128000, "rope_theta": 500000.0, "num_key_value_heads": 16,
            "tie_word_embeddings": True, "decoder_sparse_step": 1, "mlp_only_layers": None, "moe_intermediate_size": 1408,
            "num_experts_per_tok": 4, "num_experts": 60},
        qkv_bias="attention_bias", out_bias="attention_bias", qk_norm=True, feed_forward="experts", expert_size="moe_intermediate_size",
        norm_topk=True, says={"norm_topk_prob": True}, transposed=True, vision="qwen3", mrope="turns",
        vllm_assumes={"attention_bias": False, "hidden_act": "silu"}, **_SEES),
    "qwen2_5_vl_text": Family("Qwen2_5_VLForConditionalGeneration", _QWEN2_VL, vision="qwen2_5", **_QWEN2_VL_LAYERS),
    "qwen2_vl_text": Family("Qwen2VLForConditionalGeneration", _QWEN2_VL, vision="qwen2", **_QWEN2_VL_LAYERS),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM", {**_SHARED, **_HYBRID, "num_key_value_heads": 2, "intermediate_size": 512, "moe_intermediate_size": 512,
                                  "shared_expert_intermediate_size": 512, "num_experts_per_tok": 8, "num_experts": 256},
        qkv_bias="attention_bias", out_bias="attention_bias", qk_norm=True, recurrent="gated_delta", partial_rotary=True,
        unread=_BESIDE, feed_forward="experts", expert_size="moe_intermediate_size", shared_expert_size="shared_expert_intermediate_size",
        norm_topk=True, says={"norm_topk_prob": True}, classifies=False, vllm_assumes={"attention_bias": False}),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM", {**_SHARED, **_HYBRID, "num_key_value_heads": 2, "moe_intermediate_size": 512, "decoder_sparse_step": 1,
                                 "mlp_only_layers": None, "shared_expert_intermediate_size": 512, "num_experts_per_tok": 10,
                                 "num_experts": 512, "norm_topk_prob": True},
        qkv_bias="attention_bias", out_bias="attention_bias", qk_norm=True, recurrent="gated_delta_by_head", partial_rotary=True,
        unread=_BESIDE, feed_forward="experts", expert_size="moe_intermediate_size",
        shared_expert_size="shared_expert_intermediate_size", norm_topk="norm_topk_prob",
        vllm_assumes={"attention_bias": False, "tie_word_embeddings": False}),
}
FAMILIES["gemma3_vision_text"] = dataclasses.replace(
    FAMILIES["gemma3_text"], architecture="Gemma3ForConditionalGeneration", classifier_name="", classifies=False, stored_type="gemma3_text",
    final_softcap="",  # which transformers does not read of this model
    defaults={**FAMILIES["gemma3_text"].defaults, "vocab_size": 262208, "num_attention_heads": 8}, vision="siglip",
    tower=GEMMA_TOWER, unread=GEMMA_TOWER, of_tower=("mm_tokens_per_image",),
    within=(("language_model.", ""), ("model.language_model.", "model.")))
# Models of several parts: model_type -> (model_type of the text part, architecture).
NESTED = {
    "qwen3_5": ("qwen3_5_text", "Qwen3_5ForConditionalGeneration"),
    "qwen3_vl": ("qwen3_vl_text", "Qwen3VLForConditionalGeneration"),
    "qwen3_vl_moe": ("qwen3_vl_moe_text", "Qwen3VLMoeForConditionalGeneration"),
    "qwen2_5_vl": ("qwen2_5_vl_text", "Qwen2_5_VLForConditionalGeneration"),
    "qwen2_vl": ("qwen2_vl_text", "Qwen2VLForConditionalGeneration"),
    "qwen3_5_moe": ("qwen3_5_moe_text", "Qwen3_5MoeForConditionalGeneration"),
    "mistral3": ("ministral3", "Mistral3ForConditionalGeneration"),
    "gemma3": ("gemma3_vision_text", "Gemma3ForConditionalGeneration"),
}
# Of them those whose config.json may hold the fields of the text part beside the others, which are these.
FLAT = ("qwen2_5_vl", "qwen2_vl")
OUTER = ("architectures", "model_type", "vision_config", "image_token_id", "video_token_id", "vision_start_token_id",
         "vision_end_token_id", "vision_token_id", "transformers_version", "auto_map")
# Families under another name, whose code transformers has not: model_type -> (ours, architecture, fields that go).
ALIASES = {
    "kimi_k2": ("deepseek_v3", "DeepseekV3ForCausalLM", ()),
    "mimo": ("qwen2", "MiMoForCausalLM", ("num_nextn_predict_layers",)),  # its layers lie under names of their own
}
IMAGES = "jaxrl_images"  # of a config whose tower is read: the vision_config of the model around it
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# Fields of other architectures: a config that uses one means a function that no family here computes, and transformers
# may read over it in silence. They pass where they say "not used": null, false, zero, empty, and 1 for a factor.
FOREIGN = {
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "num_routed_experts", "n_shared_experts",
                "num_shared_experts", "moe_num_experts", "moe_intermediate_size", "first_k_dense_replace", "decoder_sparse_step",
                "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "mlp_layer_types", "enable_moe_block",
                "shared_intermediate_size",
                "mlp_only_layers", "shared_expert_intermediate_size", "norm_topk_prob", "moe_layer_freq", "expert_layer_period", "num_zero_experts"),
    "another router": ("router_jitter_noise", "input_jitter_noise", "routed_scaling_factor", "n_group", "topk_group", "topk_method",
                       "moe_router_enable_expert_bias", "router_bias", "router_logit_softcapping", "swiglu_limit", "swiglu_alpha", "capacity_factor",
                       "expert_capacity", "moe_expert_capacity_factor"),
    "latent attention": ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
    "another attention": ("attention_sinks", "attention_sink", "use_attention_sinks", "num_sink_tokens", "attention_chunk_size",
                          "use_qk_norm", "qk_norm", "qk_layernorm", "use_qk_layernorm", "clip_qkv", "attn_scale",
                          "attn_temperature_tuning", "attn_output_gate", "use_gated_attention", "index_topk", "nsa_config",
                          "sparse_attention_config", "parallel_attn", "use_parallel_residual", "parallel_residual", "use_cla",
                          "attn_type_list",
                          "num_kv_shared_layers", "attention_k_eq_v", "cross_attention_layers", "add_cross_attention",
                          "use_differential_attention", "window_size", "local_attention"),
    "other positions": ("alibi", "use_alibi", "rotary_pct", "rotary_percent", "rope_interleaved", "rope_interleave",
                        "rotary_interleaved", "no_rope_layers", "no_rope_layer_interval", "nope_layer_interval", "mrope_section",
                        "use_mrope", "learnable_position_embeddings"),
    "other layers": ("linear_num_key_heads", "mamba_d_state", "ssm_cfg", "layer_group_size", "full_attention_interval",
                     "hidden_size_per_layer_input", "vocab_size_per_layer_input", "altup_num_inputs", "laurel_rank",
                     "activation_sparsity_pattern", "num_nextn_predict_layers", "num_mtp_layers", "per_layer_config", "block_configs",
                     "attn_layer_indices",
                     "use_double_wide_mlp", "layer_scale", "use_layer_scale", "is_encoder_decoder"),
    "a factor": ("logit_scale", "logits_scaling", "logits_scale", "output_multiplier_scale", "lm_head_multiplier",
                 "embedding_multiplier", "embedding_multiplier_scale", "embedding_scale", "scale_emb", "residual_multiplier",
                 "scale_depth", "dim_model_base", "attention_multiplier", "mup_width_scale", "width_multiplier",
                 "mlp_multipliers", "key_multiplier", "attention_out_multiplier", "attention_in_multiplier"),
    "a soft-cap": ("logits_soft_cap", "attn_logit_softcap", "final_logit_softcap", "attn_logit_softcapping",
                   "final_logit_softcapping", "query_pre_attn_scalar"),
}
NEXT_TOKENS = ("num_nextn_predict_layers", "num_mtp_layers")
SCORES = ("scoring_func", "score_function", "scoring_function")  # and the choice of experts by one of these names
UNSCALED = ("rotary_pct", "rotary_percent", "routed_scaling_factor", "n_group", "topk_group", *FOREIGN["a factor"])  # 1 is as good as none


def family_of(hf_config: dict) -> Family:
    """Returns the family of a config, by `model_type`. A config without `architectures` is taken for one of the
    family's; of several names one must be known.

    hf_config: as `text_part` returns it. Raises ConfigError for an unknown family or architecture, and for a model of
    several parts or an alias (NESTED, ALIASES), which `text_part` has to resolve first.
    """
    known = ", ".join([*FAMILIES, *NESTED, *ALIASES])
    kind = hf_config.get("model_type")
    if kind not in FAMILIES:
        missing = f"; {not_yet(str(kind))}" if not_yet(str(kind)) else ""
        raise ConfigError(f"model_type={kind!r} is not supported; choose a checkpoint of: {known}{missing}")
    family = FAMILIES[kind]
    names = hf_config.get("architectures") or [family.architecture]
    if not {family.architecture, family.classifier} & set(names):
        raise ConfigError(f"architectures={names!r} is not supported; take a {family.architecture} checkpoint")
    return family


def text_part(hf_config: dict) -> dict:
    """Returns the HF config of the model that is computed: the text part of a model of several parts, the family's
    config of an alias, or the config itself.

    A text part has the model_type of its family here, and the fields around it that hold for it (tie_word_embeddings,
    quantization_config, dtypes). Raises ConfigError for an architecture that is not supported, for a text part of
    another model_type, and where text part and model contradict each other.
    """
    kind = hf_config.get("model_type")
    if kind in ALIASES:
        return _by_its_family(hf_config, *ALIASES[kind])
    if kind not in NESTED:
        return hf_config
    text, architecture = NESTED[kind]
    own = hf_config.get("text_config")
    if own is None and kind in FLAT:
        own = {k: v for k, v in hf_config.items() if k not in OUTER}
    names = hf_config.get("architectures") or [architecture]
    if not {architecture, classifier_of(kind)} & set(names):
        raise ConfigError(f"architectures={names!r} is not supported; take a {architecture} checkpoint")
    stored = FAMILIES[text].stored_type or text
    if not isinstance(own, dict) or own.get("model_type", stored) not in (stored, kind):
        raise ConfigError(f"model config: text_config={own!r}; give a table whose model_type is {stored}")
    beside = {k: hf_config[k] for k in ("tie_word_embeddings", "quantization_config", "dtype", "torch_dtype") if k in hf_config}
    if kind in FLAT and isinstance(own.get("tie_word_embeddings"), bool):  # transformers ties them where either says so
        beside["tie_word_embeddings"] = own["tie_word_embeddings"] or beside.get("tie_word_embeddings", False)
        own = {k: v for k, v in own.items() if k != "tie_word_embeddings"}
    if kind == "qwen3_vl_moe":  # whose text part says it by transformers' default, and is not read
        own = {k: v for k, v in own.items() if k != "tie_word_embeddings"}
        beside.setdefault("tie_word_embeddings", False)
    for key in beside.keys() & own.keys() - {"dtype", "torch_dtype"}:
        if own[key] != beside[key]:
            raise ConfigError(f"model config: {key}={beside[key]!r} beside {own[key]!r} in text_config; make them equal")
    return {**own, **beside, "model_type": text} | {k: v for k, v in hf_config.items() if k.startswith("jaxrl_")}


def classifier_of(kind: str) -> str:
    """Returns the name of the sequence classifier of a model of several parts. kind: a key of NESTED.

    transformers has no such class for models with a tower; the name follows its pattern, and reward models are stored
    under it.
    """
    return NESTED[kind][1].replace("ForConditionalGeneration", "ForSequenceClassification")


def _by_its_family(hf_config, kind: str, architecture: str, dropped) -> dict:
    names = hf_config.get("architectures") or [architecture]
    if architecture not in names:
        raise ConfigError(f"architectures={names!r} is not supported; take a {architecture} checkpoint")
    kept = {k: v for k, v in hf_config.items() if k not in ("auto_map", *dropped)}
    return {**kept, "model_type": kind, "architectures": [FAMILIES[kind].architecture]}


@overload
def number(table, key, least=None, above=None, *, kind: type[int]) -> int: ...


@overload
def number(table, key, least=None, above=None) -> float: ...


def number(table, key, least=None, above=None, kind: type = float):
    """Returns the number `table[key]`, unconverted. Raises ConfigError if it is not finite, not of the `kind`, below
    `least`, or not above `above` (None = no bound); KeyError if the key is missing.

    kind: int = a whole number; float takes ints, too; neither takes a bool.
    """
    value = table[key]
    numeric = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    low = -math.inf if least is None else least
    if not numeric or not math.isfinite(value) or value < low or (above is not None and value <= above):
        bound = f" of at least {least}" if least is not None else f" above {above}" if above is not None else ""
        raise ConfigError(f"model config: {key}={value!r}; give {'an integer' if kind is int else 'a number'}{bound}")
    return value
