"""The world that both servers of test_openenv.py serve: a number to be found. `python openenv_world.py PORT [KIND [CAPACITY]]`
serves it by the public package openenv, whose classes are made here."""

import os
import random
import sys


class World:
    """Without anything of a server."""

    def reset(self, seed=None, level=1):
        self.target, self.steps = random.Random(seed).randrange(1, 1 + 8 * level), 0
        return {"seen": f"1 to {8 * level}"}, None, False

    def step(self, said):
        self.steps += 1
        if said == "die":
            raise RuntimeError("no more")
        if said == "exit":
            os._exit(3)
        number = int(said) if str(said).isdigit() else 0
        if number == self.target:
            return {"seen": "right"}, 1.0, True
        return {"seen": "higher" if number < self.target else "lower"}, -0.125, False

    def state(self):
        return {"episode_id": None, "step_count": self.steps, "target": self.target}


def real(kind):
    """(class of the environment, of its actions, of its observations)."""
    from openenv.core.env_server import Action, Environment, Observation, State

    class Text(Action):
        say: str

    class Number(Action):
        number: int

    class Both(Action):
        number: int
        why: str

    class Seen(Observation):
        seen: str

    class Told(State):
        target: int = 0

    class Served(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self):
            super().__init__()
            self.world = World()

        def reset(self, seed=None, episode_id=None, level=1):
            seen, reward, done = self.world.reset(seed, level)
            return Seen(**seen, reward=reward, done=done)

        def step(self, action, timeout_s=None):
            seen, reward, done = self.world.step(action.say if kind == "text" else action.number)
            return Seen(**seen, reward=reward, done=done)

        @property
        def state(self):
            return Told(**self.world.state())

    return Served, {"text": Text, "number": Number, "both": Both}[kind], Seen


def main(port, kind="text", capacity="64"):
    import uvicorn
    from openenv.core.env_server import create_fastapi_app
    uvicorn.run(create_fastapi_app(*real(kind), max_concurrent_envs=int(capacity)), host="127.0.0.1", port=int(port), log_level="error")


if __name__ == "__main__":
    main(*sys.argv[1:])
