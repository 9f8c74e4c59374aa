"""What Tunix's keys of agents and environments mean: episodes of several turns. See systems/tunix.py."""

from __future__ import annotations

from jaxrl.migrate import episodes
from jaxrl.migrate.systems.tunix_meaning import AGENTIC, ROLLOUT, algorithm
from jaxrl.migrate.table import Migration

EPISODE = 1800.0  # seconds of an episode, unset


def turns(m: Migration):
    """Sets rollout.max_staleness of agentic jobs and, of those with an agent, an environment or several turns, an
    episode that the user is asked to write, with env.max_turns, env.episode_seconds, env.step_seconds, env.in_flight,
    the bound of the conversation and, without reward functions, reward.functions=(). Other algorithms set nothing."""
    if algorithm(m) != AGENTIC:
        return
    env, agent, bound = m.text("env_class_path"), m.text("agent_class_path"), m.integer(AGENTIC + "max_turns")
    ahead = m.integer(AGENTIC + "off_policy_steps")
    if ahead:
        m.set("rollout.max_staleness", ahead, AGENTIC + "off_policy_steps")
    if not env and not agent and (bound or 1) == 1:
        m.mark(AGENTIC + "max_turns", "automatic", "one turn")
        return
    said = [
        (s.key, s.value)
        for name in ("agent_class_path", "env_class_path", "agent_kwargs.*", "env_kwargs.*")
        for s in m.all(name)
    ]
    steps = next((s for s in m.all("env_kwargs.*") if s.key.endswith("max_steps")), None)
    turns_ = bound or (int(steps.value) if steps and str(steps.value).isdigit() else None)  # a text "5", too
    if not m.list("reward_functions"):
        m.set("reward.functions", (), "reward_functions")
    keys = (AGENTIC + "max_turns",) if bound else ("env_class_path", "env_kwargs.*")
    episodes.episode(m, env or agent, said, turns_, *keys)
    _bounds(m, turns_)
    both = m.options["data.max_prompt_tokens"][0] + m.options["rollout.max_new_tokens"][0]
    episodes.longest(m, both, ROLLOUT + "total_generation_steps")
    for s in (*m.all("agent_class_path"), *m.all("agent_kwargs.*"), *m.all("env_kwargs.*")):
        m.mark(s.key, "ask", "written into the stub of the episode")


def _bounds(m: Migration, most: int | None):
    """Episodes at once, and the seconds of one: those of a turn times the turns, where no others are given."""
    whole, turn, at_once = (AGENTIC + n for n in ("episode_timeout", "per_turn_timeout_secs", "max_concurrency"))
    seconds = m.number(whole) or (m.number(turn) or 0) * (most or 1) or EPISODE
    for option in ("env.episode_seconds", "env.step_seconds"):
        m.set(option, float(seconds), whole, turn)
    m.differs("an episode's time holds its sampling there; env.episode_seconds is the environment's time alone")
    if m.integer(at_once):
        m.set("env.in_flight", m.integer(at_once), at_once)
