# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine: rows that say where they come from, and hand counts.

Legend: T tokens of a device, D width, K slots per token, X devices along `expert`,
P slots, p = P / X, W rows for one destination, R rows of a device.
"""

from functools import partial

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jaxmoe.mesh import BATCH_AXES
from jaxmoe.moe.dispatch import (
    choose_block,
    choose_parts,
    combine,
    dispatch,
    rows_capacity,
    take_rows,
    weigh_rows,
)
from jaxmoe.moe.exchange import ExpertAxis
from tests import oracle
from tests.moe.harness import mesh_of

ONE = ExpertAxis()

# A few shapes, each compiled once, and many contents: T, K, P and the block.
SHAPES = st.sampled_from([(1, 1, 1, 8), (9, 1, 6, 1), (8, 3, 2, 4), (5, 2, 4, 8)])


@st.composite
def routings(draw):
    """(slots [T, K] with P for none, number of slots P, block)."""
    T, K, slots, block = draw(SHAPES)
    ids = draw(hnp.arrays(np.int32, (T, K), elements=st.integers(0, slots)))
    return ids, slots, block


@partial(jax.jit, static_argnames=("num_slots", "block"))
def dispatch_alone(x_TD, slots_TK, *, num_slots, block):
    return dispatch(
        x_TD, slots_TK, num_slots=num_slots, axis=ONE, buffer_rows=0, block=block
    )


jitted_combine = jax.jit(partial(combine, axis=ONE))


@given(routing=routings())
def test_one_device_round_trip(routing):
    """Rows of slot s are exactly its tokens, in token order, then zeros to a block;

    combining them with weights w gives x_t * sum_k w_tk over the tokens' real slots.
    """
    slots_TK, num_slots, block = routing
    T, K = slots_TK.shape
    x_TD = 1.0 + np.arange(T * 2, dtype=np.float32).reshape(T, 2)
    rows, layout, route = dispatch_alone(
        x_TD, slots_TK, num_slots=num_slots, block=block
    )
    assert int(route.overflow) == 0
    assert rows.shape == (rows_capacity(T * K, num_slots, block), 2)
    expected, of_block = [], []
    for slot in range(num_slots):
        tokens = [t for t in range(T) for k in range(K) if slots_TK[t, k] == slot]
        assert int(layout.sizes_p[slot]) == len(tokens)
        padded = [x_TD[t] for t in tokens] + [np.zeros(2)] * (-len(tokens) % block)
        expected += padded
        of_block += [slot] * (len(padded) // block)
    used = len(of_block)
    assert int(layout.used_blocks) == used
    np.testing.assert_array_equal(layout.slot_of_block[:used], of_block)
    got = np.asarray(rows)
    np.testing.assert_array_equal(got[: used * block], np.reshape(expected, (-1, 2)))
    assert not got[used * block :].any()
    weights = 1.0 + np.arange(T * K, dtype=np.float32).reshape(T, K)
    total = (weights * (slots_TK < num_slots)).sum(1)
    back = jitted_combine(rows, route, weights)
    np.testing.assert_allclose(back, x_TD * total[:, None], rtol=1e-6)


@jax.jit
def taken(source, index, inverse, cotangent):
    """(value, derivative) of take_rows and of plain indexing."""

    def plain(source):
        return jnp.concatenate([source, jnp.zeros((1, 2))])[index]

    got, pull = jax.vjp(lambda s: take_rows(s, index, inverse), source)
    want, pull_plain = jax.vjp(plain, source)
    return (got, pull(cotangent)[0]), (want, pull_plain(cotangent)[0])


@given(data=st.data())
def test_take_rows_is_indexing_with_its_true_derivative(data):
    """take_rows = source[index], 0 where index is M; its derivative is the scatter-add.

    `inverse` only says the same backwards: row m is taken at the places inverse[m].
    """
    M, K, R = data.draw(st.sampled_from([(1, 1, 1), (6, 1, 10), (4, 3, 8)]))
    index = data.draw(hnp.arrays(np.int32, (R,), elements=st.integers(0, M)))
    inverse = np.full((M, K), R, np.int32)
    for m in range(M):
        places = np.flatnonzero(index == m)
        index[places[K:]] = M  # a row goes to K places at most
        inverse[m, : len(places[:K])] = places[:K]
    source = jnp.asarray(np.random.default_rng(0).standard_normal((M, 2)), jnp.float32)
    cotangent = jnp.arange(2.0 * R).reshape(R, 2)

    for got, want in zip(*taken(source, index, inverse, cotangent), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_many_choices_are_weighed_as_few_are():
    """The weighted sum over 40 rows of each token, some at a time, and its
    derivatives, are those of one plain product."""
    M, K = 3, 40
    rows = jax.random.normal(jax.random.key(0), (M * K, 4))
    weights = jax.random.normal(jax.random.key(1), (M, K))
    index = jax.random.permutation(jax.random.key(2), M * K).reshape(M, K)
    inverse = jnp.argsort(index.reshape(-1))

    def plain(rows, weights):
        return jnp.einsum("mkd,mk->md", rows[index], weights)

    got, pull = jax.vjp(lambda r, w: weigh_rows(r, w, index, inverse), rows, weights)
    want, pull_plain = jax.vjp(plain, rows, weights)
    oracle.assert_close((got, pull(got)), (want, pull_plain(want)), relative=1e-5)


def test_gradients_contain_no_scatter_of_rows():
    """Backward of dispatch and combine scatters nothing but integers."""

    def total(x_TD, weights_TK):
        slots = jnp.arange(24, dtype=jnp.int32).reshape(12, 2) % 5
        rows, _, route = dispatch(
            x_TD, slots, num_slots=4, axis=ONE, buffer_rows=0, block=4
        )
        return jnp.sum(combine(jnp.tanh(rows), route, weights_TK, ONE) ** 2)

    inputs = jnp.ones((12, 8)), jnp.ones((12, 2))
    jaxpr = jax.make_jaxpr(jax.grad(total, argnums=(0, 1)))(*inputs)
    scatters = [e for e in oracle.equations(jaxpr) if "scatter" in e.primitive.name]
    assert scatters
    kinds = {v.aval.dtype.kind for e in scatters for v in e.outvars}
    assert kinds == {"i"}


@pytest.mark.parametrize(
    ("assignments", "slots", "parts"),
    [
        (0, 4, (8,)),
        (31, 2, (8,)),
        (32, 2, (16,)),
        (255, 2, (64, 32, 16)),
        (256, 2, (128, 64, 32)),
        (10**6, 8, (256, 64, 32)),
    ],
)
def test_parts_follow_the_even_share(assignments, slots, parts):
    """Blocks of 8, 16 or 32 rows; before them the power of 2 not above the share, up to
    256, if it is larger, and two blocks if it is 4 blocks or more."""
    block = choose_block(assignments, slots)
    assert choose_parts(assignments // slots, block) == parts


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    block=st.sampled_from([1, 8, 16]),
)
def test_rows_hold_every_distribution(sizes, block):
    """sum of ceil(n / b) b over slots never exceeds the rows, a multiple of b."""
    rows = rows_capacity(sum(sizes), len(sizes), block)
    assert rows % block == 0
    assert sum(-(-n // block) * block for n in sizes) <= rows


def test_rows_need_as_many_as_given():
    """The bound is reached: slots with one row each fill a block each."""
    assert rows_capacity(4, 4, 8) == 32


def run_on_mesh(slots_NK, *, X, num_slots, W, block=8, apply=None):
    """Dispatches 8 devices x T tokens whose value is 1 + their global number.

    Returns:
      rows [8, R], slot sizes [8, p], used blocks and slots of blocks, overflow [8],
      and the combined result [8 T] with weights 1, 10, 100 ... for the K slots.
    """
    N, K = slots_NK.shape
    axis = ExpertAxis(X)
    values = 1.0 + jnp.arange(N, dtype=jnp.float32)[:, None]
    weights = jnp.broadcast_to(10.0 ** jnp.arange(K)[None], (N, K))

    def per_device(x_TD, slots_TK, weights_TK):
        rows, layout, route = dispatch(
            x_TD,
            slots_TK,
            num_slots=num_slots,
            axis=axis,
            buffer_rows=X * W,
            block=block,
        )
        out = rows if apply is None else apply(rows, layout)
        lead = lambda a: a[None]  # noqa: E731
        back = combine(out, route, weights_TK, axis)
        return lead(rows[:, 0]), jax.tree.map(lead, (layout, route.overflow)), back

    rows_spec = P(BATCH_AXES)
    run = jax.shard_map(
        per_device,
        mesh=mesh_of(X),
        in_specs=(rows_spec,) * 3,
        out_specs=rows_spec,
        check_vma=False,  # layouts of different devices are stacked as they are
    )
    rows, (layout, overflow), back = jax.jit(run)(values, slots_NK, weights)
    return np.asarray(rows), jax.tree.map(np.asarray, layout), overflow, back[:, 0]


def rows_by_slot(rows, layout, device, block=8):
    """The rows of each slot of a device, the filling left out."""
    found, start = [], 0
    for size in layout.sizes_p[device]:
        found.append(rows[device, start : start + size].tolist())
        start += -(-size // block) * block
    return found


def test_exchange_with_rank_coded_values():
    """Every row names its token: slot s of a group gets exactly the tokens sent to it.

    data 2 x expert 4, two slots per device, 3 tokens per device; tokens of devices 0-3
    and 4-7 never mix. Inside a slot rows stand by source device, then by token.
    """
    X, num_slots, T = 4, 8, 3
    rng = np.random.default_rng(0)
    slots = rng.integers(0, num_slots + 1, (8 * T, 2)).astype(np.int32)
    rows, layout, overflow, back = run_on_mesh(slots, X=X, num_slots=num_slots, W=6)
    assert not overflow.any()
    for device in range(8):
        group, rank = divmod(device, X)
        members = range(group * X * T, (group + 1) * X * T)
        expected = [
            [1.0 + t for t in members for k in range(2) if slots[t, k] == slot]
            for slot in (2 * rank, 2 * rank + 1)
        ]
        assert rows_by_slot(rows, layout, device) == expected
    factor = ((slots < num_slots) * np.array([1.0, 10.0])).sum(1)
    np.testing.assert_allclose(back, (1.0 + np.arange(24)) * factor, rtol=1e-6)


def test_each_slot_applies_its_own_function():
    """Rows of slot s times 2^s come back as x (2^s0 + 10 * 2^s1): nothing swapped."""
    X, num_slots, block = 8, 16, 8
    slots = np.stack([np.arange(16), (np.arange(16) * 7 + 3) % 17], axis=1)

    def apply(rows, layout):
        local = jnp.repeat(layout.slot_of_block, block)
        slot = local + 2 * jax.lax.axis_index("expert")
        return rows * (2.0**slot)[:, None]

    slots = slots.astype(np.int32)
    *_, back = run_on_mesh(slots, X=X, num_slots=16, W=4, block=block, apply=apply)
    scale = np.where(slots < num_slots, 2.0**slots, 0.0) @ np.array([1.0, 10.0])
    np.testing.assert_allclose(back, (1.0 + np.arange(16)) * scale, rtol=1e-6)


def test_overflow_by_hand():
    """W = 2 rows per destination: a third one is dropped, by slot, then by token.

    data 4 x expert 2, slots 0, 1 on the first device of a pair and 2, 3 on the second.
    Tokens of device 0 choose slots 1, 0, 1, 3: sorted for destination 0 they are
    token 1 (slot 0), tokens 0 and 2 (slot 1); token 2 finds no room. Device 1 sends
    all four to slot 2: two are dropped. Device 2 has one void. The others fit.
    """
    pairs = [[1, 0, 1, 3], [2, 2, 2, 2], [0, 4, 2, 2]] + [[0, 0, 2, 3]] * 5
    slots = np.array(pairs, np.int32).reshape(-1, 1)
    rows, layout, overflow, back = run_on_mesh(slots, X=2, num_slots=4, W=2)
    np.testing.assert_array_equal(overflow, [1, 2, 0, 0, 0, 0, 0, 0])
    assert rows_by_slot(rows, layout, 0) == [[2.0], [1.0]]
    assert rows_by_slot(rows, layout, 1) == [[5.0, 6.0], [4.0]]
    lost = {2, 6, 7, 9}  # of device 0, of device 1 twice, the void
    expected = [0.0 if n in lost else 1.0 + n for n in range(32)]
    np.testing.assert_array_equal(back, expected)


def test_all_to_one_device_fills_one_buffer():
    """X = 8, everything to slot 0: device 0 gets all 16 rows, the others nothing."""
    slots = np.zeros((16, 1), np.int32)
    rows, layout, overflow, back = run_on_mesh(slots, X=8, num_slots=8, W=2)
    assert not overflow.any()
    assert rows_by_slot(rows, layout, 0) == [[1.0 + n for n in range(16)]]
    assert layout.used_blocks.tolist() == [2] + [0] * 7
    np.testing.assert_array_equal(back, 1.0 + np.arange(16))
