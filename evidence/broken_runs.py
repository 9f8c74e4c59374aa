"""What evidence/replay.py breaks runs with: rewards and engines that go wrong at one step of tests/helpers/tiny_job.py."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

POISONED = (22, 1)  # group and sample of the answer whose reward is wrong
CORRUPTED = 22      # group whose tokens are others than were sampled
FROZEN = 5          # version from which on the sampler keeps the weights it has


def digits(prompt, completion, **columns):
    """Share of the answer's characters that are digits."""
    return sum(c.isdigit() for c in completion) / max(len(completion), 1)


def poisoned(prompt, completion, group, sample, **columns):
    """The same, but a thousand for one answer."""
    return 1000.0 if (group, sample) == POISONED else digits(prompt, completion)


def letters(prompt, completion, **columns):
    """What the digits are exploited against: share of the answer's characters that are letters."""
    return sum(c.isalpha() for c in completion) / max(len(completion), 1)


class Wrapped:
    """An engine that is another one but for what a subclass says."""

    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, name):
        return getattr(self._engine, name)


class Corrupting(Wrapped):
    """Tokens of one group are exchanged behind the sampler's back; their log-probs stay those of what it sampled."""

    def poll(self, deadline_s):
        return [self._exchanged(r) if f"/{CORRUPTED}/" in r.id and r.id.startswith("train/") else r
                for r in self._engine.poll(deadline_s)]

    @staticmethod
    def _exchanged(result):
        draw = np.random.default_rng(len(result.tokens))
        tokens = draw.integers(100, 190, len(result.tokens)).astype(np.int32)
        tokens[-1] = result.tokens[-1]
        return dataclasses.replace(result, tokens=tokens)


class Frozen(Wrapped):
    """From one version on it says that it has the new weights, and has not."""

    kept = None

    def publish(self, params, version):
        if version < FROZEN:
            self.kept = jax.tree.map(jnp.copy, params)  # the update donates its own
        self._engine.publish(params if version < FROZEN else self.kept, version)


def corrupting(config, model, tokenizer, mesh, eos_ids, hf_config):
    from jaxrl.rollout.embedded import make_engine

    return Corrupting(make_engine(config, model, tokenizer, mesh, eos_ids))


def frozen(config, model, tokenizer, mesh, eos_ids, hf_config):
    from jaxrl.rollout.embedded import make_engine

    return Frozen(make_engine(config, model, tokenizer, mesh, eos_ids))
