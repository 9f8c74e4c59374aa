"""Opens the workers of a run's episodes, and wraps an engine of turns in the engine of episodes.

run.setup calls it. The episodes themselves are in rollout.episodes and jaxrl.envs.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace

from jaxrl.data.turns import TurnRenderer
from jaxrl.envs.pool import EpisodePool
from jaxrl.rollout.episodes import EpisodeEngine

log = logging.getLogger("jaxrl")


def open_episode_pool(s) -> EpisodePool | None:
    """Starts the workers that run a Session's episodes, which the Session closes; returns None for a run without
    episodes."""
    c, inputs = s.spec, s.inputs
    if not c.episodes:
        return None
    env = SimpleNamespace(**{name: c.env[name] for name in c.env})
    env.judged = bool(c.reward.functions or c.reward.model.path)
    env.function, env.tools = inputs.env or env.function, inputs.tools or env.tools
    return s.close_at_end(EpisodePool(env, c.user, c.run.dir, c.sandbox))


def episode_engine(engine, pool: EpisodePool, spec, tokenizer, images=None):
    """Returns an EpisodeEngine, which runs episodes of `pool` with an engine that samples turns.

    images: the job's ImageSource; None without images. Warns if the template leaves out images in replies of tools.

    Raises ConfigError if the chat template cannot render new messages after sampled tokens."""
    renderer = TurnRenderer(spec, tokenizer, pool.tools, images=None if images is None else images.tokens)
    shows = images is not None and spec.env.image_tokens > 0
    renderer.check(bool(pool.tools), shows)
    if shows and pool.tools and not renderer.tool_images:
        log.warning("the chat template leaves out images in replies of tools; they follow in a user's message")
    return EpisodeEngine(engine, pool, renderer, spec.env, longest=spec.longest, seed=spec.run.seed,
                         keep=spec.rollout.compaction, images=images)
