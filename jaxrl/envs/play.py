"""What a worker plays, and the model as a plain function talks to it. Standard library only."""

from __future__ import annotations

from jaxrl.envs.api import Chat


class Play:
    """What an episode is. run(task, chat, running): the episode, a coroutine unless `blocking`. name: where it is at
    first. tools: schemas. functions, files: what it is made of."""

    blocking = False
    tools: list[dict] = []
    files: list[str] = []

    def chat(self, running, parallel: int) -> Chat:
        return BlockingChat(running, parallel) if self.blocking else Chat(running, parallel)


class BlockingChat(Chat):
    """The same for a plain function: nothing is awaited."""

    def send(self, *args, **kwargs):
        return _now(super().send(*args, **kwargs))

    def _run(self, turn):
        return _now(super()._run(turn))


def _now(coroutine):
    """The result of a coroutine that waits for nothing but what blocks."""
    try:
        coroutine.send(None)
    except StopIteration as e:
        return e.value
    raise RuntimeError("it waits")
