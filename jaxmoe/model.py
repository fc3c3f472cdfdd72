# SPDX-License-Identifier: Apache-2.0
"""Floor 3. The M6 model: one Transformer stack that is encoder and decoder at once.

Layers of one kind ('dense' or 'moe') are stored stacked, [layers of the kind, ...], so
that a parameter is one array however deep the model; they are taken apart once per
step, before the layers are applied.

Legend: B sequences, S positions, D width, V vocabulary, E experts, L MoE layers.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from jaxmoe import config as config_lib
from jaxmoe.config import Model, MoE
from jaxmoe.layers.attention import Attention, attention_mask
from jaxmoe.layers.embedding import PADDING, Embedder
from jaxmoe.layers.linear import no_param, normal_param
from jaxmoe.layers.mlp import Mlp
from jaxmoe.layers.norm import make_norm
from jaxmoe.moe.exchange import EXCHANGE, ExpertAxis
from jaxmoe.moe.layer import MoELayer
from jaxmoe.moe.router import MoEStats, Sequences

# Fields: see jaxmoe.data.tasks; in training also the `number` of each sequence in the
# step, and its random `key` where something random is asked for.
Batch = dict[str, jax.Array]

STACKS = ("dense", "moe")  # names of the stacks of blocks, which are the kinds
FLOAT32_PARAMETERS = ("router_kernel",)  # never cast to the compute type

_ONE_DEVICE = ExpertAxis()


class Block(nnx.Module):
    """Attention and a dense or mixture-of-experts feed-forward part, with residuals."""

    def __init__(self, model: Model, moe: MoE, kind: str, *, rngs: nnx.Rngs):
        self.post_norm = model.norm_position == "post"
        self.attention_norm = make_norm(model, rngs)
        self.attention = Attention(model, rngs=rngs)
        self.ffn_norm = make_norm(model, rngs)
        dense = kind == "dense"
        self.mlp = Mlp(model, model.ffn_width, rngs=rngs) if dense else None
        self.moe = None if dense else MoELayer(model, moe, rngs=rngs)

    def __call__(
        self,
        x_BSD: Float[Array, "B S D"],
        mask: Bool[Array, "B 1 S S"],
        sequences: Sequences,
        axis: ExpertAxis,
    ) -> tuple[Float[Array, "B S D"], MoEStats | None]:
        """Applies the block to the sequences of this device."""
        attend = partial(self.attention, mask=mask)
        x_BSD, _ = self._residual(
            self.attention_norm, lambda h: (attend(h), None), x_BSD
        )
        if self.moe is None:
            assert self.mlp is not None
            mlp = self.mlp
            return self._residual(self.ffn_norm, lambda h: (mlp(h), None), x_BSD)
        moe = partial(self.moe, sequences=sequences, axis=axis)
        return self._residual(self.ffn_norm, moe, x_BSD)

    def _residual(self, norm: Callable, layer: Callable, x: jax.Array):
        """x + layer(norm(x)), or norm(x + layer(x)) with the norm after the sum."""
        if self.post_norm:
            y, stats = layer(x)
            return norm(x + y).astype(x.dtype), stats
        y, stats = layer(norm(x).astype(x.dtype))
        return x + y, stats


class M6(nnx.Module):
    """Embedder, stacked blocks, final norm and output projection."""

    def __init__(self, model: Model, moe: MoE, vocab_size: int, *, rngs: nnx.Rngs):
        self.model = model
        self.kinds = config_lib.layer_kinds(model)
        self.embedder = Embedder(model, vocab_size, rngs=rngs)
        self.dense = self._stack(model, moe, "dense", rngs)
        self.moe = self._stack(model, moe, "moe", rngs)
        self.final_norm = make_norm(model, rngs)
        head = no_param if model.tie_embeddings else normal_param
        self.head = head(
            rngs, (vocab_size, model.width), ("vocab", "width"), model.init_std
        )

    def _stack(self, model: Model, moe: MoE, kind: str, rngs: nnx.Rngs):
        """All blocks of one kind, their parameters stacked along a new dimension 0."""
        count = self.kinds.count(kind)
        if not count:
            return None
        if model.share_layers:
            count = 1

        @nnx.split_rngs(splits=count)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def create(rngs: nnx.Rngs) -> Block:
            return Block(model, moe, kind, rngs=rngs)

        return create(rngs)

    def blocks(self) -> list[tuple[nnx.GraphDef, Any]]:
        """Graph and state of each block, in the order in which they are applied."""
        stacks = {"dense": self.dense, "moe": self.moe}
        apart = {kind: _unstack(stack) for kind, stack in stacks.items() if stack}
        if self.model.share_layers:
            return [apart[kind][0] for kind in self.kinds]
        following = {kind: iter(blocks) for kind, blocks in apart.items()}
        return [next(following[kind]) for kind in self.kinds]

    def embed(self, batch: Batch) -> Float[Array, "B S D"]:
        """The sequences as vectors; zeros at padding."""
        return self.embedder(
            batch["tokens"], batch["patches"], batch["modality"], batch["positions"]
        )

    def logits(self, x_BSD: Float[Array, "B S D"]) -> Float[Array, "B S V"]:
        """Scores of the next token, in float32."""
        x_BSD = self.final_norm(x_BSD).astype(x_BSD.dtype)
        table_VD = (self.embedder.token if self.head is None else self.head)[...]
        return jnp.einsum(
            "BSD,VD->BSV", x_BSD, table_VD, preferred_element_type=jnp.float32
        )

    def __call__(
        self, batch: Batch, axis: ExpertAxis = _ONE_DEVICE
    ) -> tuple[Float[Array, "B S V"], MoEStats | None]:
        """Logits of every position, and the statistics of the MoE layers, stacked."""
        mask = attention_mask(batch["sequence"], batch["decoder"])
        sequences = sequences_of(batch)
        x_BSD = self.embed(batch)
        layer_stats = []
        for layer, (graph, state) in enumerate(self.blocks()):
            apply = block_function(self.model, graph, axis)
            x_BSD, stats = apply((state,), x_BSD, mask, of_layer(sequences, layer))
            if stats is not None:
                layer_stats.append(stats)
        stacked = None
        if layer_stats:
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layer_stats)
        return self.logits(x_BSD), stacked


def without_blocks(module: M6) -> M6:
    """A copy that can only embed and give logits."""
    rest = copy.copy(module)
    rest.dense, rest.moe = None, None
    return rest


def sequences_of(batch: Batch) -> Sequences:
    """What the layers know of a batch; a batch without numbers counts from 0."""
    valid_BS = batch["modality"] != PADDING
    number_B = batch.get("number", jnp.arange(valid_BS.shape[0]))
    return Sequences(valid_BS, number_B, batch.get("key"))


def of_layer(sequences: Sequences, layer: int | jax.Array) -> Sequences:
    """The same with the random keys of one layer."""
    if sequences.key_B is None:
        return sequences
    fold = jax.vmap(jax.random.fold_in, in_axes=(0, None))
    return dataclasses.replace(sequences, key_B=fold(sequences.key_B, layer))


def block_function(model: Model, graph: nnx.GraphDef, axis: ExpertAxis) -> Callable:
    """The function (states, x_BSD, mask, sequences) of a block -> (x_BSD, MoEStats).

    Its backward recomputes what `model.remat` says, never the expert exchange.
    """

    def apply(states, x_BSD, mask, sequences):
        return nnx.merge(graph, *states)(x_BSD, mask, sequences, axis)

    if model.remat == "none":
        return apply
    saved = jax.checkpoint_policies.save_only_these_names(EXCHANGE)
    if model.remat == "dots":
        saved = jax.checkpoint_policies.save_from_both_policies(
            saved, jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        )
    return jax.checkpoint(apply, policy=saved)


def _unstack(stack: Block) -> list[tuple[nnx.GraphDef, Any]]:
    """Graph and state of each block of a stack.

    lax.split, not indexing: its transpose is one concatenation, where L indexings
    would each make a gradient of the size of the whole stack.
    """
    graph, state = nnx.split(stack)
    leaves, tree = jax.tree.flatten(state)
    apart = [jax.lax.split(leaf, [1] * leaf.shape[0], axis=0) for leaf in leaves]
    return [
        (graph, jax.tree.unflatten(tree, [part[0] for part in parts]))
        for parts in zip(*apart, strict=True)
    ]


def compute_weights(params: Any, model: Model) -> Any:
    """Parameters in the type in which the model computes."""

    def cast(path, leaf):
        if path[-1].key in FLOAT32_PARAMETERS:
            return leaf
        return leaf.astype(model.compute_dtype)

    return jax.tree_util.tree_map_with_path(cast, params)


def create(
    model: Model, moe: MoE, vocab_size: int, seed: int
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The model's graph, its float32 parameters and its buffers.

    Parameters and buffers are nested dicts of arrays; `nnx.merge(graph, params,
    buffers)` makes the model again. Under `jax.jit` the arrays are born sharded, and
    are bitwise the same on every mesh.
    """
    module = M6(model, moe, vocab_size, rngs=nnx.Rngs(seed))
    graph, params, buffers = nnx.split(module, nnx.Param, ...)
    return graph, nnx.to_pure_dict(params), nnx.to_pure_dict(buffers)
