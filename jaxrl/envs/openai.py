"""OpenAI's chat completions as an episode reads and answers them: bodies in, replies out, no network.

What a request says is brought into one form first, so that a conversation that comes back (every call sends all of it)
can be compared with what was said before. Standard library only.
"""

from __future__ import annotations

import dataclasses
import json

MODEL = "policy"  # what /v1/models lists; a request may name any
TAKEN = {"messages", "model", "tools", "tool_choice", "stop", "max_tokens", "max_completion_tokens", "stream",
         "stream_options"}
# Of the run's own configuration (rollout.*), whatever a request asks for.
OVERRIDDEN = {"temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
              "repetition_penalty"}
WITHOUT_EFFECT = {"user", "metadata", "store", "service_tier", "parallel_tool_calls", "reasoning_effort", "verbosity",
                  "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
DEFAULTS = {"n": (1,), "logprobs": (False,), "top_logprobs": (0,), "logit_bias": ({},), "modalities": (["text"],),
            "response_format": ({"type": "text"},)}  # fields that are refused unless they say what is done anyway


class Refused(Exception):
    """A request that is answered with an HTTP status and the reason."""

    def __init__(self, text: str, status: int = 400, kind: str = "invalid_request_error"):
        super().__init__(text)
        self.status, self.kind = status, kind


@dataclasses.dataclass
class Asked:
    """A request. messages: see `_message`. tools: schemas. max_tokens: 0 = no limit of its own. usage: whether a
    stream ends with the numbers of tokens."""

    messages: list[dict]
    tools: list[dict]
    stop: list[str]
    max_tokens: int
    stream: bool
    usage: bool
    model: str


def parse(body: bytes):
    """The JSON of a request. Raises Refused."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise Refused("the body is no JSON") from None


def read(body) -> Asked:
    """Raises Refused where it asks for what there is not."""
    if not isinstance(body, dict):
        raise Refused("the body is no JSON object")
    for name, value in body.items():
        if value is None or name in TAKEN | OVERRIDDEN | WITHOUT_EFFECT or value in DEFAULTS.get(name, ()):
            continue
        raise Refused(f"{name}={json.dumps(value)[:80]}: not supported while an episode is sampled for training")
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(s, str) and s for s in stop):
        raise Refused("stop: expected text or a list of texts")
    most = body.get("max_completion_tokens") or body.get("max_tokens") or 0
    if not isinstance(most, int) or most < 0:
        raise Refused(f"max_tokens={most!r}: expected a whole number above 0")
    options = body.get("stream_options") or {}
    return Asked(_messages(body.get("messages")), _tools(body), stop, most, bool(body.get("stream")),
                 bool(options.get("include_usage")) if isinstance(options, dict) else False,
                 str(body.get("model") or MODEL))


def _tools(body: dict) -> list[dict]:
    tools, choice = body.get("tools") or [], body.get("tool_choice") or "auto"
    if choice not in ("auto", "none", "required"):
        raise Refused(f"tool_choice={json.dumps(choice)[:80]}: the policy chooses; leave it out")
    for tool in tools if isinstance(tools, list) else [None]:
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type", "function") == "function" else 0
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Refused('tools: expected a list of {"type": "function", "function": {"name": ...}}')
    # A reply cannot be forced to be a call; `required` is taken for what the program would like.
    return [] if choice == "none" else tools


def _messages(given) -> list[dict]:
    if not isinstance(given, list) or not given:
        raise Refused("messages: expected a list of messages")
    out, names = [], {}
    for i, message in enumerate(given):
        if not isinstance(message, dict):
            raise Refused(f"messages[{i}] is no object")
        out.append(_message(i, message, names))
        names |= {call["id"]: call["function"]["name"] for call in out[-1].get("tool_calls", ())}
    return out


def _message(i: int, given: dict, names: dict[str, str]) -> dict:
    """{"role", "content"}, of a tool's reply also `name` and `tool_call_id`, of the model's turn also `tool_calls` with
    arguments as objects where it has them."""
    role = {"developer": "system"}.get(given.get("role"), given.get("role"))
    if role not in ("system", "user", "assistant", "tool"):
        raise Refused(f"messages[{i}]: role {role!r} is none of system, developer, user, assistant, tool")
    out = {"role": role, "content": _text(i, given.get("content"))}
    if role == "tool":
        id = str(given.get("tool_call_id") or "")
        out |= {"name": str(given.get("name") or names.get(id, "tool")), "tool_call_id": id}
    if role == "assistant" and given.get("tool_calls"):
        out["tool_calls"] = [_call(i, call) for call in given["tool_calls"]]
    return out


def _text(i: int, content) -> str:
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise Refused(f"messages[{i}]: a part of type {kind!r}; only text is read")
        return "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise Refused(f"messages[{i}]: content is of type {type(content).__name__}, expected text")
    return content or ""


def _call(i: int, given) -> dict:
    function = given.get("function") if isinstance(given, dict) else None
    try:
        arguments = function.get("arguments") or "{}"
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(arguments, dict) or not isinstance(function["name"], str):
            raise TypeError
    except (AttributeError, KeyError, TypeError, ValueError):
        raise Refused(f"messages[{i}]: a tool call is {{'id', 'function': {{'name', 'arguments': JSON}}}}") from None
    return {"id": str(given.get("id") or ""), "type": "function",
            "function": {"name": function["name"], "arguments": arguments}}


# -- what was said before ----------------------------------------------------------------------------------------------


def follows(asked: list[dict], known: list[dict]) -> list[dict] | None:
    """The new messages of a conversation that goes on from the known one; None where it does not: something else was
    said before, or the model is to have said something that it did not."""
    new = asked[len(known):]
    if not new or any(message["role"] == "assistant" for message in new):
        return None
    return new if list(map(_same, asked[:len(known)])) == list(map(_same, known)) else None


def _same(message: dict) -> dict:
    """What of a message has to be equal. Programs strip what the model said; what it sampled is on record."""
    if message["role"] != "assistant":
        return message
    return message | {"content": message["content"].strip()}


# -- replies -----------------------------------------------------------------------------------------------------------


def said(turn: dict, stop: list[str]) -> dict:
    """A turn of the model as a message of the API. turn: what the trainer replies. A turn with a call that cannot be
    read is its text as it was written. A stop text ends the content and is not part of it."""
    text, calls = turn["text"], turn["calls"]
    if "written" in turn:
        text, calls = turn["written"], []
    for mark in stop:
        text = text.partition(mark)[0]
    out = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
    if turn["thinking"]:
        out["reasoning_content"] = turn["thinking"]
    if calls:
        out["tool_calls"] = [{"id": call["id"], "type": "function", "function": {
            "name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)}} for call in calls]
    return out


def remembered(message: dict) -> dict:
    """The same as `Asked.messages` has it when it comes back."""
    return _message(0, message, {})


def completion(id: str, created: int, asked: Asked, turn: dict) -> dict:
    """The body of an answer."""
    message = said(turn, asked.stop)
    why = turn["finish"] if turn["finish"] == "length" else "tool_calls" if "tool_calls" in message else "stop"
    before, sampled = turn["tokens"]
    return {"id": id, "object": "chat.completion", "created": created, "model": asked.model,
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": why}],
            "usage": {"prompt_tokens": before, "completion_tokens": sampled, "total_tokens": before + sampled}}


def chunks(whole: dict, usage: bool) -> list[dict]:
    """The same answer as a stream's objects."""
    head = {"id": whole["id"], "object": "chat.completion.chunk", "created": whole["created"], "model": whole["model"]}
    choice = whole["choices"][0]
    message = choice["message"]
    parts = [{"role": "assistant", "content": ""}]
    parts += [{name: message[name]} for name in ("reasoning_content", "content") if message.get(name)]
    parts += [{"tool_calls": [{"index": k, **call}]} for k, call in enumerate(message.get("tool_calls", ()))]
    out = [head | {"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}]}
           for delta in parts]
    out.append(head | {"choices": [{"index": 0, "delta": {}, "logprobs": None,
                                    "finish_reason": choice["finish_reason"]}]})
    return out + [head | {"choices": [], "usage": whole["usage"]}] * usage


def error(refused: Refused) -> dict:
    return {"error": {"message": str(refused), "type": refused.kind, "param": None, "code": None}}
