"""Models of published sizes and the jobs that the plan's showings use; weights are never loaded."""

from jaxrl.config import default_config, put

QWEN = {"model_type": "qwen2", "vocab_size": 151936, "num_key_value_heads": 2, "max_position_embeddings": 32768,
        "tie_word_embeddings": True, "eos_token_id": 151645}
QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
         "eos_token_id": 151645}
QWEN3_MOE = {**QWEN3, "model_type": "qwen3_moe", "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
             "norm_topk_prob": True, "tie_word_embeddings": False}
LLAMA = {"model_type": "llama", "eos_token_id": 2}
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
