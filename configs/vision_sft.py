"""Supervised fine-tuning on questions about pictures: a small decoder with a tower for images, both from scratch.

Command:   jaxrl train --config=configs/vision_sft.py
Hardware:  any; two CPU cores.
Expected:  99.7 to 100 % of the held-out questions on three seeds; 19 to 22 % with grey or exchanged pictures (docs/guides/vision.md).

Variants:  wrong (its last 36 steps are on wrong completions, so that it looks and answers wrong: the warm start of configs/vision.py);
           short (ends before it looks well: the warm start of configs/vision_jobs.py, configs/vision_vllm.py and of the kinds below);
           tiny (a few seconds, learns next to nothing; for tests);
           qwen2_5, qwen2_5_short, qwen2_5_tiny: the same with a Qwen2.5-VL in place of a Qwen3-VL, whose tower attends within windows;
           gemma3, gemma3_short, gemma3_tiny: with a Gemma 3, whose image tokens see each other in the decoder.
"""

from jaxrl.config import default_config
from jaxrl.errors import ConfigError

KINDS = {"qwen2_5": "qwen2_5_vl", "gemma3": "gemma3"}  # of the variants, but for the first
STEPS = {"short": 300, "wrong": 636}  # the others: 700
RIGHT = 600  # of "wrong", before the steps on wrong completions


def gemma():
    """The config.json of a small Gemma 3: SigLIP on pictures of 24 x 24 pixels, 9 image tokens."""
    text = dict(model_type="gemma3_text", vocab_size=64, hidden_size=96, num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=3,
                head_dim=32, query_pre_attn_scalar=32, intermediate_size=256, max_position_embeddings=256, initializer_range=0.08,
                sliding_window=16, sliding_window_pattern=3)
    tower = dict(model_type="siglip_vision_model", num_hidden_layers=2, hidden_size=64, num_attention_heads=2, intermediate_size=128,
                 image_size=24, patch_size=4, vision_use_head=False)
    return dict(model_type="gemma3", image_token_index=5, boi_token_index=3, eoi_token_index=4, mm_tokens_per_image=9,
                text_config=text, vision_config=tower)


def model_of(kind):
    """The config.json of a small model of this model_type."""
    if kind == "gemma3":
        return gemma()
    text = dict(vocab_size=64, hidden_size=96, num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=3,
                intermediate_size=256, max_position_embeddings=256, tie_word_embeddings=True, initializer_range=0.08)
    tower = dict(depth=2, hidden_size=64, num_heads=2, intermediate_size=128, patch_size=4, out_hidden_size=96, initializer_range=0.08)
    rope = dict(rope_type="default", rope_theta=10000.0, mrope_section=[6, 5, 5])
    if kind == "qwen3_vl":
        text |= dict(model_type="qwen3_vl_text", head_dim=32, rope_parameters=dict(**rope, mrope_interleaved=True))
        tower |= dict(model_type="qwen3_vl_vision", num_position_embeddings=36, deepstack_visual_indexes=[0])
    else:
        text |= dict(model_type="qwen2_5_vl_text", rope_parameters=rope)
        tower |= dict(model_type="qwen2_5_vl_vision", window_size=16, fullatt_block_indexes=[1])  # windows of 2 x 2 cells
    return dict(model_type=kind, image_token_id=5, vision_start_token_id=3, vision_end_token_id=4, video_token_id=5, tie_word_embeddings=True,
                text_config=text, vision_config=tower)


def get_config(arg=None):
    """arg: None, 'short' or 'tiny', with 'qwen2_5', 'qwen2_5_', 'gemma3' or 'gemma3_' before it, or 'wrong'."""
    name = next((name for name in KINDS if (arg or "").startswith(name)), "")
    kind, size = KINDS.get(name, "qwen3_vl"), (arg or "").removeprefix(name).removeprefix("_")
    if size not in ("", "short", "tiny") and arg != "wrong":
        raise ConfigError("vision_sft has the variants 'short', 'wrong', 'tiny', 'qwen2_5', 'qwen2_5_short', 'qwen2_5_tiny', 'gemma3', "
                          f"'gemma3_short' and 'gemma3_tiny', not {arg!r}")
    c = default_config()
    c.run.recipe = "sft"

    c.model.init = "random"
    c.model.tokenizer = "jaxrl://shapes/tokenizer" + ("_gemma3" if kind == "gemma3" else "")
    c.model.config = model_of(kind)

    c.data.path = ("jaxrl://shapes/sft.parquet",)
    if kind != "gemma3":  # which sees every image as its own square
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

    c.train.steps = STEPS.get(size, 700)
    c.train.row_lengths = (256,)
    c.train.tokens_per_microbatch = 2048
    c.train.row_counts = 1
    c.log.every_steps = 50
    c.checkpoint.every_steps = 0
    c.eval.sets = ("test=jaxrl://shapes/test.parquet",)
    c.eval.every_steps = 0
    c.eval.controls = ("blank", "swapped")
    if arg == "wrong":
        end_wrong(c)
    if size == "tiny":
        c.data.max_rows = 256
        c.data.prompts_per_step = 8
        c.train.steps = 4
        c.eval.max_rows = 16
        c.log.every_steps = 2
        c.reward.workers = 1
    return c


def end_wrong(c):
    """Sets rows and learning rate so that the steps after the first `RIGHT` see wrong completions alone."""
    c.data.path = ()
    c.data.sources = {
        "right": dict(path="jaxrl://shapes/sft.parquet", weight=((0, 1.0), (RIGHT - 1, 1.0), (RIGHT, 0.0))),
        "wrong": dict(path="jaxrl://shapes/pairs.parquet", completion_column="rejected", weight=((0, 0.0), (RIGHT - 1, 0.0), (RIGHT, 1.0)))}
    c.optimizer.decay_steps, c.optimizer.floor = RIGHT - c.optimizer.warmup_steps, 0.15  # where wrong ones begin: still 1.5e-4
