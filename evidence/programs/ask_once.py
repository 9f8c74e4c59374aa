"""Asks the question and prints the answer, by the openai client, streamed."""

import sys

from openai import OpenAI

stream = OpenAI().chat.completions.create(model="any", messages=[{"role": "user", "content": sys.argv[1]}], stream=True)
print("".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices))
