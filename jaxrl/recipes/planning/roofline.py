"""Seconds of each phase: operations over the chip's peak, bytes over its bandwidth, collectives over its links.

`ideal` is the longest of the three at the chip's own figures, a lower bound. `seconds` takes the shares of peak and bandwidth
that published runs attain (Chip.attainable) and hides communication behind the rest; `serial` does not hide it.
"""

from __future__ import annotations

from jaxrl.sharding.chips import Chip

# Seconds that a collective takes however small it is: assumptions, of the order that vendors' own benchmarks show.
LATENCY = {"tpu": 3e-6, "gpu": 15e-6, "cpu": 50e-6}


def collective_seconds(chip: Chip, topology: tuple[int, ...], found: dict) -> float:
    """Of one entry of a program's `collectives` (vars of collectives.Collective, with `sent`)."""
    if chip.kind == "tpu":
        sides = sorted(topology, reverse=True)
        axes, reached = 0, 1
        while axes < len(sides) and reached < found["group"]:
            reached *= sides[axes]
            axes += 1
        speed = chip.links * max(1, axes)
    elif found["hosts"] > 1:  # each of a host's members brings its own network card
        speed = min(chip.links, chip.network * found["group"] / found["hosts"])
    else:
        speed = chip.links
    return found["sent"] / speed + found["count"] * LATENCY[chip.kind]


def phase(chip: Chip, parts: list[tuple], network: float) -> dict:
    """{"compute", "memory", "network", "ideal", "seconds", "serial", "bound", "flops", "bytes"} of a phase.

    parts: (Work, how often) pairs, all on one device; network: seconds of their collectives, already times how often.
    """
    flops = sum(w.flops * n for w, n in parts)
    moved = sum(w.bytes * n for w, n in parts)
    compute, memory = flops / chip.flops, moved / chip.bandwidth
    of_peak, of_bandwidth = chip.attainable
    busy = max(compute / of_peak, memory / of_bandwidth)
    bound = max((("compute", compute / of_peak), ("memory", memory / of_bandwidth), ("network", network)), key=lambda p: p[1])[0]
    return {"compute": compute, "memory": memory, "network": network, "ideal": max(compute, memory, network),
            "seconds": max(busy, network), "serial": busy + network, "bound": bound, "flops": flops, "bytes": moved}
