"""Jobs of several turns: the environment's options, and a stub of an episode beside the config."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Any

from jaxrl.migrate.secret_values import Variable, without_secrets
from jaxrl.migrate.table import Migration

STUB = '''"""Episodes of {what}: write what happens between the model's turns.

The source says:
{said}

As it stands an episode ends after the model's first turn, with the score 0 ({rewards}).
Names and formats: docs/guides/environments.md.
"""


async def episode(task, chat):
    """One conversation. task.row has the data row's columns, task.prompt its prompt; at most env.max_turns turns."""
    turn = await chat.send(task.prompt)
    # WRITE HERE: while the episode goes on, read turn.text or turn.calls, and send what the environment replies:
    #     turn = await chat.send("the reply to " + turn.text)
    # Tools are typed functions: chat.send(task.prompt, tools=[search]), then chat.send(await turn.run()).
    # A reward of a turn is chat.reward(x); the score of the episode is what this function returns.
    score = 0.0
    chat.note(turn_characters=len(turn.text))
    return score
'''


def episode(m: Migration, what: str, said: Iterable[tuple[str, Any]], turns: int | None, *keys: str) -> None:
    """Sets env.function to a function in NAME_env.py, a stub beside the config, and asks the user to write it. what:
    the episode, by name. said: what the source says of it, keys and values, a line of the stub each; of a secret the
    line names the variable of the environment that has it, in env.variables.

    turns: most turns, for env.max_turns; where the source does not bound them (None, 0), the user is asked. A
    rollout.vllm.max_model_len that has been set bounds the conversation, too (`longest`)."""
    file = f"{m.name}_env.py"
    texts = []
    for key, value in said:
        shown = without_secrets(m, key, value, file)
        texts.append(f"{key}={shown!r}" if isinstance(shown, Variable) else f"{key}={shown}")
    whole = (" ".join(ascii(text).strip("'\"").replace('"', "'").replace("\\", "/").split()) for text in texts)
    lines = [line for text in whole for line in textwrap.wrap(text, 114, subsequent_indent="  ")]
    scored = m.options.get("reward.functions", (("math",), ()))[0]
    rewards = "reward.functions of its last turn are added" if scored else "the rewards are the environment's"
    m.files[file] = STUB.format(
        what=what.replace('"', "").replace("\\", "/"),
        said="\n".join(f"  {line}" for line in lines) or "  nothing of its turns",
        rewards=rewards,
    )
    m.set("env.function", f"./{file}:episode", *keys)
    if turns and turns > 0:
        m.set("env.max_turns", turns, *keys)
    else:
        m.needs("env.max_turns: the source does not bound the turns of an episode; here they are 8")
    engine = m.options.get("rollout.vllm.max_model_len", (0, ()))
    if engine[0]:
        longest(m, engine[0], *engine[1])
    m.facts["episodes"] = f"{what}: {file} is to be written"
    m.needs(
        f"{file}: write the episode of {what} where it says WRITE HERE; as it stands the job runs, and every episode "
        "ends "
        "after the model's first turn"
    )


def longest(m: Migration, tokens: int, *keys: str) -> None:
    """Sets train.max_sequence_tokens to `tokens`, the bound of a conversation, where that is less than the bound so
    far, or without one less than the prompt, all turns and the environment's replies between them may have.
    data.max_prompt_tokens and rollout.max_new_tokens have been set."""
    turns = m.options.get("env.max_turns", (8, ()))[0]
    seen = m.options.get("env.max_observation_tokens", (1024, ()))[0]
    turn, prompt = m.options["rollout.max_new_tokens"][0], m.options["data.max_prompt_tokens"][0]
    before = m.options.get("train.max_sequence_tokens", (0, ()))[0]
    if tokens < (before or prompt + turns * turn + (turns - 1) * seen):
        m.options.pop("train.max_sequence_tokens", None)
        m.set("train.max_sequence_tokens", tokens, *keys)
