"""Models of published sizes and the jobs that the plan's showings use; weights are never loaded."""

from jaxrl.config.load import default_config, put

QWEN = {"model_type": "qwen2", "vocab_size": 151936, "num_key_value_heads": 2, "max_position_embeddings": 32768,
        "tie_word_embeddings": True, "eos_token_id": 151645}
QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
         "eos_token_id": 151645}
QWEN3_MOE = {**QWEN3, "model_type": "qwen3_moe", "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
             "norm_topk_prob": True, "tie_word_embeddings": False}
LLAMA = {"model_type": "llama", "eos_token_id": 2}
QWEN35 = {"model_type": "qwen3_5_text", "vocab_size": 248320, "head_dim": 256, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
          "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "partial_rotary_factor": 0.25,
          "rope_theta": 1e7, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6}
QWEN35_MOE = {**QWEN35, "model_type": "qwen3_5_moe_text", "num_key_value_heads": 2, "tie_word_embeddings": False}
MODELS = {
    "tiny": {**QWEN, "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
             "num_attention_heads": 4, "eos_token_id": 2},
    "0.5B": {**QWEN, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5B": {**QWEN, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "0.6B": {**QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
             "tie_word_embeddings": True},
    "8B": {**QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "32B": {**QWEN3, "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64},
    # config.json of Qwen/Qwen3-30B-A3B and Qwen/Qwen3-235B-A22B
    "30B-A3B": {**QWEN3_MOE, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
                "num_attention_heads": 32},
    "235B-A22B": {**QWEN3_MOE, "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536,
                  "num_hidden_layers": 94, "num_attention_heads": 64},
    # of deepseek-ai/DeepSeek-V3 and openai/gpt-oss-120b
    "671B": {"model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
             "num_hidden_layers": 61, "first_k_dense_replace": 3, "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256,
             "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
             "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
             "max_position_embeddings": 163840, "tie_word_embeddings": False, "eos_token_id": 1},
    "gpt-oss-120b": {"model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
                     "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 128, "num_experts_per_tok": 4,
                     "sliding_window": 128, "max_position_embeddings": 131072, "tie_word_embeddings": False, "eos_token_id": 200002},
    # the text of Qwen/Qwen3.5-4B, 27B, 35B-A3B and 397B-A17B
    "3.5-4B": {**QWEN35, "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32, "num_attention_heads": 16,
               "num_key_value_heads": 4, "linear_num_value_heads": 32, "tie_word_embeddings": True},
    "3.5-27B": {**QWEN35, "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64, "num_attention_heads": 24,
                "num_key_value_heads": 4, "linear_num_value_heads": 48, "tie_word_embeddings": False},
    "3.5-35B-A3B": {**QWEN35_MOE, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16, "linear_num_value_heads": 32,
                    "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
    "3.5-397B-A17B": {**QWEN35_MOE, "hidden_size": 4096, "num_hidden_layers": 60, "num_attention_heads": 32, "linear_num_value_heads": 64,
                      "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024},
    "7B": {**LLAMA, "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096},
    "70B": {**LLAMA, "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
            "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 131072},
}


def job(model: str, target: str, **overrides):
    """A plan of GRPO with a random model; overrides are options written group__name."""
    c = default_config()
    c.run.mode, c.run.dir, c.plan.target = "plan", "runs/plan", target
    c.model.init, c.model.config = "random", MODELS[model]
    for name, value in overrides.items():
        put(c, name.replace("__", "."), value)
    return c


def grpo(prompts: int, group: int, prompt: int, answer: int, microbatch: int, **more) -> dict:
    return {"data__prompts_per_step": prompts, "rollout__group_size": group, "data__max_prompt_tokens": prompt,
            "rollout__max_new_tokens": answer, "train__tokens_per_microbatch": microbatch, **more}
