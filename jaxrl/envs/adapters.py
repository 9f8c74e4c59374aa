"""From what env.function and env.tools name to something that plays an episode. Standard library only.

`find` returns a Play. Classes become episodes by `Stepped`, tools by `Driver`; gym:<id> and textarena:<id> are classes
like a user's (envs/libraries.py), and so is a session of env.servers (envs/openenv.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect

from jaxrl.envs.api import Action, BadEnvironment, Observation, Step
from jaxrl.envs.play import Play
from jaxrl.envs.tools import by_name
from jaxrl.workers.loading import LoadError, describe, load, number


def find(setup: dict) -> Play:
    """The Play that a worker's setup names; a static method `prepare` of a class is called first. Raises LoadError."""
    if setup["tools"] or setup["mcp"]:
        return Driver(setup)
    if setup["program"]:
        from jaxrl.envs.program import Program
        return Program(setup)
    spec, options = setup["function"], setup["options"]
    kind, _, name = spec.partition(":")
    if kind in ("gym", "textarena"):
        from jaxrl.envs import libraries
        return Stepped(libraries.find(kind, name, options), spec, {}, setup["max_turns"])
    if setup["servers"]:
        from jaxrl.envs import openenv
        made = openenv.find(setup["servers"], options, setup["limits"]["step_seconds"])
        return Stepped(made, spec, {}, setup["max_turns"])
    found = load(spec)
    if isinstance(inspect.getattr_static(found, "prepare", None), staticmethod):
        found.prepare()
    if inspect.isclass(found):
        _check_class(found, spec)
        _check_options(found, (), options, spec)
        return Stepped(found, spec, options, setup["max_turns"])
    first = list(inspect.signature(found).parameters.values())[:2]
    if len(first) == 2 and all(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
                               for p in first):
        _check_options(found, (None, None), options, spec)
        return Episode(found, options)
    _check_options(found, (), options, spec)
    return Stepped(found, spec, options, setup["max_turns"])


def _check_class(found, spec: str) -> None:
    for name, wanted in (("reset", "reset(row, seed) -> Observation"), ("step", "step(action) -> Step")):
        method = getattr(found, name, None)
        if not callable(method):
            raise LoadError(f"{spec} has no method {name}: the class of an environment has {wanted}")
        try:
            inspect.signature(method).bind(*[None] * (3 if name == "reset" else 2))
        except TypeError as e:
            raise LoadError(f"{spec}: its method is not {wanted}: {e}") from None


def _check_options(found, args: tuple, options: dict, spec: str) -> None:
    try:
        inspect.signature(found).bind(*args, **options)
    except TypeError as e:
        what = ("the function of an episode has parameters (task, chat)" if args or not inspect.isclass(found)
                else "they are the arguments of the class")
        raise LoadError(f"env.options={options} do not fit {spec}: {e}; {what}, env.options go to it by name") from None


class Episode(Play):
    """A function (task, chat), asynchronous or plain."""

    def __init__(self, fn, options: dict):
        self._fn, self._options, self.functions, self.name = fn, options, [fn], getattr(fn, "__name__", "episode")
        self.blocking = not (inspect.iscoroutinefunction(fn)
                             or inspect.iscoroutinefunction(getattr(fn, "__call__", None)))  # noqa: B004

    def run(self, task, chat, running):
        return self._fn(task, chat, **self._options)


class Driver(Play):
    """env.tools and env.mcp: the row's prompt, then calls and their answers, until an answer has no calls. Servers are
    started for each episode, or (env.mcp_session=worker) once."""

    name = "episode"

    def __init__(self, setup: dict):
        self.functions = [load(spec) for spec in setup["tools"]]
        self._servers, self._shared, self._opening = setup["mcp"], setup["mcp_session"] == "worker", None
        told = []
        if self._servers:
            from jaxrl.envs import mcp
            self.files, told = mcp.files(self._servers), mcp.listed(self._servers)
        try:
            self._tools = by_name([*self.functions, *told])
        except TypeError as e:
            raise LoadError(str(e)) from None
        self.tools = [tool.schema for tool in self._tools.values()]
        self._max_turns = setup["max_turns"]

    async def run(self, task, chat, running):
        async with self._remote(running) as remote:
            turn = await chat.send(task.prompt, tools=[*self.functions, *remote])
            for _ in range(self._max_turns - 1):
                if not turn.calls or turn.finish == "length":
                    break
                turn = await chat.send(await turn.run())

    @contextlib.asynccontextmanager
    async def _remote(self, running):
        """The servers' tools."""
        if not self._servers:
            yield []
            return
        from jaxrl.envs import mcp
        if self._shared:
            if self._opening is None or mcp.broken(self._opening):
                self._opening = asyncio.ensure_future(mcp.opened(self._servers))
            running.phase = "starting its servers"
            servers = await asyncio.shield(self._opening)
        else:
            running.phase = "starting its servers"
            servers = await mcp.opened(self._servers)
        running.phase = self.name
        try:
            found = [mcp.Remote(server, schema) for server in servers for schema in server.tools]
            if [tool.schema for tool in found] != self.tools[len(self.functions):]:
                raise BadEnvironment("its servers list other tools than at the start")
            yield found
        finally:
            if not self._shared:
                await mcp.closed(servers)


class Stepped(Play):
    """A class, or a function that makes an object, with reset(row, seed) and step(action), asynchronous or plain; a
    new object for each episode, `close()` at its end if it has that. The score is the sum of the steps' rewards."""

    name = "making it"

    def __init__(self, make, spec: str, options: dict, max_turns: int):
        self._make, self._spec, self._options, self._max_turns = make, spec, options, max_turns
        self.functions = [make]

    async def run(self, task, chat, running):
        environment = await running.call(self._make, "making it", **self._options)
        if not (hasattr(environment, "reset") and hasattr(environment, "step")):
            raise BadEnvironment(f"it is made of type {type(environment).__name__}, which has no reset and step")
        try:
            seen = _observation(await running.call(environment.reset, "reset", task.row, task.seed), "reset")
            for _ in range(self._max_turns):
                if seen.state:
                    chat.state(seen.state)
                turn = await chat.send(seen.text, tools=seen.tools)
                if turn.finish == "length" and not turn.text and not turn.calls:
                    break  # the model had no turn
                step = _step(await running.call(environment.step, "step", Action(turn)))
                chat.reward(step.reward)
                chat.note(**step.notes)
                if step.done or turn.finish == "length":
                    break
                seen = _observation(step.observation, "step")
        finally:
            if callable(close := getattr(environment, "close", None)):
                phase = running.phase
                await running.call(close, "close")
                running.phase = phase


def _observation(given, where: str) -> Observation:
    if isinstance(given, Observation):
        return given
    if not isinstance(given, (str, dict, list)):
        raise BadEnvironment(f"{where} gave an observation of type {type(given).__name__}, expected text, messages or "
                             "jaxrl.envs.Observation")
    return Observation(given)


def _step(given) -> Step:
    if not isinstance(given, Step):
        raise BadEnvironment(f"step returned {type(given).__name__}, expected "
                             "jaxrl.envs.Step(observation, reward, done)")
    if number(given.reward) is None:
        raise BadEnvironment(f"the reward of a step is of type {type(given.reward).__name__}, expected a number")
    return given


def explained(error: Exception) -> str:
    """Of a library that does not load or make something."""
    with contextlib.suppress(Exception):
        return describe(error)
    return type(error).__name__
