"""The same as an agent of openai-agents."""

import sys

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled
from agents.exceptions import AgentsException
from calculator import calculate


@function_tool(name_override="calculate")
def tool(expression: str) -> str:
    """The value of a sum of whole numbers."""
    return calculate(expression)


def main():
    set_tracing_disabled(True)
    set_default_openai_api("chat_completions")
    try:
        done = Runner.run_sync(Agent(name="sums", model="gpt-5-mini", tools=[tool]), sys.argv[1], max_turns=3)
        print(done.final_output)
    except AgentsException as e:  # too many turns, a tool that there is not
        print(f"no answer: {type(e).__name__}")


main()
