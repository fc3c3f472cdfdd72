# SPDX-License-Identifier: Apache-2.0
"""Floor 1. From the configuration to a `jax.sharding.Mesh`.

Axes, always these three, in this order:
  data    devices that hold different sequences and the same experts
  expert  devices that hold different sequences and different experts
  pipe    devices that hold different layers
The batch is split over (data, expert); expert weights over `expert`.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType

from jaxmoe import cluster, config_checks, processes, versions
from jaxmoe import config as config_lib
from jaxmoe.config import Config, ConfigError
from jaxmoe.config_base import all_divisors, choice, closest, mistake, near

AXES = ("data", "expert", "pipe")
BATCH_AXES = ("data", "expert")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Devices along each mesh axis, and why they were chosen."""

    data: int
    expert: int
    pipe: int
    reason: str

    @property
    def devices(self) -> int:
        return self.data * self.expert * self.pipe

    def __str__(self) -> str:
        return f"data {self.data} x expert {self.expert} x pipe {self.pipe}"


def start_backend(mesh: config_lib.Mesh, facts: Mapping[str, str] | None = None) -> str:
    """Starts the JAX backend with the devices that `mesh` asks for.

    On a machine without an accelerator, CPU devices are simulated: the product of the
    given sizes, or `mesh.virtual_devices`. Where this is one of several processes, all
    are waited for first, and each simulates its share.

    Args:
      mesh: Devices, platform and processes.
      facts: What must be the same in all processes, see `processes.facts_of`.

    Returns:
      The platform: 'cpu', 'gpu' or 'tpu'.

    Raises:
      ConfigError: if the platform asked for is absent, the backend was started before
        with too few CPU devices, or the processes differ.
      StartError: if not all processes came.
    """
    place = cluster.find(mesh)
    fields, wanted = _simulated(mesh)
    parts = place.num_processes if place else 1
    share = max(wanted // parts, 1)
    if mesh.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    late = False
    try:
        jax.config.update("jax_num_cpu_devices", share)
    except RuntimeError:  # a backend is running; too late to simulate devices
        late = True
    if place and late and not jax.distributed.is_initialized():
        raise ConfigError(
            "JAX was started before this process met the others of the run. Processes"
            " are joined only before the first use of JAX. Restart the runtime and"
            " import jaxmoe first, or set Mesh.distributed=False for one process."
        )
    if place:
        processes.start(
            place, facts or {}, mesh.start_timeout_s, mesh.heartbeat_timeout_s
        )
    try:
        platform = jax.default_backend()
    # JAX asserts where JAX_PLATFORMS names an accelerator without its plugin.
    except (RuntimeError, AssertionError) as error:
        asked = os.environ.get("JAX_PLATFORMS", "")
        reason = str(error) or f"there is none for JAX_PLATFORMS={asked}"
        raise ConfigError(
            f"JAX could not start a backend: {reason}. Mesh.platform={mesh.platform!r}"
            " needs a working one. Set --gin.Mesh.platform='cpu' to simulate devices."
        ) from error
    if mesh.platform not in ("auto", platform):
        raise ConfigError(
            f"Mesh.platform={mesh.platform!r}, but JAX found only {platform!r}"
            f" ({_versions()}). The accelerator's plugin must be installed and its"
            " runtime running. Install 'jax[tpu]' or 'jax[cuda13]', restart the runtime"
            " after pip, or set Mesh.platform='auto'."
        )
    if platform == "cpu" and place:
        # The first process alone would find what it compiled; the others would be late.
        jax.config.update("jax_enable_compilation_cache", False)
    if platform == "cpu" and wanted % parts:
        raise mistake(
            f"{fields}={wanted} devices cannot be simulated by {parts} processes",
            "each simulates the same number",
            f"Set {fields} to {near(wanted, parts)}, or start"
            f" {choice(closest(all_divisors(wanted), parts))} processes",
        )
    if platform == "cpu" and late and jax.local_device_count() < share:
        raise ConfigError(
            f"JAX was started before with {jax.local_device_count()} CPU device(s), and"
            f" {share} are needed. Devices are simulated only before the first use of"
            " JAX. Restart the runtime and import jaxmoe first, or set"
            f" Mesh.virtual_devices={jax.device_count()}."
        )
    return platform


def _simulated(mesh: config_lib.Mesh) -> tuple[str, int]:
    """CPU devices that there shall be over all processes, and which fields say so."""
    given = [n for n in (mesh.data, mesh.expert, mesh.pipe) if n != "auto"]
    if len(given) == len(AXES):
        return "Mesh.data x Mesh.expert x Mesh.pipe", math.prod(given)
    return "Mesh.virtual_devices", mesh.virtual_devices


def resolve_sizes(config: Config, num_devices: int) -> Sizes:
    """Chooses the sizes left 'auto' and checks the given ones.

    'auto' for `pipe` takes 2 from 8 devices on, if the model and the batch can be cut
    so; for `expert` the largest divisor of the free devices that divides the experts,
    at most half of them where that is possible; `data` takes the rest: 2 x 2 x 2 on 8.

    Raises:
      ConfigError: naming the devices found and the sizes that would fit.
    """
    if config.mesh.pipe != "auto":
        return _resolve(config, config.mesh.pipe, num_devices)
    why = "fewer than 8 devices"
    if num_devices >= 8:
        try:
            return _resolve(config, 2, num_devices)
        except ConfigError as error:
            why = re.split(r": |\. ", str(error))[0]
    sizes = _resolve(config, 1, num_devices)
    if config.pipeline == config_lib.Pipeline():
        return sizes
    return dataclasses.replace(sizes, reason=f"{sizes.reason}, no pipeline: {why}")


def _resolve(config: Config, pipe: int, num_devices: int) -> Sizes:
    """As `resolve_sizes`, with so many ranks of the pipeline."""
    mesh = config.mesh
    fixed = {"data": mesh.data, "expert": mesh.expert, "pipe": pipe}
    product = math.prod(n for n in fixed.values() if n != "auto")
    if num_devices % product or (
        "auto" not in fixed.values() and product != num_devices
    ):
        raise ConfigError(_size_error(fixed, num_devices))
    free = num_devices // product
    data, expert = mesh.data, mesh.expert
    if expert == "auto":
        limit = free if data != "auto" else max(1, free // 2)
        expert = max(
            n
            for n in range(1, limit + 1)
            if free % n == 0 and config.moe.num_experts % n == 0
        )
        if data != "auto" and expert != free:
            raise ConfigError(_size_error({**fixed, "expert": free}, num_devices))
        free //= expert
    if data == "auto":
        data = free
    given = [axis for axis in AXES if getattr(mesh, axis) != "auto"]
    reason = f"{num_devices} devices"
    reason += f", {', '.join(given)} given" if given else ""
    reason += f", {config.moe.num_experts} experts to split"
    sizes = Sizes(data, expert, pipe, reason)
    config_checks.check_mesh(config, data, expert, pipe)
    return sizes


def make_mesh(sizes: Sizes) -> jax.sharding.Mesh:
    """The mesh over all devices, with axes that the compiler may partition."""
    if sizes.devices != jax.device_count():
        # A mesh of fewer would silently leave devices out.
        raise ConfigError(_size_error(sizes.__dict__, jax.device_count()))
    return lay_out(sizes, jax.devices())


def lay_out(sizes: Sizes, devices: Sequence[Any]) -> jax.sharding.Mesh:
    """Devices as a mesh, neighbours on the network near each other on its axes.

    Slices of TPUs are told apart along `data` if it divides, since gradients cross it
    once per step; else along `pipe`.

    Raises:
      ConfigError: if neither can be split over the slices.
    """
    shape = [sizes.data, sizes.expert, sizes.pipe]
    # To JAX every host of GPUs is a slice, too. Experts may span those: devices are in
    # the order of the hosts, and `Mesh.expert_nodes` says how many share a link.
    tpus = [device for device in devices if device.platform == "tpu"]
    slices = len({getattr(device, "slice_index", 0) for device in tpus}) or 1
    if slices == 1:
        grid = mesh_utils.create_device_mesh(
            shape, devices, allow_split_physical_axes=True
        )
    else:
        between = [1, 1, 1]
        outer = next((i for i in (0, 2) if shape[i] % slices == 0), None)
        if outer is None:
            raise mistake(
                f"Mesh.data={sizes.data} and Mesh.pipe={sizes.pipe} on {slices} slices",
                "experts exchange inside a slice, so data or pipe is split over slices",
                f"Set Mesh.data={slices}",
            )
        between[outer], shape[outer] = slices, shape[outer] // slices
        grid = mesh_utils.create_hybrid_device_mesh(
            shape, between, devices, allow_split_physical_axes=True
        )
    return jax.sharding.Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def single_device_mesh() -> jax.sharding.Mesh:
    """A 1 x 1 x 1 mesh over the first device."""
    devices = np.asarray(jax.devices()[:1]).reshape(1, 1, 1)
    return jax.sharding.Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _size_error(sizes: dict, num_devices: int) -> str:
    asked = " x ".join(f"Mesh.{axis}={sizes[axis]}" for axis in AXES)
    product = math.prod(n for axis in AXES if (n := sizes[axis]) != "auto")
    divisors = [str(n) for n in range(1, num_devices + 1) if num_devices % n == 0]
    devices = f"{num_devices} {jax.default_backend()} device(s)"
    if jax.process_count() > 1:
        devices += f" in {jax.process_count()} processes"
    return (
        f"{asked} needs {product} devices or a multiple, and {devices} are there. The"
        " sizes must multiply to the number of devices. Use sizes out of"
        f" {', '.join(divisors)} with product {num_devices}, or 'auto'"
        + (
            f", or on CPU set all three sizes, or Mesh.virtual_devices={product}."
            if jax.default_backend() == "cpu"
            else "."
        )
    )


def _versions() -> str:
    names = ("jax", "jaxlib", "libtpu")
    here = versions.installed(names)
    return ", ".join(f"{name} {here.get(name, 'not installed')}" for name in names)
