"""Base class of what a worker runs as an episode, and the blocking chat of plain functions. Standard library only."""

from __future__ import annotations

from collections.abc import Callable

from jaxrl.envs.api import Chat


class EpisodeRunner:
    """Runs episodes of one kind.

    Attributes:
      run: (task, chat, running) -> the episode's result; a coroutine unless `blocking`.
      blocking: whether `run` is a plain function: it gets a thread and a BlockingChat.
      name: the episode's first phase, for messages.
      tools: JSON schemas.
      functions, files: the code it consists of.
    """

    blocking = False
    tools: list[dict] = []
    functions: list = []
    files: list[str] = []
    run: Callable
    name: str

    def chat(self, running, parallel: int) -> Chat:
        """Returns the chat of one episode: a BlockingChat for plain functions, else a Chat.

        running: the episode's worker.Attempt. parallel: env.max_parallel_calls."""
        return BlockingChat(running, parallel) if self.blocking else Chat(running, parallel)


class BlockingChat(Chat):
    """A Chat for plain functions: `send` blocks instead of being awaited."""

    def send(self, *args, **kwargs):
        """Sends messages as Chat.send does, and returns the Turn once it is sampled."""
        return _now(super().send(*args, **kwargs))

    def _run(self, turn):
        return _now(super()._run(turn))


def _now(coroutine):
    """Returns the result of a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as e:
        return e.value
    raise RuntimeError("it waits")
