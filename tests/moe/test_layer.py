# SPDX-License-Identifier: Apache-2.0
"""The whole layer against the dense oracle, on every axis size, with every gradient.

Legend: T tokens, D width, E experts, K experts per token, X devices along `expert`.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmoe.config import Model, MoE
from jaxmoe.moe.exchange import ExpertAxis
from jaxmoe.moe.layer import MoELayer
from tests import oracle
from tests.moe import harness

KINDS = ("random", "empty", "collapse", "padding")
ROUTERS = {
    "top_k": {},
    "prototype": {},
    "grouped_sigmoid": {"num_groups": 4, "top_groups": 2, "route_scale": 2.5},
    "balanced": {},
}
CAPACITIES = {
    "dropless": {},
    "kx": {"capacity_factor": 1.25, "capacity_mode": "kx"},
    "1x": {"capacity_factor": 1.25, "capacity_mode": "1x"},
}
GRID = [
    pytest.param(*case, id="-".join(map(str, case)))
    for case in itertools.product(
        ROUTERS, CAPACITIES, ("gelu", "swiglu"), (True, False), (1, 2, 4, 8)
    )
]
# Every value of every axis, every router with two capacities.
FAST = [
    ("top_k", "dropless", "gelu", True, 4),
    ("top_k", "kx", "swiglu", False, 8),
    ("prototype", "kx", "gelu", True, 2),
    ("prototype", "1x", "swiglu", False, 4),
    ("grouped_sigmoid", "dropless", "swiglu", False, 1),
    ("grouped_sigmoid", "1x", "gelu", True, 8),
]


def check_all_kinds(model, moe, axis_size, **how):
    for kind in KINDS:
        scene = harness.make_scene(model, moe, kind)
        got = harness.sharded(model, moe, axis_size, **how)(scene)
        want = harness.dense(model, moe, scene)
        np.testing.assert_array_equal(got.stats.load_E, want.stats.load_E)
        assert int(got.stats.dropped) == int(want.stats.dropped)
        oracle.assert_close(got, want)
        yield kind, got


def build(router, capacity, activation, use_bias):
    model = harness.small_model(activation=activation, use_bias=use_bias)
    return model, harness.small_moe(
        router=router, **ROUTERS[router], **CAPACITIES[capacity]
    )


@pytest.mark.parametrize(("router", "capacity", "activation", "use_bias", "X"), FAST)
def test_equals_the_dense_oracle(router, capacity, activation, use_bias, X):
    """Output, counts, losses and every gradient leaf equal "all experts, masked".

    For random tokens with padding; with an expert that no token chooses; with one that
    all choose; with a single real token in the batch. The ratio of every gradient to
    the oracle's is 1 whatever the number of devices along `expert`.
    """
    model, moe = build(router, capacity, activation, use_bias)
    results = dict(check_all_kinds(model, moe, X))
    assert int(results["empty"].stats.load_E[2]) == 0
    collapsed = results["collapse"].stats
    assert int(collapsed.load_E[3]) == int(jnp.sum(collapsed.load_E)) // 2
    assert int(jnp.sum(results["padding"].stats.load_E)) == moe.top_k
    dropped = int(results["collapse"].stats.dropped)
    assert dropped == 0 if capacity == "dropless" else dropped > 0


@pytest.mark.slow
@pytest.mark.parametrize(("router", "capacity", "activation", "use_bias", "X"), GRID)
def test_grid_equals_the_dense_oracle(router, capacity, activation, use_bias, X):
    """The same, for every combination, compiled as the training is."""
    model, moe = build(router, capacity, activation, use_bias)
    kinds = list(check_all_kinds(model, moe, X, optimized=True))
    assert len(kinds) == len(KINDS)


@pytest.mark.parametrize(
    ("changes", "X"),
    [
        ({"top_k": 1}, 4),
        ({"num_shared_experts": 2, "normalize_weights": True}, 4),
        pytest.param({"top_k": 8}, 2, marks=pytest.mark.slow),
        pytest.param({"top_k": 3, "capacity_factor": 0.5}, 8, marks=pytest.mark.slow),
        pytest.param(
            {"expert_width": 40, "group_tokens": 8}, 8, marks=pytest.mark.slow
        ),
        pytest.param({"buffer_factor": 8.0, "top_k": 3}, 8, marks=pytest.mark.slow),
    ],
)
def test_other_sizes_equal_the_dense_oracle(changes, X):
    """One expert, all experts, few places, shared experts, widths: still the oracle."""
    model = harness.small_model()
    assert len(list(check_all_kinds(model, harness.small_moe(**changes), X))) == 4


def test_full_buffer_is_exactly_the_dropless_layer():
    """buffer_factor = X holds all rows even if one device gets them: no change."""
    model, whole = harness.small_model(), harness.small_moe(top_k=1)
    limited = dataclasses.replace(whole, buffer_factor=4.0)
    scene = harness.make_scene(model, whole, "collapse")
    got = harness.sharded(model, limited, 4)(scene)
    want = harness.sharded(model, whole, 4)(scene)
    assert int(got.stats.dropped) == 0
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_overflow_of_a_given_buffer_by_hand():
    """All tokens on expert 3, K = 1, buffer 1.25 of the even share: 5 of 8 rows drop.

    A device has 8 tokens and may send ceil(8 / 4 * 1.25) = 3 rows to each of 4. All 8
    go to the device of expert 3: 5 are dropped, the later ones, on each of 8 devices.
    What is dropped adds exactly 0; what is kept has the dropless value.
    """
    model, whole = harness.small_model(), harness.small_moe(top_k=1)
    limited = dataclasses.replace(whole, buffer_factor=1.25)
    scene = harness.make_scene(model, whole, "collapse")
    scene = scene._replace(valid_T=np.ones_like(scene.valid_T))
    got = harness.sharded(model, limited, 4)(scene)
    want = harness.sharded(model, whole, 4)(scene)
    assert int(want.stats.dropped) == 0
    assert int(got.stats.dropped) == 8 * 5
    assert int(got.stats.load_E[3]) == 64  # loads are counted before drops
    kept_T = np.arange(64) % 8 < 3
    oracle.assert_close(got.output[kept_T], want.output[kept_T])
    assert not np.any(got.output[~kept_T])


def test_bfloat16_is_the_oracle_to_rounding():
    """bfloat16 weights and tokens on 4 devices: outputs and gradients within 3 %.

    Choices and counts are those of float32, since the router is: exactly equal.
    """
    model, moe = build("top_k", "dropless", "gelu", True)
    scene = harness.make_scene(model, moe, "random")
    half = lambda a: np.asarray(jnp.asarray(a, jnp.bfloat16))  # noqa: E731
    experts = jax.tree.map(half, scene.params["experts"])
    scene = scene._replace(params=scene.params | {"experts": experts})
    scene = scene._replace(x_TD=half(scene.x_TD), cotangent_TD=half(scene.cotangent_TD))
    got = harness.sharded(model, moe, 4)(scene)
    assert {leaf.dtype for leaf in jax.tree.leaves(got.gradients[1]["experts"])} == {
        jnp.dtype(jnp.bfloat16)
    }
    assert got.output.dtype == jnp.bfloat16
    assert got.gradients[1]["router"]["router_kernel"].dtype == jnp.float32
    whole = jax.tree.map(
        lambda a: a.astype(np.float32) if a.dtype == jnp.bfloat16 else a, scene
    )
    want = harness.dense(model, moe, whole)
    np.testing.assert_array_equal(got.stats.load_E, want.stats.load_E)
    oracle.assert_close(got, want, relative=0.03)


def test_default_buffer_is_never_larger_than_what_can_come():
    """A token visits an expert once: K = 4 with one expert per device sends T rows.

    With capacity C, a device with p experts takes at most p * C rows per group.
    """
    model = harness.small_model()
    layer = MoELayer(model, harness.small_moe(top_k=4), rngs=nnx.Rngs(0))
    rows = [layer._buffer_rows(64, layer.moe.num_experts, X) // X for X in (1, 2, 4, 8)]
    assert rows == [256, 256, 128, 64]
    moe = harness.small_moe(top_k=4, capacity_factor=1.0)  # C = 4 * 4 / 8 = 2
    layer = MoELayer(model, moe, rngs=nnx.Rngs(0))
    rows = [layer._buffer_rows(64, layer.moe.num_experts, X) // X for X in (2, 4, 8)]
    assert rows == [16 * 4 * 2, 64, 32]


def test_padding_content_changes_no_real_token():
    """Real outputs and all statistics are bitwise the same for any padding content."""
    model, moe = build("prototype", "kx", "gelu", True)
    scene = harness.make_scene(model, moe, "random")
    noisy = np.where(scene.valid_T[:, None], scene.x_TD, 50.0).astype(np.float32)
    run = harness.sharded(model, moe, 2)
    one, two = run(scene), run(scene._replace(x_TD=noisy))
    real = scene.valid_T
    np.testing.assert_array_equal(one.output[real], two.output[real])
    jax.tree.map(np.testing.assert_array_equal, one.stats, two.stats)
    assert not np.any(one.output[~real])


def test_loads_are_global():
    """Devices 0 to 3 send all to expert 0, 4 to 7 to expert 7: 32 and 32 of 64."""
    model, moe = harness.small_model(), harness.small_moe(top_k=1)
    scene = harness.make_scene(model, moe, "random")
    params = jax.tree.map(np.copy, scene.params)
    params["router"]["router_kernel"][...] = 0.0
    params["router"]["router_kernel"][1, 0] = 9.0
    params["router"]["router_kernel"][1, 7] = -9.0
    x_TD = scene.x_TD.copy()
    x_TD[:, 1] = np.where(np.arange(64) < 32, 1.0, -1.0)
    scene = scene._replace(params=params, x_TD=x_TD, valid_T=np.ones(64, bool))
    load = harness.sharded(model, moe, 4)(scene).stats.load_E
    np.testing.assert_array_equal(load, [32, 0, 0, 0, 0, 0, 0, 32])


def layer_jaxpr(model, moe, tokens):
    layer = MoELayer(model, moe, rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)
    sequences = harness.sequences(jnp.ones(tokens, bool))

    def total(x_BSD, state):
        return jnp.sum(nnx.merge(graph, state)(x_BSD, sequences, ExpertAxis())[0] ** 2)

    x_BSD = jnp.zeros((1, tokens, model.width))
    return jax.make_jaxpr(jax.grad(total, argnums=(0, 1)))(x_BSD, state)


@pytest.mark.parametrize("factor", [None, 1.25])
def test_no_array_of_tokens_times_experts_times_capacity(factor):
    """Forward and backward, no value has more than 2 T K max(D, F) elements.

    T = 2048, E = 64, K = 2, D = F = 64: T K D = 262,144. A one-hot dispatch tensor
    [T, E, C] with C = 80 would have 10,485,760, rows for every expert [T, E, D]
    8,388,608. (The 2 is the filling of each expert's rows to whole blocks.)
    """
    model = Model(width=64, ffn_width=64, sequence_length=2048)
    moe = MoE(num_experts=64, top_k=2, capacity_factor=factor)
    assert oracle.largest(layer_jaxpr(model, moe, 2048)) <= 2 * 2048 * 2 * 64
