# SPDX-License-Identifier: Apache-2.0
"""Routers: who goes where, by hand tables and against loops over tokens.

Legend: T tokens, D width, E experts, K experts per token, G groups, N tokens of one.
"""

import dataclasses
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jaxmoe.config import Model, MoE
from jaxmoe.mesh import BATCH_AXES
from jaxmoe.moe import router as router_lib
from jaxmoe.moe.router import Router, Sequences, capacity, within_capacity
from tests import oracle
from tests.moe.harness import mesh_of, sequences

GROUPED = {"num_groups": 4, "top_groups": 2, "route_scale": 2.5}


def make_router(moe, *, width=4, group=8):
    model = Model(width=width, init_std=0.5)
    return Router(model, moe, group, rngs=nnx.Rngs(0))


@lru_cache
def steered(moe, width, group):
    """A jitted router whose logits are its tokens, the kernel being the identity."""
    graph, state = nnx.split(make_router(moe, width=width, group=group))
    state["router_kernel"].set_value(jnp.eye(width, dtype=jnp.float32))

    def apply(x_TD, valid_T):
        return nnx.merge(graph, state)(x_TD, sequences(valid_T))

    return jax.jit(apply, compiler_options=oracle.QUICK)


@lru_cache
def rule_of(moe):
    """The jitted function (logits, bias) -> (ids, weights, probabilities)."""

    def rule(logits_TE, bias_E):
        if moe.router == "grouped_sigmoid":
            return router_lib.grouped_sigmoid(logits_TE, bias_E, moe)
        return getattr(router_lib, moe.router)(logits_TE, moe)

    return jax.jit(rule, compiler_options=oracle.QUICK)


quick_weights = jax.jit(oracle.weights, static_argnums=2)
places = jax.jit(within_capacity, static_argnums=(1, 2), compiler_options=oracle.QUICK)


def route(moe, logits_TE, valid_T=None, *, group=None):
    T, E = logits_TE.shape
    valid_T = np.ones(T, bool) if valid_T is None else np.asarray(valid_T)
    return steered(moe, E, group or T)(logits_TE.astype(np.float32), valid_T)


@pytest.mark.parametrize(
    ("tokens", "experts", "k", "factor", "expected"),
    [(3, 8, 1, 1.0, 1), (1, 8, 2, 1.0, 1), (10, 4, 1, 1.0, 3), (64, 8, 2, 1.25, 20)],
)
def test_capacity_is_the_share_rounded_up(tokens, experts, k, factor, expected):
    """C = max(1, ceil(K T f / E)); cutting off would give 0, 0, 2 and 20."""
    moe = MoE(num_experts=experts, top_k=k, capacity_factor=factor)
    assert capacity(moe, tokens) == expected


def test_capacity_counts_each_token_once_in_mode_1x():
    """C = ceil(T f / E): a K-th of the share of "kx"."""
    moe = MoE(num_experts=8, top_k=4, capacity_factor=1.25, capacity_mode="1x")
    assert capacity(moe, 64) == 10
    assert capacity(MoE(num_experts=8, top_k=4, capacity_factor=1.25), 64) == 40


@given(
    k=st.integers(1, 8),
    tokens=st.integers(1, 4096),
    experts=st.integers(1, 512),
    hundredths=st.integers(1, 400),
)
def test_capacity_is_exact(k, tokens, experts, hundredths):
    """ceil in whole numbers: the factor's binary rounding never adds a place."""
    moe = MoE(num_experts=experts, top_k=k, capacity_factor=hundredths / 100)
    exact = -(-k * tokens * hundredths // (100 * experts))
    assert capacity(moe, tokens) == max(1, exact)


def test_drops_by_hand():
    """First choices before second ones, earlier tokens before later ones.

    Two places per expert. Expert 0 is the first choice of tokens 1, 2 and 3: token 3
    comes too late, and so does token 0, whose second choice it is, though it stands
    first in the group. Expert 1: first choice of 0, second of 1, 2 (too late). Expert 2
    has one taker. Token 4 is padding.
    """
    ids = [[1, 0], [0, 1], [0, 1], [0, 2], [3, 3]]
    kept = [[1, 0], [1, 1], [1, 0], [0, 1], [0, 0]]
    got = places(np.array([ids]), 3, 2)
    np.testing.assert_array_equal(got[0], np.array(kept, bool))


def test_capacity_is_counted_inside_each_group():
    """One place per expert and group: the second group starts from empty experts."""
    ids = jnp.array([[[0], [0], [1]], [[0], [1], [1]]])
    kept = places(ids, 2, 1)[:, :, 0]
    np.testing.assert_array_equal(kept, [[1, 0, 1], [1, 1, 0]])


@given(data=st.data())
def test_drops_equal_a_loop(data):
    """`within_capacity` is a loop over choices, then tokens, counting takers."""
    G, N, K, E = 2, 6, 2, 4
    limit = data.draw(st.integers(1, 4))
    one = st.permutations(range(E)).map(lambda p: p[:K])
    ids = np.array(data.draw(st.lists(one, min_size=G * N, max_size=G * N)))
    valid = np.array(data.draw(st.lists(st.booleans(), min_size=12, max_size=12)))
    void = np.where(valid[:, None], ids, E)
    got = places(void.reshape(G, N, K), E, limit)
    want = oracle.keep(ids, valid, N, limit)
    np.testing.assert_array_equal(got.reshape(G * N, K), want)


def test_collapse_drops_56_of_64():
    """All 64 tokens on one of 8 experts, factor 1, K = 1: 8 stay, 56 are dropped."""
    moe = MoE(num_experts=8, top_k=1, capacity_factor=1.0)
    logits = np.zeros((64, 8), np.float32)
    logits[:, 5] = 1.0
    routing = route(moe, logits)
    assert int(routing.stats.dropped) == 56
    expected = np.where(np.arange(64) < 8, 5, 8)  # 8: no expert
    np.testing.assert_array_equal(routing.expert_ids_TK[:, 0], expected)
    np.testing.assert_array_equal(routing.stats.load_E, [0, 0, 0, 0, 0, 64, 0, 0])


def test_collapse_without_capacity_drops_nothing():
    """Dropless is dropless: the same logits, no capacity, 0 dropped."""
    logits = np.zeros((64, 8), np.float32)
    logits[:, 5] = 1.0
    routing = route(MoE(num_experts=8, top_k=1), logits)
    assert int(routing.stats.dropped) == 0
    assert (routing.expert_ids_TK == 5).all()


def test_collapse_shows_in_the_load():
    """Two of 8 experts take all, K = 2: max load / mean load = 4."""
    logits = np.zeros((16, 8), np.float32)
    logits[:, [2, 6]] = 1.0
    load = np.asarray(route(MoE(num_experts=8, top_k=2), logits).stats.load_E)
    assert load.sum() == 32
    assert load.max() / load.mean() == 4.0


@pytest.mark.parametrize("router", ["top_k", "grouped_sigmoid"])
def test_ties_go_to_the_lower_expert(router):
    """Equal logits choose experts 0 and 1, in this order."""
    ids = route(MoE(num_experts=8, top_k=2, router=router), np.zeros((5, 8)))
    np.testing.assert_array_equal(ids.expert_ids_TK, [[0, 1]] * 5)


@pytest.mark.parametrize("axis_size", [2, 8])
def test_ties_go_to_the_lower_expert_on_every_mesh(axis_size):
    """Zero logits choose experts (0, 1) on every device."""
    router = make_router(MoE(num_experts=8, top_k=2), group=2)
    router.router_kernel[...] = jnp.zeros((4, 8))
    graph, state = nnx.split(router)
    rows = P(BATCH_AXES)

    def per_device(x_TD):
        routing = nnx.merge(graph, state)(
            x_TD, sequences(jnp.ones(x_TD.shape[0], bool))
        )
        return routing.expert_ids_TK

    run = jax.shard_map(
        per_device, mesh=mesh_of(axis_size), in_specs=rows, out_specs=rows
    )
    np.testing.assert_array_equal(jax.jit(run)(jnp.ones((16, 4))), [[0, 1]] * 16)


def test_top_k_weights_are_the_probabilities():
    """Weights are softmax values, not divided by their sum (M6-T: times its gate)."""
    logits = np.log([[0.1, 0.2, 0.3, 0.4]]).astype(np.float32)
    routing = route(MoE(num_experts=4, top_k=2), logits)
    np.testing.assert_array_equal(routing.expert_ids_TK, [[3, 2]])
    np.testing.assert_allclose(routing.weights_TK, [[0.4, 0.3]], rtol=1e-6)


def test_normalized_weights_sum_to_1():
    """`normalize_weights` divides the K weights of a token by their sum."""
    logits = np.log([[0.1, 0.2, 0.3, 0.4]]).astype(np.float32)
    routing = route(MoE(num_experts=4, top_k=2, normalize_weights=True), logits)
    np.testing.assert_allclose(routing.weights_TK, [[4 / 7, 3 / 7]], rtol=1e-6)


def test_prototype_is_the_best_of_each_prototype():
    """Experts 0..3 and 4..7 are two models: top-1 and softmax inside each."""
    probs = [[0.1, 0.2, 0.3, 0.4, 0.7, 0.1, 0.1, 0.1]]
    # Adding a constant to a prototype's logits changes nothing.
    logits = np.log(probs) + np.repeat([[5.0, -5.0]], 4, axis=1)
    routing = route(MoE(num_experts=8, top_k=2, router="prototype"), logits)
    np.testing.assert_array_equal(routing.expert_ids_TK, [[3, 4]])
    np.testing.assert_allclose(routing.weights_TK, [[0.4, 0.7]], rtol=1e-5)


def test_prototype_of_one_is_top_1():
    """One prototype of all experts is Switch routing: same ids, weights and losses."""
    logits = np.random.default_rng(0).standard_normal((16, 8))
    one = route(MoE(num_experts=8, top_k=1, router="prototype"), logits)
    other = route(MoE(num_experts=8, top_k=1), logits)
    oracle.assert_close(one, other, relative=1e-6)


def test_grouped_sigmoid_by_hand():
    """The bias decides who is chosen, and leaves the weights alone.

    Scores .5 .9 | .8 .1 | .6 .6 | .2 .3. Groups score 1.4, .9, 1.2, .5: without a bias
    groups 0 and 2 stay, and experts 1 and 4 are best inside them (5 ties with 4). A
    bias of 2 on expert 7 lifts group 3 to 2.5 and expert 7 to the first place; its
    weight is made of the score 0.3: 0.3 / 1.2 and 0.9 / 1.2, times 2.5.
    """
    moe = MoE(num_experts=8, top_k=2, router="grouped_sigmoid", **GROUPED)
    scores = np.array([[0.5, 0.9, 0.8, 0.1, 0.6, 0.6, 0.2, 0.3]])
    logits = np.log(scores / (1 - scores)).astype(np.float32)
    ids, weights, _ = rule_of(moe)(logits, np.zeros(8, np.float32))
    np.testing.assert_array_equal(ids, [[1, 4]])
    np.testing.assert_allclose(weights, [[2.5 * 0.9 / 1.5, 2.5 * 0.6 / 1.5]], rtol=1e-5)
    bias = np.array([0, 0, 0, 0, 0, 0, 0, 2], np.float32)
    ids, weights, _ = rule_of(moe)(logits, bias)
    np.testing.assert_array_equal(ids, [[7, 1]])
    np.testing.assert_allclose(weights, [[2.5 * 0.3 / 1.2, 2.5 * 0.9 / 1.2]], rtol=1e-5)


@pytest.mark.parametrize(
    ("router", "k", "groups"),
    [
        ("top_k", 1, {}),
        ("top_k", 4, {}),
        ("top_k", 4, {"normalize_weights": True}),
        ("prototype", 4, {}),
        ("grouped_sigmoid", 4, GROUPED),
        ("grouped_sigmoid", 3, {"num_groups": 8, "top_groups": 3}),
        ("grouped_sigmoid", 3, {"num_groups": 16, "top_groups": 5}),
        ("grouped_sigmoid", 3, {}),
    ],
)
def test_choices_and_weights_equal_a_loop(router, k, groups):
    """Ids, weights and probabilities are those of a loop over tokens in NumPy."""
    moe = MoE(num_experts=16, top_k=k, router=router, **groups)
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((64, 16)).astype(np.float32)
    bias = rng.standard_normal(16).astype(np.float32)
    got = rule_of(moe)(logits, bias)
    ids = oracle.choose(logits, moe, bias)
    chosen = oracle.one_hot(ids, np.ones(ids.shape, bool), 16)
    weights, probs = quick_weights(logits, chosen, moe)
    np.testing.assert_array_equal(got[0], ids)
    np.testing.assert_allclose(got[1], np.take_along_axis(weights, ids, 1), rtol=1e-5)
    np.testing.assert_allclose(got[2], probs, rtol=1e-5)
    np.testing.assert_allclose(np.sum(got[2], axis=1), 1.0, rtol=1e-6)


def test_no_gradient_reaches_the_bias():
    """The bias is moved by its own rule alone: its gradient is exactly 0."""
    moe = MoE(num_experts=8, top_k=2, router="grouped_sigmoid", **GROUPED)
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((6, 8)), jnp.float32)

    def total(bias):
        _, weights, probs = router_lib.grouped_sigmoid(logits, bias, moe)
        return jnp.sum(weights**2) + jnp.sum(probs**2)

    assert not np.any(jax.jit(jax.grad(total))(np.ones(8, np.float32)))
    router = make_router(moe)
    assert not jax.tree.leaves(nnx.state(router, nnx.Param))[1:]  # kernel only


def test_padding_is_void():
    """A padding token has no expert, counts nowhere, takes nobody's place.

    One place per expert: token 0 is padding, so token 1 gets expert 2.
    """
    moe = MoE(num_experts=4, top_k=1, capacity_factor=1.0)
    logits = np.zeros((4, 4), np.float32)
    logits[:, 2] = 1.0
    routing = route(moe, logits, [False, True, True, False])
    np.testing.assert_array_equal(routing.expert_ids_TK[:, 0], [4, 2, 4, 4])
    np.testing.assert_array_equal(routing.stats.load_E, [0, 0, 2, 0])
    assert int(routing.stats.dropped) == 1


def test_padding_content_changes_nothing():
    """Ids, loads and losses do not depend on what stands in padding, however large."""
    moe = MoE(num_experts=8, top_k=2)
    rng = np.random.default_rng(0)
    logits, valid = rng.standard_normal((16, 8)), rng.random(16) < 0.6
    other = np.where(valid[:, None], logits, 1e4)
    one, two = route(moe, logits, valid, group=8), route(moe, other, valid, group=8)
    np.testing.assert_array_equal(one.expert_ids_TK, two.expert_ids_TK)
    for name in ("load_E", "balance_loss", "z_loss"):
        np.testing.assert_array_equal(
            getattr(one.stats, name), getattr(two.stats, name)
        )


ROUTERS = ("top_k", "prototype", "grouped_sigmoid", "balanced")


@pytest.mark.parametrize("router", ROUTERS)
def test_everything_is_float32(router):
    """bfloat16 tokens are cast before the product, and nothing goes back after it."""
    groups = GROUPED if router == "grouped_sigmoid" else {}
    layer = make_router(MoE(num_experts=8, top_k=2, router=router, **groups))
    graph, state = nnx.split(layer)

    def run(x_TD, valid_T):
        return nnx.merge(graph, state)(x_TD, sequences(valid_T))

    jaxpr = jax.make_jaxpr(run)(jnp.zeros((8, 4), jnp.bfloat16), jnp.ones(8, bool))
    outvars = [v for e in oracle.equations(jaxpr) for v in e.outvars]
    floats = [
        v.aval.dtype for v in outvars if jnp.issubdtype(v.aval.dtype, np.floating)
    ]
    assert set(floats) == {np.dtype(np.float32)}


def test_the_product_is_not_rounded_by_the_hardware():
    """Forward and backward, the router's products ask for full float32.

    By default TPUs multiply float32 matrices in bfloat16 and GPUs in TF32, which picks
    other experts just as a bfloat16 router would.
    """
    layer = make_router(MoE(num_experts=8, top_k=2))
    graph, state = nnx.split(layer)

    def total(x_TD, state):
        routing = nnx.merge(graph, state)(x_TD, sequences(jnp.ones(8, bool)))
        return jnp.sum(routing.weights_TK**2) + routing.stats.z_loss

    jaxpr = jax.make_jaxpr(jax.grad(total, argnums=(0, 1)))(jnp.ones((8, 4)), state)
    products = [e for e in oracle.equations(jaxpr) if e.primitive.name == "dot_general"]
    assert len(products) == 3  # logits, and the gradients of tokens and kernel
    highest = (jax.lax.Precision.HIGHEST,) * 2
    assert [e.params["precision"] for e in products] == [highest] * 3


def test_bfloat16_tokens_choose_as_float32_does():
    """4096 tokens, D = 512, E = 64: the top-2 sets are those of float64 products."""
    moe = MoE(num_experts=64, top_k=2)
    layer = make_router(moe, width=512, group=64)
    layer.router_kernel[...] = layer.router_kernel[...] * 0.05
    x_TD = jax.random.normal(jax.random.key(1), (4096, 512)).astype(jnp.bfloat16)
    got = np.asarray(
        jax.jit(lambda x: layer(x, sequences(jnp.ones(4096, bool))))(x_TD).expert_ids_TK
    )
    exact = np.asarray(x_TD, np.float64) @ np.asarray(
        layer.router_kernel[...], np.float64
    )
    order = np.argsort(-exact, axis=1)[:, :3]
    values = np.take_along_axis(exact, order, axis=1)
    # float32 cannot tell candidates closer than its rounding of the sum
    clear = values[:, 1] - values[:, 2] > 1e-5
    assert clear.mean() > 0.99
    want = order[:, :2]
    assert (np.sort(got, axis=1) == np.sort(want, axis=1))[clear].all()
    rounded = jnp.asarray(x_TD) @ layer.router_kernel[...].astype(jnp.bfloat16)
    other = np.asarray(jax.lax.top_k(rounded, 2)[1])
    changed = (np.sort(other, axis=1) != np.sort(want, axis=1)).any(axis=1)
    assert changed[clear].mean() > 0.003  # what a bfloat16 router would do


def test_balanced_deals_experts_out_in_turn():
    """E = 4, K = 2, sequences of 4: the i-th real token takes 2i and 2i + 1 mod 4.

    Sequence 1 starts at token 4, which is even, so it goes on with expert 0.
    """
    moe = MoE(num_experts=4, top_k=2, router="balanced")
    valid = np.array([1, 0, 1, 1, 1, 1, 1, 1], bool)
    graph, state = nnx.split(make_router(moe, group=4))
    routing = nnx.merge(graph, state)(jnp.ones((8, 4)), sequences(valid, 4))
    ids = [[0, 1], [4, 4], [2, 3], [0, 1], [0, 1], [2, 3], [0, 1], [2, 3]]
    np.testing.assert_array_equal(routing.expert_ids_TK, ids)
    np.testing.assert_array_equal(routing.weights_TK, np.full((8, 2), 0.5))
    np.testing.assert_array_equal(routing.stats.load_E, [4, 4, 3, 3])


@given(data=st.data())
def test_balanced_loads_differ_by_one(data):
    """Of one sequence without padding, each expert gets its share, within 1."""
    S, K, E = data.draw(st.sampled_from([(7, 2, 5), (12, 3, 8), (5, 1, 4)]))
    number = data.draw(st.integers(0, 2**31 - 1))
    moe = MoE(num_experts=E, top_k=K, router="balanced")
    given_number = Sequences(np.ones((1, S), bool), np.array([number], np.int32))
    ids, *_ = router_lib.balanced(jnp.zeros((S, E)), given_number, moe)
    load = np.bincount(np.asarray(ids).ravel(), minlength=E)
    assert load.max() - load.min() <= 1
    assert all(len(set(row)) == K for row in np.asarray(ids).tolist())


def test_jitter_is_uniform_and_drawn_per_sequence():
    """Factors in [0.8, 1.2), mean 1; a sequence keeps its own wherever it stands."""
    keys = jax.random.split(jax.random.key(0), 3)
    x_TD = jnp.ones((3 * 100, 8))
    got = np.asarray(router_lib.jitter(x_TD, keys, 0.2)).reshape(3, 100, 8)
    assert got.min() >= 0.8
    assert got.max() < 1.2
    assert abs(got.mean() - 1.0) < 0.01
    other = router_lib.jitter(x_TD[:100], keys[2:], 0.2)
    np.testing.assert_array_equal(got[2], other)
    assert not np.array_equal(got[0], got[1])


def test_jitter_needs_a_key():
    """Evaluation gives none: the router sees its input as it is."""
    moe = MoE(num_experts=4, top_k=2, input_jitter=0.5)
    graph, state = nnx.split(make_router(moe, group=4))
    x_TD = jax.random.normal(jax.random.key(1), (4, 4))
    given_keys = sequences(np.ones(4, bool))
    still = nnx.merge(graph, state)(x_TD, given_keys)
    keys = jax.random.split(jax.random.key(0), 1)
    moved = nnx.merge(graph, state)(x_TD, dataclasses.replace(given_keys, key_B=keys))
    plain = nnx.merge(graph, state)
    plain.moe = MoE(num_experts=4, top_k=2)
    jax.tree.map(np.testing.assert_array_equal, still, plain(x_TD, given_keys))
    assert not np.array_equal(still.weights_TK, moved.weights_TK)
