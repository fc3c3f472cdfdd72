# SPDX-License-Identifier: Apache-2.0
"""Floor 0. Which numbers of experts, replicas, groups, nodes and devices fit together.

Nothing of JAX is imported.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence

from jaxmoe.config_base import (
    all_divisors,
    check_multiple,
    choice,
    closest,
    mistake,
    nearest,
)

POLICIES = ("reference", "swap", "incremental")
MOST_REPLICAS = 2**15
NAMES = ("num_replicas", "num_groups", "num_nodes", "num_devices")


def check_sizes(
    num_experts: int,
    num_replicas: int,
    num_groups: int,
    num_nodes: int,
    num_devices: int,
    *,
    names: Sequence[str] = NAMES,
) -> None:
    """Checks that a plan of these sizes exists.

    Args:
      num_experts: of each layer.
      num_replicas: slots of each layer, over all devices.
      num_groups: of experts; those of a group share a node. Ignored if it is no
        multiple of `num_nodes`.
      num_nodes: of the devices.
      num_devices: over which the slots are spread evenly.
      names: how to call the last four in a message.

    Raises:
      ConfigError: naming the numbers that do not fit, and some that would.
    """
    replicas, groups, nodes, devices = names
    sizes = (num_replicas, num_groups, num_nodes, num_devices)
    for name, value in zip(names, sizes, strict=True):
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise mistake(
                f"{name}={value!r} is no whole number", "it counts things", "Set 1"
            )
        if value < 1:
            raise mistake(
                f"{name}={value} is too small",
                "it must be at least 1",
                f"Set {name}={num_experts if name == replicas else 1}",
            )
    if num_replicas < num_experts:
        enough = -(-num_experts // num_devices) * num_devices
        raise mistake(
            f"{replicas}={num_replicas} is too small for {num_experts} experts",
            "every expert needs a slot",
            f"Set {replicas}={enough} or more",
        )
    if num_replicas > MOST_REPLICAS:
        raise mistake(
            f"{replicas}={num_replicas} is too large",
            f"it must be at most {MOST_REPLICAS}",
            f"Set {replicas}={num_experts} or a little more",
        )
    check_multiple(
        *(replicas, num_replicas, devices, num_devices),
        rule="every device has the same number of slots",
        low=num_experts,
    )
    if num_experts % num_groups and num_groups % num_nodes == 0:
        fits = choice(closest(all_divisors(num_experts), num_groups))
        raise mistake(
            f"{groups}={num_groups} does not divide {num_experts} experts",
            "every group has the same number of experts",
            f"Set {groups}={fits}",
        )
    check_multiple(
        *(devices, num_devices, nodes, num_nodes),
        rule="every node has the same number of devices",
    )


def check_policy(policy: str, name: str = "policy") -> None:
    """Checks the name of a policy.

    Raises:
      ConfigError: if there is none with this name.
    """
    if policy not in POLICIES:
        raise mistake(
            f"{name}={policy!r} is unknown",
            f"the policies are {', '.join(POLICIES)}",
            f"Set {name}={nearest(str(policy), POLICIES) or POLICIES[0]}",
        )
