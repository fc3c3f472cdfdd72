# SPDX-License-Identifier: Apache-2.0
"""Floor 4. Which slot holds which expert: plans, and how good they are.

A device has the same number of slots as every other, and a slot holds one copy of one
expert. All copies of an expert share its load evenly. Experts with much load get more
copies, and copies are spread so that devices have much the same load. Slots are
numbered device after device: slot s lies on device s // (P // D).

Everything here has static shapes and runs on the device. Layers are independent.

Legend: L layers, E experts, P slots, D devices, k slots of a device, C most copies,
which is P - E + 1.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.config_base import mistake
from jaxmoe.eplb import greedy
from jaxmoe.eplb.exchange import swap
from jaxmoe.eplb.settle import incremental
from jaxmoe.eplb.sizes import check_policy, check_sizes
from jaxmoe.eplb.slots import count

_ROUNDING = 1e-6


class Plan(NamedTuple):
    """What is where, in every layer; int32. Unpacks as the public function's result.

    Attributes:
      physical_to_logical: [L, P], the expert of each slot.
      logical_to_physical: [L, E, C], the slots of each expert, then -1. C = P - E + 1,
        the most copies there can be: a width that depends on loads is not static.
      num_copies: [L, E].
    """

    physical_to_logical: jax.Array
    logical_to_physical: jax.Array
    num_copies: jax.Array


# Planning ----------------------------------------------------------------------------


def rebalance_experts(
    load: ArrayLike,
    num_replicas: int,
    num_groups: int = 1,
    num_nodes: int = 1,
    num_devices: int = 1,
    *,
    policy: str = "reference",
    previous: ArrayLike | None = None,
    threshold: float | jax.Array = 1.0,
    tolerance: float | jax.Array = 1.02,
) -> Plan:
    """Plans the placement of the experts of every layer for a load.

    A layer keeps its plan, `previous` or else `initial_plan`, if its load is not finite
    or negative somewhere, if it has no load, or if it is balanced already. The one
    exception: without `previous`, `reference` gives the public plan for every load that
    is finite and not negative.

    Args:
      load: [L, E], tokens of each expert, of any number type; float32 from here on.
      num_replicas: P, the slots of a layer.
      num_groups: of experts; those of a group stay on one node. If it is no multiple
        of `num_nodes`, groups and nodes are ignored, as in the public function.
      num_nodes: of the devices; node n has the n-th of equal parts of them.
      num_devices: D.
      policy: 'reference', the public algorithm with ties to the lower index; 'swap',
        which improves on it; 'incremental', which changes the plan there is by as
        little as it needs to.
      previous: [L, P], the `physical_to_logical` in force; each expert has a slot.
      threshold: a layer with max/mean device load up to this is balanced.
      tolerance: for 'incremental', the max/mean to reach; see `settle.incremental` for
        where it cannot be reached.

    Returns:
      The plan. With 'incremental', an expert that stays on its device keeps its slot;
      `keep_places` gives the same for the others.

    Raises:
      ConfigError: a ValueError, if the sizes do not fit together, the policy is
        unknown, or `load` or `previous` has another shape.

    Source: deepseek-ai/EPLB@d52c72d for 'reference'.
    """
    load = jnp.asarray(load)
    if load.ndim != 2 or 0 in load.shape:
        raise mistake(
            f"load has the shape {list(load.shape)}",
            "it must be [layers, experts]",
            "Pass load[None] for one layer",
        )
    L, E = load.shape
    check_sizes(E, num_replicas, num_groups, num_nodes, num_devices)
    check_policy(policy)
    if previous is not None:
        previous = jnp.asarray(previous)
        if previous.shape != (L, num_replicas):
            raise mistake(
                f"previous has the shape {list(previous.shape)}",
                "it must be [layers, num_replicas] with"
                f" {L} layers and num_replicas={num_replicas}",
                "Pass the physical_to_logical of a plan of the same sizes",
            )
        previous = previous.astype(jnp.int32)
    groups, nodes = greedy.nodes_used(num_groups, num_nodes)
    load_LE = load.astype(jnp.float32)
    sizes = (num_replicas, groups, nodes, num_devices)
    return _rebalance(load_LE, previous, threshold, tolerance, sizes, policy)


@functools.partial(jax.jit, static_argnames=("sizes", "policy"))
def _rebalance(load_LE, previous_LP, threshold, tolerance, sizes, policy) -> Plan:
    (L, E), (P, groups, nodes, D) = load_LE.shape, sizes
    valid_L = valid_load(load_LE)
    load_LE = jnp.where(valid_L[:, None], load_LE, 0.0)
    before = plan_of(_initial_slots(L, E, P, D, nodes), E)
    if previous_LP is not None:
        before = plan_of(previous_LP, E)
    before_LP = before.physical_to_logical
    change_L = jnp.any(load_LE > 0, 1)
    balance_L = max_over_mean(load_LE, before_LP, D)
    change_L &= balance_L > threshold * (1 + _ROUNDING)
    if policy == "reference":
        if previous_LP is None:
            change_L = valid_L
        after_LP, copy_LP = greedy.place(load_LE, *sizes)
        after = _plan(after_LP, copy_LP, E)
    elif policy == "swap":
        after = plan_of(swap(load_LE, *sizes), E)
    else:
        # What shall not change is made even, so that nothing is done about it.
        load_LE = jnp.where(change_L[:, None], load_LE, 0.0)
        after_LP = incremental(load_LE, before_LP, groups, nodes, D, tolerance)
        after = plan_of(keep_places(after_LP, before_LP, D), E)
    return Plan(
        *(
            jnp.where(change_L.reshape((L,) + (1,) * (new.ndim - 1)), new, old)
            for new, old in zip(after, before, strict=True)
        )
    )


def initial_plan(
    num_layers: int,
    num_experts: int,
    num_replicas: int,
    num_devices: int,
    num_nodes: int = 1,
) -> Plan:
    """The plan to start with, the same in every layer.

    Device d has the experts d * E/D, d * E/D + 1, ... in its first slots. Its spare
    slots go on counting, inside its node, so that a device has an expert twice only if
    it has more slots than the node has experts. If D does not divide E, expert e is
    on device e * D // E.

    Raises:
      ConfigError: a ValueError, if the sizes do not fit together.
    """
    check_sizes(num_experts, num_replicas, num_nodes, num_nodes, num_devices)
    slots_LP = _initial_slots(
        num_layers, num_experts, num_replicas, num_devices, num_nodes
    )
    return plan_of(slots_LP, num_experts)


def _initial_slots(L: int, E: int, P: int, D: int, N: int) -> jax.Array:
    per_node = E // N
    device_D1 = np.arange(D)[:, None]
    node_D1 = device_D1 // (D // N)
    first_D1 = -(-device_D1 * E // D)
    place_Dk = first_D1 - node_D1 * per_node + np.arange(P // D)[None]
    expert_Dk = node_D1 * per_node + place_Dk % per_node
    return jnp.asarray(np.tile(expert_Dk.reshape(1, P), (L, 1)), jnp.int32)


def plan_of(physical_to_logical: Int[Array, "L P"], num_experts: int) -> Plan:
    """Completes a plan; the copies of an expert are numbered by slot."""
    L, P = physical_to_logical.shape
    expert_LP = physical_to_logical.astype(jnp.uint32)
    slot_LP = lax.broadcasted_iota(jnp.uint32, (L, P), 1)
    # Sorted by expert, then slot: in a run of one expert the place is the copy.
    key_LP = lax.sort(expert_LP * P + slot_LP, is_stable=False)
    sorted_LP, slot_LP = (of.astype(jnp.int32) for of in (key_LP // P, key_LP % P))
    place_LP = lax.broadcasted_iota(jnp.int32, (L, P), 1)
    starts_LP = jnp.concatenate(
        [jnp.ones((L, 1), bool), sorted_LP[:, 1:] != sorted_LP[:, :-1]], 1
    )
    first_LP = lax.cummax(jnp.where(starts_LP, place_LP, 0), 1)
    layers_L1 = jnp.arange(L)[:, None]
    copy_LP = jnp.zeros((L, P), jnp.int32)
    copy_LP = copy_LP.at[layers_L1, slot_LP].set(place_LP - first_LP)
    return _plan(physical_to_logical, copy_LP, num_experts)


def _plan(slots_LP, copy_LP, num_experts: int) -> Plan:
    """A plan from its slots and the number of the copy that each holds."""
    L, P = slots_LP.shape
    none = jnp.full((L, num_experts, P - num_experts + 1), -1, jnp.int32)
    place_LP = lax.broadcasted_iota(jnp.int32, (L, P), 1)
    logical_to_physical = none.at[jnp.arange(L)[:, None], slots_LP, copy_LP].set(
        place_LP
    )
    return Plan(slots_LP, logical_to_physical, count(slots_LP, num_experts))


def keep_places(
    new: Int[Array, "L P"], old: Int[Array, "L P"], num_devices: int
) -> Int[Array, "L P"]:
    """Permutes slots inside each device so that what stays on it keeps its slot.

    Args:
      new: the next `physical_to_logical`.
      old: the one in force.
      num_devices: D.

    Returns:
      `new` in another order inside devices. What arrives fills the other slots in
      rising order.
    """
    L, P = new.shape
    k = P // num_devices
    new_Rk, old_Rk = new.reshape(-1, k), old.reshape(-1, k)
    stays_Rkk = new_Rk[:, :, None] == old_Rk[:, None]  # new slot, old slot
    stays_Rkk &= _occurrence(new_Rk)[:, :, None] == _occurrence(old_Rk)[:, None]
    stays_Rk, filled_Rk = jnp.any(stays_Rkk, 2), jnp.any(stays_Rkk, 1)
    arrival_Rk = jnp.cumsum(~stays_Rk, 1)
    free_Rk = jnp.cumsum(~filled_Rk, 1)
    arrives_Rkk = (~stays_Rk)[:, :, None] & (~filled_Rk)[:, None]
    arrives_Rkk &= arrival_Rk[:, :, None] == free_Rk[:, None]
    to_Rkk = stays_Rkk | arrives_Rkk
    return jnp.sum(jnp.where(to_Rkk, new_Rk[:, :, None], 0), 1).reshape(L, P)


def _occurrence(expert_Rk: Int[Array, "R k"]) -> Int[Array, "R k"]:
    """How many earlier slots of the device hold the same expert."""
    k = expert_Rk.shape[1]
    earlier_kk = jnp.arange(k)[None] < jnp.arange(k)[:, None]
    same_Rkk = expert_Rk[:, :, None] == expert_Rk[:, None]
    return jnp.sum(same_Rkk & earlier_kk[None], 2)


# Measuring ---------------------------------------------------------------------------


def valid_load(load: ArrayLike) -> Bool[Array, " L"]:
    """Whether a layer's load [L, E] can be planned for: finite, and nowhere negative.

    A load of zero is valid, though it changes no plan.
    """
    load_LE = jnp.asarray(load).astype(jnp.float32)
    return jnp.all(load_LE >= 0, 1) & jnp.isfinite(jnp.sum(load_LE, 1))


def device_load(
    load: ArrayLike, physical_to_logical: Int[Array, "L P"], num_devices: int
) -> Float[Array, "L D"]:
    """The load of each device when copies share the load [L, E] of their expert."""
    load_LE = jnp.asarray(load).astype(jnp.float32)
    count_LE = count(physical_to_logical, load_LE.shape[1])
    share_LE = load_LE / jnp.maximum(count_LE, 1)
    share_LP = jnp.take_along_axis(share_LE, physical_to_logical, 1)
    return share_LP.reshape(len(load_LE), num_devices, -1).sum(2)


def max_over_mean(
    load: ArrayLike, physical_to_logical: Int[Array, "L P"], num_devices: int
) -> Float[Array, " L"]:
    """The largest over the mean load of a device; 1 is even, and no load is even."""
    load_LD = device_load(load, physical_to_logical, num_devices)
    mean_L = load_LD.mean(1)
    return jnp.where(mean_L > 0, load_LD.max(1) / jnp.where(mean_L > 0, mean_L, 1), 1.0)


def moved(
    new: Int[Array, "L P"], old: Int[Array, "L P"], num_devices: int
) -> Int[Array, " L"]:
    """Copies of a new plan [L, P] on devices that had no copy of their expert."""
    L, P = new.shape
    new_LDk, old_LDk = (
        of_LP.reshape(L, num_devices, P // num_devices) for of_LP in (new, old)
    )
    had_LDk = jnp.any(new_LDk[..., :, None] == old_LDk[..., None, :], -1)
    return jnp.sum(~had_LDk, (1, 2), dtype=jnp.int32)
