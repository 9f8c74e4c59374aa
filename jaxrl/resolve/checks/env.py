"""Checks of what an episode is (env.function, env.program, env.tools) and where it runs."""

from __future__ import annotations


def ray(cfg) -> list[str]:
    """Returns the problem of episode and reward workers in two Ray clusters, as a list; [] without one."""
    env, reward = cfg.env, cfg.reward
    if env.executor == reward.executor == "ray" and env.ray_address != reward.ray_address:
        return [f"env.ray_address={env.ray_address!r} and reward.ray_address={reward.ray_address!r}: a process is in "
                "one Ray cluster; give both the same address"]
    return []


def elsewhere(cfg) -> list[str]:
    """Returns the problems of an episode that is defined twice (env.function, program, tools, mcp), has options that it
    does not take, or is OpenEnv's without servers."""
    e, out = cfg.env, []
    if e.function and (e.tools or e.mcp):
        out.append(f"env.function and env.{'tools' if e.tools else 'mcp'}: an episode function sends its own tools "
                   "(chat.send(..., tools=)); give one of the two")
    if e.program and (e.function or e.tools or e.mcp):
        out.append("env.program beside env.function, env.tools or env.mcp: a program brings its own tools and is the "
                   "episode; give one of them")
    if e.program and e.options:
        out.append(f"env.options={dict(e.options)}: no use with env.program; write them into its command line")
    if e.mcp and not e.tools and e.options:
        out.append(f"env.options={dict(e.options)}: no use with env.mcp; write them into the servers' command lines")
    if e.function == "openenv" and not e.servers:
        out.append("env.function=openenv without env.servers: name the services, as in env.servers=http://host:8000")
    return out
