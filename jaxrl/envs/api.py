"""The API that episodes are written with. Standard library only.

    async def episode(task, chat):
        turn = await chat.send(task.prompt)
        return float(turn.text == task.row["answer"])

An episode returns its score, a dict of numbers (`env` is the score, the others are reported), or None
for no score. Rewards passed to `chat.reward` are added to the score. It may be a plain `def`;
`chat.send` and `turn.run` then block.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from jaxrl.envs import pictures
from jaxrl.envs import tools as tools_module
from jaxrl.envs.tools import BadEnvironment, ToolError
from jaxrl.workers.loading import MAX_REWARD, number

__all__ = ["BadEnvironment", "Call", "Chat", "Observation", "Row", "Step", "Task", "ToolError", "Turn"]


class MissingColumn(KeyError):
    """A row lacks a column that an environment reads. The text names the column and those that exist."""

    def __str__(self):
        return self.args[0]


class Row(dict):
    """A row's columns. row[name] of a missing one raises MissingColumn, which lists the existing ones; `get` returns
    None as of any dict."""

    def __missing__(self, name):
        raise MissingColumn(f"the row has no column {name!r}; it has: {', '.join(map(str, self)) or 'none'}")


@dataclasses.dataclass
class Task:
    """The row, prompt and seed of an episode.

    Attributes:
      row: columns of the data row.
      prompt: text or messages, as in the data.
      seed: a uint32 for everything random in the environment; equal for all completions of a prompt group and for
        retries.
      user: config.user.
    """

    row: dict
    prompt: str | list
    seed: int
    user: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Call:
    """A tool call of the model.

    arguments: by name; None if they could not be parsed, `error` then gives the reason. id: names the call in its
    reply."""

    id: str
    name: str
    arguments: dict | None = None
    error: str = ""


@dataclasses.dataclass
class Turn:
    """One turn of the model.

    Attributes:
      text: the completion without thinking and calls.
      thinking: the thinking.
      calls: tool calls, in order.
      finish: "stop", or "length" if it was cut. The turn that says that turns or tokens are used up has "length" and
        neither thinking, text nor calls; one that was cut before its text began has thinking alone.
    """

    text: str
    thinking: str = ""
    calls: list[Call] = dataclasses.field(default_factory=list)
    finish: str = "stop"
    _run: Any = dataclasses.field(default=None, repr=False, compare=False)

    def run(self):
        """Runs the calls with the tools passed to `chat.send` and returns the messages that reply to them, in order:
        {"role": "tool", "name", "tool_call_id", "content"} each, for the next `chat.send`.

        Use `await turn.run()`, or without await in a plain def. At most env.max_parallel_calls are run, concurrently if
        they are asynchronous; the others get a reply that says so. A call that cannot be parsed, names an unknown tool
        or has unfitting arguments gets an error reply and counts as malformed. A ToolError's text is the reply; any
        other exception propagates to the episode, and a call of a tool that was given as a schema raises
        BadEnvironment.
        """
        return self._run(self)


class Action(str):
    """The model's turn as a class's `step` receives it: its text, with the whole turn as `turn`."""

    turn: Turn

    def __new__(cls, turn: Turn):
        action = super().__new__(cls, turn.text)
        action.turn = turn
        return action


@dataclasses.dataclass
class Observation:
    """What an environment shows.

    Attributes:
      text: text (a user's message), a message or several, or parts of a user's message: {"type": "text", "text": ...}
        and {"type": "image", "image": ...}, see envs/pictures.py for what an image may be.
      state: name of the state in which the next turn is decided, for advantages that compare equal
        states; "" for none.
      tools: functions or schemas; None keeps the present ones.
    """

    text: str | dict | list
    state: str = ""
    tools: list | None = None


@dataclasses.dataclass
class Step:
    """Result of an action.

    Attributes:
      observation: what the model sees next; None if done.
      reward: reward of the turn.
      done: whether the episode is over.
      notes: numbers to report.
    """

    observation: Observation | str | dict | list | None = None
    reward: float = 0.0
    done: bool = False
    notes: dict = dataclasses.field(default_factory=dict)


class Chat:
    """The model as an episode talks to it.

    Args:
      host: runs the episode: `exchange(payload)` sends messages and returns the turn, `call(fn, **arguments)` calls a
        tool; both are awaited. `show_reward(value)` gets the reward of the last turn so far.
      parallel: most calls of a turn that are run.
    """

    def __init__(self, host, parallel: int):
        self._host, self._parallel = host, parallel
        self._tools, self._anchor, self._history = {}, "", None
        self._turns, self._reward, self._rewarded, self._sending = 0, 0.0, False, False
        self._notes, self._calls, self._malformed = {}, 0, 0

    async def send(self, messages, tools=None, stop=(), max_tokens: int = 0) -> Turn:
        """Sends messages and returns the model's turn.

        Args:
          messages: only new ones: text (a user's message), a message {"role", "content"} or a list of them. A content
            is text or a list of parts, as Observation.text; a list of parts alone is a user's message.
          tools: functions (see envs/tools.py) or schemas that the model may call from now on; None
            keeps the present ones.
          stop: texts that end this turn; one text or several.
          max_tokens: of this turn, below rollout.max_new_tokens; 0 for that limit.

        Raises BadEnvironment for arguments of another form, for no message (except after `rewrite`), and while another
        send is pending; TypeError for a tool that is neither a plain typed function nor a schema, and for two tools of
        one name.
        """
        return self._to_turn(await self._host.exchange(self._payload(messages, tools, stop, max_tokens)))

    def reward(self, value: float) -> None:
        """Adds to the reward of the model's last turn, and so to the score.

        Raises BadEnvironment before the first turn, and for a value that is no number, not finite, or beyond 1e15."""
        if not self._turns:
            raise BadEnvironment("chat.reward was called before the model's first turn")
        self._reward += _finite(value, "chat.reward")
        self._host.show_reward(self._reward)
        self._rewarded = True

    def state(self, key) -> None:
        """Names the state in which the coming turn is decided, for advantages that compare equal states.

        key: text, or what JSON can hold (else TypeError); it holds for one turn, "" for none."""
        self._anchor = key if isinstance(key, str) else json.dumps(key, sort_keys=True)

    def note(self, **values: float) -> None:
        """Records numbers to report; metrics are their means over episodes. A later value of a name replaces the
        earlier one.

        Raises BadEnvironment for a value that is no number or not finite."""
        self._notes |= {name: _finite(value, "chat.note", most=math.inf) for name, value in values.items()}

    def rewrite(self, messages) -> None:
        """Replaces the conversation by these messages, as `send` takes them; the next `send` adds to them, and may be
        empty.

        What was sampled before is trained as a separate sequence. Raises BadEnvironment for other messages."""
        self._history = _messages(messages)

    # -- the worker's side ---------------------------------------------------------------------------------------

    def _payload(self, messages, tools, stop, max_tokens) -> dict:
        if self._sending:
            raise BadEnvironment("chat.send was called while another one is pending; a conversation has one turn at a "
                                 "time")
        if tools is not None:
            self._tools = tools_module.tools_by_name(tools)
        stop = [stop] if isinstance(stop, str) else list(stop)
        if not all(isinstance(s, str) and s for s in stop):
            raise BadEnvironment("chat.send: stop must be texts")
        if not isinstance(max_tokens, int) or max_tokens < 0:
            raise BadEnvironment("chat.send: max_tokens must be a whole number from 0")
        messages = _messages(messages, empty=self._history is not None)
        payload = {"messages": messages if self._history is None else self._history + messages,
                   "rewrite": self._history is not None, "stop": stop, "max_tokens": max_tokens,
                   "tools": [tool.schema for tool in self._tools.values()] or None,
                   "reward": self._reward, "anchor": self._anchor, "train": True, **self._records()}
        self._reward, self._anchor, self._history, self._sending = 0.0, "", None, True
        self._host.show_reward(0.0)
        return payload

    def _records(self) -> dict:
        """Returns what the episode's outcome has beside its score, as it is now."""
        return {"notes": self._notes, "counts": {"calls": self._calls, "malformed": self._malformed}}

    def _to_turn(self, turn: dict) -> Turn:
        self._sending = False
        self._turns += 1
        calls = [Call(**call) for call in turn["calls"]]
        self._calls += len(calls)
        return Turn(turn["text"], turn["thinking"], calls, turn["finish"], self._run)

    async def _run(self, turn: Turn) -> list[dict]:
        answers = await self._host.gather([self._run_call(k, call) for k, call in enumerate(turn.calls)])
        return list(map(tools_module.tool_message, turn.calls, answers))

    async def _run_call(self, k: int, call: Call) -> str | list:
        """Returns the reply to a call: text, or parts where it holds an image."""
        if k >= self._parallel:
            return tools_module.too_many_calls_text(self._parallel)
        matched = self._match_tool(call)
        if isinstance(matched, str):
            self._malformed += 1
            return matched
        tool, arguments = matched
        try:
            found = await self._host.call(tool.fn, f"tool {call.name}", **arguments)
            return pictures.result_content(call.name, found)
        except ToolError as e:
            return str(e)

    def _match_tool(self, call: Call) -> tuple[Any, dict] | str:
        """Returns (tool, its arguments), or the reply if there is nothing to call."""
        if not isinstance(call.arguments, dict):
            return tools_module.MALFORMED
        tool = self._tools.get(call.name)
        if tool is None:
            return tools_module.unknown_tool_text(self._tools)
        if tool.fn is None:
            raise BadEnvironment("turn.run was called for a tool of which chat.send got only the schema")
        try:
            return tool, tool.arguments(call.arguments)
        except tools_module.BadArguments as e:
            return str(e)

    def _result(self, value) -> dict:
        """Returns the episode's result; see `EpisodePool.events`. Raises BadEnvironment."""
        rewards = {}
        if isinstance(value, dict):
            rewards = {str(name): _finite(v, "a value of the dict it returned") for name, v in value.items()}
            value = rewards.pop("env", None)
        elif value is not None:
            value = _finite(value, "the value it returned", "a number, a dict of numbers or None")
        return {"value": value, "rewards": rewards, "reward": self._reward, "rewarded": self._rewarded,
                **self._records()}


def _finite(value, what: str, wanted: str = "a number", most: float = MAX_REWARD) -> float:
    try:
        found = number(value)
    except OverflowError:
        raise BadEnvironment(f"{what} is an integer beyond the range of floats, expected {wanted}") from None
    if found is None:
        raise BadEnvironment(f"{what} is of type {type(value).__name__}, expected {wanted}")
    if not math.isfinite(found):
        raise BadEnvironment(f"{what} is {found}, expected {wanted}")
    if abs(found) > most:
        raise BadEnvironment(f"{what} is beyond {most:g}, whose square fp32 can hold: scale it")
    return found


def _messages(messages, empty: bool = True) -> list[dict]:
    """Returns messages as a list of {"role", "content", ...}."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    messages = [messages] if isinstance(messages, dict) else messages
    if not isinstance(messages, (list, tuple)):
        raise BadEnvironment(f"messages are of type {type(messages).__name__}, expected text, a dict or a list of "
                             "dicts")
    if messages and all(map(pictures.is_part, messages)):
        messages = [{"role": "user", "content": list(messages)}]
    out = []
    for i, one in enumerate(messages):
        if not isinstance(one, dict) or not isinstance(one.get("role"), str) or "content" not in one:
            raise BadEnvironment("a message is not a dict with role and content")
        content = pictures.content_of(one["content"], f"message {i}")
        out.append(one if content is one["content"] else {**one, "content": content})
    if not out and not empty:
        raise BadEnvironment("chat.send has no message")
    return out
