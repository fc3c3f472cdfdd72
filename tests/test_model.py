# SPDX-License-Identifier: Apache-2.0
"""The whole model: sizes, what depends on what, layer patterns, recomputation.

Legend: B sequences, S positions, D width, V vocabulary, E experts, L layers.
"""

import math
from functools import lru_cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxmoe import config_derived, gin_config
from jaxmoe import model as model_lib
from jaxmoe.config import Model, MoE
from jaxmoe.mesh import BATCH_AXES
from jaxmoe.moe.exchange import ExpertAxis
from tests import oracle
from tests.moe.harness import mesh_of

S, V, PATCHES, PATCH_DIM = 8, 20, 2, 3
CONFIGS = Path(__file__).parents[1] / "configs"


def small_model(**changes):
    sizes = {"width": 16, "num_heads": 2, "ffn_width": 24, "sequence_length": S}
    sizes |= {"num_patches": PATCHES, "patch_dim": PATCH_DIM, "init_std": 0.3}
    sizes |= {"num_layers": 2, "layer_pattern": "dense,moe"}
    return Model(**sizes | changes)


MOE = MoE(num_experts=8, top_k=2)
# Row 0: image, encoder, decoder, padding. Row 1: two packed sequences and padding.
ROWS = {
    "modality": ["11222220", "12212220"],
    "decoder": ["00001110", "00100110"],
    "sequence": ["11111110", "11122220"],
    "positions": ["01234560", "01201230"],
}


@lru_cache
def make_batch(rows=2):
    rng = np.random.default_rng(0)
    batch = {
        name: np.tile([[int(c) for c in row] for row in texts], (rows // 2, 1))
        for name, texts in ROWS.items()
    }
    batch = {name: value.astype(np.int32) for name, value in batch.items()}
    batch["decoder"] = batch["decoder"].astype(bool)
    batch["tokens"] = rng.integers(0, V, (rows, S)).astype(np.int32)
    batch["patches"] = rng.standard_normal((rows, PATCHES, PATCH_DIM)).astype(
        np.float32
    )
    return batch


@lru_cache
def parts(model, moe=MOE, module=model_lib.M6):
    """(graph, parameters, buffers) with random values, for scales and biases too.

    Drawn by NumPy: the initialisers would take seconds to compile.
    """
    shapes = nnx.eval_shape(lambda: module(model, moe, V, rngs=nnx.Rngs(0)))
    graph, params, buffers = nnx.split(shapes, nnx.Param, ...)
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        mean, std = (1.0, 0.1) if path[-1].key == "scale" else (0.0, 0.3)
        return (mean + std * rng.standard_normal(leaf.shape)).astype(np.float32)

    params = jax.tree_util.tree_map_with_path(draw, nnx.to_pure_dict(params))
    return graph, params, nnx.to_pure_dict(buffers)


@lru_cache
def applied(model, moe):
    graph, _, buffers = parts(model, moe)
    apply = lambda params, batch: nnx.merge(graph, params, buffers)(batch)  # noqa: E731
    return jax.jit(apply, compiler_options=oracle.QUICK)


def run(model, moe=MOE, batch=None):
    """(logits, stats) on one device, compiled."""
    return applied(model, moe)(parts(model, moe)[1], batch or make_batch())


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("m6_t_base", 1.342),
        ("m6_t_10b", 10.74),
        ("m6_t_100b", 103.1),
        ("m6_t_1t", 1002.6),
        ("m6_10t", 10_050),
        ("deepseek_v3", 653.9),
    ],
)
def test_expert_parameters_of_the_shipped_models(name, billions):
    """L E 2 D F (3 with SwiGLU) within 1 %: biases of M6-T are the rest."""
    config = gin_config.load([str(CONFIGS / f"{name}.gin")]).config
    module = nnx.eval_shape(
        lambda: model_lib.M6(config.model, config.moe, 1000, rngs=nnx.Rngs(0))
    )
    params = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    experts = params["moe"]["moe"]["experts"]
    number = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(experts))
    assert number / 1e9 == pytest.approx(billions, rel=0.01)
    kinds = config_derived.layer_kinds(config.model)
    assert len(kinds) == config.model.num_layers
    layers, D = kinds.count("moe"), config.model.width
    kernel = (layers, config.moe.num_experts, D)
    assert experts["up"].shape[:3] == kernel
    assert params["moe"]["attention"]["qkv_kernel"].shape[:2] == (layers, D)


VARIANTS = {
    "pre-layer": {},
    "post-rms-swiglu": {
        "norm_position": "post",
        "norm": "rms",
        "activation": "swiglu",
        "use_bias": False,
        "layer_pattern": "moe,dense",
        "tie_embeddings": False,
    },
    "post-layer-bias": {
        "norm_position": "post",
        "num_layers": 1,
        "layer_pattern": "moe",
    },
    "pre-rms-shared": {
        "norm": "rms",
        "share_layers": True,
        "layer_pattern": "dense,moe*2",
        "num_layers": 3,
        "head_dim": 5,
    },
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_a_plain_restatement(name):
    """Embedding, blocks in their order, norms, head: as written out in NumPy."""
    model = small_model(**VARIANTS[name])
    logits, _ = run(model)
    want = oracle.model_logits(parts(model)[1], make_batch(), model, MOE)
    assert logits.dtype == jnp.float32
    oracle.assert_close(logits, want, relative=2e-5)


@pytest.mark.parametrize(
    ("pattern", "layers", "kinds"),
    [
        ("moe", 3, "mmm"),
        ("dense,moe", 4, "dmdm"),
        ("dense*2,moe*3", 5, "ddmmm"),
        ("moe,dense*2", 6, "mddmdd"),
    ],
)
def test_layers_stand_in_the_order_of_the_pattern(pattern, layers, kinds):
    """Block i is the next one of its kind; every layer's parameters are its own."""
    model = small_model(layer_pattern=pattern, num_layers=layers, width=4, ffn_width=4)
    module = nnx.merge(*parts(model))
    _, *states = nnx.split(module, nnx.Param, ...)
    params, buffers = map(nnx.to_pure_dict, states)
    network = model_lib.Network(module)
    in_order = network.in_order(model_lib.take_apart(params), buffers)
    states = [weights for weights, _ in in_order]
    assert "".join("m" if "moe" in s else "d" for s in states) == kinds
    seen = {"m": 0, "d": 0}
    for kind, state in zip(kinds, states, strict=True):
        stack = module.moe if kind == "m" else module.dense
        expected = stack.attention.qkv_kernel[...][seen[kind]]
        seen[kind] += 1
        np.testing.assert_array_equal(state["attention"]["qkv_kernel"], expected)
    kernels = [np.asarray(s["attention"]["qkv_kernel"]) for s in states]
    assert len({kernel.tobytes() for kernel in kernels}) == len(kinds)


class GivenEmbeddings(model_lib.M6):
    """The model from the embeddings on, to take derivatives with respect to them."""

    def embed(self, batch):
        return batch["embeddings"]


def test_logits_depend_on_what_the_mask_allows_and_on_nothing_else():
    """|d logits_i / d embedding_j| is > 0 where i may see j, and exactly 0 elsewhere.

    So decoder logits do not depend on later tokens and do depend on the whole encoder
    part, encoder logits on no decoder token, packed neighbours on each other never, and
    nothing on padding. Through attention and experts, two layers deep.
    """
    model = small_model()
    batch = make_batch()
    graph, *state = parts(model, MOE, GivenEmbeddings)
    projection = jax.random.normal(jax.random.key(0), (V,))

    def outputs(x_BSD):
        logits, _ = nnx.merge(graph, *state)(batch | {"embeddings": x_BSD})
        return jnp.sum(logits @ projection, axis=0)  # [S]: rows do not mix

    x_BSD = jax.random.normal(jax.random.key(1), (2, S, 16))
    x_BSD *= (batch["modality"] > 0)[:, :, None]
    jacobian = jax.jit(jax.jacrev(outputs), compiler_options=oracle.QUICK)(
        x_BSD
    )  # [S, B, S, D]
    size_BSS = np.abs(jacobian).max(axis=3).transpose(1, 0, 2)
    for b in range(2):
        allowed = oracle.attention_mask(
            batch["sequence"][b].tolist(), batch["decoder"][b].tolist()
        )
        np.testing.assert_array_equal(size_BSS[b] > 0, allowed)


@pytest.mark.parametrize("capacity", [None, 1.0])
def test_padding_content_changes_nothing(capacity):
    """Logits of real positions, and all statistics, are bitwise independent of what

    stands in padding, with and without capacities.
    """
    model, batch = small_model(), make_batch()
    moe = MoE(num_experts=8, top_k=2, capacity_factor=capacity)
    empty = batch["modality"] == 0
    other = batch | {
        "tokens": np.where(empty, V - 1, batch["tokens"]),
        "positions": np.where(empty, S - 1, batch["positions"]),
        "decoder": np.where(empty, True, batch["decoder"]),
    }
    one, two = run(model, moe), run(model, moe, other)
    np.testing.assert_array_equal(one[0][~empty], two[0][~empty])
    jax.tree.map(np.testing.assert_array_equal, one[1], two[1])
    assert int(one[1].load_E.sum()) == 2 * (~empty).sum()


def test_shared_layers_are_one_layer_applied_many_times():
    """share_layers: one layer's parameters, and the logits and statistics of a model

    of L layers that are copies of it.
    """
    shapes = {"layer_pattern": "moe", "num_layers": 3}
    shared, apart = small_model(share_layers=True, **shapes), small_model(**shapes)
    params = parts(shared)[1]
    assert {leaf.shape[0] for leaf in jax.tree.leaves(params["moe"])} == {1}
    repeat = lambda leaf: np.repeat(leaf, 3, axis=0)  # noqa: E731
    copied = params | {"moe": jax.tree.map(repeat, params["moe"])}
    logits, stats = run(shared)
    want_logits, want_stats = applied(apart, MOE)(copied, make_batch())
    assert stats.load_E.shape == (3, 8)
    oracle.assert_close((logits, stats), (want_logits, want_stats))


def device_gradients(policy, axis_size):
    """(function, parameters, batch) of a small model on data 8/X x expert X.

    The function gives the gradients summed over devices, logits and statistics.
    """
    model = small_model(remat=policy, layer_pattern="moe", num_layers=1)
    graph, params, buffers = parts(model)

    def per_device(params, batch):
        def total(params):
            module = nnx.merge(graph, params, buffers)
            logits, stats = module(batch, ExpertAxis(axis_size))
            return jnp.sum(jnp.sin(logits)) + jnp.sum(stats.z_loss), (logits, stats)

        gradients, (logits, stats) = jax.grad(total, has_aux=True)(params)
        summed = jax.tree_util.tree_map_with_path(
            lambda path, g: jax.lax.psum(g, "data" if is_expert(path) else BATCH_AXES),
            gradients,
        )
        return summed, logits, jax.lax.psum(stats, BATCH_AXES)

    specs = jax.tree_util.tree_map_with_path(
        lambda path, _: P(None, "expert") if is_expert(path) else P(), params
    )
    mapped = jax.shard_map(
        per_device,
        mesh=mesh_of(axis_size),
        in_specs=(specs, P(BATCH_AXES)),
        out_specs=(specs, P(BATCH_AXES), P()),
        check_vma=False,  # gradients are summed by hand, as in the train step
    )
    return mapped, params, make_batch(16)


@lru_cache
def compiled_gradients(policy, axis_size):
    """(text of the compiled program, its result)."""
    function, *inputs = device_gradients(policy, axis_size)
    compiled = jax.jit(function).lower(*inputs).compile(oracle.QUICK)
    return compiled.as_text(), compiled(*inputs)


def is_expert(path):
    return "experts" in [key.key for key in path]


SLOW_DOTS = pytest.param("dots", marks=pytest.mark.slow)


@pytest.mark.parametrize("policy", ["full", "exchange", SLOW_DOTS])
def test_recomputation_changes_no_number(policy):
    """Every remat policy gives the same logits, statistics and gradients."""
    got, want = compiled_gradients(policy, 4)[1], compiled_gradients("none", 4)[1]
    oracle.assert_close(got, want, relative=1e-6)


def test_sharded_gradients_equal_those_of_one_owner():
    """With experts on 4 devices and on 1: every leaf has the same gradient.

    Expert, router, attention, norm and embedding leaves alike: ratio 1 within 1e-5.
    Key biases are left out: their true gradient is 0, what is there is rounding.
    """
    results = [compiled_gradients("none", axis_size)[1] for axis_size in (4, 1)]
    for gradients, *_ in results:
        attention = gradients["moe"]["attention"]
        attention["qkv_bias"] = attention["qkv_bias"].at[:, 1].set(0.0)
    oracle.assert_close(*results)


@pytest.mark.parametrize(
    ("policy", "count"), [("none", 5), ("dots", 5), ("full", 5), ("exchange", 8)]
)
def test_the_exchange_is_recomputed_only_where_asked_for(policy, count):
    """5 all-to-alls per MoE layer: rows there and back and counts forward, rows there

    and back backward. 'exchange' has the first three once more.
    """
    function, *inputs = device_gradients(policy, 4)
    assert oracle.count(jax.make_jaxpr(function)(*inputs), "all_to_all") == count


@pytest.mark.parametrize("policy", ["none", "full", SLOW_DOTS])
def test_the_compiled_program_has_no_other_exchange(policy):
    """XLA keeps the 5 all-to-alls as they are: it neither repeats nor splits them."""
    text, _ = compiled_gradients(policy, 4)
    assert text.count(" all-to-all(") + text.count(" all-to-all-start(") == 5


def test_full_recomputation_keeps_only_block_inputs_and_the_exchange():
    """Between the passes 'full' keeps less than 'dots', and 'dots' less than 'none'."""

    def kept(policy):
        model = small_model(remat=policy, num_layers=4)
        graph, params, buffers = parts(model)

        def total(params):
            logits, _ = nnx.merge(graph, params, buffers)(make_batch())
            return jnp.sum(logits)

        leaves = jax.tree.leaves(jax.eval_shape(lambda p: jax.vjp(total, p)[1], params))
        return sum(math.prod(leaf.shape) for leaf in leaves)

    assert kept("full") < kept("dots") < kept("none")


def test_bfloat16_model_routes_in_float32():
    """With bfloat16 weights: logits come out float32, and every choice of experts and

    every softmax, here those of router and attention, is made of float32 numbers.
    """
    graph, params, buffers = parts(small_model())

    def cast(path, leaf):
        keep = path[-1].key == "router_kernel"
        return leaf if keep else leaf.astype(jnp.bfloat16)

    weights = jax.tree_util.tree_map_with_path(cast, params)
    jaxpr = jax.make_jaxpr(lambda w, batch: nnx.merge(graph, w, buffers)(batch)[0])(
        weights, make_batch()
    )
    assert jaxpr.out_avals[0].dtype == jnp.float32
    for name in ("top_k", "exp"):
        found = [e for e in oracle.equations(jaxpr) if e.primitive.name == name]
        assert found
        assert {e.invars[0].aval.dtype for e in found} == {jnp.dtype(jnp.float32)}
    products = [e for e in oracle.equations(jaxpr) if e.primitive.name == "dot_general"]
    in_half = [e for e in products if e.invars[0].aval.dtype == jnp.bfloat16]
    assert len(products) - len(in_half) == 1  # the router's


def test_seed_decides_the_weights():
    """Equal seeds give bitwise equal parameters, other seeds others, within 2 std."""
    model = small_model(num_layers=1, layer_pattern="moe")

    def create(seed):
        init = lambda: model_lib.create(model, MOE, V, seed)[1]  # noqa: E731
        return jax.jit(init, compiler_options=oracle.QUICK)()

    one, same, other = create(3), create(3), create(4)
    jax.tree.map(np.testing.assert_array_equal, one, same)
    assert np.any(one["embedder"]["token"] != other["embedder"]["token"])
    for path, leaf in jax.tree_util.tree_leaves_with_path(one):
        assert leaf.dtype == jnp.float32, path
        if path[-1].key not in ("scale",):
            assert np.abs(leaf).max() <= 2 * model.init_std


def test_head_is_the_token_table_when_tied():
    """tie_embeddings: no parameter `head`; untied: one of the table's shape."""
    tied, apart = parts(small_model())[1], parts(small_model(tie_embeddings=False))[1]
    assert "head" not in tied
    assert apart["head"].shape == tied["embedder"]["token"].shape == (V, 16)


def test_dense_model_has_no_statistics():
    """Without MoE layers there are no statistics and no buffers."""
    model = small_model(layer_pattern="dense")
    _, params, buffers = parts(model)
    logits, stats = run(model)
    assert stats is None
    assert not buffers
    assert "moe" not in params
    assert logits.shape == (2, S, V)
