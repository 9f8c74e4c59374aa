"""JAX profiles of a few steps: traces (`profile.steps`), arrays in device memory (`profile.memory`)."""

from __future__ import annotations

from pathlib import Path

import jax


def traced_steps(profile, process: int) -> tuple:
    """Returns (first, last) of the steps that a process traces, by config.profile; () for none."""
    return tuple(profile.steps) if process in profile.processes else ()


def memory_steps(profile, process: int) -> tuple:
    """Returns the steps after which a process writes a memory profile; () for none."""
    return tuple(profile.memory) if process in profile.processes else ()


class Profiler:
    """Traces the steps first..last (both included) into `folder`; TensorBoard and Perfetto open it.

    profiler.at(completed)     call it before the first step and after each completed one, with growing numbers

    The trace begins when the step before `first` is completed, or at once where a run resumes between the two, and
    ends when `last` is, or in `close`. A run that is past `last` traces nothing.

    After each step of `memory` (0: before the first) what this process's devices hold is written to
    memory_<step>_<process>.prof, which `pprof` opens: bytes by the Python line that made them. These are the
    arrays that live between two steps (weights, optimizer state, caches); what a program takes while it runs
    is not among them.

    A trace marks each step ("step", with its number) and names each operation by the part of the model or of the step
    that it belongs to: the modules' names (attention, mlp ...), `head`, `loss`, `critic`, `optimizer`. A program that
    comes from the compilation cache keeps the names it was compiled with.

    Args:
      steps: config.profile.steps; empty = never.
      python: whether every call of Python is in the trace, with its stack; that slows the steps down.
      folder: made by the profiler.
      memory: config.profile.memory; empty = never.
    """

    def __init__(self, steps: tuple[int, int] | tuple[()], folder: str | Path, memory: tuple[int, ...] = (),
                 python: bool = False):
        self._steps, self._folder, self._memory = tuple(steps), str(folder), tuple(memory)
        self._python = python
        self._running = self._done = False
        self._step = None  # the annotation of the step that is being traced

    def at(self, completed: int) -> None:
        """Starts or ends the trace and writes the memory profile of a completed step. completed: its number, 0 = before
        the first step."""
        self._leave_step()
        if completed in self._memory:
            Path(self._folder).mkdir(parents=True, exist_ok=True)
            jax.profiler.save_device_memory_profile(f"{self._folder}/memory_{completed:08d}_{jax.process_index()}.prof")
        if not self._steps or self._done:
            return
        first, last = self._steps
        if completed >= last:
            self.close()
            self._done = True
        elif completed + 1 >= first and not self._running:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = int(self._python)
            jax.profiler.start_trace(self._folder, profiler_options=options)
            self._running = True
        if self._running:
            self._step = jax.profiler.StepTraceAnnotation("step", step_num=completed + 1)
            self._step.__enter__()

    def _leave_step(self) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None

    def close(self) -> None:
        """Ends a running trace. May be called twice."""
        self._leave_step()
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
