"""The warm start of configs/grpo.py: a small decoder from scratch, supervised on demonstrations of the embedded task.

Command:   runs by itself inside configs/grpo.py; alone: jaxrl train --config=configs/grpo_sft.py
Hardware:  any; two CPU cores.
Expected:  docs/measurements/quickstart.md. Late demonstrations give only the boxed answer, so greedy accuracy stays low.

Variants:  tiny (a few seconds, learns next to nothing; for tests).
"""

from jaxrl.config import default_config
from jaxrl.errors import ConfigError


def get_config(arg=None):
    """arg: None or 'tiny'."""
    if arg not in (None, "tiny"):
        raise ConfigError(f"grpo_sft has the variant 'tiny', not {arg!r}")
    c = default_config()
    c.run.recipe = "sft"

    c.model.init = "random"
    c.model.tokenizer = "jaxrl://arith/tokenizer"
    c.model.config = dict(  # qk-norm (qwen3) halves the demonstrations it takes to learn where the next step stands
        model_type="qwen3", vocab_size=128, hidden_size=96, num_hidden_layers=3, num_attention_heads=3,
        num_key_value_heads=3, head_dim=32, intermediate_size=256, max_position_embeddings=256, rope_theta=10000.0,
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
        c.model.config.hidden_size, c.model.config.num_hidden_layers = 32, 2
        c.model.config.num_attention_heads = c.model.config.num_key_value_heads = 2
        c.model.config.head_dim, c.model.config.intermediate_size = 16, 64
        c.data.max_rows = 512
        c.train.steps = 30
        c.optimizer.lr = 5e-3
        c.log.every_steps = 10
    return c
