"""Videos: which way a square moves, which no single frame tells. A small decoder with a tower, both from scratch.

Command:   jaxrl train --config=configs/video.py           # supervised
           jaxrl train --config=configs/video.py:rl        # GRPO after a warm start that ends early
Hardware:  any; two CPU cores.
Expected:  docs/guides/vision.md, which also has the accuracy of the controls blank and swapped.

Variants:  short (ends before it sees well: the warm start of rl); rl; each with 'qwen2_5_' or 'qwen2_' before it: with a Qwen2.5-VL or a Qwen2-VL
           in place of a Qwen3-VL (qwen2_5, qwen2: the first one); each with 'tiny_' before it: a few seconds, learns next to nothing; for tests.
"""

from jaxrl.config import load_config
from jaxrl.errors import ConfigError

KINDS = {"": "qwen3_vl", "qwen2_5": "qwen2_5_vl", "qwen2": "qwen2_vl"}
PIXELS, FRAMES = 24 * 24, 4  # of a frame, of a video


def get_config(arg=None):
    """arg: None, 'short' or 'rl', with 'tiny_', 'qwen2_5_' or 'qwen2_' before it, in this order."""
    rest, tiny = (arg or "").removeprefix("tiny"), (arg or "").startswith("tiny")
    rest = rest.removeprefix("_")
    kind = next((kind for kind in ("qwen2_5", "qwen2") if rest.startswith(kind)), "")
    job = rest.removeprefix(kind).removeprefix("_")
    if job not in ("", "short", "rl"):
        raise ConfigError(f"video has the variants 'short' and 'rl', with 'tiny_', 'qwen2_5_' or 'qwen2_' before them, not {arg!r}")
    c = load_config("vision" if job == "rl" else "vision_sft")
    c.run.dir = ""
    c.data.path = (f"jaxrl://moving/{'train' if job == 'rl' else 'sft'}.parquet",)
    c.eval.sets = ("test=jaxrl://moving/test.parquet",)
    c.data.image_min_pixels = c.data.image_max_pixels = None
    c.data.video_max_pixels = PIXELS * (1 if kind else FRAMES)  # the videos' own size
    c.data.max_prompt_tokens = 64
    c.rollout.prompt_lengths = (64,)
    c.rollout.max_new_tokens = 6
    if job == "rl":
        c.run.warm_start = "video:" + "_".join(filter(None, ("tiny" * tiny, kind, "short")))
        c.train.steps = 40
    else:
        c.model.tokenizer = "jaxrl://moving/tokenizer"
        c.model.config = model_of(KINDS[kind], c.model.config.to_dict())
        c.train.steps = 35 if job == "short" else 60
    if tiny:
        c.train.steps = 2
        c.data.max_rows, c.eval.max_rows = 64, 8
        c.data.prompts_per_step, c.rollout.group_size, c.rollout.slots = 4, 4, 16
        c.train.tokens_per_microbatch = 1024
        c.log.every_steps = c.checkpoint.every_steps = 1
        c.reward.workers = 1
    return c


def model_of(kind, qwen3):
    """The config.json of a small model of this model_type; that of vision_sft for a Qwen3-VL."""
    out = {**qwen3, "video_token_id": 6}
    if kind == "qwen3_vl":
        return out
    given = load_config("vision_sft:qwen2_5").model.config.to_dict()
    if kind == "qwen2_vl":
        tower = dict(depth=2, embed_dim=64, hidden_size=96, num_heads=2, mlp_ratio=2, patch_size=4, initializer_range=0.08)
        given |= {"model_type": kind, "vision_config": tower, "text_config": {**given["text_config"], "model_type": "qwen2_vl_text"}}
    return {**given, "video_token_id": 6}
