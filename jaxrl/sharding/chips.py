"""Accelerators as data: what one device holds, computes and moves. Dense figures, no sparsity.

Units: bytes, FLOP/s, bytes per second. `links` is what one device sends per second over its fast interconnect (NVLink, or one
ring of the TPU torus in both directions), `network` what it sends to another host (slice) over its share of the network.

Sources. TPU: cloud.google.com/tpu/docs, pages "TPU v5e", "v5p", "v6e", "TPU7x": memory, bf16 peak, HBM bandwidth and
interconnect per chip; the interconnect (v5p 4,800 Gbit/s out of a chip) divided by its torus axes; network: the hosts' NICs
(v5p 200 Gbit/s for 4 chips, v5e and v6e 100 to 200 Gbit/s for 8 and 4) divided by their chips. NVIDIA: the data sheets
of A100, H100 SXM, H200 SXM and B200, NVLink taken one way (half of the sheet's figure); network: one NIC per GPU as in DGX
(200 Gbit/s A100, 400 Gbit/s the others). CPU: what two cores of the machine this was written on do (docs/plan.md), so that a
test can compare; never a promise.
"""

from __future__ import annotations

from typing import NamedTuple

GIB, GB = 2**30, 10**9


class Chip(NamedTuple):
    """One kind of device. `axes`: torus axes (TPU), 0 = a switch inside a host; `host`: devices of one host."""

    kind: str                  # tpu, gpu or cpu
    memory: float
    flops: float               # bf16, except on the CPU: fp32
    bandwidth: float           # of the device's memory
    links: float
    network: float
    host: int
    axes: int = 0
    dtype: str = "bf16"        # what train.compute_dtype=auto means there

    @property
    def attainable(self) -> tuple[float, float]:
        """(share of the peak that large matrix products reach in a training step, share of the bandwidth when decoding).

        TPU: MaxText's Llama2-70B reaches 65 % on v5p, Llama3.1-8B 46 % on v6e. GPU: MaxText's Llama2-7B on 8 H100 reaches 50 %
        with attention counted; engines reach 30 to 60 % of the decoding bound. CPU: measured, docs/plan.md.
        """
        return {"tpu": (0.55, 0.6), "gpu": (0.5, 0.45), "cpu": (0.5, 0.5)}[self.kind]


CHIPS: dict[str, Chip] = {
    "v5e": Chip("tpu", 16 * GIB, 197e12, 819 * GB, 100 * GB, 1.56 * GB, 8, 2),
    "v5p": Chip("tpu", 95 * GIB, 459e12, 2765 * GB, 200 * GB, 6.25 * GB, 4, 3),
    "v6e": Chip("tpu", 32 * GIB, 918e12, 1640 * GB, 224 * GB, 6.25 * GB, 4, 2),
    "a100": Chip("gpu", 80 * GB, 312e12, 2039 * GB, 300 * GB, 25 * GB, 8),
    "h100": Chip("gpu", 80 * GB, 989e12, 3350 * GB, 450 * GB, 50 * GB, 8),
    "h200": Chip("gpu", 141 * GB, 989e12, 4800 * GB, 450 * GB, 50 * GB, 8),
    "b200": Chip("gpu", 180 * GB, 2250e12, 8000 * GB, 900 * GB, 50 * GB, 8),
    "cpu": Chip("cpu", 2 * GIB, 0.1e12, 20 * GB, 5 * GB, 1 * GB, 1 << 20, dtype="fp32"),
}
