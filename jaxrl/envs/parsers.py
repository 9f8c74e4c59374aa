"""Parsers of the tool-call formats of models. Standard library only; model output is never executed.

A parser is given its markers as they appear in the text: as spelled, or, if they are single tokens of the
tokenizer, as characters that stand for those tokens (`data/turns.py`), so that a marker that was merely
spelled stays text. A call that cannot be parsed has `error`. Parsers never raise, and take time proportional
to the text (evidence/absent.py).
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

MAX_PYTHON_CHARS = 100_000  # most characters of a pythonic call
MAX_SCHEMA_DEPTH = 10  # most levels of options and references in an argument's schema
JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null", list: "array",
              dict: "object"}
SPACE = re.compile(r"\s*")
FUNCTION, PARAMETER = re.compile(r"<function=([^<>\n]+)>"), re.compile(r"\s*<parameter=([^<>\n]+)>")


@dataclasses.dataclass
class Call:
    """One tool call.

    Attributes:
      arguments: by name; None if they could not be parsed, `error` then gives the reason.
      id: the model's id, or empty.
    """

    name: str
    arguments: dict | None
    error: str = ""
    id: str = ""


@dataclasses.dataclass(frozen=True)
class Parser:
    """A tool-call format.

    Attributes:
      marks: the markers as spelled.
      end: index of the marker that closes a call, -1 for none.
      form: (text, markers as they appear in it, types) -> (text without its calls, calls). types: tool name ->
        argument name -> JSON types, for formats that do not write types.
    """

    name: str
    marks: tuple[str, ...]
    end: int
    form: Callable[[str, tuple[str, ...], dict[str, dict[str, list[str]]]], tuple[str, list[Call]]]

    def read(self, text: str, marks: tuple[str, ...] = (), types: dict | None = None) -> tuple[str, list[Call]]:
        """Returns (text without its calls, its calls in order). Never raises: a call that cannot be parsed, or whose
        arguments JSON cannot represent, has `error`.

        marks: the markers as they appear in the text; () = as spelled. types: tool name -> argument name -> JSON types
        (`argument_types`). In formats without types an argument is text if text is allowed or nothing is known of it
        (types None: of all)."""
        outside, calls = self.form(text, marks or self.marks, types or {})
        return outside, [_plain(call) for call in calls]


def _plain(call: Call) -> Call:
    if call.error:
        return call
    try:
        return dataclasses.replace(call, arguments=json.loads(json.dumps(call.arguments, allow_nan=False)))
    except (TypeError, ValueError, RecursionError):
        return Call(call.name, None, "an argument is not a plain value")


def argument_types(tools) -> dict[str, dict[str, list[str]]]:
    """Returns tool name -> argument name -> the JSON types that its schema allows ([] = it does not say), from JSON
    schemas ({"type": "function", "function": {...}} or bare): `type`, `anyOf`, `oneOf`, `allOf`, `nullable`, the values
    of `enum` and `const`, and references to `$defs`. tools: None = none.
    """
    out = {}
    for tool in tools or ():
        function = tool.get("function", tool)
        parameters = function.get("parameters") or {}
        properties = parameters.get("properties") or {}
        out[function.get("name", "")] = {name: _types(spec, parameters) for name, spec in properties.items()}
    return out


def _types(spec, root: dict, above: tuple[int, ...] = ()) -> list[str]:
    """Returns the JSON types that a schema allows, [] if any. root: the schema that has the definitions. above: ids of
    the schemas around it."""
    if not isinstance(spec, dict) or id(spec) in above or len(above) > MAX_SCHEMA_DEPTH:
        return []
    named, above = spec.get("type"), (*above, id(spec))
    found = [named] if isinstance(named, str) else list(named) if isinstance(named, (list, tuple)) else []
    options = spec.get("anyOf") or spec.get("oneOf") or ()
    if not found and options:
        parts = [_types(option, root, above) for option in options]
        found = sum(parts, []) if all(parts) else []
    if not found and isinstance(spec.get("$ref"), str):
        value = root
        for key in spec["$ref"].removeprefix("#/").split("/"):
            value = value.get(key) if isinstance(value, dict) else None
        found = _types(value, root, above)
    if not found and spec.get("allOf"):
        found = next(filter(None, (_types(part, root, above) for part in spec["allOf"])), [])
    if not found and ("enum" in spec or "const" in spec):
        values = spec.get("enum", [spec.get("const")])
        found = [JSON_TYPES.get(type(value), "") for value in values]
    return list(dict.fromkeys(found + ["null"] * bool(found and spec.get("nullable"))))


def _json(text: str, start: int = 0) -> tuple[Any, int]:
    """Returns the JSON value at a position of the text, and its end. Raises ValueError if there is none."""
    def no_constant(name):
        raise ValueError(f"{name} is no JSON")
    try:
        return json.JSONDecoder(parse_constant=no_constant).raw_decode(text, start)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _skip(text: str, at: int) -> int:
    """Returns the next position that is not white space."""
    space = SPACE.match(text, at)
    return space.end() if space else at


def _from_json(value, keys: tuple[str, ...]) -> Call:
    """Returns the call of a JSON value. keys: accepted names of the arguments."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return Call("", None, 'a call is a JSON object with "name" and "' + keys[0] + '"')
    arguments = next((value[key] for key in keys if key in value), {})
    if isinstance(arguments, str):
        try:
            arguments = _json(arguments)[0]
        except ValueError:
            pass  # reported below
    if not isinstance(arguments, dict):
        return Call(value["name"], None, f'"{keys[0]}" is no JSON object')
    return Call(value["name"], arguments, id=value["id"] if isinstance(value.get("id"), str) else "")


def _blocks(text: str, begin: str, end: str, read) -> tuple[str, list[Call]]:
    """Parses the calls between two markers, each alone. Returns (text around them, calls). read: text
    between -> its calls.
    """
    outside, calls, at = [], [], 0
    while (start := text.find(begin, at)) >= 0:
        outside.append(text[at:start])
        stop, at = text.find(end, start + len(begin)), len(text)
        if stop < 0:
            calls.append(Call("", None, "the call has no end"))
            break
        at = stop + len(end)
        calls += read(text[start + len(begin):stop])
    return "".join([*outside, text[at:]]).strip(), calls


def _hermes(text, marks, types):
    def read(inside):
        try:
            value, end = _json(inside, _skip(inside, 0))
        except ValueError as e:
            return [Call("", None, f"no JSON: {e}")]
        return [Call("", None, "more than one JSON value in a call") if inside[end:].strip() else _from_json(
            value, ("arguments", "parameters"))]
    return _blocks(text, marks[0], marks[1], read)


def _qwen(text, marks, types):
    def typed(value, kinds):
        value = value.removeprefix("\n").removesuffix("\n")
        if value == "null" and "null" in kinds:  # templates write None so, also where text is allowed
            return None
        if not kinds or "string" in kinds:
            return value
        try:
            found, end = _json(value.strip())
            return found if end == len(value.strip()) else value
        except ValueError:
            return value  # checking the arguments reports this

    def read(inside):
        inside, close = inside.strip(), "</function>"
        head = FUNCTION.match(inside)
        if not (head and inside.endswith(close) and head.end() + len(close) <= len(inside)):
            return [Call("", None, "a call is <function=name> ... </function>")]
        name, body, arguments, at = head[1].strip(), inside[head.end():-len(close)], {}, 0
        while (found := PARAMETER.match(body, at)) and (end := body.find("</parameter>", found.end())) >= 0:
            key, at = found[1].strip(), end + len("</parameter>")
            arguments[key] = typed(body[found.end():end], types.get(name, {}).get(key, ()))
        if body[at:].strip():
            return [Call(name, None, "an argument is <parameter=name> ... </parameter>")]
        return [Call(name, arguments)]
    return _blocks(text, marks[0], marks[1], read)


def _llama(text, marks, types):
    before, tag, rest = text.partition(marks[0])
    if not tag:
        before, rest = "", text
    if not (tag or re.match(r'\s*\{\s*"name"\s*:', rest)):
        return text.strip(), []
    calls, at = [], _skip(rest, 0)
    while True:
        try:
            value, at = _json(rest, at)
        except ValueError as e:
            return before.strip(), [*calls, Call("", None, f"no JSON: {e}")]
        calls.append(_from_json(value, ("parameters", "arguments")))
        at = _skip(rest, at)
        if at < len(rest) and rest[at] == ";":
            at = _skip(rest, at + 1)
        if at >= len(rest) or rest[at] != "{":
            return (before + rest[at:]).strip(), calls


def _mistral(text, marks, types):
    begin, args, call_id = marks
    first, *parts = text.split(begin)
    calls = []
    for part in parts:
        at = _skip(part, 0)
        try:
            if part[at:at + 1] == "[" and not part.startswith(args, at):
                values, end = _json(part, at)
                calls += [_from_json(value, ("arguments",)) for value in values] or [Call("", None, "an empty list")]
            else:
                name, found, end = _name_and_id(part, at, args, call_id)
                value, end = _json(part, _skip(part, end))
                calls.append(dataclasses.replace(_from_json({"name": name, "arguments": value}, ("arguments",)),
                                                 id=found))
            first += part[end:]
        except ValueError as e:
            calls.append(Call("", None, f"no JSON: {e}"))
    return first.strip(), calls


def _name_and_id(part: str, at: int, args: str, call_id: str) -> tuple[str, str, int]:
    """Returns (name, [CALL_ID] if any, start of the arguments) of name[ARGS]{...} or name{...}."""
    stops = [place for mark in (args, call_id, "{") if (place := part.find(mark, at)) >= 0]
    if not stops:
        raise ValueError("a call is a JSON list, or a name and its arguments")
    name, at, found = part[at:min(stops)].strip(), min(stops), ""
    if part.startswith(call_id, at):
        stop = min((place for mark in (args, "{") if (place := part.find(mark, at + len(call_id))) >= 0),
                   default=len(part))
        found, at = part[at + len(call_id):stop].strip(), stop
    return name, found, at + len(args) if part.startswith(args, at) else at


class _JsonNames(ast.NodeTransformer):
    """Replaces true, false and null, which models write for True, False and None."""

    def visit_Name(self, node):
        names = {"true": True, "false": False, "null": None}
        return ast.copy_location(ast.Constant(names[node.id]), node) if node.id in names else node


def _python_call(node) -> Call:
    name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    if not re.fullmatch(r"[A-Za-z_][\w.]*", name):
        return Call("", None, "a call is name(argument=value)")
    if node.args or any(k.arg is None for k in node.keywords):
        return Call(name, None, "arguments are given by name")
    if len({k.arg for k in node.keywords}) < len(node.keywords):
        return Call(name, None, "an argument is given twice")
    try:
        return Call(name, {k.arg: ast.literal_eval(_JsonNames().visit(k.value)) for k in node.keywords})
    except (ValueError, TypeError, SyntaxError):
        return Call(name, None, "an argument is no plain value")


def _python_list(text: str) -> list[Call]:
    try:
        if len(text) > MAX_PYTHON_CHARS:
            raise ValueError(f"longer than {MAX_PYTHON_CHARS} characters")
        tree = ast.parse(text.strip(), mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            raise ValueError("calls stand in a list: [name(argument=value)]")
        return list(map(_python_call, tree.elts))
    except (ValueError, SyntaxError, RecursionError, MemoryError) as e:
        reason = "nested too deeply" if isinstance(e, (RecursionError, MemoryError)) else str(e)
        return [Call("", None, f"no list of calls: {reason}")]


def _pythonic(text, marks, types):
    if marks[0] in text:
        return _blocks(text, marks[0], marks[1], _python_list)
    if not re.match(r"\s*\[\s*[A-Za-z_][\w.]*\s*\(", text):
        return text.strip(), []
    return "", _python_list(text)


# In the order in which `auto` tries them: formats with markers before those recognized by their form alone.
PARSERS = {parser.name: parser for parser in (
    Parser("qwen", ("<tool_call>", "</tool_call>"), 1, _qwen),
    Parser("hermes", ("<tool_call>", "</tool_call>"), 1, _hermes),
    Parser("mistral", ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), -1, _mistral),
    Parser("pythonic", ("<|tool_call_start|>", "<|tool_call_end|>"), 1, _pythonic),
    Parser("llama", ("<|python_tag|>",), -1, _llama),
)}
