"""Supervised fine-tuning on questions about pictures: a small decoder with a tower for images, both from scratch.

Command:   jaxrl train --config=configs/vision_sft.py
Hardware:  any; two CPU cores.
Expected:  docs/guides/vision.md, which has the accuracy on grey and on exchanged pictures, too.

Variants:  short (ends before it looks well: the warm start of configs/vision.py); tiny (a few seconds, learns next to nothing; for tests).
"""

from jaxrl.config import default_config
from jaxrl.errors import ConfigError


def get_config(arg=None):
    """arg: None, 'short' or 'tiny'."""
    if arg not in (None, "short", "tiny"):
        raise ConfigError(f"vision_sft has the variants 'short' and 'tiny', not {arg!r}")
    c = default_config()
    c.run.recipe = "sft"

    c.model.init = "random"
    c.model.tokenizer = "jaxrl://shapes/tokenizer"
    c.model.config = dict(
        model_type="qwen3_vl", image_token_id=5, vision_start_token_id=3, vision_end_token_id=4, video_token_id=5,
        tie_word_embeddings=True,
        text_config=dict(
            model_type="qwen3_vl_text", vocab_size=64, hidden_size=96, num_hidden_layers=3, num_attention_heads=3,
            num_key_value_heads=3, head_dim=32, intermediate_size=256, max_position_embeddings=256,
            tie_word_embeddings=True, initializer_range=0.08,
            rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[6, 5, 5], mrope_interleaved=True)),
        vision_config=dict(
            model_type="qwen3_vl_vision", depth=2, hidden_size=64, num_heads=2, intermediate_size=128, patch_size=4,
            out_hidden_size=96, num_position_embeddings=36, deepstack_visual_indexes=[0], initializer_range=0.08))

    c.data.path = ("jaxrl://shapes/sft.parquet",)
    c.data.image_min_pixels = c.data.image_max_pixels = 24 * 24  # the pictures' own size: a cell is one image token
    c.data.prompts_per_step = 32
    c.data.max_prompt_tokens = 32
    c.rollout.engine = "jax"
    c.rollout.max_new_tokens = 12
    c.rollout.prompt_lengths = (32,)
    c.reward.functions = ("boxed",)

    c.optimizer.lr = 1e-3
    c.optimizer.b2 = 0.98
    c.optimizer.schedule = "cosine"
    c.optimizer.floor = 0.05
    c.optimizer.warmup_steps = 20

    c.train.steps = 300 if arg == "short" else 700
    c.train.row_lengths = (256,)
    c.train.tokens_per_microbatch = 2048
    c.train.row_counts = 1
    c.log.every_steps = 50
    c.checkpoint.every_steps = 0
    c.eval.sets = ("test=jaxrl://shapes/test.parquet",)
    c.eval.every_steps = 0
    c.eval.controls = ("blank", "swapped")
    if arg == "tiny":
        c.data.max_rows = 256
        c.train.steps = 10
        c.eval.max_rows = 16
        c.log.every_steps = 5
        c.reward.workers = 1
    return c
