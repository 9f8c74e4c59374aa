"""Supervised fine-tuning of a small hybrid (three layers with a recurrence, one with attention) on the embedded task.

Command:   jaxrl train --config=configs/sft_hybrid.py
Hardware:  any; two CPU cores.
Expected:  loss per trained token 1.87 (step 50), 0.70 (step 100), 0.29 (step 550), 0.05 (step 650), 0.20 (step 1100)
           (CPU, jax 0.10.2); 192 seconds on two cores. The last demonstrations give only the boxed answer.

Variants:  tiny (learns next to nothing; for tests).
"""

from jaxrl.config import load_config


def get_config(arg=None):
    """arg: None or 'tiny'. The job of configs/grpo_sft.py with another model."""
    c = load_config("grpo_sft" + (f":{arg}" if arg else ""))
    c.run.dir = ""  # its own
    c.model.config = dict(
        model_type="qwen3_5_text", vocab_size=128, hidden_size=96, num_hidden_layers=4, num_attention_heads=3,
        num_key_value_heads=3, head_dim=32, intermediate_size=256, linear_num_key_heads=3, linear_num_value_heads=3,
        linear_key_head_dim=32, linear_value_head_dim=32, max_position_embeddings=256, rope_theta=10000.0,
        tie_word_embeddings=True, initializer_range=0.08)
    c.train.steps = 1100  # the demonstrations twice: after once it copies clauses of `skip` problems wrong, and GRPO leaves that so
    if arg == "tiny":
        c.model.config.hidden_size, c.model.config.intermediate_size = 32, 64
        c.model.config.num_hidden_layers, c.model.config.full_attention_interval = 2, 2
        c.model.config.num_attention_heads = c.model.config.num_key_value_heads = 2
        c.model.config.linear_num_key_heads, c.model.config.linear_num_value_heads = 2, 4
        c.model.config.head_dim = c.model.config.linear_key_head_dim = c.model.config.linear_value_head_dim = 8
        c.train.steps, c.optimizer.lr, c.log.every_steps = 4, 3e-3, 2
    return c
