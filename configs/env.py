"""GRPO in episodes of several turns: a small decoder from scratch, a short SFT warm start, then reinforcement learning.

Command:   jaxrl train --config=configs/env.py:calc      (or guess, library, lake, repair, lake_pixels, spot)
Hardware:  any; two CPU cores. repair needs bubblewrap (docs/guides/sandbox.md).
Expected:  held-out accuracy, greedy, after the warm start and after 40 steps (seeds 0, 1, 2): calc 25 -> 100 % each, guess 34 -> 97,
           88, 94 %, library 36, 42, 36 -> 100 %; with the warm start 91 to 118, 53 and 166 to 172 seconds each on two cores.
           calc through real vLLM: 25 -> 100 % (seed 0).
           lake 11 -> 17 % (seed 0), for which 40 steps are too few. lake_pixels 27 -> 43 %,
           4 % on grey pictures (seed 0, docs/guides/vision.md).
           spot 60 -> 65 %, on grey pictures 21 -> 10 % (seed 0, see docs/guides/vision.md), for which 40 steps are few.
           repair, which takes 100 steps: 2, 15, 5 -> 90, 58, 78 % of 40 held-out functions, 141 to 164 seconds. Of the 64 functions
           it learns from it repairs 94, 88, 95 % in the last ten steps.
           evidence/environments_learn.py repeats calc, guess and library with controls: without the tool, with one guess, with one look-up
           at most 3 %; demonstrations for as long as RL took at most 38 %; rewards dealt out at random calc 14, 25, 0 %, guess 31, 19, 22 %,
           library 14, 5, 9 %.

calc      sums and differences of three numbers of five digits, which are beyond so small a model, with a calculator as a tool. The
          demonstrations call it with random signs; the reward reads the final answer.
guess     a number from 1 to 32 in six guesses, each answered with `higher` or `lower`. The demonstrations go on one by one.
library   'city of boss of ann', 'city of boss of friend of teacher of ann': two, three or four things to look up, one after the other;
          the facts are other ones in each row. The demonstrations follow as many relations as chance says, mostly two.
lake      mazes with holes to fall into or a box to push, as text. The demonstrations walk at random.
lake_pixels, spot   pictures, read by a small Qwen3-VL: the maps of `lake` drawn, and `click the red circle` with three tries.
repair    functions that do not do what their name says, in two tries; unit tests in the sandbox decide, and the first that fails is told
          after the first. The demonstrations say what stands there already.

Where nothing but the last answer may tell, the policy finds out that halving pays, and doing what the question says.
jaxrl/envs/builtin.py has the environments, docs/guides/environments.md says how to write one.
"""

from jaxrl.config import default_config
from jaxrl.errors import ConfigError

# name -> (turns, longest turn, longest episode) in tokens
LENGTHS = {"calc": (3, 40, 128), "guess": (6, 4, 64), "library": (5, 20, 112), "lake": (8, 4, 192), "repair": (2, 10, 76),
           "lake_pixels": (8, 4, 256), "spot": (3, 6, 112)}
PICTURES = {"lake_pixels": (8 * 16, 32 * 32), "spot": (3 * 9, 24 * 24)}  # image tokens of an episode; pixels, 8 x 8 of which are a token


def get_config(arg=None):
    """arg: calc, guess, library, lake, repair, lake_pixels or spot."""
    if arg not in LENGTHS:
        raise ConfigError(f"env has the variants {', '.join(LENGTHS)}, not {arg!r}: --config=configs/env.py:calc")
    c = default_config()
    c.run.recipe = "rl"
    c.run.warm_start = f"env_sft:{arg}"

    if arg == "calc":
        c.env.tools = ("jaxrl.envs.builtin:calculate",)
        c.reward.functions = ("exact",)
    else:
        c.env.function = arg
        c.reward.functions = ()
        c.data.answer_column = ""
    c.env.max_turns, c.rollout.max_new_tokens, c.train.max_sequence_tokens = LENGTHS[arg]
    c.env.parser = "pythonic"
    c.env.max_observation_tokens = 24

    c.data.path = (f"jaxrl://{arg}/train.jsonl",)
    c.data.prompts_per_step = 16
    c.data.max_prompt_tokens = 32

    c.rollout.engine = "jax"  # for a model this small
    c.rollout.group_size = 8
    c.rollout.slots = 128
    c.rollout.compaction = False  # another slot count is another program, and a tiny model gains little from it
    c.optimizer.lr = 1e-4 if arg in PICTURES else 2e-4 if arg == "library" else 4e-4
    c.optimizer.warmup_steps = 10

    c.train.steps = 100 if arg == "repair" else 40
    c.train.row_lengths = (256,)
    c.train.tokens_per_microbatch = 2048
    c.train.row_counts = 1

    if arg in PICTURES:
        c.env.image_tokens, c.data.image_min_pixels = PICTURES[arg]
        c.data.image_max_pixels, c.data.max_prompt_tokens = c.data.image_min_pixels, 48
        c.eval.controls = ("blank",)

    c.eval.sets = (f"test=jaxrl://{arg}/test.jsonl",)
    c.eval.every_steps = 20
    return c
