# SPDX-License-Identifier: Apache-2.0
"""Copies of an expert share its tokens evenly, those of their own device first."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jaxmoe.moe.exchange import ExpertAxis
from jaxmoe.moe.share import choose_slots, share_counts
from tests import helpers


def by_hand(count_XE, expert_P):
    """Token by token: [X, P] in the order of the slots."""
    X, E = count_XE.shape
    P_ = len(expert_P)
    sent = np.zeros((X, P_), int)
    for expert in range(E):
        slots = [s for s in range(P_) if expert_P[s] == expert]
        total = count_XE[:, expert].sum()
        room = [
            total // len(slots) + (i < total % len(slots)) for i in range(len(slots))
        ]
        left = count_XE[:, expert].copy()
        for i, slot in enumerate(slots):
            device = slot // (P_ // X)
            own = min(room[i], left[device])
            sent[device, slot] += own
            room[i] -= own
            left[device] -= own
        for device in range(X):
            for i, slot in enumerate(slots):
                more = min(room[i], left[device])
                sent[device, slot] += more
                room[i] -= more
                left[device] -= more
        assert not left.any()
    return sent


@pytest.mark.parametrize(("X", "E", "slots"), [(4, 8, 12), (2, 4, 10), (1, 3, 5)])
@given(seed=st.integers(0, 2**31))
def test_shares_are_those_by_hand(X, E, slots, seed):
    """Also where a device has an expert twice, and where an expert has no token."""
    random = np.random.default_rng(seed)
    more = random.integers(0, E, slots - E)
    expert_P = random.permutation(np.concatenate([np.arange(E), more])).astype(np.int32)
    count_XE = random.integers(0, 7, (X, E)) * random.integers(0, 2, (X, E))
    slot_s = np.argsort(expert_P, kind="stable").astype(np.int32)
    got = share_counts(
        jnp.asarray(count_XE, jnp.int32), jnp.asarray(expert_P), jnp.asarray(slot_s), X
    )
    want = by_hand(count_XE, expert_P)
    np.testing.assert_array_equal(np.asarray(got), want[:, slot_s])
    for expert in range(E):  # each copy within one of the others
        shares = want.sum(0)[expert_P == expert]
        assert shares.max() - shares.min() <= 1


def test_every_assignment_goes_to_a_slot_of_its_expert():
    """On 4 devices; void assignments go nowhere; the numbers are the planned ones."""
    X, E, T, K = 4, 6, 20, 2
    random = np.random.default_rng(0)
    expert_P = np.asarray([0, 1, 2, 3, 4, 5, 0, 0, 1, 5, 2, 0], np.int32)
    ids = random.integers(0, E + 1, (X * T, K)).astype(np.int32)
    mesh = helpers.mesh_of(1, X)
    slots = jax.jit(
        jax.shard_map(
            lambda ids: choose_slots(
                ids, jnp.asarray(expert_P), num_experts=E, axis=ExpertAxis(X)
            ),
            mesh=mesh,
            in_specs=P("expert"),
            out_specs=P("expert"),
            check_vma=False,
        )
    )(ids)
    slots = np.asarray(slots)
    assert (slots[ids == E] == 12).all()
    np.testing.assert_array_equal(expert_P[slots[ids < E]], ids[ids < E])
    count_XE = np.stack(
        [np.bincount(of.ravel(), minlength=E + 1)[:E] for of in ids.reshape(X, T, K)]
    )
    sent = np.stack(
        [np.bincount(of.ravel(), minlength=13)[:12] for of in slots.reshape(X, T, K)]
    )
    np.testing.assert_array_equal(sent, by_hand(count_XE, expert_P))
