"""What keys of TRL's RLOO mean together, where it is not GRPO's. See systems/trl_rloo.py."""

from __future__ import annotations

from jaxrl.migrate import common
from jaxrl.migrate.systems import trl_meaning as trl
from jaxrl.migrate.table import Migration

LOSS = '''"""TRL's RLOO loss: PPO's clipped surrogate of a completion, whose ratio is the product of its tokens' ratios.

Each token has its completion's loss, so that algorithm.aggregation=sequence_mean is the mean over completions.
"""

import jax.numpy as jnp

from jaxrl.algorithms import clipped_policy_loss, sequence_sum


def clipped(tokens, cfg):
    gap = jnp.where(tokens.mask, tokens.logp - tokens.old, 0)
    whole = sequence_sum(gap, tokens.sequences)
    bounds = cfg.clip_low, cfg.clip_high
    return clipped_policy_loss(tokens.logp, tokens.old, tokens.advantage, tokens.mask, *bounds, log_ratio=whole)
'''
ADVANTAGE = '''"""TRL's normalize_advantages: leave-one-out advantages, brought to mean 0 and deviation 1 over the
completions of the step, with 1e-4 added to the deviation."""

import numpy as np

from jaxrl.algorithms import group_advantages


def normalized(inputs):
    advantages, _ = group_advantages(inputs.scores, inputs.groups, mean="leave_one_out", std="none")
    present = np.isfinite(inputs.scores)
    _, group = np.unique(inputs.groups, return_inverse=True)
    present &= np.bincount(group, present)[group] > 1  # a completion without another has no baseline
    if present.sum() < 2:
        return np.zeros(len(advantages))
    own = advantages[present]
    return np.where(present, (advantages - own.mean()) / (own.std(ddof=1) + 1e-4), 0.0)
'''


def loss(m: Migration):
    """Sets RLOO's loss: the mean over completions of -min(r A, clip(r) A), r the ratio of the whole completion, and
    algorithm.mask_truncated.

    With several optimizer steps per batch algorithm.policy_loss is a function in NAME_loss.py, with algorithm.clip_low,
    clip_high and aggregation=sequence_mean. With one r is 1 and the gradient that of -A log pi(completion):
    algorithm.policy_loss=pg, aggregation=sequence_sum, and the bounds are inert. Truncated completions that are masked
    leave a known difference if there is a KL."""
    low, high = m.number("epsilon"), m.number("epsilon_high")
    by = "epsilon" if high is None else "epsilon_high"
    high = low if high is None else high
    if trl.updates(m) > 1:
        file = f"{m.name}_loss.py"
        keys = ("num_iterations", "steps_per_generation", "generation_batch_size")
        m.files[file] = LOSS
        m.set("algorithm.policy_loss", f"./{file}:clipped", *keys)
        m.set("algorithm.aggregation", "sequence_mean", *keys)
        m.set("algorithm.clip_low", low, "epsilon")
        m.set("algorithm.clip_high", high, by)
        m.facts["clip"] = f"{1 - low:g} to {1 + high:g}, of the ratio of whole completions"
    else:
        m.set("algorithm.policy_loss", "pg", "epsilon", "epsilon_high")
        m.set("algorithm.aggregation", "sequence_sum", "epsilon", "epsilon_high")
        why = "one optimizer step per batch: the ratio is 1, and nothing is clipped"
        for key in ("epsilon", "epsilon_high"):
            m.mark(key, "inert", why)
        m.facts["clip"] = "none: " + why
    m.set("algorithm.mask_truncated", m.flag("mask_truncated_completions"), "mask_truncated_completions")
    if m.flag("mask_truncated_completions") and m.number("beta"):
        m.differs("a truncated completion's reward has its KL taken off; TRL's KL of one is 0")


def advantages(m: Migration):
    """Sets leave-one-out advantages: the score less the mean of the group's others, of scores that are clipped, then
    have their KL taken off.

    They are algorithm.advantage_mean=leave_one_out, advantage_std=none and whiten=False, with reward_clip_range as
    `clip`. normalize_advantages makes algorithm.advantage a function in NAME_advantage.py, which brings a step's to
    mean 0 and deviation 1. Before TRL 1.6 there is a known difference of completions without a score."""
    m.set("algorithm.advantage_mean", "leave_one_out", "num_generations")
    m.set("algorithm.advantage_std", "none", "normalize_advantages")
    m.facts["advantage"] = "leave one out"
    if m.flag("normalize_advantages"):
        file = f"{m.name}_advantage.py"
        m.files[file] = ADVANTAGE
        m.set("algorithm.advantage", f"./{file}:normalized", "normalize_advantages")
        m.facts["advantage"] += ", mean 0 and deviation 1 over the completions of a step"
    else:
        m.set("algorithm.advantage", "outcome", "normalize_advantages")
    m.set("algorithm.whiten", False, "normalize_advantages")
    if m["reward_clip_range"] is not None:
        clip(m)
    if trl.before(m, "1.6"):
        m.differs(
            "a completion that no function scores has no advantage and is in no baseline; before 1.6 it counts 0"
        )


def clip(m: Migration):
    """Sets reward.clip to half of reward_clip_range's width. Bounds that are not opposite also set reward.bias: it
    moves the rewards by the bounds' middle, which the leave-one-out baseline takes off, and is a known difference.

    Raises Unreadable for anything but two finite numbers, the lower one first."""
    ends = m.list("reward_clip_range")
    if len(ends) != 2 or not all(type(end) in (int, float) and abs(end) < float("inf") for end in ends):
        raise m.wrong("reward_clip_range", "two numbers, the least and the largest reward")
    low, high = ends
    if low >= high:
        raise m.wrong("reward_clip_range", "the least reward before the largest")
    m.set("reward.clip", (high - low) / 2, "reward_clip_range")
    if middle := (low + high) / 2:
        m.set("reward.bias", -middle, "reward_clip_range")
        m.differs(
            f"rewards are moved by {-middle:g} to be clipped on both sides of 0 (reward.bias): advantages are the "
            f"same, and the rewards that are logged are lower by {middle:g}"
        )


def kl(m: Migration):
    """Sets algorithm.kl.* by beta: the KL of a completion, log pi_old - log pi_ref summed over its tokens, is taken off
    its reward (k1 in the reward). Also as `trl_meaning.synced_reference`."""
    common.kl(m, m.number("beta"), "k1", "reward", "beta")
    trl.synced_reference(m)


def mismatch(m: Migration):
    """Sets algorithm.mismatch.correction=none: log-probs are the trainer's own, whatever engine has sampled."""
    m.set("algorithm.mismatch.correction", "none", "use_vllm")
