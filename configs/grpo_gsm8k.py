r"""GRPO on GSM8K with Qwen2.5-1.5B-Instruct, from the Hugging Face hub.

Command:   jaxrl train --config=configs/grpo_gsm8k.py
           Local copies of model and data: --config.model.path=FOLDER --config.data.path=TRAIN.jsonl
           --config.eval.sets=test=TEST.jsonl (rows with GSM8K's columns `question` and `answer`).
Hardware:  one GPU of 80 GB or more (pip install -e '.[cuda12]' or '.[cuda13]').
Expected:  the public figure to match is SkyRL's: accuracy 0.796 on the test split after 140 steps on 4 H100 (same
           model and data; its steps are larger: 1024 prompts x 5 samples).

What was never run here: this config with the real weights or the real data. A model of this shape with random weights
ran on an H200 (docs/measurements/speed.md: an update of 256 completions of 512 tokens 3.2 s, their rollout 3.9 s). What is tested: three
steps of it on a CPU with a random model of Qwen2.5's shape and a file of GSM8K's columns, changed by overrides only
(tests/models/test_embedded_configs.py).

No variants.
"""

from jaxrl.config import default_config
from jaxrl.errors import ConfigError


def get_config(arg=None):
    """Takes no argument."""
    if arg is not None:
        raise ConfigError(f"grpo_gsm8k has no variants, not {arg!r}")
    c = default_config()
    c.run.recipe = "rl"
    c.model.path = "Qwen/Qwen2.5-1.5B-Instruct"

    c.data.path = ("openai/gsm8k",)
    c.data.subset = "main"
    c.data.prompt_column = "question"
    c.data.answer_column = "answer"
    c.data.answer_pattern = r"#### (.*)"
    c.data.system_prompt = r"Please reason step by step, and put your final answer within \boxed{}."
    c.data.prompts_per_step = 256
    c.data.max_prompt_tokens = 512

    c.rollout.group_size = 8
    c.rollout.max_new_tokens = 1024

    c.reward.functions = ("math",)
    c.algorithm.kl.coef = 0.001
    c.algorithm.num_minibatches = 4
    c.optimizer.lr = 1e-6

    c.train.steps = 140
    c.train.row_lengths = (2048,)
    c.train.tokens_per_microbatch = 16384

    c.eval.sets = ("test=openai/gsm8k@test",)
    c.eval.every_steps = 10
    return c
