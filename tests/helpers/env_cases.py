"""Pools of episodes for tests: real processes, and a model that is a function."""

import sys
import time

from jaxrl.config.load import default_config, put
from jaxrl.envs.pool import EpisodePool
from jaxrl.workers.supervisor import children


def options(**changes):
    """config.env with these options."""
    config = default_config()
    for name, value in changes.items():
        put(config, f"env.{name}", value)
    return config.env


def pool(function="", user=None, run_dir="", sandbox=None, **changes) -> EpisodePool:
    return EpisodePool(options(function=function, **changes), user, run_dir, sandbox)


def turn(text="", *calls, finish="stop", thinking="") -> dict:
    """A turn of the model. calls: (name, arguments), None for arguments that cannot be read."""
    found = [{"id": f"c{k}", "name": name, "arguments": arguments, "error": "" if arguments is not None else "no JSON"}
             for k, (name, arguments) in enumerate(calls)]
    written = {"written": text} if any(call["error"] for call in found) else {}
    return {"text": text, "thinking": thinking, "calls": found, "finish": finish, "tokens": [7, 2]} | written


def play(episodes, rows, model=lambda id, k, said: turn("ok"), seconds=600.0, seed=lambda id: 1):
    """Plays rows {id: columns} to their ends. model: (id, number of the turn, data of the send) -> turn, or None for no
    answer. Returns ({id: event}, {id: [data of its sends]}); each id ends once."""
    for id, row in rows.items():
        episodes.start(id, {"row": row, "prompt": row.get("prompt", "go"), "seed": seed(id)})
    return follow(episodes, set(rows), model, seconds)


def follow(episodes, ids, model=lambda id, k, said: turn("ok"), seconds=600.0):
    ends, said, deadline = {}, {id: [] for id in ids}, time.monotonic() + seconds
    while set(ends) != ids:
        assert time.monotonic() < deadline, f"never ended: {sorted(ids - set(ends))}"
        for event in episodes.events(0.2):
            assert event.id not in ends, "an episode ends once"
            if event.kind == "send":
                said[event.id].append(event.data)
                reply = model(event.id, len(said[event.id]) - 1, event.data)
                if reply is not None:
                    episodes.reply(event.id, reply)
            else:
                ends[event.id] = event
    return ends, said


def texts(said) -> list[str]:
    """What an episode said, message by message."""
    return [message["content"] for data in said for message in data["messages"]]


def alone(episodes, seconds=300.0):
    """Waits until nothing that episodes started is left below the one worker (Linux)."""
    def below(pid):
        found = children(pid)
        return len(found) + sum(map(below, found))

    (worker,), deadline = episodes._workers, time.monotonic() + seconds
    while sys.platform == "linux" and below(worker.process._process.pid) != 1:
        assert time.monotonic() < deadline, "something outlives its episode"
        time.sleep(0.05)
