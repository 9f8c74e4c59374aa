"""The warm start of configs/env.py: a small decoder from scratch, supervised on all turns of demonstrated episodes.

Command:   runs by itself inside configs/env.py; alone: jaxrl train --config=configs/env_sft.py:calc
Hardware:  any; two CPU cores.
Expected:  see configs/env.py. The last demonstrations leave out what pays.
"""

from jaxrl.config import default_config
from jaxrl.errors import ConfigError

STEPS = {"calc": (2, 600), "guess": (1, 150), "library": (2, 350), "lake": (2, 225), "repair": (1, 200), "lake_pixels": (3, 225),
         "spot": (6, 465)}  # passes over the first demonstrations, steps in all
PICTURES = {"lake_pixels": (32 * 32, 16), "spot": (24 * 24, 32)}  # pixels, rows a step
VISION = dict(  # a small Qwen3-VL, whose patches have 4 x 4 pixels
    model_type="qwen3_vl", image_token_id=5, vision_start_token_id=3, vision_end_token_id=4, video_token_id=5, tie_word_embeddings=True,
    text_config=dict(
        model_type="qwen3_vl_text", vocab_size=64, hidden_size=96, num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=3,
        head_dim=32, intermediate_size=256, max_position_embeddings=512, tie_word_embeddings=True, initializer_range=0.08,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[6, 5, 5], mrope_interleaved=True)),
    vision_config=dict(
        model_type="qwen3_vl_vision", depth=2, hidden_size=64, num_heads=2, intermediate_size=128, patch_size=4, out_hidden_size=96,
        initializer_range=0.08, num_position_embeddings=64, deepstack_visual_indexes=[0]))


def get_config(arg=None):
    """arg: calc, guess, library, lake, repair, lake_pixels or spot."""
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
    kind = "jsonl"
    if arg in PICTURES:
        kind, c.model.tokenizer, c.model.config = "parquet", "jaxrl://pictures/tokenizer", VISION
        c.data.image_min_pixels = c.data.image_max_pixels = PICTURES[arg][0]
    c.data.path = (f"jaxrl://{arg}/sft.{kind}",) * passes + (f"jaxrl://{arg}/lazy.{kind}",)
    c.data.train_turns = "all"
    c.data.shuffle = False  # the lazy demonstrations come last
    c.data.prompts_per_step = PICTURES[arg][1] if arg in PICTURES else 16
    c.data.max_prompt_tokens = 48 if arg in PICTURES else 32
    c.rollout.max_new_tokens = 256 - c.data.max_prompt_tokens  # all behind the first prompt

    c.optimizer.lr = 1e-3 if arg in PICTURES else 3e-3
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
