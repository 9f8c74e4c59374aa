"""OpenEnv services as environments (env.function=openenv). A WebSocket to one of env.servers is a session with an
environment that has reset, step and state. Standard library only.

Messages are JSON: {"type": "reset" | "step" | "state" | "close", "data": ...}; the server replies {"type":
"observation", "data": {"observation": {...}, "reward", "done"}}, {"type": "state", ...} or {"type": "error", "data":
{"message", "code"}}. An action is an object whose fields the server describes at /schema. An action that does not fit
counts against the policy; every other error or malformed reply counts as the environment's failure.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from typing import Any

from jaxrl.envs.api import BadEnvironment, Observation, Step
from jaxrl.envs.pictures import png_of
from jaxrl.envs.websocket import WebSocket
from jaxrl.processes import http_client
from jaxrl.workers.loading import LoadError, describe, number

INVALID = "There is no valid action in this answer."
SCHEMA_SECONDS = 20.0  # for a server to reply with its action schema
RETRY_SECONDS = 0.5     # between two tries at servers without free sessions
OPTIONS = ("action", "observation", "state", "prompt", "reset", "image")
KINDS = {"integer": int, "number": float, "boolean": bool}
WORDS = {int: r"(?<![\w.])-?\d++(?![\w.]*\d)", float: r"-?\d+(?:\.\d+)?", bool: r"true|false"}
MAX_BRACES = 100       # most opening braces tried, from the end of a turn
MAX_NUMBER, MAX_DIGITS = 2.0**63, 400  # limits of a number in a turn: absolute value and characters


def make_factory(servers: list[str], options: dict, step_seconds: float):
    """Returns a function without arguments that creates an environment. Asks every server for its schema.

    Args:
      servers: URLs of replicas of one environment.
      options: env.options with the keys of OPTIONS: action, observation, state, prompt, reset, image.
      step_seconds: env.step_seconds; an episode waits half of it for a server with a free session.

    Raises:
      LoadError: an unknown option, a server without a schema, servers with different actions, or an action field
        that does not exist."""
    unknown = [name for name in options if name not in OPTIONS]
    if unknown:
        raise LoadError(f"env.options.{unknown[0]}: unknown option; openenv has {', '.join(OPTIONS)}")
    schemas = {server: _schema(server) for server in servers}
    first = schemas[servers[0]]
    for server, fields in schemas.items():
        if fields != first:
            raise LoadError(f"{server} has other actions than {servers[0]} ({_field_list(fields)}; "
                            f"{_field_list(first)}); "
                            "env.servers are replicas of one environment")
    if (name := options.get("action", "")) and name not in first:
        raise LoadError(f"env.options.action={name!r}: an action of {servers[0]} has the fields {_field_list(first)}")
    turns = itertools.count()

    def make():
        return OpenEnv(servers, next(turns), first, options, 0.5 * step_seconds)

    make.__module__ = __name__
    return make


class OpenEnv:
    """One session of an OpenEnv server as an environment.

    The observation is the field that option `observation` names, or the only field, else all fields as JSON. Options:
    docs/guides/environments.md.

    Args:
      options: env.options of openenv.
      servers: URLs, tried in turn from number `turn` on while they are full. fields: those of an action, from the
        server's schema.
      patience: seconds to wait for a free session."""

    def __init__(self, servers: list[str], turn: int, fields: dict, options: dict, patience: float):
        self._servers = [servers[(turn + k) % len(servers)] for k in range(len(servers))]
        self._fields, self._options, self._patience = fields, options, patience
        self._field = options.get("action", "") or (next(iter(fields)) if len(fields) == 1 else "")
        self._wire, self._server, self._invalid = None, "", 0

    async def reset(self, row, seed):
        """Opens a session with seed modulo 2^31 and the row's columns of option `reset`; returns the first Observation.

        Raises BadEnvironment if no server has a free session within `patience`, if the connection or the protocol
        breaks, and if the episode is over before its first action; MissingColumn for a column that the row lacks."""
        data = {"seed": seed % 2**31} | {name: row[name] for name in self._options.get("reset", ())}
        reply = await self._open({"type": "reset", "data": data})
        if reply["done"]:
            raise BadEnvironment(f"{self._server}: the episode is over before its first action")
        says = self._options.get("prompt")
        says = self._instructions() if says is None else says
        return Observation(self._shown(reply["observation"], f"{says}\n\n" if says else ""), await self._anchor())

    async def step(self, action):
        """Sends the action in the model's text; returns a Step with the server's reward (0 if it gives none).

        A text without an action, or one that the server refuses (VALIDATION_ERROR), changes nothing: it gets the text
        INVALID, reward 0, and is counted in the note `invalid`. Raises BadEnvironment for any other error of the
        server, and if the connection or the protocol breaks."""
        found = self._action(str(action))
        message = {"type": "step", "data": found}
        reply = None if found is None else await self._ask(message, "observation", refused=True)
        if reply is None:
            self._invalid += 1
            return Step(Observation(INVALID, await self._anchor()), 0.0, False, {"invalid": self._invalid})
        reply = self._check_observation(reply)
        seen = None if reply["done"] else Observation(self._shown(reply["observation"]), await self._anchor())
        return Step(seen, reply["reward"], reply["done"], {"invalid": self._invalid})

    async def close(self):
        """Closes the session's connection."""
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()

    # -- transport ---------------------------------------------------------------------------------------------------

    async def _open(self, reset: dict) -> dict:
        """Opens a session on the first server with a free one, and returns its reply to `reset`."""
        loop, errors = asyncio.get_running_loop(), []
        until = loop.time() + self._patience
        while True:
            full = False
            for server in self._servers:
                self._server = server
                try:
                    self._wire = await WebSocket.open(_socket(self._server))
                    return self._check_observation(await self._ask(reset, "observation"))
                except ServerFull as e:
                    full, errors = True, [str(e)]
                except OSError as e:
                    errors.append(f"{self._server}: {str(e) or type(e).__name__}")
                await self.close()
            if not full or loop.time() > until:
                raise BadEnvironment(errors[-1])
            await asyncio.sleep(RETRY_SECONDS)

    async def _ask(self, message: dict, kind: str, refused: bool = False) -> dict | Any:
        """Returns the data of a reply; None for an action that does not fit, if `refused` allows that."""
        assert self._wire is not None  # the session is open
        try:
            await self._wire.send(json.dumps(message))
            text = await self._wire.receive()
        except ConnectionError as e:
            raise BadEnvironment(f"{self._server}: {e}") from None
        try:
            reply = json.loads(text)
        except (ValueError, RecursionError):
            raise BadEnvironment(f"{self._server} wrote invalid JSON: {text[:60]!r}") from None
        data = reply.get("data") if isinstance(reply, dict) else None
        if isinstance(data, dict) and reply.get("type") == kind:
            return data
        if not isinstance(data, dict) or reply.get("type") != "error":
            raise BadEnvironment(f"{self._server} replied to {message['type']} with {text[:60]!r}")
        code = data.get("code")
        if code == "CAPACITY_REACHED":
            raise ServerFull(f"{self._server} has no room for another session "
                             f"(max_sessions={data.get('max_sessions')}): lower "
                             "env.in_flight to what env.servers can hold, or raise their max_concurrent_envs")
        if code == "VALIDATION_ERROR" and refused:
            return None
        raise BadEnvironment(f"{self._server}: {code}: {str(data.get('message'))[:200]}")

    def _check_observation(self, data: dict) -> dict:
        reward = data.get("reward")
        try:
            value = 0.0 if reward is None else number(reward)
        except OverflowError:
            value = None
        if not isinstance(data.get("observation"), dict) or not isinstance(data.get("done"), bool) or value is None:
            raise BadEnvironment(f"{self._server} gave an observation without observation, reward and done: "
                                 f"{str(data)[:80]}")
        return data | {"reward": value}

    async def _anchor(self) -> str:
        """Returns the field of the state that option `state` names, as text; "" without that option."""
        name = self._options.get("state", "")
        if not name:
            return ""
        state = await self._ask({"type": "state"}, "state")
        if name not in state:
            raise BadEnvironment(f"env.options.state={name!r}: the state has the fields {', '.join(state) or 'none'}")
        return _as_text(state[name])

    # -- text and actions --------------------------------------------------------------------------------------------

    def _instructions(self) -> str:
        return "" if self._field else f"Answer with a JSON object each turn, of the fields {_field_list(self._fields)}."

    def _shown(self, seen: dict, before: str = "") -> str | list:
        """Returns an observation after a text: as text, or with option `image` as parts, of which that field is one."""
        name = self._options.get("image", "")
        if not name:
            return before + self._text(seen)
        if name not in seen:
            found = ", ".join(seen) or "none"
            raise BadEnvironment(f"env.options.image={name!r}: an observation has the fields {found}")
        rest = {field: value for field, value in seen.items() if field != name}
        text = before + (self._text(rest) if rest else "")
        return [*([{"type": "text", "text": text}] if text else []), *_images(seen[name], f"{self._server}: {name}")]

    def _text(self, seen: dict) -> str:
        name = self._options.get("observation", "")
        if name and name not in seen:
            raise BadEnvironment(f"env.options.observation={name!r}: it has the fields {', '.join(seen) or 'none'}")
        return _as_text(seen[name] if name else next(iter(seen.values())) if len(seen) == 1 else seen) or "(nothing)"

    def _action(self, text: str) -> dict | None:
        """Parses a turn into an action: its text in the only field (numbers: the last one), or the last object it
        contains. None if there is none.
        """
        if not self._field:
            begin = len(text)
            for _ in range(MAX_BRACES):
                if (begin := text.rfind("{", 0, begin)) < 0:
                    break
                try:
                    found, _ = json.JSONDecoder().raw_decode(text, begin)
                    json.dumps(found, allow_nan=False)
                except (ValueError, RecursionError):
                    continue
                if set(found) <= set(self._fields) and set(found):
                    return found
            return None
        kind = KINDS.get(self._fields[self._field])
        if kind is None:
            return {self._field: text.strip()}
        found = re.findall(WORDS[kind], text.lower())
        if not found or kind is bool:
            return {self._field: found[-1] == "true"} if found else None
        fits = len(found[-1]) <= MAX_DIGITS and abs(float(found[-1])) < MAX_NUMBER
        return {self._field: kind(found[-1])} if fits else None


class ServerFull(Exception):
    """A server has no free session."""


def _schema(server: str) -> dict[str, str]:
    """Returns name -> type of an action's fields."""
    try:
        schema = json.loads(http_client.fetch(f"{_http(server)}/schema", SCHEMA_SECONDS))
        fields = schema["action"]["properties"]
        return {name: str(kind.get("type", "")) for name, kind in fields.items() if name != "metadata"}
    except Exception as e:
        raise LoadError(f"{server} does not describe its actions at /schema, as an OpenEnv server does: "
                        f"{describe(e)}") from None


def _http(server: str) -> str:
    return re.sub(r"^ws", "http", server).rstrip("/")


def _socket(server: str) -> str:
    return re.sub(r"^http", "ws", server).rstrip("/") + "/ws"


def _field_list(fields: dict) -> str:
    return ", ".join(f"{name} ({kind})" if kind else name for name, kind in fields.items()) or "none"


def _images(value, where: str) -> list[dict]:
    """Returns the parts of a field that holds an image or a list of images: base64 text or a data URI, or an array as
    lists [H, W, 3] of numbers from 0 to 255.
    """
    if isinstance(value, str):
        return [{"type": "image", "image": value if value.startswith("data:") else f"data:;base64,{value}"}]
    if isinstance(value, list) and value and all(isinstance(one, str) for one in value):
        return [part for one in value for part in _images(one, where)]
    try:
        height, width, count = len(value), len(value[0]), len(value[0][0])
        pixels = bytes(number for row in value for pixel in row for number in pixel)
        if count not in (3, 4) or len(pixels) != height * width * count:
            raise ValueError
    except (TypeError, ValueError, IndexError, KeyError):
        raise BadEnvironment(f"{where} is no image: expected base64 text, a data URI or lists [height, width, 3] of "
                             "numbers from 0 to 255") from None
    return [{"type": "image", "image": png_of(pixels, height, width, count)}]


def _as_text(value) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
