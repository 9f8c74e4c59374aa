"""A server's GPU memory, lent to the trainer and taken back: vLLM's sleep mode as a state machine.

    awake ---sleep---> asleep ---wake_weights---> empty ---filled---> full ---wake_cache---> awake
      any failed call ---> lost ---recover---> empty

Level 2 drops weights and cache. Level 1 would keep a copy of the weights in pinned host memory: as many bytes over PCIe each way
per step, for weights that the next publish replaces in full, and that a server woken by mistake would silently answer with.
After level 2 such a server fails the probe instead. The cache stays away while weights arrive, so that a publish needs room for
weights alone.

Sources: vLLM's docs/features/sleep_mode.md; vllm/entrypoints/serve/dev/sleep, v1/engine/core.py (EngineCore.sleep, wake_up) and
device_allocator/cumem.py of 0.32.
"""

from __future__ import annotations

from jaxrl.rollout.vllm.adapter import ServerError

LEVEL = 2


class Memory:
    """What one server holds. Methods call its `control` (adapter.Control); each names in its text the states it is legal in.

    A call in another state raises RuntimeError and reaches no server. A call that fails raises what the control raises and
    leaves the state `lost`: nobody knows how far it came, and only `recover` goes on from there.
    """

    def __init__(self, control):
        self.control = control
        self.state = "awake"

    def sleep(self) -> None:
        """awake -> asleep. Whatever the server was still working on is aborted there."""
        self._go(("awake",), "asleep", lambda: self.control.sleep(LEVEL))

    def wake_weights(self) -> None:
        """asleep -> empty: memory for weights is there, what it holds is undefined."""
        self._go(("asleep",), "empty", lambda: self.control.wake_up("weights"))

    def filled(self) -> None:
        """empty -> full: every weight has arrived."""
        self._go(("empty",), "full", lambda: None)

    def wake_cache(self) -> None:
        """full -> awake: the server schedules again. ServerError where it says that it still sleeps."""
        self._go(("full",), "awake", self._wake_all)

    def recover(self) -> None:
        """lost -> empty: all memory is back (the cache's too), weights are undefined."""
        self._go(("lost",), "empty", lambda: self._wake_all(()))

    def meet(self) -> None:
        """A server met anew: awake, or `lost` where an earlier trainer left it asleep or paused."""
        self.state = "lost" if self.control.is_sleeping() else "awake"

    def open(self) -> None:
        """Before an update of the weights: asleep or lost -> empty. An awake server stays so."""
        if self.state == "asleep":
            self.wake_weights()
        elif self.state == "lost":
            self.recover()

    def close(self) -> None:
        """After it: empty -> full -> awake."""
        if self.state != "awake":
            self.filled()
            self.wake_cache()

    def _wake_all(self, tags=("kv_cache",)) -> None:
        status = self.control.wake_up(*tags)
        if status != "awake":
            raise ServerError(f"{self.control.url} says it is {status!r} after it was woken")

    def _go(self, legal: tuple[str, ...], then: str, call) -> None:
        if self.state not in legal:
            raise RuntimeError(f"{self.control.url}: its memory is {self.state}; this needs {' or '.join(legal)}")
        self.state = "lost"
        call()
        self.state = then
