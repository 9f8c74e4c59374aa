"""Keeps freed memory in the process where XLA computes on CPUs. Called by main before the first thread, and by
run.setup before the first device use.

XLA for CPUs allocates the temporaries of every call of a program with malloc, and glibc returns large ones to the
system when they are freed: the next call faults them in again, page by page, which took a fifth of the processor time
of small models (docs/explanations/kernels.md). Programs on accelerators have allocators of their own.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import sys

# mallopt(3), numbers of malloc.h
TRIM_THRESHOLD, MMAP_MAX, ARENA_MAX = -1, -4, -8
KEPT = 2**30  # bytes; more than this at the end of the heap is returned to the system


def keep_freed_memory() -> bool:
    """Lets glibc keep freed bytes for the next allocation, up to KEPT at the end of its heap; returns whether it does.

    Threads that start afterwards share one heap, since other heaps hold no large blocks. It does nothing where jax may
    find an accelerator, where libc has no such options, and where the environment has set any of them (MALLOC_*,
    GLIBC_TUNABLES)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not only_cpus() or is_set_by_user(os.environ):
        return False
    return all([mallopt(option, value) for option, value in ((MMAP_MAX, 0), (TRIM_THRESHOLD, KEPT), (ARENA_MAX, 1))])


def only_cpus() -> bool:
    """Returns whether jax has CPU devices alone, without starting any: by jax_platforms, or because no plugin is
    installed."""
    jax = sys.modules.get("jax")  # main calls before it is imported
    if platforms := jax.config.jax_platforms if jax else os.environ.get("JAX_PLATFORMS"):
        return platforms == "cpu"
    return not (importlib.metadata.entry_points(group="jax_plugins")
                or any(map(importlib.util.find_spec, ("jax_plugins", "libtpu"))))


def is_set_by_user(environ) -> bool:
    """Returns whether an environment (name -> value) has options of glibc's malloc."""
    return any(name.startswith("MALLOC_") for name in environ) or "glibc.malloc" in environ.get("GLIBC_TUNABLES", "")
