"""OpenAI's chat completions format: parses request bodies and builds replies for an episode; no network.

`proxy` and `program` call it. Requests are normalized first, so that a conversation that comes back (every call sends
all of it) can be compared with what was sampled before. Standard library only.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

MODEL = "policy"  # what /v1/models lists; a request may name any
USED_FIELDS = {"messages": list, "model": str, "tools": list, "tool_choice": (str, dict), "stop": (str, list),
               "max_tokens": int, "max_completion_tokens": int, "stream": bool, "stream_options": dict}
# Set by the run's configuration (rollout.*), whatever a request asks for.
OVERRIDDEN_FIELDS = {"temperature": float, "top_p": float, "top_k": int, "min_p": float, "seed": int,
                     "presence_penalty": float, "frequency_penalty": float, "repetition_penalty": float}
IGNORED_FIELDS = {"user": str, "metadata": dict, "store": bool, "service_tier": str, "parallel_tool_calls": bool,
                  "reasoning_effort": str, "verbosity": str, "safety_identifier": str, "prompt_cache_key": str,
                  "prompt_cache_retention": str}
TYPES = USED_FIELDS | OVERRIDDEN_FIELDS | IGNORED_FIELDS
WORDS = {str: "text", bool: "true or false", int: "a whole number", float: "a number", list: "a list",
         dict: "an object"}
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
MAX_DEPTH = 100  # nesting of lists and objects
DEFAULTS = {"n": (1,), "logprobs": (False,), "top_logprobs": (0,), "logit_bias": ({},), "modalities": (["text"],),
            "response_format": ({"type": "text"},)}  # fields that are refused unless they have the default value


class RequestError(Exception):
    """A request that is answered with an HTTP error `status` and the reason; kind: the error's `type` in OpenAI's
    API."""

    def __init__(self, text: str, status: int = 400, kind: str = "invalid_request_error"):
        super().__init__(text)
        self.status, self.kind = status, kind


@dataclasses.dataclass
class ChatRequest:
    """A parsed request.

    Attributes:
      messages: {"role", "content"} each, as `_message` normalizes them: a tool's reply also has `name` and
        `tool_call_id`, the model's turn `tool_calls`, if any, with arguments as objects. A content is text, or a list
        of parts where one is an image.
      tools: JSON schemas.
      max_tokens: 0 for no limit of its own.
      usage: whether a stream ends with token counts.

    stop: texts that end the completion. stream: whether it comes in pieces. model: the name that replies repeat."""

    messages: list[dict]
    tools: list[dict]
    stop: list[str]
    max_tokens: int
    stream: bool
    usage: bool
    model: str


def parse_body(body: bytes | str):
    """Returns the JSON of a request, with finite numbers only.

    Raises RequestError for other text and for nesting beyond MAX_DEPTH levels."""
    try:
        found = json.loads(body, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        raise RequestError("the body is not JSON") from None
    inside, depth = [found], 0
    while inside := [one for outer in inside if isinstance(outer, (dict, list))
                     for one in (outer.values() if isinstance(outer, dict) else outer)]:
        if (depth := depth + 1) > MAX_DEPTH:
            raise RequestError(f"the body is nested more than {MAX_DEPTH} levels deep")
    return found


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(text)
    return number


def read_request(body, images: bool = False) -> ChatRequest:
    """Returns the ChatRequest of a request's body, parsed JSON; sampling fields such as temperature are ignored, since
    the run's config sets them.

    images: whether messages may show any. Raises RequestError for unsupported fields and wrong types."""
    if not isinstance(body, dict):
        raise RequestError("the body is not a JSON object")
    for name, value in body.items():
        if name in TYPES:
            _get(body, name, TYPES[name])
        elif value is not None and not any(value == one and type(value) is type(one)
                                           for one in DEFAULTS.get(name, ())):
            raise RequestError(f"{name}={_short(value)}: not supported while an episode is sampled for training")
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    for k, text in enumerate(stop):
        if not text or not isinstance(text, str):
            raise RequestError(f"stop[{k}]={_short(text)}: expected text")
    for name in ("max_completion_tokens", "max_tokens"):
        if (body.get(name) or 0) < 0:
            raise RequestError(f"{name}={body[name]}: expected a whole number above 0")
    usage = _get(body.get("stream_options") or {}, "include_usage", bool, "stream_options.")
    return ChatRequest(_messages(body.get("messages"), images), _tools(body), stop,
                       body.get("max_completion_tokens") or body.get("max_tokens") or 0, bool(body.get("stream")),
                       bool(usage), body.get("model") or MODEL)


def _get(table: dict, name: str, types, place: str = "", needed: bool = False) -> Any:
    """Returns a field's value, None if it is null or absent. Raises RequestError for another type.

    Args:
      types: one or several keys of WORDS; float includes whole numbers.
      place: prefix of the name in messages.
    """
    value, types = table.get(name), types if isinstance(types, tuple) else (types,)
    wanted = types + (int,) * (float in types)
    if value is None and not needed or type(value) in wanted:
        return value
    raise RequestError(f"{place}{name}={_short(value)}: expected {' or '.join(WORDS[one] for one in types)}")


def _short(value) -> str:
    return json.dumps(value)[:80]


def _tools(body: dict) -> list[dict]:
    tools, choice, names = body.get("tools") or [], body.get("tool_choice") or "auto", set()
    if choice not in ("auto", "none", "required"):
        raise RequestError(f"tool_choice={_short(choice)}: the policy chooses; leave it out")
    for k, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type") not in ("function", None):
            raise RequestError(f'tools[{k}]={_short(tool)}: expected '
                               f'{{"type": "function", "function": {{"name": ...}}}}')
        function = _get(tool, "function", dict, f"tools[{k}].", needed=True)
        name = _get(function, "name", str, f"tools[{k}].function.", needed=True)
        for field, kind in (("description", str), ("parameters", dict), ("strict", bool)):
            _get(function, field, kind, f"tools[{k}].function.")
        if name in names:
            raise RequestError(f"tools[{k}].function.name={_short(name)}: two tools have this name")
        names.add(name)
    # A reply cannot be forced to be a call; `required` is treated as a preference.
    return [] if choice == "none" else tools


def _messages(messages, images: bool) -> list[dict]:
    if not messages:
        raise RequestError("messages: expected a list of messages")
    out, names = [], {}
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise RequestError(f"messages[{i}]={_short(message)}: expected an object")
        out.append(_message(f"messages[{i}].", message, names, images))
        names |= {call["id"]: call["function"]["name"] for call in out[-1].get("tool_calls", ())}
    return out


def _message(place: str, message: dict, names: dict[str, str], images: bool = False) -> dict:
    """Returns {"role", "content"}; for a tool's reply also `name` and `tool_call_id`, for the model's turn also
    `tool_calls` with arguments as objects, if any. The content is text, or the list of its parts if one is an image.
    """
    role = ROLES.get(_get(message, "role", str, place, needed=True))
    if role is None:
        raise RequestError(f"{place}role={_short(message['role'])}: expected {', '.join(ROLES)}")
    out: dict[str, Any] = {"role": role, "content": _content(place, _get(message, "content", (str, list), place),
                                                          images and role != "assistant")}
    name = _get(message, "name", str, place)
    if role == "tool":
        id = _get(message, "tool_call_id", str, place) or ""
        out |= {"name": name or names.get(id, "tool"), "tool_call_id": id}
    calls = _get(message, "tool_calls", list, place)
    if role == "assistant" and calls:
        out["tool_calls"] = [_call(f"{place}tool_calls[{k}]", call) for k, call in enumerate(calls)]
    return out


def _content(place: str, content: str | list | None, images: bool) -> str | list[dict]:
    parts, known = content if isinstance(content, list) else (), []
    for k, part in enumerate(parts):
        if images and isinstance(part, dict) and part.get("type") in ("image", "image_url"):
            known.append({"type": "image", **_image(f"{place}content[{k}]", part)})
        elif not isinstance(part, dict) or type(part.get("text")) is not str:
            kind = part.get("type") if isinstance(part, dict) else part
            raise RequestError(f"{place}content[{k}]: a part of type {_short(kind)}; only text is supported"
                               + ", and images of user, system and tool messages" * images)
        else:
            known.append({"type": "text", "text": part["text"]})
    if any(part["type"] == "image" for part in known):
        return known
    return "".join(part["text"] for part in known) if isinstance(content, list) else content or ""


def _image(place: str, part: dict) -> dict:
    """Returns {"image": a data URI}; {} for a part of type image without one, which is the row's next image."""
    url = part.get("image_url", part.get("image"))
    url = url.get("url") if isinstance(url, dict) else url
    if url is None and part["type"] == "image":
        return {}
    if not isinstance(url, str) or not url.startswith("data:"):
        raise RequestError(f"{place}: an image at {_short(url)}: expected a data URI (data:image/png;base64,...); "
                           "nothing is fetched")
    return {"image": url}


def _call(place: str, call) -> dict:
    if not isinstance(call, dict):
        raise RequestError(f"{place}={_short(call)}: expected {{'id', 'function': {{'name', 'arguments': JSON}}}}")
    function = _get(call, "function", dict, f"{place}.", needed=True)
    name = _get(function, "name", str, f"{place}.function.", needed=True)
    arguments = _get(function, "arguments", (str, dict), f"{place}.function.") or "{}"
    try:
        arguments = parse_body(arguments) if isinstance(arguments, str) else arguments
    except RequestError:
        arguments = None
    if not isinstance(arguments, dict):
        raise RequestError(f"{place}.function.arguments={_short(function['arguments'])}: expected an object as JSON")
    return {"id": _get(call, "id", str, f"{place}.") or "", "type": "function",
            "function": {"name": name, "arguments": arguments}}


# -- continuing a conversation -----------------------------------------------------------------------------------------


def new_messages(messages: list[dict], known: list[dict]) -> list[dict] | None:
    """Returns the new messages of a conversation that continues the known one; None if it does not: earlier messages
    differ, none is new, or it contains an assistant message that was not sampled.

    messages, known: in the form of ChatRequest.messages. White space around the content of assistant messages does not
    count.
    """
    new = messages[len(known):]
    if not new or any(message["role"] == "assistant" for message in new):
        return None
    return new if list(map(_same, messages[:len(known)])) == list(map(_same, known)) else None


def _same(message: dict) -> dict:
    """Returns the part of a message that has to be equal. Programs strip completions; the sampled ids are recorded."""
    if message["role"] != "assistant":
        return message
    return message | {"content": message["content"].strip()}


# -- replies -----------------------------------------------------------------------------------------------------------


def assistant_message(turn: dict, stop: list[str]) -> dict:
    """Returns the model's turn as a message of the API: role, content (None for calls without text), refusal (None)
    and, if there are any, reasoning_content and tool_calls.

    A turn with a call that cannot be parsed is returned as its text, without calls.

    Args:
      turn: the trainer's reply.
      stop: stop texts; the content ends before the first of them.
    """
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


def as_request_message(message: dict) -> dict:
    """Returns an assistant message in the form of `ChatRequest.messages`, as it will come back."""
    return _message("", message, {})


def completion_body(id: str, created: int, request: ChatRequest, turn: dict) -> dict:
    """Returns the body of a reply as a chat.completion of OpenAI's API, as a dict.

    Args:
      id, created: of the reply; seconds since 1970. request: gives the model's name and the stop texts.
      turn: the model's turn as the trainer sends it, with "tokens"."""
    message = assistant_message(turn, request.stop)
    why = turn["finish"] if turn["finish"] == "length" else "tool_calls" if "tool_calls" in message else "stop"
    before, sampled = turn["tokens"]
    return {"id": id, "object": "chat.completion", "created": created, "model": request.model,
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": why}],
            "usage": {"prompt_tokens": before, "completion_tokens": sampled, "total_tokens": before + sampled}}


def stream_chunks(whole: dict, usage: bool) -> list[dict]:
    """Returns the chat.completion.chunk objects that stream a whole reply.

    whole: of `completion_body`. usage: whether a last chunk has the token counts."""
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


def error_body(refused: RequestError) -> dict:
    """Returns the body of an error reply in the form of OpenAI's API, as a dict."""
    return {"error": {"message": str(refused), "type": refused.kind, "param": None, "code": None}}
