"""GRPO that generates while it trains: configs/grpo.py with completions up to two weight syncs old and the decoupled loss.

Command:   jaxrl train --config=configs/grpo_async.py
Hardware:  any; two CPU cores. Sampler and trainer take turns there, and what is saved is decoding with idle slots; see
           docs/explanations/asynchrony.md for engines that work beside the trainer.
Expected:  92.1 % (seeds 0, 1 and 2; 126 problems) after 40 steps; 80 % after 18, 16 and 18 steps, as without
           staleness.

Completions that are begun continue under new weights; every token keeps the version that drew it. The proximal policy is
the one at the beginning of a step: with one optimizer step per batch the current one, so that nothing has to be scored for
it. Tokens of older weights count with the ratio of the two, and not at all above 5.

Variants:  tiny (a few seconds, learns next to nothing; for tests).
"""

from jaxrl.config import load_config


def get_config(arg=None):
    """arg: None or 'tiny'."""
    c = load_config("grpo" + (f":{arg}" if arg else ""))
    c.run.dir = ""  # runs/grpo_async
    c.algorithm.preset, c.algorithm.old_logprobs = "decoupled_ppo", "auto"
    c.rollout.max_staleness = 2
    c.rollout.partial = True
    return c
