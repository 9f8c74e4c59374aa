"""Supervised fine-tuning on conversations of four kinds, mixed: a small decoder from scratch learns their answers.

Command:   jaxrl train --config=configs/sft_chat.py
Hardware:  any; two CPU cores.
Expected:  loss per trained token from 1.54 (first 50 steps) over 0.093 (steps 151 to 200) to 0.017 (last 50), in 3 min
           47 s on a very busy machine (jax 0.10.2).

Every turn of the assistant is trained on, calls of tools included; what a user or a tool said is masked. The short
games come first: their share falls from 60 % to 20 % over the first 200 steps.

Variants:  tiny (a few seconds, learns next to nothing; for tests).
"""

from jaxrl.config import default_config
from jaxrl.errors import ConfigError


def get_config(arg=None):
    """arg: None or 'tiny'."""
    if arg not in (None, "tiny"):
        raise ConfigError(f"sft_chat has the variant 'tiny', not {arg!r}")
    c = default_config()
    c.run.recipe = "sft"

    c.model.init = "random"
    c.model.tokenizer = "jaxrl://chat/tokenizer"
    c.model.config = dict(
        model_type="qwen3", vocab_size=160, hidden_size=96, num_hidden_layers=3, num_attention_heads=3,
        num_key_value_heads=3, head_dim=32, intermediate_size=256, max_position_embeddings=512, rope_theta=100.0,  # near tokens matter
        tie_word_embeddings=True, initializer_range=0.08)

    c.data.sources = {
        "guess": dict(path="jaxrl://guess/sft.jsonl", weight=((0, 0.6), (200, 0.2))),
        "lake": dict(path="jaxrl://lake/sft.jsonl", weight=((0, 0.2), (200, 0.2))),
        "library": dict(path="jaxrl://library/sft.jsonl", weight=((0, 0.1), (200, 0.3))),
        "calc": dict(path="jaxrl://calc/sft.jsonl", weight=((0, 0.1), (200, 0.3))),
    }
    c.data.train_turns = "all"
    c.data.prompts_per_step = 16
    c.data.max_prompt_tokens = 32
    c.rollout.max_new_tokens = 224  # all behind the first prompt

    c.optimizer.lr = 3e-3
    c.optimizer.b2 = 0.98
    c.optimizer.schedule = "cosine"
    c.optimizer.floor = 0.05
    c.optimizer.warmup_steps = 20

    c.train.steps = 600
    c.train.row_lengths = (256,)
    c.train.tokens_per_microbatch = 1024
    c.train.row_counts = 1
    c.log.every_steps = 50
    c.checkpoint.every_steps = 0
    if arg == "tiny":
        c.model.config.hidden_size, c.model.config.num_hidden_layers, c.model.config.intermediate_size = 32, 2, 64
        c.model.config.num_attention_heads = c.model.config.num_key_value_heads = 2
        c.train.steps = c.log.every_steps = 4
    return c
