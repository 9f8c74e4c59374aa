"""An environment of skyrl-gym as a class with reset and step."""

import skyrl_gym

from jaxrl.envs import Step


class SkyRL:
    def __init__(self, env: str, max_turns: int):
        self.name, self.max_turns = env, max_turns

    def reset(self, row, seed):
        extras = {"reward_spec": {"ground_truth": row["answer"]}, "max_turns": self.max_turns}
        self.env = skyrl_gym.make(self.name, extras=extras)
        messages, _ = self.env.init([{"role": "user", "content": row["question"]}])
        return messages

    def step(self, action):
        out = self.env.step(str(action))
        return Step(out["observations"] or None, float(out["reward"]), bool(out["done"]))

    def close(self):
        self.env.close()
