# SPDX-License-Identifier: Apache-2.0
"""Floor 7. Devices of a machine that is not there, to compile for.

Names: 'v5p:4x4x4', a TPU slice of 64 chips; 'v5p:4x4x4*2', two of them; 'h200:1x8x8',
8 hosts of 8 GPUs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import re
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.sharding import AxisType, Mesh

from jaxmoe.aot import network
from jaxmoe.aot.chips import CHIPS, Chip
from jaxmoe.aot.gpu_target import gpu_target
from jaxmoe.config_base import mistake
from jaxmoe.mesh import AXES, Sizes, lay_out

_NAME = re.compile(r"(\w+):(\d+(?:x\d+)*)(?:\*(\d+))?$")


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices, in the order in which a mesh takes them.

    Attributes:
      name: what was asked for.
      chip: their kind.
      devices: all of them.
      platform: 'tpu' or 'gpu'.
    """

    name: str
    chip: Chip
    devices: tuple
    platform: str

    def mesh(self, sizes: Sizes) -> Mesh:
        """The mesh of these sizes, laid out as training lays it out."""
        if self.platform == "tpu":
            return lay_out(sizes, self.devices)
        shape = (sizes.data, sizes.expert, sizes.pipe)
        devices = np.asarray(self.devices).reshape(shape)
        return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))

    def network(self, mesh: Mesh) -> network.Network:
        """Where the devices of a mesh are."""
        devices = list(mesh.devices.flat)
        if self.platform == "gpu":
            return network.hosts(self.chip, len(devices))
        coords = [d.coords for d in devices]
        slices = [getattr(d, "slice_index", 0) or 0 for d in devices]
        return network.grid(self.chip, coords, slices)


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
    """Compiles anew: a program for devices that are not there can be written into a
    compilation cache, but not be read back."""
    name = "jax_enable_compilation_cache"
    before = getattr(jax.config, name)
    try:
        jax.config.update(name, False)
        reset_cache()
        yield
    finally:
        jax.config.update(name, before)
        reset_cache()


def topology(name: str) -> Topology:
    """The devices of a machine by its name; no device is touched.

    Raises:
      ConfigError: for an unknown machine, or where the compiler for it is missing.
    """
    found = _NAME.match(name)
    chip = CHIPS.get(found[1]) if found else None
    if found is None or chip is None:
        raise mistake(
            f"--topology={name!r}",
            "a topology is a chip and the sizes of its grid, 'v5p:4x4x4', of two slices"
            f" 'v5p:4x4x4*2', of GPUs 'h200:1xHOSTSx8'; chips are {', '.join(CHIPS)}",
            "Try --topology=v5e:4x4",
        )
    shape, count = found[2], int(found[3] or 1)
    if chip.clock:
        return Topology(name, chip, _tpu(chip, shape, count, name), "tpu")
    return Topology(name, chip, _gpu(chip, shape, name), "gpu")


def _tpu(chip: Chip, shape: str, slices: int, name: str) -> tuple:
    if importlib.util.find_spec("libtpu") is None:
        raise mistake(
            f"--topology={name!r} needs libtpu, which is not installed",
            "its compiler is what compiles for TPU, also where there is no TPU",
            "Install it with pip install -e '.[aot]'",
        )
    # Do not ask a metadata server which slice this machine is part of, nor complain
    # that nobody says. No chip is used, so others need not be kept from it.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    from jax.experimental import topologies

    more = {"num_slices": slices} if slices > 1 else {}
    try:
        found = topologies.get_topology_desc(f"{chip.name}:{shape}", "tpu", **more)
    except Exception as error:
        reason = str(error).splitlines()[0][:200]
        raise mistake(
            f"--topology={name!r} is none that libtpu knows ({reason})",
            "a slice of v4 or v5p has three sizes, of v5e or v6e two, each as Cloud TPU"
            " offers them",
            "Try v5e:4x4, v5p:4x4x4 or v6e:16x16",
        ) from None
    return tuple(found.devices)


def _gpu(chip: Chip, shape: str, name: str) -> tuple:
    plugins = ("jax_cuda13_plugin", "jax_cuda12_plugin")
    if not any(importlib.util.find_spec(plugin) for plugin in plugins):
        raise mistake(
            f"--topology={name!r} needs JAX's CUDA plugin, which is not installed",
            "its compiler is what compiles for GPUs, also where there is none",
            "Install it with pip install -e '.[aot-gpu]'",
        )
    from jax.experimental import topologies

    sizes = shape.split("x")
    if len(sizes) != 3 or sizes[0] != "1" or sizes[2] != "8":
        raise mistake(
            f"--topology={name!r}",
            "GPUs are given as 1 x hosts x GPUs of a host",
            f"Try {chip.name}:1x1x8 or {chip.name}:1x8x8",
        )
    found = topologies.get_topology_desc(
        platform="cuda", target_config=gpu_target(chip), topology=shape
    )
    return tuple(found.devices)
