"""The warm start of configs/env.py: a small decoder from scratch, supervised on all turns of demonstrated episodes.

Command:   runs by itself inside configs/env.py; alone: jaxrl train --config=configs/env_sft.py:calc
Hardware:  any; two CPU cores.
Expected:  see configs/env.py. The last demonstrations leave out what pays.
"""

from jaxrl.config import default_config
from jaxrl.errors import ConfigError

STEPS = {"calc": (2, 600), "guess": (1, 150), "library": (2, 350), "lake": (2, 225), "repair": (1, 200)}  # passes over sft.jsonl, steps in all


def get_config(arg=None):
    """arg: calc, guess, library, lake or repair."""
    if arg not in STEPS:
        raise ConfigError(f"env_sft has the variants {', '.join(STEPS)}, not {arg!r}: --config=configs/env_sft.py:calc")
    c = default_config()
    c.run.recipe = "sft"

    c.model.init = "random"
    c.model.tokenizer = "jaxrl://chat/tokenizer"
    c.model.config = dict(
        model_type="qwen3", vocab_size=160, hidden_size=96, num_hidden_layers=3, num_attention_heads=3,
        num_key_value_heads=3, head_dim=32, intermediate_size=256, max_position_embeddings=512, rope_theta=100.0,  # near tokens matter
        tie_word_embeddings=True, initializer_range=0.08)

    passes, steps = STEPS[arg]
    c.data.path = (f"jaxrl://{arg}/sft.jsonl",) * passes + (f"jaxrl://{arg}/lazy.jsonl",)
    c.data.train_turns = "all"
    c.data.shuffle = False  # the lazy demonstrations come last
    c.data.prompts_per_step = 16
    c.data.max_prompt_tokens = 32
    c.rollout.max_new_tokens = 224  # all behind the first prompt

    c.optimizer.lr = 3e-3
    c.optimizer.b2 = 0.98
    c.optimizer.schedule = "cosine"
    c.optimizer.floor = 0.05
    c.optimizer.warmup_steps = 20

    c.train.steps = steps
    c.train.row_lengths = (256,)
    c.train.tokens_per_microbatch = 1024
    c.train.row_counts = 1
    c.log.every_steps = 50
    c.checkpoint.every_steps = 0
    return c
