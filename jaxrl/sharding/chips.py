"""Accelerators as data: what one device holds, computes and moves. Dense figures, no sparsity.

Units: bytes, FLOP/s, bytes per second. `links` is what one device sends per second over its fast interconnect (NVLink,
or one ring of the TPU torus in both directions), `network` its share of what its host sends to others (0 in a TPU
slice, which has none inside).

Sources. TPU: cloud.google.com/tpu/docs, pages "TPU v5e", "v5p", "v6e": memory, bf16 peak, HBM bandwidth, and
interconnect (v5e 1,600, v5p 4,800, v6e 3,584 Gbit/s out of a chip) divided by the torus axes. NVIDIA: the data sheets
of A100, H100 SXM, H200 SXM and B200, NVLink taken one way (half of the sheet's figure); network: one card per GPU as
in DGX systems (200 Gbit/s A100, 400 Gbit/s the others). CPU: two cores of an AMD EPYC reach 0.2 TFLOP/s in fp32
matrix products (docs/guides/plan.md); its other figures are assumptions, there so that a plan can be made and
compared on any machine.
"""

from __future__ import annotations

from typing import NamedTuple

GIB, GB = 2**30, 10**9


class Chip(NamedTuple):
    """One kind of device.

    Attributes:
      kind: tpu, gpu or cpu. memory: bytes of one device.
      flops: peak FLOP/s in bf16 (CPU: fp32), dense. bandwidth: of the device's memory, bytes per second.
      links, network: bytes per second that one device sends over its fast interconnect, and its share of the network.
      host: devices of one host. axes: torus axes (TPU), 0 = a switch inside a host.
      dtype: what train.compute_dtype=auto means there.
    """

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
        """Returns (share of the peak that large matrix products reach in training, share of the bandwidth when
        decoding).

        TPU: MaxText's Llama2-70B reaches 65 % on v5p, Llama3.1-8B 46 % on v6e. GPU: MaxText's Llama2-7B on 8 H100
        reaches 50 % with attention counted; engines reach 30 to 60 % of the decoding bound. CPU: an assumption.
        """
        return {"tpu": (0.55, 0.6), "gpu": (0.5, 0.45), "cpu": (0.5, 0.5)}[self.kind]


CHIPS: dict[str, Chip] = {
    "v5e": Chip("tpu", 16 * GIB, 197e12, 819 * GB, 100 * GB, 0, 4, 2),
    "v5p": Chip("tpu", 95 * GIB, 459e12, 2765 * GB, 200 * GB, 0, 4, 3),
    "v6e": Chip("tpu", 32 * GIB, 918e12, 1640 * GB, 224 * GB, 0, 4, 2),
    "a100": Chip("gpu", 80 * GB, 312e12, 2039 * GB, 300 * GB, 25 * GB, 8),
    "h100": Chip("gpu", 80 * GB, 989e12, 3350 * GB, 450 * GB, 50 * GB, 8),
    "h200": Chip("gpu", 141 * GB, 989e12, 4800 * GB, 450 * GB, 50 * GB, 8),
    "b200": Chip("gpu", 180 * GB, 2250e12, 8000 * GB, 900 * GB, 50 * GB, 8),
    "cpu": Chip("cpu", 2 * GIB, 0.2e12, 20 * GB, 5 * GB, 1 * GB, 1 << 20, dtype="fp32"),
}
