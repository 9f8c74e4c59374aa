"""A server's GPU memory, lent to the trainer and taken back: vLLM's sleep mode as a state machine.

    awake ---sleep---> asleep ---open---> filling ---close---> awake
      any failed call ---> lost ---open---> filling

Level 2 drops weights and cache. Level 1 would keep a copy of the weights in pinned host memory: as many bytes over PCIe
each way per step, for weights that the next publish replaces in full, and that a server woken by mistake would silently
answer with. After level 2 such a server fails the probe instead. The cache stays away while weights arrive, so that a
publish needs room for weights alone.

Sources: vLLM's docs/features/sleep_mode.md; vllm/entrypoints/serve/dev/sleep, v1/engine/core.py (EngineCore.sleep,
wake_up) and device_allocator/cumem.py of 0.32.
"""

from __future__ import annotations

from jaxrl.rollout.vllm.adapter import ServerError

LEVEL = 2


class ServerMemory:
    """GPU memory of one server as a state machine, through calls of its `control` (adapter.Control).

    A call in the wrong state raises RuntimeError and reaches no server. A call that fails raises what the control
    raises and leaves the state `lost`, since its progress is unknown; only `open` leads out of that.

    Attributes:
      state: "awake" (at first), "asleep", "filling" or "lost".
    """

    def __init__(self, control):
        self.control = control
        self.state = "awake"

    def meet(self) -> None:
        """Sets the state of a new server: awake, or `lost` if an earlier trainer left it asleep or paused. Raises
        ServerError or Refused if the server does not tell."""
        self.state = "lost" if self.control.is_sleeping() else "awake"

    def sleep(self) -> None:
        """Puts the server to sleep: awake -> asleep. It aborts the requests that it is still working on and drops
        weights and cache (level 2), so weights must be published again before it serves. Raises RuntimeError in any
        other state, ServerError or Refused if the call fails (-> lost)."""
        self._go(("awake",), "asleep", lambda: self.control.sleep(LEVEL))

    def open(self) -> None:
        """Prepares for weights: asleep -> filling, with memory for weights whose content is undefined; lost -> filling,
        with all memory. In any other state it does nothing. Raises ServerError or Refused if the call fails (->
        lost)."""
        if self.state == "asleep":
            self._go(("asleep",), "filling", lambda: self.control.wake_up("weights"))
        elif self.state == "lost":
            self._go(("lost",), "filling", self._wake)

    def close(self) -> None:
        """Ends a weight transfer: filling -> awake, the server schedules again. An awake server stays awake. Raises
        RuntimeError in any other state, ServerError if it reports that it still sleeps, or fails, Refused if it refuses
        (-> lost)."""
        if self.state != "awake":
            self._go(("filling", "awake"), "awake", lambda: self._wake("kv_cache"))

    def _wake(self, *tags) -> None:
        status = self.control.wake_up(*tags)
        if status != "awake":
            raise ServerError(f"{self.control.url} says it is {status!r} after it was woken")

    def _go(self, legal: tuple[str, ...], then: str, call) -> None:
        if self.state not in legal:
            raise RuntimeError(f"{self.control.url}: its memory is {self.state}; this needs {' or '.join(legal)}")
        self.state = "lost"
        call()
        self.state = then
