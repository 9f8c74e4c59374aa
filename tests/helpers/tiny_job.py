"""A config of a few seconds for tests, and its reward: a random two-layer model learns to answer with digits.

Used as a file, too: python -m jaxrl.main --config=tests/helpers/tiny_job.py
"""

from pathlib import Path

from jaxrl.config.load import default_config

MODEL = {
    "model_type": "qwen2",
    "vocab_size": 192,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
MAMBA = {  # a recurrence, experts, attention, an MLP: each a layer
    "model_type": "nemotron_h", "vocab_size": 192, "hidden_size": 32, "intermediate_size": 64, "hybrid_override_pattern": "ME*M-",
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2,
    "ssm_state_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16, "max_position_embeddings": 512,
}
FALCON = {  # a recurrence beside attention in each layer, one key head for all value heads
    "model_type": "falcon_h1", "vocab_size": 192, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_rms_norm": True,
    "max_position_embeddings": 512,
}
HYBRID = {
    "model_type": "qwen3_5_text",
    "vocab_size": 192,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "full_attention_interval": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}

RECURRENT = {"hybrid": HYBRID, "nemotron": MAMBA, "falcon": FALCON}


def digits(prompt, completion, **columns):
    """Share of the answer's characters that are digits."""
    return sum(c.isdigit() for c in completion) / max(len(completion), 1)


def get_config(arg=None):
    c = default_config()
    c.model.init, c.model.config, c.model.tokenizer = "random", MODEL, "jaxrl://arith/tokenizer"
    c.data.path, c.data.max_rows = ("jaxrl://arith/train.jsonl",), 24
    c.data.prompts_per_step, c.data.max_prompt_tokens = 4, 96
    c.rollout.group_size, c.rollout.max_new_tokens = 8, 12
    c.rollout.prompt_lengths = (96,)
    c.reward.functions = (f"{Path(__file__).resolve()}:digits",)
    c.reward.pass_mark, c.reward.workers = 0.5, 1
    c.eval.sets, c.eval.max_rows, c.eval.every_steps = ("test=jaxrl://arith/test.jsonl",), 6, 4
    c.train.steps, c.train.tokens_per_microbatch = 8, 512
    c.optimizer.lr, c.optimizer.warmup_steps = 3e-2, 1
    c.checkpoint.every_steps, c.checkpoint.keep = 2, 10
    c.log.tensorboard = False
    if arg in RECURRENT:
        c.model.config = RECURRENT[arg]
    if arg == "sft":
        c.run.recipe = "sft"
        c.data.path, c.eval.sets, c.log.every_steps = ("jaxrl://arith/sft.jsonl",), (), 2
        c.rollout.max_new_tokens = 64
    return c
