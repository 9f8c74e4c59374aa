"""Simulated H100 and H200 devices for which jax's CUDA plugin compiles, without GPU, driver or CUDA library."""

from __future__ import annotations

import importlib.util

# Chip -> (name, bytes of memory, bytes/s), as a card and XLA's own descriptions say (openxla/xla,
# backends/gpu/target_config/specs); what both have in common is HOPPER.
CHIPS = {"h100": ("NVIDIA H100 80GB HBM3", 84942979072, 3352320000000),
         "h200": ("NVIDIA H200 141GB HBM3e", 151397597184, 4800000000000)}
HOPPER = """gpu_device_info {{ threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: {bandwidth}
  l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: {memory} shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 thread_dim_limit_x: 1024 thread_dim_limit_y: 1024
  thread_dim_limit_z: 64 device_vendor: "NVIDIA Corporation" platform_version: "Compute Capability 9.0a"
  device_address_bits: 64 pcie_bandwidth: 34359738368 ecc_enabled: true name: "{name}" driver_version: "13.0.0"
  runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0" }}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }} device_description_str: "{name}"
"""


def compiles(chip: str) -> bool:
    """Returns whether programs for this chip (`h100` or `h200`) can be compiled here: jax's plugin for
    CUDA 13 is installed (with that for CUDA 12 alone: False). False for any other chip."""
    return chip in CHIPS and importlib.util.find_spec("jax_cuda13_plugin") is not None


def devices(chip: str, hosts: int = 1, per_host: int = 1) -> list:
    """Returns hosts x per_host devices to build a mesh of. They compile and cannot run. Raises KeyError for another
    chip.
    """
    from jax.experimental import topologies

    name, memory, bandwidth = CHIPS[chip]
    config = HOPPER.format(name=name, memory=memory, bandwidth=bandwidth)
    return list(topologies.get_topology_desc(platform="cuda", topology=f"1x{hosts}x{per_host}",
                                             target_config=config).devices)
