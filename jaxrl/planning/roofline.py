"""Seconds of each phase: operations over the chip's peak, bytes over its bandwidth, collectives over its links.

`ideal` is the longest of the three at the chip's own figures, a lower bound. `seconds` takes the shares of peak and
bandwidth that published runs attain (Chip.attainable), adds the time that launches of kernels take (LAUNCH), and hides
communication behind the rest; `serial` does not.
"""

from __future__ import annotations

from jaxrl.sharding.chips import Chip

# Seconds of a collective however small it is, and of one more device or host in its ring: assumptions, of the order
# that vendors' benchmarks show. (start, next device, next host)
LATENCY = {"tpu": (3e-6, 1e-6, 0.0), "gpu": (10e-6, 1e-6, 5e-6), "cpu": (50e-6, 10e-6, 0.0)}

# Seconds that each kernel of a decoding step adds to its products and bytes. On an H200 a token of 256 slots took 4.79
# ms with 447 launches (1.5B) and 3.00 ms with 391 (0.5B; benchmarks/results/suite_nvidia_h200.md): for 2.2 us a launch
# nothing ran, in both cases, and kernels other than products and attention took about 3.4 us each.
LAUNCH = {"gpu": 5.5e-6}


def collective_seconds(chip: Chip, topology: tuple[int, ...], found: dict) -> float:
    """Returns the seconds of all runs of one entry of a program's `collectives`: bytes over links, and latency.

    A ring over several hosts uses the network cards of all its members on a host; on a torus it uses as many axes as it
    spans, and goes half around each in both directions.

    Args:
      topology: chips along each axis of the torus; read on TPUs alone.
      found: the fields of a collectives.Collective as a dict, with `sent` (bytes that each device sends).
    """
    start, device, host = LATENCY[chip.kind]
    if chip.kind == "tpu":
        sides, axes, reached = sorted(topology, reverse=True), 0, 1
        while axes < len(sides) and reached < found["group"]:
            reached *= sides[axes]
            axes += 1
        speed, hops = chip.links * max(1, axes), sum(sides[:axes]) / 2
    else:
        hops = found["group"] - found["hosts"]
        speed = chip.links if found["hosts"] == 1 else min(chip.links, chip.network * found["group"] / found["hosts"])
    return found["sent"] / speed + found["count"] * (start + hops * device + (found["hosts"] - 1) * host)


def phase(chip: Chip, parts: list[tuple], network: float) -> dict:
    """Returns the seconds of a phase, and what bounds it.

    Args:
      parts: (Work, how often) pairs, all on one device.
      network: seconds of their collectives, already times how often.

    Returns:
      {"compute", "memory"}: seconds at the chip's own peak and bandwidth; "network" as given; "launches": seconds of
      LAUNCH. "ideal": the longest of the first three. "seconds": max(network, launches + the longer of compute and
      memory at the shares that runs attain, Chip.attainable); "serial": their sum instead of the maximum. "bound":
      which of the four is longest, with these shares. "flops", "bytes": sums over the parts.
    """
    flops = sum(w.flops * n for w, n in parts)
    moved = sum(w.bytes * n for w, n in parts)
    compute, memory = flops / chip.flops, moved / chip.bandwidth
    launches = sum(w.launches * n for w, n in parts) * LAUNCH.get(chip.kind, 0.0)
    of_peak, of_bandwidth = chip.attainable
    busy = max(compute / of_peak, memory / of_bandwidth) + launches
    bound = max((("compute", compute / of_peak), ("memory", memory / of_bandwidth), ("network", network),
                 ("launches", launches)), key=lambda p: p[1])[0]
    return {"compute": compute, "memory": memory, "network": network, "launches": launches,
            "ideal": max(compute, memory, network), "seconds": max(busy, network), "serial": busy + network,
            "bound": bound, "flops": flops, "bytes": moved}
