"""Config files of Hugging Face checkpoints as nobody's default has them: each mathematical field of each family, flipped.

BASE is a plain config per family. Over it, an entry of
  MOVES    changes what transformers computes, and we go with it;
  IGNORED  is there and changes nothing in transformers, nor here;
  REFUSED  has a name that our ConfigError must say: transformers crashes on it, or its meaning is not one of ours.
"""

from __future__ import annotations

LAYERS = 4
SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5, initializer_range=0.2, pad_token_id=0,
             bos_token_id=1, eos_token_id=2)
GEMMA = dict(head_dim=8, query_pre_attn_scalar=12, sliding_window=5)
EXPERTS = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24)
SIGMOID = dict(n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=12, n_group=3, topk_group=2, first_k_dense_replace=1)
LATENT = dict(kv_lora_rank=10, qk_nope_head_dim=4, qk_rope_head_dim=6, num_key_value_heads=4)
HYBRID = dict(head_dim=16, rms_norm_eps=1e-2, full_attention_interval=3, linear_num_key_heads=3, linear_num_value_heads=9, linear_key_head_dim=5,
              linear_value_head_dim=7)
HYBRID_EXPERTS = {**HYBRID, **EXPERTS, "shared_expert_intermediate_size": 20}
HYBRIDS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
GROWS = {"rope_type": "yarn", "rope_theta": 300.0, "factor": 4.0, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.4,
         "mscale": 1.0, "mscale_all_dim": 1.0}
PARTIAL = ("glm4_moe", "minimax_m2", "glm", "glm4", "phi3", *HYBRIDS)
SHORT, LONG = [1.1, 1.7, 2.5, 6.0], [2.0, 3.0, 9.0, 20.0]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 50}
SECTIONS = {"mrope_section": [1, 2, 1]}
BASE = {
    "llama": {},
    "mistral": {"sliding_window": 6, "head_dim": 8},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    "qwen3": {"head_dim": 8},
    "seed_oss": {"head_dim": 8},
    "gemma": {"head_dim": 8},
    "granite": {"attention_multiplier": 0.3},
    "ernie4_5": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "minimax_m2": {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 8, "rotary_dim": 4},
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "phi3": {"original_max_position_embeddings": 50},
    "olmo2": {},
    "olmo3": {"sliding_window": 5},
    "smollm3": {},
    "ministral3": {"head_dim": 8, "rope_parameters": GROWS},
    "gemma2": {**GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
    "gemma3_text": {**GEMMA, "sliding_window_pattern": 2},
    "qwen3_moe": {**EXPERTS, "head_dim": 8},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 20},
    "olmoe": {"num_experts": 5, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None, "head_dim": 8},
    "deepseek_v3": {**SIGMOID, **LATENT, "q_lora_rank": 12, "v_head_dim": 6, "num_nextn_predict_layers": 0},
    "glm4_moe_lite": {**{k: v for k, v in SIGMOID.items() if k != "first_k_dense_replace"}, **LATENT, "q_lora_rank": None, "v_head_dim": 12},
    "glm4_moe": {**SIGMOID, "head_dim": 8, "num_nextn_predict_layers": 0},
    "gpt_oss": {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 5, "head_dim": 8, "swiglu_limit": 0.9},
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": HYBRID_EXPERTS,
    "qwen3_next": HYBRID_EXPERTS,
    "qwen3_vl_text": {"head_dim": 8, "rope_theta": 10000.0},
    "qwen3_vl_moe_text": {**EXPERTS, "head_dim": 8, "rope_theta": 10000.0},
    **dict.fromkeys(("qwen2_5_vl_text", "qwen2_vl_text"), {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2,
                                                           "rope_theta": 10000.0, "rope_parameters": {"rope_type": "default", **SECTIONS}}),
    "nemotron_h": {
        **{k: v for k, v in SIGMOID.items() if k != "first_k_dense_replace"}, "hybrid_override_pattern": "ME*-M", "num_hidden_layers": 5,
        "layer_norm_epsilon": 1e-2, "head_dim": 10, "mamba_num_heads": 6, "n_groups": 3, "ssm_state_size": 5, "mamba_head_dim": 7,
        "conv_kernel": 3, "time_step_min": 0.3, "moe_shared_expert_intermediate_size": 20},
    "granitemoehybrid": {
        "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 24, "shared_intermediate_size": 20, "rms_norm_eps": 1e-2,
        "layer_types": ["mamba", "attention", "mamba", "mamba"], "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 5,
        "mamba_d_conv": 3, "attention_multiplier": 0.3},
    "falcon_h1": {
        "mamba_n_heads": 6, "mamba_n_groups": 2, "mamba_d_state": 5, "mamba_d_conv": 3, "mamba_d_ssm": 42, "rms_norm_eps": 1e-2,
        "mamba_rms_norm": True, "mamba_norm_before_gate": False, "key_multiplier": 0.3, "ssm_multipliers": [0.5, 1.5, 0.8, 1.2, 0.7]},
}
WITHOUT_POSITIONS = ("nemotron_h",)  # no rotary embedding is read
FULL, SLIDING = "full_attention", "sliding_attention"
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}  # both ends of its ramp within the head
LINEAR = {"rope_type": "linear", "factor": 3.0}
THETA = {"rope_theta": 300.0}


def old(table, **beside):
    return {"rope_scaling": table, **THETA, **beside}


def new(table, **beside):
    return {"rope_parameters": {**THETA, **table}, **beside}


def layered(full=None, sliding=None, **beside):
    tables = {FULL: full, SLIDING: sliding}
    return {"rope_parameters": {k: v for k, v in tables.items() if v is not None} | beside}


# What every family with one rotary embedding does alike; tested in llama, and in turns in the others.
ROPES = [
    {"rope_theta": 77.0}, new({}), new({"rope_type": "default"}), new(LINEAR), old(LINEAR), old({"type": "linear", "factor": 2}),
    old({**LINEAR, "rope_theta": 50.0}),                                      # the table's theta wins
    {**new({"rope_theta": 20.0}), "rope_theta": 9.0},
    {**new(YARN), "rope_scaling": {**LINEAR, **THETA}},                        # rope_scaling hides rope_parameters
    {**new(LINEAR), "rope_scaling": {}},
    new({**LLAMA3, "original_max_position_embeddings": 16}),
    new(LLAMA3),                                                              # its window is then the model's
    new(LLAMA3, original_max_position_embeddings=16),
    new({**LLAMA3, "original_max_position_embeddings": 48}, original_max_position_embeddings=16),   # in both places
    old({**LLAMA3, "original_max_position_embeddings": 48}, original_max_position_embeddings=16),
    new({**LLAMA3, "high_freq_factor": 1.0, "original_max_position_embeddings": 16}),                # a step
    new({**LLAMA3, "low_freq_factor": 4.0, "high_freq_factor": 1.0, "original_max_position_embeddings": 16}),
    new(YARN), old(YARN), new({**YARN, "original_max_position_embeddings": None} | {"original_max_position_embeddings": 8}),
    new({"rope_type": "yarn", "factor": 4.0}),                                # no window named: the model's
    new({"rope_type": "yarn", "factor": 4.0}, original_max_position_embeddings=16),
    old({"rope_type": "yarn", "factor": 4.0}, original_max_position_embeddings=16),
    new(YARN, original_max_position_embeddings=32),
    new({**YARN, "factor": None}), new({**YARN, "factor": 0.5}), new({**YARN, "factor": 1}),
    new({**YARN, "beta_fast": 0}), new({**YARN, "beta_fast": None}), new({**YARN, "beta_slow": 0}), new({**YARN, "beta_slow": None}),
    new({**YARN, "beta_fast": 3.0}), new({**YARN, "beta_fast": 0.3, "beta_slow": 2.0}), new({**YARN, "beta_slow": 0.01}),
    new({**YARN, "beta_fast": 1.0, "truncate": False}),                       # both ends of the ramp in one place
    new({**YARN, "truncate": False}), old({**YARN, "truncate": False}), new({**YARN, "truncate": None}), new({**YARN, "truncate": 0}),
    new({**YARN, "attention_factor": 1.7}), new({**YARN, "attention_factor": 0.0}), new({**YARN, "attention_factor": None}),
    new({**YARN, "mscale": 0.7, "mscale_all_dim": 0.3}), new({**YARN, "mscale": 0.7}), new({**YARN, "mscale": 0.7, "mscale_all_dim": 0}),
    new({"rope_type": "dynamic", "factor": 3.0}),
    new({"rope_type": "dynamic", "factor": 3.0, "original_max_position_embeddings": 8}),             # not its window
]
ROPES_REFUSED = [
    ({"rope_theta": None}, "rope_theta=None"), (new({"rope_theta": None}), "rope_theta=None"), ({"rope_theta": 0}, "rope_theta=0"),
    ({"rope_theta": "10000"}, "rope_theta='10000'"), ({"rope_theta": float("nan")}, "rope_theta=nan"),
    (new({**YARN, "rope_theta": 1}), "rope_theta=1"), (new({**YARN, "beta_fast": -1}), "beta_fast=-1"),
    (new({**YARN, "factor": 0}), "factor=0"), (new({**LINEAR, "factor": "8"}), "factor='8'"), (new({**LINEAR, "factor": None}), "factor"),
    (new({"rope_type": "yarn"}), "rope_type=yarn needs factor"),
    (new({**YARN, "attention_factor": "1"}), "attention_factor='1'"), (new({**YARN, "mscale": True}), "mscale=True"),
    (new({**YARN, "original_max_position_embeddings": None}), "original_max_position_embeddings=None"),
    (new(YARN, original_max_position_embeddings=None), "original_max_position_embeddings=None"),
    (new({**LLAMA3, "low_freq_factor": 0}), "low_freq_factor=0"), (new({**LLAMA3, "high_freq_factor": None}), "high_freq_factor"),
    (new({**LINEAR, "type": "yarn"}), "type='yarn'"), (new({"rope_type": "longrope"}), "rope_type='longrope'"),
    (new({"rope_type": "proportional"}), "rope_type='proportional'"), (new({"rope_type": "mrope"}), "rope_type='mrope'"),
    (new({**LINEAR, "partial_rotary_factor": 0.5}), "partial_rotary_factor"), ({"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
    (layered({**LINEAR, **THETA}), FULL), ({"rope_parameters": [1]}, "rope_parameters"), ({"rope_scaling": "linear"}, "rope_scaling"),
]
ROUTER = [{"norm_topk_prob": True}, {"num_experts_per_tok": 3}, {"num_experts": 4}, {"moe_intermediate_size": 12},
          {"decoder_sparse_step": 2}, {"mlp_only_layers": [0, 2]}, {"num_experts": 0}]
GROUPS = [{"n_group": 2}, {"n_group": 1, "topk_group": 1}, {"topk_group": 1}, {"topk_group": 3}, {"num_experts_per_tok": 3},
          {"n_routed_experts": 12}, {"norm_topk_prob": False}, {"routed_scaling_factor": 3.5}, {"n_shared_experts": 2},
          {"moe_intermediate_size": 20}, {"first_k_dense_replace": 0}, {"first_k_dense_replace": 3}, {"first_k_dense_replace": 9}]
SIZES_OF_LATENTS = [{"kv_lora_rank": 6}, {"qk_nope_head_dim": 10}, {"qk_rope_head_dim": 8}, {"v_head_dim": 16}, {"rope_interleave": False},
                    {"attention_bias": True}, {"hidden_act": "gelu"}, {"rms_norm_eps": 0.5}, {"tie_word_embeddings": True}]
MOVES = {
    "llama": [
        *ROPES, {"head_dim": 12}, {"attention_bias": True}, {"mlp_bias": True}, {"num_key_value_heads": None}, {"num_key_value_heads": 1},
        {"tie_word_embeddings": True}, {"hidden_act": "gelu"}, {"hidden_act": "gelu_pytorch_tanh"}, {"rms_norm_eps": 0.5},
        {"rms_norm_eps": 0.0}, {"num_attention_heads": 2},
    ],
    "mistral": [*ROPES[0::4], {"sliding_window": 3}, {"sliding_window": 1}, {"sliding_window": None}, {"head_dim": 12}, {"hidden_act": "gelu"},
                {"rms_norm_eps": 0.5}, {"tie_word_embeddings": True}],
    "qwen2": [
        *ROPES[1::4], {"use_sliding_window": False}, {"sliding_window": None}, {"sliding_window": 3}, {"max_window_layers": 0},
        {"max_window_layers": 1}, {"max_window_layers": 9}, {"layer_types": [SLIDING, FULL, FULL, SLIDING]},
        {"layer_types": [FULL] * LAYERS}, {"use_sliding_window": False, "layer_types": [FULL] * LAYERS},
        {"use_sliding_window": False, "sliding_window": 0}, {"head_dim": 12}, {"hidden_act": "gelu"}, {"rms_norm_eps": 0.5},
        {"tie_word_embeddings": True}, {"num_key_value_heads": None}, {"max_window_layers": 28},
    ],
    "qwen3": [
        *ROPES[2::4], {"head_dim": 12}, {"attention_bias": True}, {"hidden_act": "gelu_pytorch_tanh"}, {"rms_norm_eps": 0.5},
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, {"tie_word_embeddings": True},
        {"use_sliding_window": True, "sliding_window": 4, "layer_types": [SLIDING] * LAYERS}, {"num_key_value_heads": 4},
    ],
    "gemma2": [
        *ROPES[3::4], {"layer_types": [FULL, SLIDING, SLIDING, FULL]}, {"layer_types": [SLIDING] * LAYERS, "sliding_window": 2},
        {"layer_types": [FULL] * LAYERS}, {"layer_types": [SLIDING, SLIDING, SLIDING, FULL], "sliding_window_pattern": 4},
        {"sliding_window": 3}, {"attn_logit_softcapping": None}, {"attn_logit_softcapping": 1.0}, {"final_logit_softcapping": None},
        {"final_logit_softcapping": 1.0}, {"query_pre_attn_scalar": 40}, {"head_dim": 12}, {"attention_bias": True},
        {"hidden_activation": "silu"}, {"hidden_activation": "gelu"}, {"rms_norm_eps": 0.5}, {"tie_word_embeddings": False},
    ],
    "gemma3_text": [
        {"rope_theta": 77.0}, {"rope_local_base_freq": 30.0}, old(LINEAR), old(YARN), old({**YARN, "truncate": False}),
        old({**LLAMA3, "original_max_position_embeddings": 16}), old({**LINEAR, "rope_theta": 20.0}),
        layered({**YARN, **THETA}), layered({**YARN, **THETA, "truncate": False}), layered({**YARN, **THETA}, truncate=False),
        layered({**YARN, **THETA}, {**YARN, **THETA, "beta_fast": 0}, truncate=None), layered({"rope_type": "yarn", "factor": 4.0, **THETA}),
        layered({**LINEAR, **THETA}, {**LINEAR, "rope_theta": 70.0}), layered({"type": "linear", "factor": 2.0}, rope_theta=None)
        | {"rope_parameters": {FULL: {"type": "linear", "factor": 2.0}}}, layered(sliding={"rope_theta": 40.0}),
        layered({"rope_type": "dynamic", "factor": 2.0, **THETA}), {**layered({**THETA}), "rope_theta": 5.0, "rope_local_base_freq": 60.0},
        {**layered({**LINEAR, **THETA}), "rope_scaling": {"factor": 7.0}}, {**layered({}, {}), "rope_theta": 30.0},
        {"sliding_window_pattern": 3}, {"sliding_window_pattern": 1}, {"sliding_window_pattern": 6},
        {"layer_types": [FULL, SLIDING, SLIDING, FULL]}, {"layer_types": [FULL] * LAYERS}, {"sliding_window": 2},
        {"final_logit_softcapping": 2.0}, {"query_pre_attn_scalar": 40}, {"head_dim": 12}, {"attention_bias": True},
        {"hidden_activation": "gelu"}, {"rms_norm_eps": 0.5}, {"tie_word_embeddings": False},
    ],
    "qwen3_moe": [
        *ROPES[0::8], *ROUTER, {"head_dim": 12}, {"attention_bias": True}, {"hidden_act": "gelu"}, {"rms_norm_eps": 0.5},
        {"use_sliding_window": True, "sliding_window": 4}, {"tie_word_embeddings": True}, {"num_key_value_heads": 4},
    ],
    "qwen2_moe": [
        *ROPES[2::8], *ROUTER, {"shared_expert_intermediate_size": 12}, {"qkv_bias": False}, {"hidden_act": "gelu"}, {"rms_norm_eps": 0.5},
        {"use_sliding_window": True, "sliding_window": 4}, {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 4, "layer_types": [SLIDING] * LAYERS}, {"tie_word_embeddings": True},
        {"num_key_value_heads": 4},
    ],
    "olmoe": [*ROPES[4::8], {"norm_topk_prob": True}, {"num_experts_per_tok": 3}, {"num_experts": 4}, {"intermediate_size": 24},
              {"attention_bias": True}, {"hidden_act": "gelu"}, {"rms_norm_eps": 0.5}, {"tie_word_embeddings": True}, {"num_key_value_heads": 4}],
    "deepseek_v3": [*ROPES[3::8], *(e for e in GROUPS), *SIZES_OF_LATENTS,
                    *(new({**YARN, "mscale_all_dim": x, "mscale": y}) for x, y in ((0.4, 0.7), (1.0, 1.0), (0.6, 0)))],
    "glm4_moe_lite": [*ROPES[5::8], *(e for e in GROUPS if "first_k_dense_replace" not in e), *SIZES_OF_LATENTS, {"q_lora_rank": 9},
                      {"mlp_layer_types": ["sparse"] * LAYERS}, {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}],
    "glm4_moe": [
        *ROPES[1::8], *GROUPS, {"partial_rotary_factor": 0.25}, {"partial_rotary_factor": 1.0}, {"partial_rotary_factor": None},
        new({**LINEAR, "partial_rotary_factor": 0.75}), {"partial_rotary_factor": 0.25, **old(YARN)}, {"use_qk_norm": True}, {"head_dim": 12},
        {"attention_bias": True}, {"hidden_act": "gelu"}, {"rms_norm_eps": 0.5}, {"tie_word_embeddings": True}, {"num_key_value_heads": 4},
    ],
    "mixtral": [*ROPES[6::8], {"num_experts_per_tok": 3}, {"num_local_experts": 4}, {"sliding_window": 3}, {"head_dim": 12},
                {"hidden_act": "gelu"}, {"rms_norm_eps": 0.5}, {"tie_word_embeddings": True}, {"num_key_value_heads": 4}],
    "gpt_oss": [*ROPES[7::8], {"original_max_position_embeddings": 16}, {"num_experts_per_tok": 3}, {"num_local_experts": 4},
                {"intermediate_size": 24}, {"sliding_window": 3}, {"layer_types": [FULL] * LAYERS}, {"layer_types": [SLIDING, FULL, FULL, SLIDING]},
                {"swiglu_limit": 0.4}, {"swiglu_alpha": 1.0}, {"attention_bias": False}, {"head_dim": 12}, {"rms_norm_eps": 0.5},
                {"tie_word_embeddings": True}, {"num_key_value_heads": 4}],
}
GLM = [{"partial_rotary_factor": 0.25}, {"partial_rotary_factor": 1.0}, {"partial_rotary_factor": None}, {"rms_norm_eps": 0.5},
       new({**LINEAR, "partial_rotary_factor": 0.75}), {"attention_bias": False}, {"head_dim": 12}, {"hidden_act": "gelu"},
       {"tie_word_embeddings": True}, {"num_key_value_heads": 4}]
COMMON = [{"rms_norm_eps": 0.5}, {"num_key_value_heads": 4}, {"num_key_value_heads": 1}]
MOVES |= {
    "seed_oss": [*ROPES[3::8], *COMMON, {"head_dim": 12}, {"attention_bias": False}, {"attention_out_bias": True}, {"mlp_bias": True},
                 {"hidden_act": "gelu"}, {"tie_word_embeddings": True}],
    "gemma": [*ROPES[5::8], *COMMON, {"head_dim": 12}, {"attention_bias": True}, {"hidden_act": "silu"}, {"tie_word_embeddings": False}],
    "granite": [*ROPES[0::8], *COMMON, {"embedding_multiplier": 12.0}, {"logits_scaling": 8.0}, {"residual_multiplier": 0.22},
                {"attention_multiplier": 0.7}, {"attention_bias": True}, {"mlp_bias": True}, {"hidden_act": "gelu"}, {"tie_word_embeddings": True}],
    "ernie4_5": [*ROPES[1::8], *COMMON, {"use_bias": True}, {"head_dim": 12}, {"hidden_act": "gelu"}, {"tie_word_embeddings": False}],
    "hunyuan_v1_dense": [
        *ROPES[4::8], *COMMON, {"attention_bias": True}, {"head_dim": 12}, {"hidden_act": "gelu"}, {"tie_word_embeddings": True},
        new({"rope_type": "dynamic", "factor": 1.0, "alpha": 50.0}), old({"type": "dynamic", "factor": 1.0, "alpha": 1000.0, "mscale": 1.0})],
    "minimax_m2": [
        *ROPES[6::8], *COMMON, {"num_experts_per_tok": 3}, {"num_local_experts": 4}, {"intermediate_size": 24}, {"rotary_dim": 6},
        {"rotary_dim": None}, {"partial_rotary_factor": 0.25}, new({"partial_rotary_factor": 0.75}), {"head_dim": 12}, {"hidden_act": "gelu"},
        {"tie_word_embeddings": True}],
    "glm": [*ROPES[2::8], *GLM], "glm4": [*ROPES[3::8], *GLM],
    "phi3": [
        *COMMON, new({}), {"rope_theta": 77.0}, new(LONGROPE), old(LONGROPE), old({**LONGROPE, "rope_type": "su"}),
        old({**{k: v for k, v in LONGROPE.items() if k != "rope_type"}, "type": "yarn"}), new({**LONGROPE, "attention_factor": 1.3}),
        new({**LONGROPE, "factor": 8.0}), new({**LONGROPE, "factor": 0.5}), new({**LONGROPE, "short_factor": LONG}),
        new({**LONGROPE, "short_factor": SHORT[:2], "long_factor": LONG[:2], "partial_rotary_factor": 0.5}),
        {**old({**LONGROPE, "short_factor": SHORT[:3], "long_factor": LONG[:3]}), "partial_rotary_factor": 0.75},
        {"partial_rotary_factor": 0.75}, {"sliding_window": 5}, {"sliding_window": 1}, {"hidden_act": "gelu"}, {"tie_word_embeddings": True}],
    "olmo2": [*ROPES[6::8], *COMMON, {"head_dim": 12}, {"attention_bias": True}, {"hidden_act": "gelu"}, {"tie_word_embeddings": True}],
    "olmo3": [
        *COMMON, layered({**YARN, **THETA}), layered({**LINEAR, **THETA}, {"rope_theta": 30.0}), layered(sliding=LINEAR), {"rope_scaling": YARN},
        {"rope_scaling": LINEAR, "rope_theta": 500000.0}, {"sliding_window": 3}, {"layer_types": [FULL] * LAYERS},
        {"layer_types": [FULL, SLIDING, FULL, SLIDING]}, {"head_dim": 12}, {"attention_bias": True}, {"hidden_act": "gelu"},
        {"tie_word_embeddings": True}],
    "smollm3": [
        *ROPES[7::8], *COMMON, {"no_rope_layers": [1, 0, 1, 1]}, {"no_rope_layers": [0] * LAYERS}, {"no_rope_layers": [1] * LAYERS},
        {"no_rope_layer_interval": 2}, {"no_rope_layer_interval": 9}, {"use_sliding_window": True, "sliding_window": 5},
        {"use_sliding_window": True, "sliding_window": 5, "no_rope_layer_interval": 2},
        {"use_sliding_window": True, "sliding_window": 5, "layer_types": [SLIDING, FULL, FULL, SLIDING]}, {"attention_bias": True},
        {"mlp_bias": True}, {"head_dim": 12}, {"hidden_act": "gelu"}, {"tie_word_embeddings": False}],
    "ministral3": [
        *COMMON, *({"rope_parameters": {**GROWS, **entry}} for entry in (
            {"llama_4_scaling_beta": 0.1}, {"llama_4_scaling_beta": 0}, {"original_max_position_embeddings": 16}, {"rope_type": "default"},
            {"rope_type": "linear"}, {"factor": 2.0}, {"mscale": 0.5}, {"rope_theta": 90.0})),
        {"rope_parameters": None}, {"rope_scaling": {**GROWS, "factor": 3.0}}, {"original_max_position_embeddings": 16}, {"sliding_window": 3},
        {"head_dim": 12}, {"hidden_act": "gelu"}, {"tie_word_embeddings": True}],
}
RECURRENT = "linear_attention"
OF_HYBRIDS = [
    {"full_attention_interval": 2}, {"full_attention_interval": 5},
    {"layer_types": [FULL, RECURRENT, RECURRENT, FULL]}, {"layer_types": [FULL] * LAYERS},
    {"linear_num_key_heads": 1}, {"linear_num_key_heads": 9}, {"linear_num_value_heads": 3}, {"linear_key_head_dim": 8},
    {"linear_value_head_dim": 4}, {"linear_conv_kernel_dim": 2}, {"partial_rotary_factor": 0.5}, new({"partial_rotary_factor": 0.75}),
    {"rope_theta": 300.0}, new({}), {"head_dim": 8}, {"attention_bias": True}, {"rms_norm_eps": 0.5}, {"tie_word_embeddings": True},
    {"num_key_value_heads": 4}, new({"rope_type": "linear", "factor": 3.0, "partial_rotary_factor": 0.5})]
MOVES |= {
    "qwen3_5_text": [*OF_HYBRIDS, {"num_key_value_heads": 1}, {"num_hidden_layers": 1}],
    "qwen3_5_moe_text": [*OF_HYBRIDS, {"num_experts_per_tok": 3}, {"num_experts": 4}, {"moe_intermediate_size": 12},
                         {"shared_expert_intermediate_size": 12}],
    "qwen3_next": [*OF_HYBRIDS, {"norm_topk_prob": False}, {"num_experts_per_tok": 3}, {"mlp_only_layers": [0, 2]},
                   {"decoder_sparse_step": 2}, {"shared_expert_intermediate_size": 12}, {"num_experts": 4}, {"moe_intermediate_size": 12}],
}
MOVES["qwen3_vl_text"] = [*ROPES[5::8], {"rope_theta": 77.0}, {"attention_bias": True}, {"hidden_act": "gelu"}, {"rms_norm_eps": 0.5},
                          {"num_key_value_heads": 4}, {"head_dim": 12}, {"tie_word_embeddings": True}]
NEMOTRON = [{"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)} for pattern in ("M*-EM", "MM*E", "E-*M-M", "-", "M")]
MOVES["nemotron_h"] = [
    *NEMOTRON, {"hybrid_override_pattern": None, "layers_block_type": ["mamba", "attention", "moe", "linear_attention", "mlp"]},
    {"layer_types": [RECURRENT, FULL, "mlp", "moe", RECURRENT]}, {"hybrid_override_pattern": "ME*-MM*E", "num_hidden_layers": None},
    {"mamba_num_heads": 9}, {"n_groups": 1}, {"n_groups": 6}, {"mamba_n_groups": 2}, {"ssm_state_size": 8}, {"mamba_head_dim": 4},
    {"conv_kernel": 2}, {"mamba_d_conv": 4}, {"use_conv_bias": False}, {"mamba_conv_bias": False}, {"use_bias": True}, {"mlp_bias": True},
    {"mlp_bias": True, "moe_latent_size": 12}, {"moe_latent_size": 12}, {"time_step_min": 0.001}, {"mamba_dt_min": 1.5}, {"layer_norm_epsilon": 0.5},
    {"mlp_hidden_act": "gelu"}, {"mlp_hidden_act": "silu"}, {"head_dim": 12}, {"head_dim": 7}, {"num_key_value_heads": 1}, {"n_routed_experts": 12},
    {"num_experts_per_tok": 3}, {"n_group": 2}, {"n_group": 1, "topk_group": 1}, {"topk_group": 1}, {"norm_topk_prob": False},
    {"routed_scaling_factor": 3.5}, {"moe_intermediate_size": 20}, {"moe_shared_expert_intermediate_size": 12}]
MOVES["qwen3_vl_moe_text"] = [*ROPES[6::8], {"rope_theta": 77.0}, {"attention_bias": True}, {"hidden_act": "gelu"}, {"rms_norm_eps": 0.5},
                              {"num_key_value_heads": 4}, {"head_dim": 12}, {"tie_word_embeddings": False}, {"num_experts": 4},
                              {"num_experts_per_tok": 3}, {"moe_intermediate_size": 12}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [0, 2]}]


def sectioned(entries):
    """The entries with sections of frequencies in every rotary table."""
    return [{k: {**v, **SECTIONS} if k in ("rope_parameters", "rope_scaling") and v else v for k, v in entry.items()} for entry in entries]


RUNS = ("qwen2_5_vl_text", "qwen2_vl_text")
MOVES |= dict.fromkeys(RUNS, [
    *sectioned(ROPES[1::6]), {"rope_theta": 77.0},
    *(e for e in MOVES["qwen2"] if not {"rope_parameters", "rope_scaling", "rope_theta", "head_dim"} & set(e))])
MOVES["falcon_h1"] = [
    *ROPES[2::8], *COMMON, {"mamba_n_heads": 2}, {"mamba_n_groups": 1}, {"mamba_n_groups": 6}, {"mamba_d_state": 8}, {"mamba_d_conv": 2},
    {"mamba_d_ssm": 30}, {"mamba_d_ssm": None, "mamba_n_heads": 8}, {"mamba_d_ssm": None, "mamba_expand": 3},
    {"mamba_d_head": 21, "mamba_n_heads": 2},
    {"mamba_conv_bias": False}, {"mamba_proj_bias": True}, {"projectors_bias": True}, {"attention_bias": True}, {"mlp_bias": True},
    {"mamba_norm_before_gate": True}, {"mamba_rms_norm": False}, {"mamba_rms_norm": False, "mamba_norm_before_gate": True},
    {"time_step_limit": [0.0, 0.5]}, {"time_step_limit": [0.4, {"__float__": "Infinity"}]}, {"embedding_multiplier": 5.0},
    {"lm_head_multiplier": 0.04},
    {"key_multiplier": 1.0}, {"attention_in_multiplier": 1.7}, {"attention_out_multiplier": 0.4}, {"ssm_in_multiplier": 1.4},
    {"ssm_out_multiplier": 0.3}, {"ssm_multipliers": None}, *({"ssm_multipliers": [2.0 if i == j else 1.0 for j in range(5)]} for i in range(5)),
    {"mlp_multipliers": [0.5, 1.0]}, {"mlp_multipliers": [1.0, 0.3]}, {"head_dim": 12}, {"tie_word_embeddings": True}]
TURNS = {"position_embedding_type": "rope"}
MOVES["granitemoehybrid"] = [
    *({**TURNS, **entries} for entries in (ROPES[0], *ROPES[3::8])), TURNS, *COMMON, {"layer_types": None}, {"layer_types": [FULL] * LAYERS},
    {"layer_types": None, "layers_block_type": [RECURRENT, "mamba", "attention", FULL]}, {"mamba_n_heads": 4}, {"mamba_n_groups": 1},
    {"mamba_n_groups": 8}, {"mamba_d_state": 8}, {"mamba_d_conv": 2}, {"mamba_expand": 3}, {"mamba_n_heads": 16, "mamba_d_head": 4},
    {"mamba_conv_bias": False}, {"mamba_proj_bias": True}, {"time_step_limit": [0.4, float("inf")]}, {"time_step_limit": [0.0, 0.5]},
    {"time_step_limit": [0.4, {"__float__": "Infinity"}]}, {"num_local_experts": 0}, {"num_local_experts": 0, "num_experts_per_tok": 0},
    {"num_local_experts": 4}, {"num_experts_per_tok": 3}, {"intermediate_size": 12}, {"shared_intermediate_size": 12},
    {"embedding_multiplier": 12.0}, {"logits_scaling": 8.0}, {"residual_multiplier": 0.22}, {"attention_multiplier": 0.7}, {"attention_bias": True},
    {"tie_word_embeddings": True}, {"head_dim": 12}]
UNUSED = [{"num_experts": 0}, {"kv_lora_rank": None}, {"logit_scale": 1.0}, {"residual_multiplier": 1}, {"use_mrope": False},
          {"partial_rotary_factor": 1.0}, {"attention_dropout": 0.3}, {"rope_scaling": None}, {"rope_parameters": None},
          {"original_max_position_embeddings": 16}, {"use_cache": False}, {"some_field_of_tomorrow": "text"}]
TRAINING = [{"output_router_logits": False}, {"router_aux_loss_coef": 0.5}]
SAID = [{"num_nextn_predict_layers": 1}, {"num_mtp_layers": 2}, {"topk_method": "noaux_tc"}, {"scoring_func": "sigmoid"}, {"moe_layer_freq": 1}]
IGNORED = {
    "llama": [*UNUSED, {"sliding_window": 4, "use_sliding_window": False}, {"layer_types": [FULL] * LAYERS}, {"pretraining_tp": 2}],
    "mistral": [*UNUSED, {"attention_bias": True}, {"layer_types": [SLIDING] * LAYERS}, {"max_window_layers": 1}],
    "qwen2": [*UNUSED, {"attention_bias": False}, {"query_pre_attn_scalar": None}],
    "qwen3": [*UNUSED, {"sliding_window": 0}, {"max_window_layers": 0}, {"use_qk_norm": True}],
    "gemma2": [*UNUSED, {"hidden_act": "silu"}, {"sliding_window_pattern": 2}, {"use_bidirectional_attention": False}],
    "gemma3_text": [*UNUSED, {"attn_logit_softcapping": None}, {"rope_parameters": {FULL: None, SLIDING: None}}],
    "qwen3_moe": [*UNUSED[1:], *TRAINING, {"max_window_layers": 1}, {"sliding_window": 4}, {"use_qk_norm": True}, {"n_group": 1}],
    "qwen2_moe": [*UNUSED[1:], *TRAINING, {"sliding_window": 4}, {"max_window_layers": 1}, {"layer_types": [FULL] * LAYERS}],
    "olmoe": [*UNUSED[1:], *TRAINING, {"clip_qkv": None}],
    "deepseek_v3": [*(e for e in UNUSED if "kv_lora_rank" not in e), *TRAINING, *SAID, {"head_dim": 6}, {"qk_head_dim": 10},
                    {"pretraining_tp": 2}],
    "glm4_moe_lite": [*(e for e in UNUSED if "kv_lora_rank" not in e), *TRAINING, *SAID, {"head_dim": 6}, {"first_k_dense_replace": 1},
                      {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}, {"pretraining_tp": 2}],
    "glm4_moe": [*(e for e in UNUSED if "partial_rotary_factor" not in e), *TRAINING, *SAID, {"partial_rotary_factor": 0.5}],
    "mixtral": [*UNUSED[1:], *TRAINING, {"router_jitter_noise": 0.0}],
    "gpt_oss": [*(e for e in UNUSED[1:] if "original_max_position_embeddings" not in e), *TRAINING, {"experts_per_token": 2},
                {"initial_context_length": 4096}, {"layer_types": [SLIDING, FULL] * (LAYERS // 2)}],
}
IGNORED_GLM = [*(e for e in UNUSED if "partial_rotary_factor" not in e), {"partial_rotary_factor": 0.5}, {"layer_types": [FULL] * LAYERS}]
IGNORED |= {
    "seed_oss": [*UNUSED, {"residual_dropout": 0.4}, {"layer_types": [FULL] * LAYERS}, {"pretraining_tp": 2}],
    "gemma": [*UNUSED, {"hidden_act": "gelu"}, {"hidden_activation": "silu"}, {"use_bidirectional_attention": False}],
    "granite": [*(e for e in UNUSED if "residual_multiplier" not in e), {"residual_multiplier": 1}, {"layer_types": [FULL] * LAYERS}],
    "ernie4_5": [*UNUSED, {"layer_types": [FULL] * LAYERS}, {"compression_ratio": 1.0}],
    "hunyuan_v1_dense": [*UNUSED, {"use_qk_norm": True}, {"use_cla": False}, {"pretraining_tp": 2}, {"eod_token_id": 5},
                         new({"rope_type": "default", "rope_theta": 10000.0})],
    "minimax_m2": [*(e for e in UNUSED[1:] if "partial_rotary_factor" not in e), *TRAINING, {"router_jitter_noise": 0.0}, {"use_qk_norm": True},
                   {"scoring_func": "sigmoid"}, {"use_routing_bias": True}, {"n_group": 1}, {"rotary_dim": 4}, {"norm_topk_prob": False}],
    "glm": IGNORED_GLM, "glm4": IGNORED_GLM,
    "phi3": [*(e for e in UNUSED if "original_max_position_embeddings" not in e), {"resid_pdrop": 0.3}, {"embd_pdrop": 0.3},
             {"max_window_layers": 1}, {"layer_types": [FULL] * LAYERS}, {"attention_bias": True}, {"original_max_position_embeddings": 16}],
    "olmo2": [*UNUSED, {"use_qk_norm": True}, {"clip_qkv": None}],
    "olmo3": [*UNUSED, {"layer_types": [SLIDING, SLIDING, SLIDING, FULL]}, {"sliding_window_pattern": 4}, {"rope_theta": 500000.0},
              {"rope_parameters": {FULL: None, SLIDING: None}}],
    "smollm3": [*UNUSED, {"sliding_window": 4}, {"layer_types": [FULL] * LAYERS}, {"no_rope_layers": [1, 1, 1, 0]}, {"max_window_layers": 1},
                {"use_sliding_window": True}, {"pretraining_tp": 2}],
    "ministral3": [*(e for e in UNUSED if not {"rope_parameters", "original_max_position_embeddings"} & set(e)), {"max_window_layers": 1},
                   {"layer_types": [FULL] * LAYERS}],
}
SAID_OF_HYBRIDS = [
    *(e for e in UNUSED if "partial_rotary_factor" not in e), {"attn_output_gate": True}, {"output_gate_type": "silu"},
    {"output_gate_type": "swish"},
    {"mamba_ssm_dtype": "float32"}, {"mtp_num_hidden_layers": 1}, {"mtp_use_dedicated_embeddings": False},
    {"layer_types": [RECURRENT, RECURRENT, FULL, RECURRENT]}, {"layer_types": [RECURRENT, RECURRENT, FULL, RECURRENT], "full_attention_interval": 2},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True, "mrope_section": [1, 0, 0]}}]
IGNORED |= {"qwen3_5_text": SAID_OF_HYBRIDS, "qwen3_5_moe_text": [*SAID_OF_HYBRIDS[1:], *TRAINING], "qwen3_next": [*SAID_OF_HYBRIDS[1:], *TRAINING]}
IGNORED["qwen3_vl_text"] = [*UNUSED, {"rope_parameters": {"rope_theta": 10000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}}]
IGNORED["nemotron_h"] = [
    *(e for e in UNUSED if not {"use_mrope", "num_experts"} & set(e)), *TRAINING, {"rope_theta": 77.0}, {"partial_rotary_factor": 0.5},
    {"rms_norm_eps": 0.5}, {"norm_eps": 1e-5}, {"num_hidden_layers": None}, {"num_nextn_predict_layers": 1, "mtp_layers_block_type": [FULL, "moe"]},
    {"mtp_hybrid_override_pattern": "*E"}, {"sliding_window": None}, {"expand": 3}, {"chunk_size": 16}, {"mamba_chunk_size": 8},
    {"time_step_max": 0.2}, {"time_step_floor": 0.1}, {"time_step_limit": [0.0, float("inf")]}, {"time_step_limit": [0.0, {"__float__": "Infinity"}]},
    {"mamba_hidden_act": "silu"}, {"mamba_proj_bias": False}, {"attention_bias": False}, {"mamba_ssm_cache_dtype": "float32"},
    {"n_shared_experts": 1}, {"moe_shared_expert_overlap": False}, {"residual_in_fp32": False}, {"hidden_dropout": 0.3},
    {"rescale_prenorm_residual": False}, {"use_mamba_kernels": False}, {"num_logits_to_keep": 2}, {"hidden_act": "gelu"},
    {"tie_word_embeddings": False}, {"layers_block_type": [RECURRENT, "moe", FULL, "mlp", RECURRENT]}]
IGNORED["qwen3_vl_moe_text"] = [*UNUSED[1:], *TRAINING, *IGNORED["qwen3_vl_text"][-1:], {"norm_topk_prob": True}, {"use_qk_norm": True}]
IGNORED |= dict.fromkeys(RUNS, [
    *(e for e in UNUSED if not {"rope_parameters", "original_max_position_embeddings"} & set(e)), {"attention_bias": False},
    {"rope_parameters": {"rope_type": "default", "type": "mrope", "mrope_section": [2, 1, 1]}},
    {"rope_scaling": {"type": "mrope", **SECTIONS}}, {"head_dim": 8}])
IGNORED["granitemoehybrid"] = [
    *(e for e in UNUSED[1:] if "residual_multiplier" not in e), *TRAINING, {"position_embedding_type": "nope"}, {"rope_theta": 77.0},
    {"mamba_d_head": 8}, {"mamba_d_head": "auto"}, {"mamba_chunk_size": 8}, {"time_step_limit": None}, {"time_step_limit": [0.0, float("inf")]},
    {"shared_intermediate_size": 20}, {"hidden_act": "silu"}, {"max_position_embeddings": 128}]
IGNORED["falcon_h1"] = [
    *(e for e in UNUSED if "num_experts" not in e), {"mamba_d_head": 7}, {"mamba_d_head": "auto"}, {"mamba_chunk_size": 8}, {"mamba_expand": 3},
    {"time_step_limit": None}, {"mlp_multipliers": None}, {"mlp_multipliers": [1.0, 1.0]}, {"num_logits_to_keep": 2}, {"hidden_act": "silu"},
    {"mamba_use_mlp": True}, {"max_position_embeddings": 128}]
FOREIGN = [
    {"num_experts": 8}, {"num_local_experts": 4}, {"n_routed_experts": 64}, {"moe_intermediate_size": 16}, {"kv_lora_rank": 8},
    {"q_lora_rank": 8}, {"attention_sinks": True}, {"attention_chunk_size": 8}, {"clip_qkv": 6.0}, {"use_parallel_residual": True},
    {"no_rope_layers": [1, 0, 1, 0]}, {"alibi": True}, {"rotary_pct": 0.5}, {"rope_interleaved": True}, {"logit_scale": 0.25},
    {"logits_scaling": 8.0}, {"embedding_multiplier": 12.0}, {"residual_multiplier": 0.22}, {"attention_multiplier": 0.1},
    {"scale_emb": 12}, {"scale_depth": 1.4}, {"dim_model_base": 256}, {"num_kv_shared_layers": 2}, {"full_attention_interval": 4},
    {"position_embedding_type": "nope"}, {"is_causal": False}, {"quantization_config": {"bits": 4}}, {"is_encoder_decoder": True},
    {"per_layer_config": {"0": {"sliding_window": 3}}}, {"layer_types": ["chunked_attention"] * LAYERS},
    {"layer_types": ["linear_attention"] * LAYERS}, {"layer_types": [FULL]}, {"hidden_size": True}, {"rms_norm_eps": None},
    {"rms_norm_eps": -1.0}, {"max_position_embeddings": None}, {"tie_word_embeddings": None}, {"tie_word_embeddings": "false"},
    {"head_dim": 0}, {"num_key_value_heads": 0}, {"initializer_range": None},
]
NO_CAPS = [{"attn_logit_softcapping": 50.0}, {"final_logit_softcapping": 30.0}, {"query_pre_attn_scalar": 100}]
NO_EXPERTS = [entry for entry in FOREIGN if not {"num_experts", "num_local_experts", "moe_intermediate_size"} & set(entry)]
NO_GROUPS = [{"n_group": 4}, {"n_group": 6}, {"topk_group": 4}, {"topk_group": 1, "num_experts_per_tok": 3}, {"n_shared_experts": 0},
             {"scoring_func": "softmax"}, {"topk_method": "greedy"}, {"moe_layer_freq": 2}, {"norm_topk_prob": None}, {"num_experts": 4},
             {"n_routed_experts": 0}, {"routed_scaling_factor": None}, {"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}]
NO_LATENT = [*(e for e in NO_EXPERTS if not {"n_routed_experts", "q_lora_rank", "kv_lora_rank", "head_dim", "num_key_value_heads"} & set(e)),
             *NO_CAPS, *NO_GROUPS, {"kv_lora_rank": None}, {"kv_lora_rank": 0}, {"q_lora_rank": 0}, {"qk_rope_head_dim": 7}, {"v_head_dim": None},
             {"head_dim": 8}, {"qk_head_dim": 12}, {"num_key_value_heads": 2}, {"rope_interleave": None}, {"sliding_window": 4},
             {"use_qk_norm": True}, {"index_topk": 4}]
REFUSED = {
    "llama": [*FOREIGN, *NO_CAPS, {"sliding_window": 4}, {"layer_types": [SLIDING] * LAYERS}, {"hidden_act": "relu"}, {"mlp_bias": 1},
              {"attention_bias": "false"}, {"use_qk_norm": True}, {"hidden_size": 34, "head_dim": 8}],
    "mistral": [*FOREIGN, *NO_CAPS, {"sliding_window": 0}, {"layer_types": [FULL] * LAYERS}, {"sliding_window": 4.5}],
    "qwen2": [*FOREIGN, *NO_CAPS, {"sliding_window": 0}, {"layer_types": [SLIDING] * LAYERS, "use_sliding_window": False},
              {"layer_types": [SLIDING] * LAYERS, "sliding_window": None}, {"max_window_layers": None}, {"use_sliding_window": 1}],
    "qwen3": [*FOREIGN, *NO_CAPS, {"head_dim": None}, {"layer_types": [FULL, FULL, FULL, SLIDING]}],
    "gemma2": [*FOREIGN, {"sliding_window_pattern": 3}, {"sliding_window": None}, {"sliding_window": 0},
               {"sliding_window": None, "layer_types": [FULL] * LAYERS}, {"attn_logit_softcapping": 0},
               {"final_logit_softcapping": 0.0}, {"query_pre_attn_scalar": 0}, {"query_pre_attn_scalar": 12.5},
               {"hidden_activation": None}, {"head_dim": None},
               {"use_bidirectional_attention": True}],
    "gemma3_text": [*FOREIGN, NO_CAPS[0], {"sliding_window_pattern": 0}, {"sliding_window_pattern": None}, {"sliding_window": None},
                    {"final_logit_softcapping": 0}, {"rope_local_base_freq": None}, {"use_bidirectional_attention": True}],
    "qwen3_moe": [*NO_EXPERTS, *NO_CAPS, {"num_experts_per_tok": 6}, {"norm_topk_prob": 1}, {"decoder_sparse_step": 0},
                  {"mlp_only_layers": "0"}, {"sliding_window": 0, "use_sliding_window": True}, {"shared_expert_intermediate_size": 8}],
    "qwen2_moe": [*NO_EXPERTS, *NO_CAPS, {"num_experts_per_tok": 6}, {"shared_expert_intermediate_size": 0}, {"use_qk_norm": True},
                  {"layer_types": [SLIDING] * LAYERS}],
    "olmoe": [*NO_EXPERTS, *NO_CAPS, {"num_experts": 0}, {"sliding_window": 4}, {"decoder_sparse_step": 2}],
    "deepseek_v3": [*NO_LATENT, {"first_k_dense_replace": -1}, {"mlp_layer_types": ["dense"] * LAYERS}, {"n_group": None}],
    "glm4_moe_lite": [*NO_LATENT, {"mlp_layer_types": ["dense"]}, {"mlp_layer_types": ["dense", "chunked", "sparse", "sparse"]},
                      {"first_k_dense_replace": 2}, {"first_k_dense_replace": 2, "mlp_layer_types": ["dense"] + ["sparse"] * 3}],
    "glm4_moe": [*(e for e in NO_EXPERTS if "n_routed_experts" not in e), *NO_CAPS, *NO_GROUPS, {"partial_rotary_factor": 0.45},
                 {"use_qk_norm": 1}, {"sliding_window": 4}, {"rope_interleave": True}],
    "mixtral": [*NO_EXPERTS, *NO_CAPS, {"router_jitter_noise": 0.1}, {"norm_topk_prob": True}],
    "gpt_oss": [*NO_EXPERTS, *NO_CAPS, {"norm_topk_prob": True}, {"hidden_act": "gelu"}, {"swiglu_limit": 0}, {"swiglu_limit": None},
                {"swiglu_alpha": 0.0}, {"attention_bias": None}, {"sliding_window": None}, {"sliding_window": 0},
                {"sliding_window_pattern": 4}, {"experts_per_token": 4}, {"num_local_experts": 0}, {"num_experts_per_tok": 6}],
}
REFUSED |= {
    "seed_oss": [*FOREIGN, *NO_CAPS, {"sliding_window": 4}, {"layer_types": [SLIDING] * LAYERS}, {"head_dim": None}, {"mlp_bias": 1},
                 {"attention_out_bias": None}, {"use_qk_norm": True}],
    "gemma": [*FOREIGN, *NO_CAPS, {"sliding_window": 4}, {"hidden_act": "relu"}, {"use_bidirectional_attention": True}, {"head_dim": None},
              {"hidden_size": 34}],
    "granite": [*(e for e in FOREIGN if not {"logits_scaling", "embedding_multiplier", "residual_multiplier", "attention_multiplier"} & set(e)),
                *NO_CAPS, {"logits_scaling": 0}, {"embedding_multiplier": None}, {"residual_multiplier": -1.0}, {"attention_multiplier": "1"},
                {"sliding_window": 4}, {"use_qk_norm": True}],
    "ernie4_5": [*FOREIGN, *NO_CAPS, {"sliding_window": 4}, {"use_bias": None}, {"head_dim": None}],
    "hunyuan_v1_dense": [*FOREIGN, *NO_CAPS, {"sliding_window": 4}, {"use_cla": True}, {"attention_bias": 1}],
    "minimax_m2": [*NO_EXPERTS, *NO_CAPS, {"num_local_experts": 0}, {"num_experts_per_tok": 6}, {"sliding_window": 4}, {"n_group": 2},
                   {"routed_scaling_factor": 2.5}, {"scoring_func": "softmax"}, {"router_jitter_noise": 0.1}, {"use_routing_bias": False},
                   {"attn_type_list": [1, 0, 1, 1]}, {"rotary_dim": 10}, {"rotary_dim": 3}, {"norm_topk_prob": True}],
    **dict.fromkeys(("glm", "glm4"), [*FOREIGN, *NO_CAPS, {"sliding_window": 4}, {"partial_rotary_factor": 0.4}, {"head_dim": None},
                                      {"use_qk_norm": True}, {"attention_bias": 1}]),
    "phi3": [*FOREIGN, *NO_CAPS, {"sliding_window": 0}, {"layer_types": [SLIDING] * LAYERS}, {"partial_rotary_factor": 0.4},
             {"hidden_size": 34}],
    "olmo2": [*FOREIGN, *NO_CAPS, {"sliding_window": 4}, {"layer_types": [SLIDING] * LAYERS}, {"attention_bias": 1}],
    "olmo3": [*FOREIGN, *NO_CAPS, {"sliding_window": None}, {"sliding_window": 0}, {"sliding_window_pattern": 3}, {"rope_theta": 300.0}],
    "smollm3": [*(e for e in FOREIGN if "no_rope_layers" not in e), *NO_CAPS, {"no_rope_layers": [1, 1, 1]}, {"no_rope_layers": [1, 1, 1, 2]},
                {"no_rope_layer_interval": 0}, {"layer_types": [SLIDING] * LAYERS}, {"use_sliding_window": 1}, {"hidden_size": 34},
                {"sliding_window": 0, "use_sliding_window": True}],
    "ministral3": [*FOREIGN, *NO_CAPS, {"sliding_window": 0}, {"layer_types": [SLIDING] * LAYERS}, {"head_dim": None}],
}
NO_HYBRID = [
    *(e for e in FOREIGN if not {"full_attention_interval", "layer_types"} & set(e)), *NO_CAPS, {"linear_num_value_heads": 10},
    {"linear_num_key_heads": 0}, {"linear_conv_kernel_dim": None}, {"full_attention_interval": 0}, {"layer_types": [RECURRENT]},
    {"layer_types": [SLIDING] * LAYERS}, {"layer_types": ["mamba"] * LAYERS}, {"attn_output_gate": False}, {"output_gate_type": "sigmoid"},
    {"mamba_ssm_dtype": "bfloat16"}, {"hidden_act": "gelu"}, {"layer_scale": True}, {"partial_rotary_factor": 0.35}, {"sliding_window": 4}]
REFUSED |= {
    "qwen3_5_text": NO_HYBRID,
    "qwen3_vl_text": [*FOREIGN, *NO_CAPS, {"sliding_window": 4}, {"head_dim": None}],
    "qwen3_vl_moe_text": [*NO_EXPERTS, *NO_CAPS, {"sliding_window": 4}, {"norm_topk_prob": False}, {"num_experts_per_tok": 6},
                          {"decoder_sparse_step": 0}, {"mlp_only_layers": "0"}, {"shared_expert_intermediate_size": 8}],
    **dict.fromkeys(RUNS, [*REFUSED["qwen2"], {"head_dim": 16}, {"hidden_size": 34}]),
    "qwen3_5_moe_text": [e for e in NO_HYBRID if not {"num_experts", "num_local_experts", "moe_intermediate_size"} & set(e)],
    "qwen3_next": [*(e for e in NO_HYBRID if not {"num_experts", "num_local_experts", "moe_intermediate_size"} & set(e)), {"norm_topk_prob": 1}],
}
REFUSED["nemotron_h"] = [
    *(e for e in FOREIGN if not {"n_routed_experts", "num_local_experts", "num_experts", "moe_intermediate_size", "rms_norm_eps", "layer_types",
                                 "full_attention_interval"} & set(e)), *NO_CAPS,
    {"hybrid_override_pattern": "MEX"}, {"hybrid_override_pattern": None}, {"hybrid_override_pattern": ["M", "E"]}, {"hybrid_override_pattern": ""},
    {"layers_block_type": ["mamba", "conv"]}, {"layer_types": ["mamba"]*3 + ["sliding_attention"]}, {"num_hidden_layers": 4},
    {"layer_norm_epsilon": None}, {"mamba_num_heads": 7}, {"n_groups": 0}, {"ssm_state_size": None}, {"conv_kernel": 0},
    {"mamba_hidden_act": "gelu"},
    {"mamba_proj_bias": True}, {"attention_bias": True}, {"residual_in_fp32": True}, {"tie_word_embeddings": True}, {"n_shared_experts": 2},
    {"n_shared_experts": 0}, {"time_step_limit": [0.001, 0.1]}, {"time_step_limit": [0.1]}, {"time_step_min": None},
    {"mamba_ssm_cache_dtype": "bfloat16"}, {"attention_head_dim": 8},
    {"sliding_window": 4}, {"mlp_hidden_act": "relu"}, {"use_bias": 1}, {"use_conv_bias": None}, {"moe_latent_size": 0},
    {"moe_shared_expert_intermediate_size": 0}, {"n_routed_experts": 0}, {"num_experts_per_tok": 7}, {"n_group": 4}, {"topk_group": 4},
    {"scoring_func": "softmax"}, {"layer_scale": True}, {"intermediate_size": [48, 32]}, {"time_step_limit": None, "mamba_dt_limit": [0.0, 1.0]}]
FACTORS = {"logits_scaling", "embedding_multiplier", "residual_multiplier", "attention_multiplier"}
REFUSED["granitemoehybrid"] = [
    *(e for e in NO_EXPERTS if not (FACTORS | {"position_embedding_type", "full_attention_interval"}) & set(e)
      and e != {"layer_types": ["linear_attention"] * LAYERS}),
    *NO_CAPS, {"logits_scaling": 0}, {"embedding_multiplier": None}, {"residual_multiplier": -1.0}, {"attention_multiplier": "1"},
    {"layer_types": ["mamba", "sliding_attention", "mamba", "mamba"]}, {"layer_types": ["mamba"]}, {"mamba_n_heads": 7}, {"mamba_n_groups": 3},
    {"mamba_d_head": 9}, {"mamba_d_state": 0}, {"mamba_d_conv": None}, {"mamba_expand": 0}, {"mamba_conv_bias": None}, {"mamba_proj_bias": 1},
    {"time_step_limit": [0.5]}, {"time_step_limit": [0.5, 0.1]}, {"time_step_limit": "auto"}, {"hidden_act": "gelu"}, {"num_experts_per_tok": 6},
    {"num_experts_per_tok": 0}, {"shared_intermediate_size": 0}, {"sliding_window": 4}, {"position_embedding_type": "alibi"}, {"use_qk_norm": True}]
REFUSED["falcon_h1"] = [
    *(e for e in FOREIGN if "embedding_multiplier" not in e and "layer_types" not in e and "full_attention_interval" not in e), *NO_CAPS,
    {"mamba_n_heads": 5}, {"mamba_n_groups": 4}, {"mamba_d_head": 9}, {"mamba_d_state": 0}, {"mamba_d_conv": None}, {"mamba_conv_bias": None},
    {"mamba_proj_bias": 1}, {"projectors_bias": None}, {"mamba_rms_norm": None}, {"mamba_norm_before_gate": 1}, {"time_step_limit": [0.5]},
    {"hidden_act": "gelu"}, {"sliding_window": 4}, {"embedding_multiplier": 0}, {"lm_head_multiplier": 0}, {"key_multiplier": None},
    {"attention_in_multiplier": "1"}, {"attention_out_multiplier": None}, {"ssm_in_multiplier": None}, {"ssm_out_multiplier": True},
    {"ssm_multipliers": [1.0] * 4}, {"ssm_multipliers": [1.0, 1.0, None, 1.0, 1.0]}, {"mlp_multipliers": [1.0]}, {"mlp_multipliers": 0.5},
    {"use_qk_norm": True}, {"mlp_bias": None}, {"logits_scaling": 2.0}, {"attn_layer_indices": [1]}]
GEMMA3_ROPES_REFUSED = [
    ({"rope_theta": None}, "rope_theta=None"), (new(LINEAR), "rope_type"), (new({}), "rope_theta"),
    (old({"type": "linear", "factor": 8.0}), "type='linear'"), (layered({**LINEAR, "factor": 0}), "factor=0"),
    (layered({"rope_type": "longrope"}), "rope_type='longrope'"), (old({FULL: LINEAR}), FULL),
    (layered(sliding={"rope_theta": None}), "rope_theta=None"),
]
PHI3_ROPES_REFUSED = [
    ({"rope_theta": None}, "rope_theta=None"), (new(LINEAR), "rope_type='linear'"), (new(LLAMA3), "rope_type='llama3'"),
    (new({"rope_type": "dynamic", "factor": 2.0}), "rope_type='dynamic'"), (new({"rope_type": "longrope"}), "short_factor=None"),
    (new({**LONGROPE, "long_factor": LONG[:3]}), "long_factor="), (new({**LONGROPE, "short_factor": [1, 1, 1, "1"]}), "short_factor="),
    (new({**LONGROPE, "short_factor": [1, 1, 1, 0]}), "short_factor="), (new({**LONGROPE, "factor": 0}), "factor=0"),
    (new({**LONGROPE, "partial_rotary_factor": 0.5}), "short_factor="), (new({**LONGROPE, "attention_factor": "1"}), "attention_factor='1'"),
    (new(LONGROPE, original_max_position_embeddings=None), "original_max_position_embeddings=None"),
]


def config(family, entries):
    """The content of a config.json."""
    return {"model_type": family, **SIZES, **BASE[family], **entries}


def refused():
    """(family, entries, what the error must name)."""
    for missing in ("llama_4_scaling_beta", "original_max_position_embeddings"):
        yield "ministral3", {"rope_parameters": {k: v for k, v in GROWS.items() if k != missing}}, missing
    yield "deepseek_v3", new({**LINEAR, "mscale_all_dim": 1.0}), "mscale_all_dim=1.0"
    for section in ([2, 1], [2, 1, 2], 4):
        yield "qwen3_vl_text", new({"mrope_section": section}), f"mrope_section={section}"
    for section in ([2, 1], [2, 1, 2], None):
        yield "qwen2_5_vl_text", new({"mrope_section": section}), f"mrope_section={section}"
    yield "qwen2_5_vl_text", {"rope_parameters": None}, "mrope_section=(16, 24, 24)"
    yield "qwen3_vl_text", new({"mrope_interleaved": False}), "mrope_interleaved=False"
    yield "qwen2_5_vl_text", new({**SECTIONS, "mrope_interleaved": True}), "mrope_interleaved=True"
    for family, cases in REFUSED.items():
        if family in WITHOUT_POSITIONS:
            yield from ((family, entries, next(iter(entries))) for entries in cases)
            continue
        ropes = PHI3_ROPES_REFUSED if family == "phi3" else GEMMA3_ROPES_REFUSED if family in ("gemma3_text", "olmo3") else ROPES_REFUSED
        beside = TURNS if family == "granitemoehybrid" else {}  # without which it reads no rotary table
        yield from ((family, {**entries, **beside}, name) for entries, name in ropes if (family not in PARTIAL or name != "partial_rotary_factor")
                   and (family != "ministral3" or list(entries) != ["rope_theta"])  # which its table has
                   and (family not in RUNS or name != "rope_type='mrope'"))
        yield from ((family, entries, next(iter(entries))) for entries in cases)
