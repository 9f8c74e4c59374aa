"""The same as a tool-calling agent of smolagents, with its own prompt."""

import os
import sys

from calculator import calculate
from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def calculate_sum(expression: str) -> str:
    """The value of a sum of whole numbers.

    Args:
        expression: numbers with + or - between them
    """
    return calculate(expression)


def main():
    model = OpenAIServerModel("any", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    agent = ToolCallingAgent(tools=[calculate_sum], model=model, max_steps=3, verbosity_level=0)
    print(agent.run(sys.argv[1]))


main()
