"""A service of OpenEnv by the public package: `python openenv_sums.py PORT`. The question is one of the row; the answer is scored."""

import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Answer(Action):
    text: str


class Question(Observation):
    text: str


class Sums(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, question="", answer=""):
        self.answer, self.state_now = answer, State()
        return Question(text=question)

    def step(self, action, timeout_s=None):
        self.state_now.step_count += 1
        right = action.text == self.answer
        return Question(text="right" if right else "again", reward=float(right), done=right or self.state_now.step_count == 2)

    @property
    def state(self):
        return self.state_now


uvicorn.run(create_fastapi_app(Sums, Answer, Question, max_concurrent_envs=64), host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
