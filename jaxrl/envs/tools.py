"""Tools: plain typed functions that a model may call. Builds their JSON schema, checks arguments, formats replies.

Standard library only. The schema equals that of transformers' `get_json_schema`: the function's name, the docstring
up to the first section, the types of the arguments and their descriptions in the section `Args:`.
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing

MALFORMED = "This call could not be read and was not run."
SIMPLE = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null", list: "array",
          tuple: "array", dict: "object"}
SECTIONS = ("Args:", "Returns:", "Raises:")


class ToolError(Exception):
    """A tool's refusal, whose text the model receives. Any other exception is the environment's fault."""


class BadEnvironment(Exception):
    """An environment that violates its interface; its episode fails. The text contains no data values and is used as
    the cause."""


class BadArguments(Exception):
    """Arguments that do not fit a tool. The model receives the text."""


class Tool:
    """A callable tool, or (fn None) the schema of one whose calls the episode runs itself.

    tool: a plain function, or a schema {"type": "function", "function": ...}. Raises TypeError for anything else, and
    what `schema` raises.

    Attributes:
      fn: the function or None. schema: for the model. name: by which the model calls it."""

    def __init__(self, tool):
        if isinstance(tool, dict):
            self.fn, self.schema = None, tool
            function = tool.get("function")
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise TypeError("a tool's schema is {'type': 'function', 'function': {'name': ...}}, got "
                                f"{repr(tool)[:80]}")
        elif callable(tool) and not inspect.isclass(tool):
            self.fn, self.schema = tool, schema(tool)
        else:
            raise TypeError(f"a tool is a plain function (def ...) or its schema, got {repr(tool)[:80]}")
        self.name = self.schema["function"]["name"]

    def arguments(self, arguments: dict) -> dict:
        """Returns the arguments as the function takes them: 3.0 for an integer becomes 3, 3 for a number 3.0.

        Raises BadArguments, naming all that is wrong: an argument that is missing, unknown or of another type.
        """
        parameters = self.schema["function"]["parameters"]
        known, out = parameters["properties"], {}
        wrong = [f"{name!r} is missing" for name in parameters.get("required", ()) if name not in arguments]
        if any(name not in known for name in arguments):
            wrong.append(f"there is more than {', '.join(known)}" if known else "it takes none")
        for name in known.keys() & arguments.keys():
            try:
                out[name] = fit(arguments[name], known[name])
            except BadArguments as e:
                wrong.append(f"{name!r} must be {e}")
        if wrong:
            raise BadArguments(f"The arguments do not fit and the call was not run: {'; '.join(sorted(wrong))}.")
        return out


def tools_by_name(sources) -> dict[str, Tool]:
    """Returns name -> Tool of functions, schemas and Tools. Raises TypeError for anything else (see `Tool`), and if two
    have the same name."""
    tools = {}
    for tool in (one if isinstance(one, Tool) else Tool(one) for one in sources):
        if tool.name in tools:
            raise TypeError(f"two tools have the name {tool.name!r}; rename one of them")
        tools[tool.name] = tool
    return tools


def unknown_tool_text(tools) -> str:
    """Returns the reply to a call of an unknown tool."""
    return f"There is no such tool. There are: {', '.join(tools)}." if tools else "There are no tools."


def too_many_calls_text(most: int) -> str:
    """Returns the reply to calls beyond env.max_parallel_calls."""
    return f"This call was not run: at most {most} of a turn {'is' if most == 1 else 'are'}."


def tool_message(call, content: str | list) -> dict:
    """Returns the chat message of role `tool` that replies to a call. content: text or parts."""
    return {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": content}


def result_text(name: str, value) -> str:
    """Returns a tool's result as text: a string unchanged, anything else as JSON.

    name: of the tool, for messages. Raises BadEnvironment for a value that JSON cannot hold."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        raise BadEnvironment(f"tool {name!r} returned {type(value).__name__}, expected text or what JSON can hold"
                             ) from None


# -- schema ----------------------------------------------------------------------------------------------------------


def schema(fn) -> dict:
    """Returns {"type": "function", "function": {name, description, parameters[, return]}} of a function.

    fn: a function with type hints and a Google-style docstring, whose text before `Args:` the model reads.

    A description that ends with (choices: [...]), a JSON list, allows these values alone.

    Raises TypeError with a remedy: no docstring or signature, a parameter without a type or a description, one that
    cannot be passed by name, a type that is not defined or that no call can hold, or choices that are not a JSON
    list."""
    name = getattr(fn, "__name__", type(fn).__name__)
    description, described, returned = _doc(name, inspect.getdoc(fn) or "")
    try:
        hints, signature = typing.get_type_hints(fn), inspect.signature(fn)
    except (NameError, AttributeError, SyntaxError) as e:
        raise TypeError(f"tool {name!r}: a type of its arguments is not defined: {e}") from None
    except ValueError as e:  # a function of C
        raise TypeError(f"tool {name!r} has no signature; wrap it in a function with typed parameters: {e}") from None
    properties, required = {}, []
    for key, parameter in signature.parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise TypeError(f"tool {name!r}: parameter {key!r} cannot be passed by name; use plain parameters")
        if key not in hints:
            raise TypeError(f"tool {name!r}: parameter {key!r} has no type; write {key}: str, int, float, bool or"
                            " list[...]")
        if key not in described:
            raise TypeError(f"tool {name!r}: parameter {key!r} is not described; add a line '{key}: ...' below"
                            " 'Args:' in the docstring")
        where = f"tool {name!r}: parameter {key!r}"
        properties[key] = _type(hints[key], where) | _described(described[key], where)
        if parameter.default is parameter.empty:
            required.append(key)
    parameters = {"type": "object", "properties": properties} | ({"required": required} if required else {})
    out = {"name": name, "description": description, "parameters": parameters}
    result = hints.get("return")
    if "return" in hints and (typing.get_origin(result) or result is typing.Any or result in SIMPLE):
        out["return"] = _type(result, "") | ({"description": returned} if returned else {})
    return {"type": "function", "function": out}


def _doc(name: str, text: str) -> tuple[str, dict[str, str], str]:
    """Returns (description, descriptions of the arguments, description of the result) of a docstring."""
    parts, current = {"": []}, ""
    for line in text.strip().splitlines():
        if line.strip() in SECTIONS:
            parts[current := line.strip()] = []
        else:
            parts[current].append(line)
    description = "\n".join(parts[""]).strip()
    if not description:
        raise TypeError(f"tool {name!r} has no docstring; add one that says what it does, the model reads it")
    described, key = {}, None
    for line in filter(str.strip, parts.get("Args:", ())):
        if found := re.match(r"\s*(\w+)(?: *\([^)]*\))?:\s*(.*)", line):
            key, line = found.groups()
            described[key] = []
        if key is not None:
            described[key].append(line.strip())
    return (description, {k: " ".join(filter(None, v)) for k, v in described.items()},
            "\n".join(parts.get("Returns:", ())).strip())


def _described(text: str, where: str) -> dict:
    """Returns the schema part of a description, with the allowed values if it ends with (choices: [...]). where: prefix
    of messages."""
    found = re.search(r"\(choices:\s*(.*?)\)\s*$", text, re.IGNORECASE)
    if not found:
        return {"description": text}
    try:
        values = json.loads(found.group(1))
    except ValueError:
        values = None
    if not isinstance(values, list) or not values:
        raise TypeError(f"{where} has the choices {found.group(1)}, which are not a JSON list of values; write "
                        '(choices: ["a", "b"])')
    choices = [c.strip() if isinstance(c, str) else c for c in values]
    return {"enum": choices, "description": text[:found.start()].strip()}


def _type(hint, where: str) -> dict:
    """Returns the JSON schema of a type. where: prefix of messages, "" for a result, which may be anything."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is typing.Any:
        return {}
    if origin is None and hint in SIMPLE:
        return {"type": SIMPLE[hint]}
    if origin in (typing.Union, types.UnionType):
        return _union([_type(t, where) for t in inner if t is not type(None)], type(None) in inner)
    if origin is typing.Literal and all(type(v) in SIMPLE for v in inner):
        kinds = list(dict.fromkeys(SIMPLE[type(v)] for v in inner))
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(inner)}
    if not inner and hint in (typing.List, typing.Tuple, typing.Dict):  # noqa: UP006
        return {"type": SIMPLE[origin]}
    if origin is list:
        return {"type": "array", "items": _type(inner[0], where)}
    if origin is tuple and ... not in inner:
        return {"type": "array", "prefixItems": [_type(t, where) for t in inner]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _type(inner[1], where)}
    if where:
        raise TypeError(f"{where} is of type {getattr(hint, '__name__', hint)}, which no call can hold; use str, int,"
                        " float, bool, list[...], dict[str, ...], Literal[...]")
    return {"type": "object"}


def _union(kinds: list[dict], nullable: bool) -> dict:
    if len(kinds) == 1:
        out = kinds[0]
    elif all(kind.keys() == {"type"} for kind in kinds):
        names = sorted({kind["type"] for kind in kinds})
        out = {"type": names[0] if len(names) == 1 else names}
    else:
        out = {"anyOf": kinds}
    return out | {"nullable": True} if nullable else out


# -- arguments -------------------------------------------------------------------------------------------------------


def fit(value, kind: dict, strict: bool = False):
    """Returns `value` converted to the type of `kind`, a JSON schema: type, enum, anyOf, nullable, items, prefixItems,
    properties and additionalProperties are read.

    Of several types or options the first that fits is taken. 3.0 becomes 3 for an integer if nothing else fits, 3
    becomes 3.0 for a number; text is never converted.

    strict: 3.0 is not an integer, because another option may fit. Raises BadArguments naming the expected types."""
    if value is None and (kind.get("nullable") or kind.get("type") == "null"):
        return None
    if "enum" in kind:
        for choice in kind["enum"]:
            if choice == value and isinstance(choice, bool) == isinstance(value, bool):
                return choice
        raise BadArguments(f"one of {', '.join(map(json.dumps, kind['enum']))}")
    options = kind.get("anyOf") or [kind | {"type": t} for t in _type_names(kind)]
    if not options:
        return value
    if len(options) == 1:
        return _fit(value, options[0], strict)
    for strictly in (True,) if strict else (True, False):
        for option in options:
            try:
                return _fit(value, option, strictly)
            except BadArguments:
                pass
    raise BadArguments(" or ".join(dict.fromkeys(map(_kind_name, options))))


def _type_names(kind: dict) -> list[str]:
    names = kind.get("type", [])
    # an integer is also a number: it is tried first, so that it stays an integer
    return sorted([names] if isinstance(names, str) else names, key=lambda name: name == "number")


def _kind_name(kind: dict) -> str:
    name, inner = kind.get("type", "another value"), _inner(kind.get("items"))
    if name == "array" and "type" in inner:
        return f"array of {_kind_name(inner)}"
    return name if isinstance(name, str) else " or ".join(name)


def _fit(value, kind: dict, strict: bool):
    """Returns the value converted to one option of a schema, as `fit`. Raises BadArguments if it is of another kind."""
    name = kind.get("type")
    if not isinstance(name, str) or "anyOf" in kind or "enum" in kind or kind.get("nullable") and value is None:
        return fit(value, kind, strict)
    if name == "integer" and isinstance(value, float) and value.is_integer() and not strict:
        return int(value)
    if name == "number" and isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:  # an integer beyond the float range
            raise BadArguments(name) from None
    if name == "array" and isinstance(value, list):
        wanted = kind.get("prefixItems", [kind.get("items")] * len(value))
        if len(wanted) != len(value):
            raise BadArguments(f"a list of {len(wanted)}")
        return [fit(v, _inner(k), strict) for v, k in zip(value, wanted, strict=True)]
    if name == "object" and isinstance(value, dict):
        own, others = kind.get("properties") or {}, kind.get("additionalProperties")
        return {k: fit(v, _inner(own.get(k, others)), strict) for k, v in value.items()}
    simple = {"string": str, "boolean": bool, "null": type(None), "integer": int}.get(name)
    if simple is None or not isinstance(value, simple) or isinstance(value, bool) and simple is int:
        raise BadArguments(_kind_name(kind))
    return value


def _inner(kind) -> dict:
    """Returns the schema of a part; {} where there is none, or true or false in its place."""
    return kind if isinstance(kind, dict) else {}
