"""An environment of verifiers: a sum, a tool that computes it, a reward. Nothing in it knows what trains it."""

import verifiers.v1 as vf
from calculator import calculate as value


class Sum(vf.TaskData):
    answer: str


class Calculator(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    def calculate(self, expression: str) -> str:
        """The value of a sum of whole numbers."""
        return value(expression)


class SumTask(vf.Task[Sum, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Calculator(vf.ToolsetConfig())]

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)


class SumsConfig(vf.TasksetConfig):
    prompt: str = "1+2"
    answer: str = "3"


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self):
        return [SumTask(Sum(prompt=self.config.prompt, answer=self.config.answer), self.config.task)]


__all__ = ["Sums"]

if __name__ == "__main__":
    Calculator.run()
