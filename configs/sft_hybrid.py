"""Supervised fine-tuning of a small hybrid (three layers with a recurrence, one with attention) on the embedded task.

Command:   jaxrl train --config=configs/sft_hybrid.py
Hardware:  any; two CPU cores.
Expected:  not measured in full yet.

Variants:  tiny (learns next to nothing; for tests).
"""

from jaxrl.config import default_config
from jaxrl.errors import ConfigError


def get_config(arg=None):
    """arg: None or 'tiny'."""
    if arg not in (None, "tiny"):
        raise ConfigError(f"sft_hybrid has the variant 'tiny', not {arg!r}")
    c = default_config()
    c.run.recipe = "sft"

    c.model.init = "random"
    c.model.tokenizer = "jaxrl://arith/tokenizer"
    c.model.config = dict(
        model_type="qwen3_5_text", vocab_size=128, hidden_size=96, num_hidden_layers=4, num_attention_heads=3,
        num_key_value_heads=3, head_dim=32, intermediate_size=256, linear_num_key_heads=3, linear_num_value_heads=3,
        linear_key_head_dim=32, linear_value_head_dim=32, max_position_embeddings=256, rope_theta=10000.0,
        tie_word_embeddings=True, initializer_range=0.08)

    c.data.path = ("jaxrl://arith/sft.jsonl",)
    c.data.shuffle = False  # from demonstrations that work to demonstrations that jump
    c.data.prompts_per_step = 16
    c.data.max_prompt_tokens = 40
    c.rollout.max_new_tokens = 72  # longest demonstration

    c.optimizer.lr = 3e-3
    c.optimizer.b2 = 0.98
    c.optimizer.schedule = "cosine"
    c.optimizer.floor = 0.05
    c.optimizer.warmup_steps = 20

    c.train.steps = 550
    c.train.row_lengths = (128,)
    c.train.tokens_per_microbatch = 1024
    c.train.row_counts = 1
    c.log.every_steps = 50
    c.checkpoint.every_steps = 0
    if arg == "tiny":
        c.model.config.hidden_size, c.model.config.intermediate_size = 32, 64
        c.model.config.num_hidden_layers, c.model.config.full_attention_interval = 2, 2
        c.model.config.num_attention_heads = c.model.config.num_key_value_heads = 2
        c.model.config.linear_num_key_heads, c.model.config.linear_num_value_heads = 2, 4
        c.model.config.head_dim = c.model.config.linear_key_head_dim = c.model.config.linear_value_head_dim = 8
        c.data.max_rows = 512
        c.train.steps = 4
        c.log.every_steps = 2
    return c
