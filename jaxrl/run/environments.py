"""The workers that play a run's episodes, and the engine of episodes around the engine of turns."""

from __future__ import annotations

from types import SimpleNamespace

from jaxrl.data.turns import TurnRenderer
from jaxrl.envs.pool import EpisodePool
from jaxrl.rollout.episodes import EpisodeEngine


def open_pool(s) -> EpisodePool | None:
    """The workers of a Session's episodes, starting; None for runs without."""
    c, given = s.spec, s.given
    if not c.episodes:
        return None
    env = SimpleNamespace(**{name: c.env[name] for name in c.env})
    env.judged = bool(c.reward.functions or c.reward.model.path)
    env.function, env.tools = given.env or env.function, given.tools or env.tools
    return s.own(EpisodePool(env, c.user, c.run.dir, c.sandbox))


def in_episodes(engine, pool: EpisodePool, spec, tokenizer):
    """An engine of episodes around one of turns. Raises ConfigError where the chat template cannot tell new messages
    behind what was sampled."""
    renderer = TurnRenderer(spec, tokenizer, pool.tools)
    renderer.check(bool(pool.tools))
    return EpisodeEngine(engine, pool, renderer, spec.env, longest=spec.longest, seed=spec.run.seed,
                         keep=spec.rollout.compaction)
