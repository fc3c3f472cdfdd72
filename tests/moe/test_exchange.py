# SPDX-License-Identifier: Apache-2.0
"""Ways of rows across `expert`: ragged offsets, types on the wire, nodes.

CPU has no ragged_all_to_all: here it is emulated, once in NumPy for the offsets, once
by an all-gather that obeys them for the whole layer.

Legend: X devices along `expert`, s source, d destination, n nodes, q devices of one.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jaxmoe.config import ConfigError, MoE
from jaxmoe.mesh import BATCH_AXES
from jaxmoe.moe import exchange
from jaxmoe.moe.exchange import ExpertAxis, expert_axis, ragged_places
from tests import oracle
from tests.moe import harness


def numpy_ragged(sent, offsets):
    """ragged_all_to_all of X devices as its documentation says, row by row.

    Args:
      sent: list by device of its rows.
      offsets: list by device of (input offsets, send sizes, output offsets, rows out).
    """
    received = [np.zeros(rows, int) for *_, rows in offsets]
    for s, (begins, sizes, places, _) in enumerate(offsets):
        for d, (begin, size, place) in enumerate(
            zip(begins, sizes, places, strict=True)
        ):
            received[d][place : place + size] = sent[s][begin : begin + size]
    return received


@given(
    totals=st.lists(
        st.lists(st.integers(0, 5), min_size=3, max_size=3), min_size=3, max_size=3
    ),
    buffer=st.integers(1, 16),
)
def test_ragged_offsets_in_numpy(totals, buffer):
    """Rows coded 100 s + i arrive in the order of the sources until the buffer is full,

    and the inverse offsets bring each of them to where it was.
    """
    totals = np.array(totals)
    sent_sd, start_sd = map(np.asarray, ragged_places(jnp.asarray(totals), buffer))
    begin_sd = np.cumsum(totals, axis=1) - totals
    rows = [100 * s + 1 + np.arange(totals[s].sum()) for s in range(3)]
    there = [(begin_sd[s], sent_sd[s], start_sd[s], buffer) for s in range(3)]
    received = numpy_ragged(rows, there)
    for d in range(3):
        owed = [
            rows[s][begin_sd[s, d] + i] for s in range(3) for i in range(totals[s, d])
        ]
        expected = np.zeros(buffer, int)
        expected[: len(owed[:buffer])] = owed[:buffer]
        np.testing.assert_array_equal(received[d], expected)
    back = [(start_sd[:, d], sent_sd[:, d], begin_sd[:, d], 16) for d in range(3)]
    for s, returned in enumerate(numpy_ragged(received, back)):
        keeps = [begin_sd[s, d] + i for d in range(3) for i in range(sent_sd[s, d])]
        expected = np.zeros(16, int)
        expected[keeps] = rows[s][keeps]
        np.testing.assert_array_equal(returned, expected)


def gathered_ragged(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, **how
):
    """lax.ragged_all_to_all by an all-gather of everything."""
    gather = partial(
        jax.lax.all_gather,
        axis_name=how["axis_name"],
        axis_index_groups=how["axis_index_groups"],
    )
    rows, begin, size, place = map(
        gather, (operand, input_offsets, send_sizes, output_offsets)
    )
    index, groups = jax.lax.axis_index("expert"), how["axis_index_groups"]
    if groups is not None:
        place_of = {i: n for group in groups for n, i in enumerate(group)}
        index = jnp.asarray([place_of[i] for i in range(len(place_of))])[index]
    for s in range(rows.shape[0]):
        i = jnp.arange(rows.shape[1])
        to = place[s, index] + i - begin[s, index]
        mine = (i >= begin[s, index]) & (i < begin[s, index] + size[s, index])
        to = jnp.where(mine, to, output.shape[0])
        output = output.at[to].set(rows[s], mode="drop")
    return output


@pytest.fixture
def emulated(monkeypatch):
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", gathered_ragged)
    harness.program.cache_clear()
    yield
    harness.program.cache_clear()


SLOW_8 = pytest.param(8, marks=pytest.mark.slow)


@pytest.mark.parametrize("X", [2, 4, SLOW_8])
def test_ragged_layer_equals_the_dense_oracle(emulated, X):
    """With ragged exchange and ragged_dot, as on TPU and GPU: every gradient leaf."""
    model = harness.small_model()
    moe = harness.small_moe(capacity_factor=1.25)
    axis = ExpertAxis(X, platform="tpu", ragged=True)
    for kind in ("random", "empty", "collapse", "padding"):
        scene = harness.make_scene(model, moe, kind)
        got = harness.sharded(model, moe, axis)(scene)
        want = harness.dense(model, moe, scene)
        assert int(got.stats.dropped) == int(want.stats.dropped)
        oracle.assert_close(got, want)


def test_overflow_of_the_ragged_buffer_by_hand(emulated):
    """All 32 tokens of 4 devices on one: a buffer of ceil(1.25 * 8) = 10 drops 22.

    Rows of the first source come first: all 8 of it stay, 2 of the second. What is
    dropped adds exactly 0. Two such groups of devices: 44.
    """
    model, whole = harness.small_model(), harness.small_moe(top_k=1)
    limited = dataclasses.replace(whole, buffer_factor=1.25)
    scene = harness.make_scene(model, whole, "collapse")
    scene = scene._replace(valid_T=np.ones_like(scene.valid_T))
    axis = ExpertAxis(4, ragged=True)
    got = harness.sharded(model, limited, axis)(scene)
    want = harness.sharded(model, whole, axis)(scene)
    assert (int(want.stats.dropped), int(got.stats.dropped)) == (0, 44)
    kept = np.arange(64) % 32 < 10
    np.testing.assert_array_equal(got.output[kept], want.output[kept])
    assert not np.any(got.output[~kept])


def exchanges_of(model, moe, axis):
    """Every all_to_all of the layer, forward and backward."""
    run = harness.program(model, moe, axis)
    jaxpr = run.trace(
        *harness.arguments(harness.make_scene(model, moe, "random"))
    ).jaxpr
    return [e for e in oracle.equations(jaxpr) if e.primitive.name == "all_to_all"]


WIRES = {"compute": 0.0, "float32": 0.0, "bfloat16": 0.02, "float8": 0.08}


@pytest.mark.parametrize(("wire", "relative"), WIRES.items())
def test_rows_may_travel_in_another_type(wire, relative):
    """Output and gradients stay near those of the exact exchange.

    float32 changes no bit; 8 bits of precision cost about 1 %, e4m3's 4 bits 5 %.
    """
    model, moe = harness.small_model(), harness.small_moe()
    scene = harness.make_scene(model, moe, "random")
    exact = harness.sharded(model, moe, 4)(scene)
    got = harness.sharded(model, moe, ExpertAxis(4, wire=wire))(scene)
    if not relative:
        jax.tree.map(np.testing.assert_array_equal, got, exact)
    else:
        assert not np.array_equal(got.output, exact.output)
        oracle.assert_close(got.stats, exact.stats)
        oracle.assert_close(got.output, exact.output, relative=relative)
        oracle.assert_close(got.gradients, exact.gradients, relative=2 * relative)


@pytest.mark.parametrize(
    ("wire", "types"),
    [
        ("compute", ["float32"] * 4),
        ("bfloat16", ["bfloat16"] * 4),
        # forward there, back; backward: the gradient to the experts, and from them
        ("float8", ["uint8", "bfloat16", "uint8", "bfloat16"]),
    ],
)
def test_what_travels_has_the_type_of_the_wire(wire, types):
    """Four exchanges of rows and one of counts, of the width that the type needs."""
    model, moe = harness.small_model(), harness.small_moe()
    exchanges = exchanges_of(model, moe, ExpertAxis(4, wire=wire))
    crossing = [e.outvars[0].aval for e in exchanges]
    rows = [aval for aval in crossing if aval.dtype != np.int32]
    assert len(crossing) == len(rows) + 1
    assert sorted(str(aval.dtype) for aval in rows) == sorted(types)
    assert {a.shape[1] for a in rows} <= {harness.D, harness.D + 4}


def test_float8_rows_round_trip():
    """Each number is exact to 1/16 of its row's largest, whatever the other rows."""
    rows = np.random.default_rng(0).standard_normal((6, 32)).astype(np.float32)
    rows *= 10.0 ** np.arange(-20, 40, 10)[:, None]
    rows[2] = 0.0
    packed = jax.jit(exchange._pack)(rows)
    assert packed.dtype == np.uint8
    assert packed.shape == (6, 36)
    got = np.asarray(exchange._unpack(packed, jnp.float32))
    assert np.isfinite(got).all()
    assert not got[2].any()
    largest = np.abs(rows).max(axis=1, keepdims=True)
    assert (np.abs(got - rows) <= largest / 16).all()


# Nodes -----------------------------------------------------------------------------

NODES = [(4, 2, "top_k"), (8, 2, "grouped_sigmoid"), (8, 4, "prototype")]


@pytest.mark.parametrize(("X", "nodes", "router"), NODES)
@pytest.mark.parametrize("ragged", [False, True])
def test_two_stages_equal_the_dense_oracle(request, X, nodes, router, ragged):
    """Across nodes, then inside: output, counts, losses and every gradient leaf."""
    if ragged:
        request.getfixturevalue("emulated")
    groups = {"num_groups": 4, "top_groups": 2} if router == "grouped_sigmoid" else {}
    model, moe = harness.small_model(), harness.small_moe(router=router, **groups)
    axis = ExpertAxis(X, nodes=nodes, ragged=ragged)
    for kind in ("random", "empty", "collapse", "padding"):
        scene = harness.make_scene(model, moe, kind)
        got = harness.sharded(model, moe, axis)(scene)
        want = harness.dense(model, moe, scene)
        assert int(got.stats.dropped) == 0
        oracle.assert_close(got, want)


def test_a_token_crosses_to_a_node_once():
    """K = 4, 8 devices in 2 nodes: at most 2 rows a token leave it, not 4.

    The buffers between nodes hold T rows for each node; without nodes a device has T
    rows for each of the 8 devices.
    """
    model, moe = harness.small_model(), harness.small_moe(top_k=4)
    between = [
        e.outvars[0].aval.shape
        for e in exchanges_of(model, moe, ExpertAxis(8, nodes=2))
        if len(e.params["axis_index_groups"]) == 4
        and e.outvars[0].aval.shape[-1] == harness.D
    ]
    tokens = harness.B * harness.S // 8
    assert between == [(2 * tokens, harness.D)] * 4


def test_overflow_between_nodes_counts_assignments():
    """All 64 tokens choose experts 2 and 3, which are node 0 of 2 x 2 devices.

    A device has 8 tokens and room for 2 nodes * ceil(0.5 * 16) / 2 = 8 rows, 4 for
    each node: 4 of its tokens with 2 assignments each do not cross. On node 0 each
    device then has 8 tokens of its own and its partner, all for experts 2 and 3 on the
    second device: 16 rows, where it may send 4. 8 * 8 + 4 * 12 = 112 are lost.
    """
    model = harness.small_model()
    moe = harness.small_moe(buffer_factor=0.5)
    scene = harness.make_scene(model, moe, "random")
    scene.params["router"]["router_kernel"][0, 2:4] += 20.0
    scene = scene._replace(valid_T=np.ones_like(scene.valid_T))
    got = harness.sharded(model, moe, ExpertAxis(4, nodes=2))(scene)
    assert int(got.stats.load_E[2]) == int(got.stats.load_E[3]) == 64
    assert int(got.stats.dropped) == 112


def test_positions_in_groups():
    """Between nodes: the same place in each; inside: consecutive devices."""
    axis = ExpertAxis(8, nodes=2)
    assert axis.between_nodes().groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert axis.inside_node().groups == ((0, 1, 2, 3), (4, 5, 6, 7))

    def places():
        inside, between = axis.inside_node().position(), axis.between_nodes().position()
        return jnp.stack([inside, between, axis.position()])[None]

    run = jax.shard_map(
        places, mesh=harness.mesh_of(8), in_specs=(), out_specs=P(BATCH_AXES)
    )
    got = np.asarray(jax.jit(run)())
    np.testing.assert_array_equal(got, [[i % 4, i // 4, i] for i in range(8)])


def test_ragged_is_refused_on_cpu():
    with pytest.raises(ConfigError, match=r"MoE\.exchange='auto'"):
        expert_axis(harness.mesh_of(4), MoE(exchange="ragged"), 1)


def test_axis_of_a_mesh():
    got = expert_axis(harness.mesh_of(4), MoE(exchange_dtype="bfloat16"), 2)
    assert got == ExpertAxis(4, "cpu", False, "bfloat16", nodes=2)
