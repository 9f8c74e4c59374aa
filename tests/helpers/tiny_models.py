"""Tiny random checkpoints of every family, made by transformers, with nothing left at a value that hides a mistake."""

from __future__ import annotations

import json
from pathlib import Path

VOCAB = 96
SIZES = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=128, rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2,
             pad_token_id=0, initializer_range=0.2)
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32, "rope_theta": 500.0}
# architecture -> (HF model type, config entries that differ from SIZES). Windows are shorter than the tests' rows.
ARCHITECTURES = {
    "llama": ("llama", {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 700.0}}),
    "llama3": ("llama", {"rope_parameters": LLAMA3, "head_dim": 12}),
    "llama_bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 900.0}}),
    "llama_dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 900.0}}),
    "mistral": ("mistral", {"sliding_window": 6, "head_dim": 10}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_yarn": ("qwen2", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5000.0,
                                                 "original_max_position_embeddings": 32}}),
    "qwen2_window": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 12}),
    "seed_oss": ("seed_oss", {"head_dim": 12, "attention_out_bias": True}),
    "gemma": ("gemma", {"head_dim": 12, "attention_bias": True}),
    "granite": ("granite", {"embedding_multiplier": 3.0, "logits_scaling": 1.7, "residual_multiplier": 0.4, "attention_multiplier": 0.2,
                            "attention_bias": True, "tie_word_embeddings": True}),
    "ernie4_5": ("ernie4_5", {"head_dim": 12, "use_bias": True}),
    "hunyuan": ("hunyuan_v1_dense", {"head_dim": 12, "rope_parameters": {"rope_type": "dynamic", "factor": 1.0, "alpha": 50.0, "rope_theta": 900.0}}),
    "glm": ("glm", {"head_dim": 12}),
    "glm4": ("glm4", {"head_dim": 16, "partial_rotary_factor": 0.25}),
    "phi3": ("phi3", {"sliding_window": 6, "head_dim": 8}),
    "phi4_mini": ("phi3", {"tie_word_embeddings": True, "original_max_position_embeddings": 64, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 5000.0, "partial_rotary_factor": 0.75, "short_factor": [1.0, 2.0, 5.0],
        "long_factor": [3.0, 9.0, 30.0]}}),
    "olmo2": ("olmo2", {"attention_bias": True}),
    "olmo3": ("olmo3", {"num_hidden_layers": 5, "sliding_window": 6, "rope_parameters": {
        "full_attention": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5000.0, "original_max_position_embeddings": 32},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5, "no_rope_layers": [1, 0, 1, 0, 1], "use_sliding_window": True, "sliding_window": 6,
                            "mlp_bias": True}),
    "ministral3": ("ministral3", {"head_dim": 10, "rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "rope_theta": 5000.0, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.3}}),
    "gemma2": ("gemma2", {"num_hidden_layers": 3, "head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 5,
                          "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}),
    "gemma3": ("gemma3_text", {"num_hidden_layers": 5, "head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 5,
                               "sliding_window_pattern": 2, "rope_parameters": {
                                   "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 3000.0},
                                   "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}}),
}
FEW = {"num_experts": 6, "num_experts_per_tok": 3}
GROUPS = {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_group": 3, "topk_group": 2, "n_shared_experts": 2,
          "routed_scaling_factor": 1.7}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 6, "num_key_value_heads": 4}
# The same of models with experts. Their router's flags have the value that the family's defaults have not.
EXPERTS = {
    "qwen3_moe": ("qwen3_moe", {**FEW, "head_dim": 12, "num_hidden_layers": 3, "moe_intermediate_size": 24, "norm_topk_prob": True}),
    "qwen3_moe_mixed": ("qwen3_moe", {**FEW, "head_dim": 12, "num_hidden_layers": 5, "moe_intermediate_size": 24,
                                      "decoder_sparse_step": 2, "mlp_only_layers": [4]}),
    "qwen2_moe": ("qwen2_moe", {**FEW, "num_hidden_layers": 3, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
                                "mlp_only_layers": [0], "norm_topk_prob": True}),
    "olmoe": ("olmoe", {**FEW, "norm_topk_prob": True}),
    "glm4_moe": ("glm4_moe", {**GROUPS, "head_dim": 12, "num_hidden_layers": 4, "first_k_dense_replace": 1, "use_qk_norm": True,
                              "attention_bias": True, "partial_rotary_factor": 0.5}),
    "deepseek_v3": ("deepseek_v3", {**GROUPS, **LATENT, "num_hidden_layers": 4, "first_k_dense_replace": 1, "q_lora_rank": 20, "v_head_dim": 10,
                                    "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5000.0, "mscale": 1.0,
                                                        "mscale_all_dim": 0.8, "original_max_position_embeddings": 32}}),
    "moonlight": ("deepseek_v3", {**GROUPS, **LATENT, "num_hidden_layers": 3, "first_k_dense_replace": 1, "q_lora_rank": None, "v_head_dim": 12,
                                  "n_group": 1, "topk_group": 1, "rope_interleave": False, "attention_bias": True}),
    "glm4_moe_lite": ("glm4_moe_lite", {**GROUPS, **LATENT, "num_hidden_layers": 3, "q_lora_rank": 20, "v_head_dim": 18, "attention_bias": True,
                                        "n_group": 1, "topk_group": 1}),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 6}),
    "minimax_m2": ("minimax_m2", {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 12, "num_hidden_layers": 3, "intermediate_size": 24,
                                  "rotary_dim": 6}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 12, "intermediate_size": 24,
                            "num_hidden_layers": 5, "sliding_window": 6, "swiglu_limit": 0.7, "swiglu_alpha": 1.3,
                            "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5000.0, "truncate": False,
                                                "original_max_position_embeddings": 32}}),
}
LINEAR = {"head_dim": 16, "linear_num_key_heads": 3, "linear_value_head_dim": 7, "linear_key_head_dim": 5, "rms_norm_eps": 1e-2}
SPARSE = {**FEW, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
MAMBA = {"mamba_num_heads": 6, "n_groups": 3, "ssm_state_size": 5, "mamba_head_dim": 7, "conv_kernel": 3, "layer_norm_epsilon": 1e-2,
         "time_step_min": 0.3, "num_hidden_layers": None, "rms_norm_eps": None, "tie_word_embeddings": False}
BAMBA = {"mamba_n_heads": 8, "mamba_n_groups": 4, "mamba_d_state": 5, "mamba_d_conv": 3, "rms_norm_eps": 1e-2, "intermediate_size": 24,
         "shared_intermediate_size": 40, "embedding_multiplier": 3.0, "logits_scaling": 1.7, "residual_multiplier": 0.4, "attention_multiplier": 0.2}
FALCON = {"mamba_n_heads": 6, "mamba_n_groups": 2, "mamba_d_state": 5, "mamba_d_conv": 3, "mamba_d_ssm": 42, "mamba_d_head": 7, "rms_norm_eps": 1e-2,
          "embedding_multiplier": 3.0, "lm_head_multiplier": 0.4, "key_multiplier": 0.3, "attention_in_multiplier": 1.3,
          "attention_out_multiplier": 0.7,
          "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.6, "ssm_multipliers": [0.5, 1.5, 0.8, 1.2, 0.7], "mlp_multipliers": [0.9, 0.4],
          "rope_parameters": {"rope_type": "default", "rope_theta": 700.0}}
UNGATED = {**GROUPS, "n_shared_experts": 1, "moe_shared_expert_intermediate_size": 40}
# The same of models with recurrent layers.
HYBRIDS = {
    "qwen3_5": ("qwen3_5_text", {**LINEAR, "num_hidden_layers": 7, "full_attention_interval": 3, "linear_num_value_heads": 9,
                                 "linear_conv_kernel_dim": 3, "tie_word_embeddings": True}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**LINEAR, **SPARSE, "num_hidden_layers": 5, "full_attention_interval": 4, "linear_num_value_heads": 3}),
    "qwen3_next": ("qwen3_next", {**LINEAR, **SPARSE, "num_hidden_layers": 4, "full_attention_interval": 2, "linear_num_value_heads": 6,
                                  "mlp_only_layers": [1], "norm_topk_prob": False}),
    "nemotron_h": ("nemotron_h", {**MAMBA, **UNGATED, "hybrid_override_pattern": "ME*-MEM*-", "head_dim": 10, "moe_latent_size": 20}),
    "nemotron_h_dense": ("nemotron_h", {**MAMBA, "hybrid_override_pattern": "M-*M-*M", "head_dim": 12, "use_bias": True, "mlp_bias": True,
                                        "use_conv_bias": False, "n_groups": 1}),
    "granite4": ("granitemoehybrid", {**BAMBA, "num_local_experts": 6, "num_experts_per_tok": 3, "num_hidden_layers": 5,
                                      "layer_types": ["mamba", "mamba", "attention", "mamba", "mamba"], "tie_word_embeddings": True}),
    "falcon_h1": ("falcon_h1", {**FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "num_hidden_layers": 3, "head_dim": 12}),
    "falcon_h1_plain": ("falcon_h1", {**FALCON, "mamba_n_groups": 1, "projectors_bias": True, "attention_bias": True, "mlp_bias": True,
                                      "mamba_proj_bias": True, "mamba_conv_bias": False, "tie_word_embeddings": True}),
    "granite4_dense": ("granitemoehybrid", {**BAMBA, "num_local_experts": 0, "num_experts_per_tok": 0, "mamba_proj_bias": True,
                                            "num_hidden_layers": 6,
                                            "layer_types": ["mamba", "attention", "mamba"] * 2, "mamba_n_groups": 1, "mamba_conv_bias": False,
                                            "position_embedding_type": "rope", "time_step_limit": [0.3, 1.5]}),
}


def make_tiny(architecture: str, directory, seed: int = 0, dtype: str = "float32", tokenizer: bool = True,
              fused: bool = False, **overrides) -> str:
    """Writes a random checkpoint that transformers made, and returns its path.

    Args:
      architecture: a key of ARCHITECTURES, EXPERTS or HYBRIDS.
      directory: created if needed.
      seed: of the weights. Norms, biases and embeddings are random too, so that none of them can be dropped unseen.
      dtype: dtype of the stored tensors.
      tokenizer: also write the tiny tokenizer.
      fused: experts as transformers holds them, not as checkpoints were published.
      overrides: entries of the HF config.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, entries = (ARCHITECTURES | EXPERTS | HYBRIDS)[architecture]
    config = AutoConfig.for_model(model_type, **{**SIZES, **entries, **overrides})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1 or name.endswith("_bias"):  # those of all experts are a matrix
                weight.normal_(0.0, 0.3)
                if "norm" in name and not zero_centred(model_type, name):
                    weight.add_(1.0)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.3)
    model.to(getattr(torch, dtype)).save_pretrained(directory, save_original_format=not fused)
    if tokenizer:
        make_tokenizer(directory)
    return str(directory)


def zero_centred(model_type: str, name: str) -> bool:
    """Whether a norm scales by 1 + weight: Gemma's and those of models with recurrent layers, but for the recurrences'."""
    return "gemma" in model_type or model_type.startswith(("qwen3_5", "qwen3_next")) and "linear_attn" not in name


def make_tokenizer(directory, vocab_size: int = VOCAB) -> str:
    """Writes a character tokenizer in HF format (<pad> <bos> <eos> <unk>, then characters); returns its path."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    characters = "".join(map(chr, range(33, 127))).replace("_", "")
    tokens = special + [" ", "\n", *characters][:vocab_size - len(special)]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>",
                                   eos_token="<eos>", unk_token="<unk>")
    fast.chat_template = ("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
                          "{% if add_generation_prompt %}assistant: {% endif %}")
    fast.save_pretrained(directory)
    return str(directory)


def edit_config(directory, **entries) -> None:
    """Changes entries of a folder's config.json; None removes one."""
    path = Path(directory) / "config.json"
    config = {**json.loads(path.read_text()), **entries}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
