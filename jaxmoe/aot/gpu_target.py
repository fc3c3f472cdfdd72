# SPDX-License-Identifier: Apache-2.0
"""Floor 0. What XLA must know of a GPU to compile for it where there is none."""

from __future__ import annotations

from jaxmoe.aot.chips import Chip

# Compute capability 9.0, H100 and H200 SXM (NVIDIA's "Hopper Tuning Guide").
_HOPPER = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 49152,
    "shared_memory_per_core": 233472,
    "threads_per_core_limit": 2048,
    "core_count": 132,
    "fpus_per_core": 128,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "l2_cache_size": 50 * 2**20,
    "clock_rate_ghz": 1.98,
    "shared_memory_per_block_optin": 232448,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
}


def gpu_target(chip: Chip) -> str:
    """The description of a GPU, as text of XLA's GpuTargetConfigProto."""
    info = _HOPPER | {
        "memory_bandwidth": round(chip.memory_rate),
        "device_memory_size": chip.memory,
    }
    lines = "\n".join(f"  {name}: {value}" for name, value in info.items())
    return (
        f"gpu_device_info {{\n{lines}\n  cuda_compute_capability {{ major: 9 }}\n}}\n"
        'platform_name: "CUDA"\n'
        "dnn_version_info { major: 9 minor: 10 patch: 0 }\n"
        "runtime_version { major: 12 minor: 8 patch: 0 }\n"
        f'device_description_str: "NVIDIA {chip.name.upper()}"\n'
    )
