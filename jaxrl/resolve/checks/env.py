"""Checks of what an episode is (env.function, env.program, env.tools) and where it runs."""

from __future__ import annotations

from jaxrl.config.load import get
from jaxrl.config.option import no_effect
from jaxrl.config.schema import SCHEMA

OF_PROGRAMS = ("score", "crash", "train_calls")
OF_RAY = ("ray_address", "ray_cpus")


def ray(cfg) -> list[str]:
    """Where workers of episodes and of rewards run."""
    out = []
    for group in ("env", "reward"):
        o = cfg[group]
        if o.executor != "ray":
            remedy = f"set {group}.executor=ray, or leave it out"
            out += [no_effect(f"{group}.{name}", o[name], f"with {group}.executor=local", remedy)
                    for name in OF_RAY if o[name] != SCHEMA[group][name].default]
    env, reward = cfg.env, cfg.reward
    if env.executor == reward.executor == "ray" and env.ray_address != reward.ray_address:
        out.append(f"env.ray_address={env.ray_address!r} and reward.ray_address={reward.ray_address!r}: a process is "
                   "in one Ray cluster; give both the same address")
    return out


def elsewhere(cfg) -> list[str]:
    """What an episode is."""
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
    if e.servers and e.function != "openenv":
        out.append(no_effect("env.servers", e.servers, f"with env.function={e.function!r}", "set env.function=openenv, "
                             "or leave it out"))
    if e.mcp_session != "episode" and not e.mcp:
        out.append(no_effect("env.mcp_session", e.mcp_session, "without env.mcp", "leave it out"))
    if not e.program:
        out += [no_effect(f"env.{name}", get(e, name), "without env.program", "leave it out")
                for name in OF_PROGRAMS if get(e, name) != SCHEMA["env"][name].default]
    return out
