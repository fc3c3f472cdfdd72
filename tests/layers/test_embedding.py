# SPDX-License-Identifier: Apache-2.0
"""Embeddings by hand: token or patch, plus position, plus segment; zeros in padding.

Legend: B batch, S positions, D width, P patches, C numbers of a patch.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxmoe.config import Model
from jaxmoe.data import tasks
from jaxmoe.layers.embedding import IMAGE, PADDING, TEXT, Embedder

S, D, P, C, V = 6, 4, 2, 3, 10


def make(num_patches=P):
    model = Model(
        width=D, sequence_length=S, num_patches=num_patches, patch_dim=C, init_std=1.0
    )
    embedder = Embedder(model, V, rngs=nnx.Rngs(0))
    if embedder.patch is not None:
        embedder.patch.patch_bias[...] = jnp.arange(1.0, D + 1)
    return embedder


def batch(modality, positions=None):
    rng = np.random.default_rng(0)
    return (
        jnp.asarray(rng.integers(0, V, (1, S))),
        jnp.asarray(rng.standard_normal((1, P, C)), jnp.float32),
        jnp.array([modality]),
        jnp.array([positions or list(range(S))]),
    )


def test_by_hand():
    """x = token (text) or patch W + b (image), + position + segment; 0 in padding."""
    embedder = make()
    inputs = batch([IMAGE, IMAGE, TEXT, TEXT, PADDING, PADDING], [0, 1, 2, 3, 0, 0])
    tokens, patches, *_ = (np.asarray(a) for a in inputs)
    got = np.asarray(jax.jit(lambda *a: embedder(*a))(*inputs)[0])
    table, position, segment = (
        np.asarray(p[...])
        for p in (embedder.token, embedder.position, embedder.segment)
    )
    image = patches[0] @ np.asarray(embedder.patch.patch_kernel[...]) + np.arange(1, 5)
    want = np.zeros((S, D))
    want[:2] = image + position[:2] + segment[0]
    want[2:4] = table[tokens[0, 2:4]] + position[2:4] + segment[1]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert not got[4:].any()


def test_patches_follow_image_positions():
    """The i-th image position takes patch i, also behind text and in packed rows."""
    embedder = make()
    inputs = batch([TEXT, IMAGE, TEXT, TEXT, IMAGE, TEXT])
    x = np.asarray(embedder(*inputs)[0])
    projected = np.asarray(embedder.patch(inputs[1])[0])
    fixed = np.asarray(embedder.position[...]) + np.asarray(embedder.segment[...])[:1]
    np.testing.assert_allclose(
        x[[1, 4]] - fixed[[1, 4]], projected, rtol=1e-4, atol=1e-5
    )


def test_padding_costs_no_gradient():
    """Neither tokens nor patches nor positions of padding receive a gradient."""
    embedder = make()
    tokens, patches, modality, positions = batch([TEXT, TEXT, 0, 0, 0, 0])
    tokens = jnp.array([[1, 2, 9, 9, 9, 9]])
    graph, state = nnx.split(embedder)

    def total(state):
        x = nnx.merge(graph, state)(tokens, patches, modality, positions)
        return jnp.sum(x**2)

    gradient = nnx.to_pure_dict(jax.jit(jax.grad(total))(state))
    assert set(np.flatnonzero(np.abs(gradient["token"]).sum(1))) == {1, 2}
    assert set(np.flatnonzero(np.abs(gradient["position"]).sum(1))) == {0, 1}
    assert not np.any(gradient["segment"][0])
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradient["patch"]))


def test_without_patches_there_is_no_projection():
    """num_patches = 0: a text model, with no patch parameters."""
    embedder = make(num_patches=0)
    assert embedder.patch is None
    x = embedder(*batch([TEXT] * S))
    assert x.shape == (1, S, D)


def test_modalities_are_those_of_the_data():
    """The model and the data mean the same by 0, 1 and 2."""
    assert (PADDING, IMAGE, TEXT) == (tasks.PADDING, tasks.PATCH, tasks.TEXT)


def test_patches_are_cast_to_the_weights():
    """float32 patches do not lift a bfloat16 model to float32."""
    embedder = make()
    graph, state = nnx.split(embedder)
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), state)
    run = lambda *a: nnx.merge(graph, half)(*a)  # noqa: E731
    shape = jax.eval_shape(run, *batch([IMAGE, IMAGE, TEXT, TEXT, 0, 0]))
    assert shape.dtype == jnp.bfloat16
