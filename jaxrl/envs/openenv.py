"""Services of OpenEnv as environments (env.function=openenv): a WebSocket to one of env.servers is a session, whose
environment has reset, step and state. Standard library only.

Messages are JSON: {"type": "reset" | "step" | "state" | "close", "data": ...}; the server answers {"type":
"observation", "data": {"observation": {...}, "reward", "done"}}, {"type": "state", ...} or {"type": "error", "data":
{"message", "code"}}. An action is an object, whose fields the server tells at /schema. One that does not fit it is the
policy's fault; every other error, and whatever is not such an answer, is the environment's.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re

from jaxrl.envs.api import BadEnvironment, Observation, Step
from jaxrl.envs.websocket import WebSocket
from jaxrl.processes import http_client
from jaxrl.workers.loading import LoadError, describe, number

INVALID = "There is no valid action in this answer."
SCHEMA_SECONDS = 20.0  # for a server to tell what its actions are
FULL_SECONDS = 0.5     # between two looks at servers that have no room
OPTIONS = ("action", "observation", "state", "prompt", "reset")
KINDS = {"integer": int, "number": float, "boolean": bool}
WORDS = {int: r"(?<![\w.])-?\d++(?![\w.]*\d)", float: r"-?\d+(?:\.\d+)?", bool: r"true|false"}
BRACES = 100       # at the end of an answer from which an object is read
LARGEST, LONGEST = 2.0**63, 400  # of numbers that an answer names: amount and characters


def find(servers: list[str], options: dict, step_seconds: float):
    """A function without arguments that makes an environment. Every server is asked for its schema once, and they have
    to be equal. Raises LoadError."""
    unknown = [name for name in options if name not in OPTIONS]
    if unknown:
        raise LoadError(f"env.options.{unknown[0]}: openenv has {', '.join(OPTIONS)}")
    told = {server: _schema(server) for server in servers}
    first = told[servers[0]]
    for server, fields in told.items():
        if fields != first:
            raise LoadError(f"{server} has other actions than {servers[0]} ({_named(fields)}; {_named(first)}); "
                            "env.servers are replicas of one environment")
    if (name := options.get("action", "")) and name not in first:
        raise LoadError(f"env.options.action={name!r}: an action of {servers[0]} has the fields {_named(first)}")
    turns = itertools.count()

    def make():
        return OpenEnv(servers, next(turns), first, options, 0.5 * step_seconds)

    make.__module__ = __name__
    return make


class OpenEnv:
    """A session. What is seen: the field of the observation that `observation` names, or its only one, else all as
    JSON. The options are told in docs/guides/environments.md."""

    def __init__(self, servers: list[str], turn: int, fields: dict, options: dict, patience: float):
        self._servers = [servers[(turn + k) % len(servers)] for k in range(len(servers))]
        self._fields, self._options, self._patience = fields, options, patience
        self._field = options.get("action", "") or (next(iter(fields)) if len(fields) == 1 else "")
        self._wire, self._server, self._invalid = None, "", 0

    async def reset(self, row, seed):
        given = {"seed": seed % 2**31} | {name: row[name] for name in self._options.get("reset", ())}
        told = await self._open({"type": "reset", "data": given})
        if told["done"]:
            raise BadEnvironment(f"{self._server}: the episode is over before its first action")
        says = self._options.get("prompt")
        says = self._says() if says is None else says
        seen = self._text(told["observation"])
        return Observation(f"{says}\n\n{seen}" if says else seen, await self._anchor())

    async def step(self, action):
        found = self._action(str(action))
        message = {"type": "step", "data": found}
        told = None if found is None else await self._ask(message, "observation", refused=True)
        if told is None:
            self._invalid += 1
            return Step(Observation(INVALID, await self._anchor()), 0.0, False, {"invalid": self._invalid})
        told = self._checked(told)
        seen = None if told["done"] else Observation(self._text(told["observation"]), await self._anchor())
        return Step(seen, told["reward"], told["done"], {"invalid": self._invalid})

    async def close(self):
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()

    # -- the wire ----------------------------------------------------------------------------------------------------

    async def _open(self, reset: dict) -> dict:
        """A session of the first server that has room, and what it says to `reset`."""
        loop, errors = asyncio.get_running_loop(), []
        until = loop.time() + self._patience
        while True:
            full = False
            for server in self._servers:
                self._server = server
                try:
                    self._wire = await WebSocket.open(_socket(self._server))
                    return self._checked(await self._ask(reset, "observation"))
                except Full as e:
                    full, errors = True, [str(e)]
                except OSError as e:
                    errors.append(f"{self._server}: {str(e) or type(e).__name__}")
                await self.close()
            if not full or loop.time() > until:
                raise BadEnvironment(errors[-1])
            await asyncio.sleep(FULL_SECONDS)

    async def _ask(self, message: dict, kind: str, refused: bool = False) -> dict | None:
        """The data of the answer; None for an action that does not fit, where that may be (`refused`)."""
        try:
            await self._wire.send(json.dumps(message))
            said = await self._wire.receive()
        except ConnectionError as e:
            raise BadEnvironment(f"{self._server}: {e}") from None
        try:
            told = json.loads(said)
        except (ValueError, RecursionError):
            raise BadEnvironment(f"{self._server} wrote no JSON: {said[:60]!r}") from None
        data = told.get("data") if isinstance(told, dict) else None
        if isinstance(data, dict) and told.get("type") == kind:
            return data
        if not isinstance(data, dict) or told.get("type") != "error":
            raise BadEnvironment(f"{self._server} answered {message['type']} with {said[:60]!r}")
        code = data.get("code")
        if code == "CAPACITY_REACHED":
            raise Full(f"{self._server} has no room for another session (max_sessions={data.get('max_sessions')}): set "
                       "env.in_flight to what env.servers can hold, or their max_concurrent_envs higher")
        if code == "VALIDATION_ERROR" and refused:
            return None
        raise BadEnvironment(f"{self._server}: {code}: {str(data.get('message'))[:200]}")

    def _checked(self, told: dict) -> dict:
        reward = told.get("reward")
        value = 0.0 if reward is None else number(reward)
        if not isinstance(told.get("observation"), dict) or not isinstance(told.get("done"), bool) or value is None:
            raise BadEnvironment(f"{self._server} gave an observation without observation, reward and done: "
                                 f"{str(told)[:80]}")
        return told | {"reward": value}

    async def _anchor(self) -> str:
        """The field of the state that `state` names, as text."""
        name = self._options.get("state", "")
        if not name:
            return ""
        told = await self._ask({"type": "state"}, "state")
        if name not in told:
            raise BadEnvironment(f"env.options.state={name!r}: the state has the fields {', '.join(told) or 'none'}")
        return _as_text(told[name])

    # -- text and actions --------------------------------------------------------------------------------------------

    def _says(self) -> str:
        return "" if self._field else f"Answer with a JSON object each turn, of the fields {_named(self._fields)}."

    def _text(self, seen: dict) -> str:
        name = self._options.get("observation", "")
        if name and name not in seen:
            raise BadEnvironment(f"env.options.observation={name!r}: it has the fields {', '.join(seen) or 'none'}")
        return _as_text(seen[name] if name else next(iter(seen.values())) if len(seen) == 1 else seen) or "(nothing)"

    def _action(self, text: str) -> dict | None:
        """The object that an answer means: its text in the field that takes it (of numbers the last one), or the last
        object that it holds. None where there is none."""
        if not self._field:
            begin = len(text)
            for _ in range(BRACES):
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
        fits = len(found[-1]) <= LONGEST and abs(float(found[-1])) < LARGEST
        return {self._field: kind(found[-1])} if fits else None


class Full(Exception):
    """A server has no room for another session."""


def _schema(server: str) -> dict[str, str]:
    """Name and kind of an action's fields."""
    try:
        told = json.loads(http_client.answer(f"{_http(server)}/schema", SCHEMA_SECONDS))
        fields = told["action"]["properties"]
        return {name: str(kind.get("type", "")) for name, kind in fields.items() if name != "metadata"}
    except Exception as e:
        raise LoadError(f"{server} does not tell its actions at /schema, as a server of OpenEnv does: "
                        f"{describe(e)}") from None


def _http(server: str) -> str:
    return re.sub(r"^ws", "http", server).rstrip("/")


def _socket(server: str) -> str:
    return re.sub(r"^http", "ws", server).rstrip("/") + "/ws"


def _named(fields: dict) -> str:
    return ", ".join(f"{name} ({kind})" if kind else name for name, kind in fields.items()) or "none"


def _as_text(value) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
