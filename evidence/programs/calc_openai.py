"""A sum of whole numbers, with a calculator as a tool, by the openai client. Nothing in it knows what trains it."""

import json
import sys

from calculator import calculate
from openai import OpenAI

CALCULATE = {"type": "function", "function": {
    "name": "calculate", "description": "The value of a sum of whole numbers.",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}}}


def main():
    client, messages = OpenAI(), [{"role": "user", "content": sys.argv[1]}]
    for _ in range(3):
        message = client.chat.completions.create(model="gpt-5-mini", messages=messages, tools=[CALCULATE]).choices[0].message
        if not message.tool_calls:
            print(message.content)
            return
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            try:
                said = calculate(json.loads(call.function.arguments)["expression"])
            except (KeyError, TypeError):
                said = "calculate wants an expression"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
    print("no answer")


main()
