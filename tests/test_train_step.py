# SPDX-License-Identifier: Apache-2.0
"""The train step: exact on every mesh and under accumulation, in loss and gradients.

Legend: M microbatches, B sequences of a step, S positions, E experts, L MoE layers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmoe.metrics import load_statistics
from jaxmoe.tree_names import named_leaves
from tests import helpers, oracle
from tests.helpers import MESHES, tiny_config
from tests.oracle import assert_close

CONFIG = helpers.exacting_config()
SPLITS = [(8, 1, 1), (4, 2, 2), (2, 4, 4), (1, 8, 1)]  # data, expert, accumulation
GRID = [(*mesh, m) for mesh in MESHES for m in (1, 2, 4)]


def slow(*case):
    return pytest.param(case, marks=pytest.mark.slow)


def accumulating(config, microbatches):
    return helpers.changed(config, train={"accumulation": microbatches})


def gradients(config, data, expert, *, params=None, batch=None):
    """(gradients, StepMetrics) at the initial weights, on the host."""
    state = helpers.initial_state(config, data, expert)
    params = state.params if params is None else params
    batch = helpers.batches(config)[0] if batch is None else batch
    run = helpers.gradients_of(config, data, expert)
    return helpers.host(run(params, state.buffers, batch))


def norm(tree):
    squares = [np.sum(np.square(g, dtype=np.float64)) for g in jax.tree.leaves(tree)]
    return float(np.sqrt(sum(squares)))


def reshaped(batch, microbatches):
    """[M, B / M, ...] -> another M, the sequences in their order."""
    return {
        name: a.reshape(microbatches, -1, *a.shape[2:]) for name, a in batch.items()
    }


# The same on every mesh ---------------------------------------------------------------


@pytest.mark.parametrize(
    "meshes", [[(4, 2), (1, 1)], pytest.param(MESHES, marks=pytest.mark.slow)]
)
def test_initial_weights_are_bitwise_equal_on_every_mesh(meshes):
    """w_0 = f(seed): no key is folded with a device's number (bitwise)."""
    config = tiny_config(moe={"router": "grouped_sigmoid"})
    states = []
    for mesh in meshes:
        setup = helpers.setup_of(config, *mesh)
        layout = setup.state_sharding
        create = jax.jit(setup._initial_state, out_shardings=layout)
        states.append(helpers.quickly(create)())
    for state in states[1:]:
        helpers.assert_same(state, states[0])


def test_another_seed_gives_other_weights_and_the_seed_decides_alone():
    """f(seed) != f(seed') in every random leaf; batch size and mesh do not enter."""
    first = helpers.initial_state(CONFIG, 1, 1).params
    other = helpers.changed(CONFIG, train={"seed": 1}, data={"batch_size": 8})
    second = helpers.initial_state(other, 1, 1).params
    for (name, a), b in zip(
        named_leaves(first).items(), jax.tree.leaves(second), strict=True
    ):
        constant = name.endswith(("bias", "scale"))
        assert np.array_equal(a, b) == constant, name


@pytest.mark.parametrize(("data", "expert", "microbatches"), SPLITS)
def test_gradients_do_not_depend_on_mesh_or_accumulation(data, expert, microbatches):
    """g(mesh, M) = g(1 device, 1): every leaf within 1e-5 of its largest entry.

    So are the global norm (and it is the NumPy norm of the whole gradient), the losses
    by task, the balance losses; loads and drops are the same numbers.
    """
    check_against_one_device(CONFIG, data, expert, microbatches)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "expert", "microbatches"), [c for c in GRID if c not in SPLITS]
)
def test_gradients_do_not_depend_on_mesh_or_accumulation_full_grid(
    data, expert, microbatches
):
    """The same claim on the rest of all meshes x accumulation 1, 2, 4."""
    check_against_one_device(CONFIG, data, expert, microbatches)


VARIANTS = {
    "dropless": {},
    "prototype": {"moe": {"router": "prototype", "capacity_factor": 0.5}},
    "grouped": {
        "moe": {"router": "grouped_sigmoid", "num_groups": 4, "top_groups": 2},
        "model": {"norm": "rms", "activation": "swiglu", "use_bias": False},
    },
    "shared": {
        "model": {"share_layers": True, "num_layers": 4, "tie_embeddings": False},
        "moe": {"num_shared_experts": 1, "normalize_weights": True},
    },
    "dense": {"model": {"layer_pattern": "dense", "norm_position": "post"}},
    "groups": {"moe": {"group_tokens": 20, "capacity_factor": 0.75}},
}


@pytest.mark.slow
@pytest.mark.parametrize("split", [(4, 2, 1), (1, 8, 2)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_of_every_kind_of_model(variant, split):
    """The same claim for other routers, norms, activations and shared layers."""
    check_against_one_device(tiny_config(**VARIANTS[variant]), *split)


def check_against_one_device(config, data, expert, microbatches):
    want, one = gradients(config, 1, 1)
    config = accumulating(config, microbatches)
    got, metrics = gradients(config, data, expert)
    assert_close(got, want)
    assert metrics.grad_norm == pytest.approx(norm(got), rel=1e-6)
    assert metrics.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
    assert_close(metrics.sums.nll, one.sums.nll)
    np.testing.assert_array_equal(metrics.sums.tokens, one.sums.tokens)
    np.testing.assert_array_equal(metrics.sums.correct, one.sums.correct)
    if one.stats is None:
        assert metrics.stats is None
        return
    assert_close(metrics.stats.balance_loss, one.stats.balance_loss)
    assert_close(metrics.stats.z_loss, one.stats.z_loss)
    np.testing.assert_array_equal(metrics.stats.load_E, one.stats.load_E)
    np.testing.assert_array_equal(metrics.stats.dropped, one.stats.dropped)
    if config.moe.capacity_factor is not None:
        assert one.stats.dropped.sum() > 0, "the case has no drops to compare"


def test_microbatch_m_is_the_same_set_of_sequences_whatever_the_accumulation():
    """batch(M)[m] = rows m * B/M .. (m+1) * B/M - 1 of the step, bitwise."""
    whole = helpers.batches(CONFIG)[0]
    for m in (2, 4):
        parts = helpers.batches(accumulating(CONFIG, m))[0]
        helpers.assert_same(parts, reshaped(whole, m))


@pytest.mark.parametrize(
    "split", [*SPLITS[:3:2], *(slow(*c) for c in GRID if c not in SPLITS[:3:2])]
)
def test_losses_of_12_adamw_steps_do_not_depend_on_the_mesh(split):
    """loss_t(mesh, M) = loss_t(1 device, 1) within 1e-5 for t = 1..12, with clipping
    and warm-up; and the loss falls."""
    data, expert, microbatches = split
    want = helpers.losses_of(CONFIG, 1, 1, 12)
    got = helpers.losses_of(accumulating(CONFIG, microbatches), data, expert, 12)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert want[-1] < want[0] - 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adafactor", "sgd"])
def test_losses_of_other_optimizers_do_not_depend_on_the_mesh(name):
    """The same claim over 8 steps. Without biases, of which some have the true gradient
    0: Adafactor would divide its rounding by itself and make steps of it."""
    optimizer = {"name": name, "learning_rate": 0.01}
    config = helpers.changed(CONFIG, optimizer=optimizer, model={"use_bias": False})
    want = helpers.losses_of(config, 1, 1, 8)
    got = helpers.losses_of(accumulating(config, 2), 2, 4, 8)
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_one_loss_sequence_per_seed_and_data_bitwise():
    """Two runs on one mesh give the same 5 losses and the same weights, bitwise."""

    def run():
        state = helpers.initial_state(CONFIG)
        seen = []
        for batch in helpers.batches(CONFIG, 5):
            state, metrics = helpers.step_of(CONFIG)(state, batch)
            seen.append(helpers.host(metrics))
        return helpers.host(state), seen

    helpers.assert_same(run(), run())


# The loss -----------------------------------------------------------------------------


def logits_of(config, batch):
    """Logits [B, S, V] of the model applied outside any step, without a mesh."""
    setup = helpers.setup_of(config, 1, 1)
    state = helpers.initial_state(config, 1, 1)
    module = nnx.merge(setup.graph, state.params, state.buffers)
    one = {name: jnp.asarray(a[0]) for name, a in reshaped(batch, 1).items()}
    return np.asarray(jax.jit(lambda b: module(b)[0])(one), np.float64)


def test_loss_is_the_sum_over_real_tokens_divided_by_their_global_number():
    """loss = -sum_t log softmax(logits_t)[target_t] / T over the T positions with a
    target, in NumPy; per task too. Padding and images have no part in it."""
    config = accumulating(CONFIG, 2)
    batch = helpers.batches(config)[0]
    _, metrics = gradients(config, 4, 2)
    logits = logits_of(CONFIG, batch)
    flat = reshaped(batch, 1)
    targets, task = flat["targets"][0], flat["task"][0]
    top = logits.max(-1, keepdims=True)
    log_probs = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    nll = -np.take_along_axis(log_probs, targets[..., None], -1)[..., 0]
    right = logits.argmax(-1) == targets
    for t in range(4):
        where = task == 1 + t
        assert metrics.sums.tokens[t] == where.sum() > 0
        assert metrics.sums.nll[t] == pytest.approx(nll[where].sum(), rel=1e-5)
        assert metrics.sums.correct[t] == right[where].sum()
    real = nll[task > 0]
    assert helpers.loss_of(metrics) == pytest.approx(real.sum() / real.size, rel=1e-5)
    assert real.size < targets.size / 2, "the case has no padding to speak of"


def test_the_divisor_is_global_where_targets_are_spread_unevenly():
    """Targets in one row of 32 only: 31 rows (7 devices, one microbatch) have none, and
    yet g = g(1 device, 1 microbatch). Means of means would be 8 or 16 times off."""
    config = accumulating(CONFIG, 2)
    batch = dict(helpers.batches(config)[0])
    row = np.zeros((2, 16, 1), bool)
    row[1, 5] = True
    batch["task"] = np.where(row, batch["task"], 0)
    got, metrics = gradients(config, 4, 2, batch=batch)
    want, one = gradients(CONFIG, 1, 1, batch=reshaped(batch, 1))
    assert metrics.sums.tokens.sum() == (batch["task"] > 0).sum() > 0
    assert helpers.loss_of(metrics) == pytest.approx(helpers.loss_of(one), rel=1e-5)
    assert_close(got, want)


def test_auxiliary_losses_do_not_grow_with_microbatches():
    """The same 8 sequences once, and in each of 4 microbatches: the loss, the balance
    and z-loss per routing group, every gradient and the norm are equal."""
    four = accumulating(CONFIG, 4)
    once = helpers.changed(CONFIG, data={"batch_size": 8})
    eight = helpers.batches(once)[0]
    repeated = {name: np.concatenate([a] * 4) for name, a in eight.items()}
    want, one = gradients(once, 1, 1)
    got, metrics = gradients(four, 2, 4, batch=repeated)
    assert_close(got, want)
    assert metrics.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
    assert_close(metrics.stats.balance_loss, 4 * one.stats.balance_loss)
    assert_close(metrics.stats.z_loss, 4 * one.stats.z_loss)
    np.testing.assert_array_equal(metrics.stats.load_E, 4 * one.stats.load_E)
    real = (repeated["modality"] > 0).sum()
    assert metrics.stats.load_E.sum() == real * CONFIG.moe.top_k


def operations(remat):
    """How often the gradient of CONFIG computes some things, by the remat policy."""
    config = helpers.changed(CONFIG, model={"remat": remat})
    setup, state = helpers.setup_of(config, 4, 2), helpers.initial_state(CONFIG, 4, 2)
    jaxpr = jax.make_jaxpr(setup.loss_and_gradients)(
        state.params, state.buffers, helpers.batches(CONFIG)[0]
    )
    names = ("exp", "dot_general", "all_to_all")
    return {name: oracle.count(jaxpr, name) for name in names}


def test_the_remat_policy_is_in_the_program():
    """Exponentials are computed again by both policies, fewer products by 'dots' than
    by 'full', and the exchange of tokens by none."""
    none, dots, full = map(operations, ("none", "dots", "full"))
    assert dots["exp"] == full["exp"] > none["exp"]
    assert full["dot_general"] > dots["dot_general"]
    assert dots["all_to_all"] == full["all_to_all"] == none["all_to_all"] > 0


@pytest.mark.parametrize(
    "remat", [pytest.param("dots", marks=pytest.mark.slow), "full"]
)
def test_remat_changes_no_result(remat):
    """g(remat) = g(none) within 1e-6, and statistics are counted once."""
    config = helpers.changed(CONFIG, model={"remat": remat})
    want, one = gradients(CONFIG, 4, 2)
    got, metrics = gradients(config, 4, 2)
    assert_close(got, want, relative=1e-6)
    assert_close(metrics, one, relative=1e-6)


# Counts over devices ------------------------------------------------------------------


def writable_params(config):
    return jax.tree.map(np.array, helpers.initial_state(config, 1, 1).params)


def steered(expert_of_row):
    """(params, batch): the router sends all of row r to expert_of_row[r] first, and
    second to expert 3. A row is one token over and over, and nothing but its embedding
    reaches the MoE layer."""
    params = writable_params(CONFIG)
    for name in ("position", "segment"):
        params["embedder"][name][...] = 0
    for kind in ("dense", "moe"):
        for leaf in ("out_kernel", "out_bias"):
            params[kind]["attention"][leaf][...] = 0
    for leaf in ("down", "down_bias"):
        params["dense"]["mlp"][leaf][...] = 0
    x_ED = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
    params["embedder"]["token"][:8] = x_ED
    centred = x_ED - x_ED.mean(1, keepdims=True)
    normed_ED = centred / centred.std(1, keepdims=True)  # as the MoE layer sees them
    logits_EE = 5 * np.eye(8) + 3 * (np.arange(8) == 3)[None]
    kernel = params["moe"]["moe"]["router"]["router_kernel"]
    kernel[0] = np.linalg.pinv(normed_ED) @ logits_EE
    batch = dict(helpers.batches(CONFIG)[0])
    shape = batch["tokens"].shape
    tokens = np.broadcast_to(np.asarray(expert_of_row)[None, :, None], shape)
    batch["tokens"] = np.ascontiguousarray(tokens, np.int32)
    batch["modality"], batch["sequence"] = np.full(shape, 2), np.ones(shape, int)
    batch["positions"], batch["decoder"] = np.zeros(shape, int), np.zeros(shape, bool)
    for name in ("modality", "sequence", "positions"):
        batch[name] = batch[name].astype(np.int32)
    return params, batch


@pytest.mark.parametrize("mesh", [(1, 8), (4, 2), (8, 1)])
def test_loads_are_counted_over_all_devices(mesh):
    """Half the devices send all to expert 0 first, half to expert 7: the counts are
    global, T / 2 each, and their sum is T * K, on every mesh."""
    params, batch = steered([0] * 16 + [7] * 16)
    _, metrics = gradients(CONFIG, *mesh, params=params, batch=batch)
    half = 16 * 40
    want = [[half, 0, 0, 2 * half, 0, 0, 0, half]]
    np.testing.assert_array_equal(metrics.stats.load_E, want)
    assert load_statistics(metrics.stats.load_E)["load_max_over_mean"] == 4.0


@pytest.mark.parametrize("mesh", [(1, 8), (4, 2)])
def test_ties_go_to_the_lowest_experts_and_collapse_is_visible(mesh):
    """All-zero router scores, k = 2: every token goes to experts 0 and 1 on every mesh;
    max load / mean = 8 / 2 = 4, 6 dead experts."""
    params = writable_params(CONFIG)
    params["moe"]["moe"]["router"]["router_kernel"][...] = 0
    _, metrics = gradients(CONFIG, *mesh, params=params)
    real = (helpers.batches(CONFIG)[0]["modality"] > 0).sum()
    np.testing.assert_array_equal(metrics.stats.load_E, [[real, real, *[0] * 6]])
    found = load_statistics(metrics.stats.load_E)
    assert (found["load_max_over_mean"], found["dead_experts"]) == (4.0, 6)


@pytest.mark.parametrize("share", [pytest.param(False, marks=pytest.mark.slow), True])
def test_router_bias_follows_the_global_loads(share):
    """bias += rate * sign(mean load - load), from the loads of all devices; the state
    keeps its shapes, with shared layers too (the sum of their loads counts)."""
    config = tiny_config(
        model={"layer_pattern": "moe", "share_layers": share},
        moe={"router": "grouped_sigmoid", "bias_update_rate": 0.1},
    )
    state = helpers.initial_state(config, 2, 4)
    shapes = jax.tree.map(jnp.shape, state)
    new, metrics = helpers.step_of(config, 2, 4)(state, helpers.batches(config)[0])
    assert jax.tree.map(jnp.shape, new) == shapes
    load_LE = np.asarray(metrics.stats.load_E)
    assert load_LE.shape == (2, 8)
    load_LE = load_LE.sum(0, keepdims=True) if share else load_LE
    want = np.float32(0.1) * np.sign(load_LE.mean(1, keepdims=True) - load_LE)
    np.testing.assert_array_equal(new.buffers["moe"]["moe"]["router"]["bias"], want)


# The update ---------------------------------------------------------------------------


def test_clipped_sgd_update_uses_the_global_norm():
    """w - w' = rate * g * min(1, limit / |g|) with |g| over all devices."""
    sgd = {"name": "sgd", "learning_rate": 0.5, "schedule": "constant"}
    sgd |= {"warmup_steps": 0, "clip_norm": 0.5}
    config = helpers.changed(CONFIG, optimizer=sgd)
    state = helpers.initial_state(config, 4, 2)
    before = helpers.host(state.params)
    grads, metrics = gradients(CONFIG, 4, 2)
    assert metrics.grad_norm > 1
    new, stepped = helpers.step_of(config, 4, 2)(state, helpers.batches(config)[0])
    assert stepped.grad_norm == pytest.approx(metrics.grad_norm, rel=1e-6)
    factor = 0.5 * 0.5 / norm(grads)
    moved = jax.tree.map(lambda a, b: a - np.asarray(b), before, new.params)
    want = jax.tree.map(lambda g: factor * g, grads)
    for name, got in named_leaves(moved).items():
        scale = np.abs(named_leaves(before)[name]).max()  # the difference's rounding
        np.testing.assert_allclose(
            got, named_leaves(want)[name], rtol=1e-4, atol=1e-6 * max(1, scale)
        )
    assert int(new.step) == 1


def test_the_old_state_is_donated():
    """After a step every array of the state that went in is deleted."""
    state = helpers.initial_state(CONFIG)
    leaves = jax.tree.leaves(state)
    new, metrics = helpers.step_of(CONFIG)(state, helpers.batches(CONFIG)[0])
    jax.block_until_ready(metrics)
    assert all(leaf.is_deleted() for leaf in leaves)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(new))


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_masters():
    """Weights in products are bfloat16 but the router's; masters, optimizer state,
    gradients and loss are float32; the gather moves bfloat16; the loss is near."""
    config = helpers.changed(CONFIG, model={"compute_dtype": "bfloat16"})
    setup, state = helpers.setup_of(config, 4, 2), helpers.initial_state(config, 4, 2)
    jaxpr = jax.make_jaxpr(setup.loss_and_gradients)(
        state.params, state.buffers, helpers.batches(config)[0]
    )
    gathered = [
        (e.outvars[0].aval.dtype, e.outvars[0].aval.shape)
        for e in oracle.equations(jaxpr)
        if e.primitive.name == "all_gather"
    ]
    router = (jnp.float32, (16, 8))
    assert gathered.count(router) == 1
    assert {t for t, shape in gathered if shape != router[1]} == {jnp.dtype("bfloat16")}
    scattered = [
        e.invars[0].aval.dtype
        for e in oracle.equations(jaxpr)
        if e.primitive.name == "reduce_scatter"
    ]
    assert set(scattered) == {jnp.dtype("float32")}

    new, metrics = helpers.step_of(config, 4, 2)(state, helpers.batches(config)[0])
    types = {leaf.dtype for leaf in jax.tree.leaves((new.params, new.optimizer))}
    assert types == {jnp.dtype("float32"), jnp.dtype("int32")}  # int32: step counts
    assert {leaf.dtype for leaf in jax.tree.leaves(metrics.sums)} == {
        jnp.dtype("float32")
    }
    _, want = gradients(CONFIG, 4, 2)
    loss = helpers.loss_of(metrics)
    assert loss != helpers.loss_of(want)
    assert loss == pytest.approx(helpers.loss_of(want), rel=0.02)
