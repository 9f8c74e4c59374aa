"""Turns what env.function, env.tools, env.mcp or env.program name into an EpisodeRunner. Standard library only.

Workers call `load_runner`. Classes run by `StepRunner`, tools by `ToolRunner`. gym:<id> and textarena:<id> are
classes like a user's (envs/libraries.py), and so is a session of env.servers (envs/openenv.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect

from jaxrl.envs.api import Action, BadEnvironment, Observation, Step
from jaxrl.envs.runner import EpisodeRunner
from jaxrl.envs.tools import tools_by_name
from jaxrl.workers.loading import LoadError, load, number


def load_runner(setup: dict) -> EpisodeRunner:
    """Returns the EpisodeRunner that a worker's setup names, after calling a class's static method `prepare`.

    setup: the pool's first message. Raises LoadError if user code cannot be loaded, has the wrong signature or does not
    take env.options, and if a library, program or server is missing; what `prepare` raises is passed on."""
    if setup["tools"] or setup["mcp"]:
        return ToolRunner(setup)
    if setup["program"]:
        from jaxrl.envs.program import ProgramRunner
        return ProgramRunner(setup)
    spec, options = setup["function"], setup["options"]
    kind, _, name = spec.partition(":")
    if kind in ("gym", "textarena"):
        from jaxrl.envs import libraries
        return StepRunner(libraries.make_factory(kind, name, options), spec, {}, setup["max_turns"])
    if setup["servers"]:
        from jaxrl.envs import openenv
        made = openenv.make_factory(setup["servers"], options, setup["limits"]["step_seconds"])
        return StepRunner(made, spec, {}, setup["max_turns"])
    found = load(spec)
    if isinstance(inspect.getattr_static(found, "prepare", None), staticmethod):
        found.prepare()
    if inspect.isclass(found):
        _check_class(found, spec)
        _check_options(found, (), options, spec)
        return StepRunner(found, spec, options, setup["max_turns"])
    first = list(inspect.signature(found).parameters.values())[:2]
    if len(first) == 2 and all(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
                               for p in first):
        _check_options(found, (None, None), options, spec)
        return FunctionRunner(found, options)
    _check_options(found, (), options, spec)
    return StepRunner(found, spec, options, setup["max_turns"])


def _check_class(found, spec: str) -> None:
    for name, wanted in (("reset", "reset(row, seed) -> Observation"), ("step", "step(action) -> Step")):
        method = getattr(found, name, None)
        if not callable(method):
            raise LoadError(f"{spec} has no method {name}: an environment class needs {wanted}")
        try:
            inspect.signature(method).bind(*[None] * (3 if name == "reset" else 2))
        except TypeError as e:
            raise LoadError(f"{spec}: its method is not {wanted}: {e}") from None


def _check_options(found, args: tuple, options: dict, spec: str) -> None:
    try:
        inspect.signature(found).bind(*args, **options)
    except TypeError as e:
        what = ("an episode function has the parameters (task, chat)" if args or not inspect.isclass(found)
                else "env.options are the class's arguments")
        raise LoadError(f"env.options={options} do not fit {spec}: {e}; {what}, options are passed by name") from None


class FunctionRunner(EpisodeRunner):
    """Runs a function fn(task, chat), asynchronous or plain, as an episode.

    options: further keyword arguments of the function."""

    def __init__(self, fn, options: dict):
        self._fn, self._options, self.functions, self.name = fn, options, [fn], getattr(fn, "__name__", "episode")
        self.blocking = not (inspect.iscoroutinefunction(fn)
                             or inspect.iscoroutinefunction(getattr(fn, "__call__", None)))  # noqa: B004

    def run(self, task, chat, running):
        """Calls the function and returns what it returns: a number, a dict of numbers or None; a coroutine of it if the
        function is asynchronous."""
        return self._fn(task, chat, **self._options)


class ToolRunner(EpisodeRunner):
    """Runs env.tools and env.mcp: the row's prompt, then tool calls and replies, until a turn has no calls.

    Servers start once per episode, or once per worker with env.mcp_session=worker.

    setup: the pool's first message to a worker. Raises LoadError if a tool cannot be loaded or has no schema, if a
    server fails, or if two tools have the same name."""

    name = "episode"

    def __init__(self, setup: dict):
        self.functions = [load(spec) for spec in setup["tools"]]
        self._servers, self._shared, self._opening = setup["mcp"], setup["mcp_session"] == "worker", None
        schemas = []
        if self._servers:
            from jaxrl.envs import mcp
            self.files, schemas = mcp.command_files(self._servers), mcp.list_tools(self._servers)
        try:
            self._tools = tools_by_name([*self.functions, *schemas])
        except TypeError as e:
            raise LoadError(str(e)) from None
        self.tools = [tool.schema for tool in self._tools.values()]
        self._max_turns, self._images = setup["max_turns"], setup.get("images", False)

    async def run(self, task, chat, running):
        """Sends the prompt with the tools, then the replies to calls, until a turn has none or was cut, or
        env.max_turns is reached. Returns None: reward functions score the episode.

        Raises BadEnvironment if a server fails or lists other tools than at start-up."""
        async with self._remote(running) as remote:
            turn = await chat.send(task.prompt, tools=[*self.functions, *remote])
            for _ in range(self._max_turns - 1):
                if not turn.calls or turn.finish == "length":
                    break
                turn = await chat.send(await turn.run())

    @contextlib.asynccontextmanager
    async def _remote(self, running):
        """Yields the servers' tools."""
        if not self._servers:
            yield []
            return
        from jaxrl.envs import mcp
        if self._shared:
            if self._opening is None or mcp.needs_restart(self._opening):
                self._opening = asyncio.ensure_future(mcp.open_servers(self._servers))
            running.phase = "starting its servers"
            servers = await asyncio.shield(self._opening)
        else:
            running.phase = "starting its servers"
            servers = await mcp.open_servers(self._servers)
        running.phase = self.name
        try:
            found = [mcp.McpTool(server, schema, self._images) for server in servers for schema in server.tools]
            if [tool.schema for tool in found] != self.tools[len(self.functions):]:
                raise BadEnvironment("its servers list different tools than at start-up")
            yield found
        finally:
            if not self._shared:
                await mcp.close_servers(servers)


class StepRunner(EpisodeRunner):
    """Runs a class, or a function that returns an object, with reset(row, seed) and
    step(action), asynchronous or plain.

    Each episode gets a new object; its `close()`, if any, is called at the end. The score is the sum
    of the steps' rewards.

    make: makes an object. spec: its import path, for messages. options: keyword arguments of make. max_turns:
    env.max_turns."""

    name = "making it"

    def __init__(self, make, spec: str, options: dict, max_turns: int):
        self._make, self._spec, self._options, self._max_turns = make, spec, options, max_turns
        self.functions = [make]

    async def run(self, task, chat, running):
        """Makes an environment, resets it, and passes it the model's turns until it is done, a turn was cut, or
        env.max_turns is reached. Returns None: the steps' rewards go to `chat.reward`.

        Raises BadEnvironment for an object without reset and step, and for results that are no Observation or Step."""
        environment = await running.call(self._make, "making it", **self._options)
        if not (hasattr(environment, "reset") and hasattr(environment, "step")):
            raise BadEnvironment(f"it is of type {type(environment).__name__}, which has no reset and step")
        try:
            seen = _observation(await running.call(environment.reset, "reset", task.row, task.seed), "reset")
            for _ in range(self._max_turns):
                if seen.state:
                    chat.state(seen.state)
                turn = await chat.send(seen.text, tools=seen.tools)
                if turn.finish == "length" and not turn.text and not turn.calls:
                    break  # no turns or tokens are left
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


def _observation(value, where: str) -> Observation:
    if isinstance(value, Observation):
        return value
    if not isinstance(value, (str, dict, list)):
        raise BadEnvironment(f"{where} gave an observation of type {type(value).__name__}, expected text, messages or "
                             "jaxrl.envs.Observation")
    return Observation(value)


def _step(step) -> Step:
    if not isinstance(step, Step):
        raise BadEnvironment(f"step returned {type(step).__name__}, expected "
                             "jaxrl.envs.Step(observation, reward, done)")
    try:
        known = number(step.reward) is not None
    except OverflowError:
        known = True  # chat.reward says so
    if not known:
        raise BadEnvironment(f"the reward of a step is of type {type(step.reward).__name__}, expected a number")
    return step
