"""Losses, advantages and rewards with one fault each, and what of a config names them: for run.mode=certify to find."""

import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.algorithms import clipped_policy_loss
from jaxrl.algorithms.numerics import sequence_sum

HERE = str(Path(__file__).resolve())
CALLS = itertools.count()
SEEN = []


def clip(t, cfg, **changes):
    t = t._replace(**changes)
    return clipped_policy_loss(t.logp, t.old, t.advantage, t.mask, cfg.clip_low, cfg.clip_high)


# ---- losses


def sound(t, cfg):
    return clip(t, cfg)


def by_microbatch(t, cfg):
    loss, stats = clip(t, cfg)
    return loss / jnp.maximum(t.mask.sum(), 1), stats


def by_width(t, cfg):
    loss, stats = clip(t, cfg)
    return loss / t.mask.shape[-1], stats


def by_slots(t, cfg):
    """The mean over an array that holds padding, too."""
    loss, stats = clip(t, cfg)
    return loss - loss.mean(), stats


def mask_late(t, cfg):
    loss, stats = clip(t, cfg)
    return jnp.where(jnp.roll(t.mask, 1, axis=-1).at[:, 0].set(False), loss, 0), stats


def without_the_end(t, cfg):
    """The last token of each answer is not learnt."""
    last = t.sequences != jnp.roll(t.sequences, -1, axis=-1)
    loss, stats = clip(t, cfg)
    return jnp.where(last, 0, loss), stats


def across_answers(t, cfg):
    """A sum over the row instead of over the answer."""
    ratio = jnp.cumsum(jnp.where(t.mask, t.logp - t.old, 0), axis=-1)
    return jnp.where(t.mask, -t.advantage * jnp.exp(0.1 * ratio + t.logp - jax.lax.stop_gradient(t.logp)), 0), {}


def kl_without_gradient(t, cfg):
    loss, stats = clip(t, cfg)
    return loss + jnp.where(t.mask, 0.1 * jax.lax.stop_gradient(jnp.square(t.logp - t.ref)), 0), stats


def kl_k1(t, cfg):
    """Has a gradient, whose expectation is 0."""
    loss, stats = clip(t, cfg)
    return loss + jnp.where(t.mask, 0.1 * (t.logp - t.ref), 0), stats


def entropy_without_gradient(t, cfg):
    loss, stats = clip(t, cfg)
    return loss - jnp.where(t.mask, 0.1 * jax.lax.stop_gradient(t.entropy), 0), stats


def descends(t, cfg):
    return clip(t, cfg, advantage=-t.advantage)


def reads_padding(t, cfg):
    centred = t.logp - (t.logp - t.old).sum(-1, keepdims=True)
    loss, stats = clip(t, cfg)
    return loss + jnp.where(t.mask, 0.1 * centred, 0), stats


def of_answers(t, cfg):
    """Sound: a ratio by answer, summed with the ids of the answers."""
    ratio = sequence_sum(jnp.where(t.mask, t.logp - t.old, 0), t.sequences)
    return jnp.where(t.mask, -t.advantage * jnp.exp(0.1 * ratio + t.logp - jax.lax.stop_gradient(t.logp)), 0), {}


# ---- advantages


def of_batch(inputs):
    """Less the mean of all groups."""
    return np.nan_to_num(inputs.scores - np.nanmean(inputs.scores))


def reshaped(inputs):
    """As if no answer were ever missing."""
    size = np.count_nonzero(inputs.groups == inputs.groups[0])
    table = np.nan_to_num(np.resize(inputs.scores, (-(-len(inputs.scores) // size), size)))
    return (table - table.mean(1, keepdims=True)).ravel()[:len(inputs.scores)]


def by_place(inputs):
    """Weighs early answers more."""
    own = np.array([s - np.nanmean(inputs.scores[inputs.groups == g])
                    for s, g in zip(inputs.scores, inputs.groups, strict=True)])
    return np.nan_to_num(own) / (1 + np.arange(len(own)))


def remembers(inputs):
    """A running baseline, which is in no checkpoint."""
    SEEN.append(np.nanmean(inputs.scores))
    return np.nan_to_num(inputs.scores - np.mean(SEEN))


# ---- rewards


def digits(prompt, completion, **columns):
    return sum(c.isdigit() for c in completion) / max(len(completion), 1)


def counts(prompt, completion, **columns):
    return digits(prompt, completion) + 0.01 * next(CALLS)


def first_column(prompt, completion, **columns):
    return float(str(next(iter(columns.values()))) in completion)


def ranked(prompts, completions, **columns):
    """Against the best of whatever else it is asked for."""
    found = [digits("", c) for c in completions]
    return [x / max(max(found), 1e-9) for x in found]


def first_wins(prompts, completions, **columns):
    seen = set()
    return [float(c not in seen and not seen.add(c)) for c in completions]


def no_empty(prompt, completion, **columns):
    return float(completion.split()[0] == "17")


def as_int(prompt, completion, **columns):
    inner = completion.partition("\\boxed{")[2].partition("}")[0]
    return float(int(inner) > 17) if inner[:1].isdigit() else 0.0


def loss(name, **more):
    return {"algorithm.policy_loss": f"{HERE}:{name}", **more}


def advantage(name):
    return {"algorithm.advantage": f"{HERE}:{name}"}


def reward(name):
    return {"reward.functions": (f"{HERE}:{name}",)}


KL = {"algorithm.kl.coef": 0.01}
# what is wrong -> (options, the claim that finds it)
DEFECTS = {
    "loss normalised per microbatch": (loss("by_microbatch"), "microbatches"),
    "loss divided by the length of the rows": (loss("by_width"), "padding"),
    "mean over slots that hold padding": (loss("by_slots"), "padding"),
    "mask off by one": (loss("mask_late"), "packing"),
    "last token of each answer left out": (loss("without_the_end"), "tokens"),
    "ratio summed over a row instead of an answer": (loss("across_answers"), "packing"),
    "KL without gradient": (loss("kl_without_gradient", **KL), "terms"),
    "KL whose expected gradient is 0": (loss("kl_k1", **KL), "terms"),
    "entropy without gradient": (loss("entropy_without_gradient"), "terms"),
    "sign": (loss("descends"), "objective"),
    "padding that is read": (loss("reads_padding"), "mask"),
    "advantage that leaks between groups": (advantage("of_batch"), "groups"),
    "advantage that takes every group for full": (advantage("reshaped"), "groups"),
    "advantage by place": (advantage("by_place"), "order"),
    "advantage with a memory": (advantage("remembers"), "resume"),
    "reward that counts its calls": (reward("counts"), "reward_twice"),
    "reward of the first column": (reward("first_column"), "reward_columns"),
    "reward against the rest of the batch": (reward("ranked"), "reward_rows"),
    "reward that depends on order": (reward("first_wins"), "reward_rows"),
    "reward that fails on an empty answer": (reward("no_empty"), "reward_hostile"),
    "reward that fails on other digits": (reward("as_int"), "reward_hostile"),
}
SOUND = {"own clip": loss("sound"), "own ratio of answers": loss("of_answers")}
