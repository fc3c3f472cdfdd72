# SPDX-License-Identifier: Apache-2.0
"""Floor 3. The M6 model: one Transformer stack that is encoder and decoder at once.

Layers of one kind ('dense' or 'moe') are stored stacked, [layers of the kind, ...], so
that a parameter is one array however deep the model; they are taken apart once per
step, before the layers are applied. `M6` says what parameters there are, `Network` how
they are used, by the plain step and by the stages of a pipeline alike.

Legend: B sequences, S positions, D width, V vocabulary, E experts, L MoE layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxmoe import config_derived
from jaxmoe.config import Model, MoE
from jaxmoe.layers.attention import Attention, Memory, attention_mask
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
# In the buffers of the MoE layers: which expert is where (jaxmoe.eplb.placement).
PLACEMENT = "placement"
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
        expert_P: Int[Array, " P"] | None = None,
    ) -> tuple[Float[Array, "B S D"], MoEStats | None]:
        """Applies the block to the sequences of this device."""
        return self.remember(x_BSD, mask, sequences, axis, expert_P)[:2]

    def remember(
        self,
        x_BSD: Float[Array, "B S D"],
        mask: Bool[Array, "B 1 S T"],
        sequences: Sequences,
        axis: ExpertAxis,
        expert_P: Int[Array, " P"] | None = None,
        memory: Memory | None = None,
        place_B: Int[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B S D"], MoEStats | None, Memory]:
        """The same for all positions, or for one that follows those in a memory.

        `mask`, `memory` and `place_B` are those of `Attention.remember`.
        """
        attend = partial(
            self.attention.remember, mask=mask, memory=memory, place_B=place_B
        )
        x_BSD, memory = self._residual(self.attention_norm, attend, x_BSD)
        if self.moe is None:
            assert self.mlp is not None
            mlp = self.mlp
            ffn = lambda h: (mlp(h), None)  # noqa: E731
        else:
            ffn = partial(self.moe, sequences=sequences, axis=axis, expert_P=expert_P)
        x_BSD, stats = self._residual(self.ffn_norm, ffn, x_BSD)
        assert memory is not None
        return x_BSD, stats, memory

    def _residual(self, norm: Callable, layer: Callable, x: jax.Array):
        """x + layer(norm(x)), or norm(x + layer(x)) with the norm after the sum; and
        what the layer returns besides."""
        if self.post_norm:
            y, more = layer(x)
            return norm(x + y).astype(x.dtype), more
        y, more = layer(norm(x).astype(x.dtype))
        return x + y, more


class M6(nnx.Module):
    """Embedder, stacked blocks, final norm and output projection."""

    def __init__(self, model: Model, moe: MoE, vocab_size: int, *, rngs: nnx.Rngs):
        self.model = model
        self.kinds = config_derived.layer_kinds(model)
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
        _, params, buffers = nnx.split(self, nnx.Param, ...)
        weights = take_apart(nnx.to_pure_dict(params))
        return Network(self)(weights, nnx.to_pure_dict(buffers), batch, axis)


class Network:
    """How a model is applied, part by part, to weights that are given.

    Weights are the parameters as nested dicts, but that each stack of blocks is a list
    of its layers (`take_apart`).
    """

    def __init__(self, module: M6):
        self.model, self.kinds = module.model, module.kinds
        stacks = {kind: getattr(module, kind) for kind in STACKS}
        self._graphs = {k: nnx.split(s)[0] for k, s in stacks.items() if s is not None}
        self._ends_graph = nnx.split(without_blocks(module))[0]

    def ends(self, weights: Any) -> M6:
        """What can embed and give logits."""
        ends = {name: part for name, part in weights.items() if name not in STACKS}
        return nnx.merge(self._ends_graph, ends)

    def layers(
        self,
        kinds: tuple[str, ...],
        layers: Sequence[tuple[Any, Any]],
        x_BSD: Float[Array, "B S D"],
        *,
        mask: Bool[Array, "B 1 S S"],
        sequences: Sequences,
        axis: ExpertAxis,
        first_layer: int | jax.Array = 0,
    ) -> tuple[Float[Array, "B S D"], MoEStats | None]:
        """Applies some layers that follow each other.

        Args:
          kinds: of the layers.
          layers: parameters and buffers of each.
          x_BSD, mask, sequences: the tokens, who sees whom, what else is known of them.
          axis: devices along `expert`.
          first_layer: number in the model of the first of them.

        Returns:
          The tokens, and the statistics of the MoE layers, stacked.
        """
        found = []
        for i, (kind, states) in enumerate(zip(kinds, layers, strict=True)):
            apply = _block_function(self.model, self._graphs[kind], axis)
            numbered = _of_layer(sequences, first_layer + i)
            x_BSD, stats = apply(states, x_BSD, mask, numbered)
            if stats is not None:
                found.append(stats)
        if not found:
            return x_BSD, None
        return x_BSD, stack(found)

    def remember(
        self,
        layers: Sequence[tuple[Any, Any]],
        x_BSD: Float[Array, "B S D"],
        memories: Sequence[Memory | None],
        *,
        mask: Bool[Array, "B 1 S T"],
        sequences: Sequences,
        axis: ExpertAxis,
        place_B: Int[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B S D"], list[Memory]]:
        """Applies all layers, for inference, with what each keeps of the positions.

        Args:
          layers, mask, sequences, axis: as in `layers`.
          x_BSD, place_B: all positions; or the one at `place_B`.
          memories: of each layer, of the positions before; or None for each.
        """
        kept = []
        rows = zip(self.kinds, layers, memories, strict=True)
        for kind, states, memory in rows:
            block, slots = _merged(self._graphs[kind], states)
            x_BSD, _, memory = block.remember(
                x_BSD, mask, sequences, axis, slots, memory, place_B
            )
            kept.append(memory)
        return x_BSD, kept

    def __call__(
        self, weights: Any, buffers: Any, batch: Batch, axis: ExpertAxis
    ) -> tuple[Float[Array, "B S V"], MoEStats | None]:
        """Logits of every position, and the statistics of the MoE layers, stacked."""
        ends = self.ends(weights)
        x_BSD, stats = self.layers(
            self.kinds,
            self.in_order(weights, buffers),
            ends.embed(batch),
            mask=attention_mask(batch["sequence"], batch["decoder"]),
            sequences=sequences_of(batch),
            axis=axis,
        )
        return ends.logits(x_BSD), stats

    def in_order(self, weights: Any, buffers: Any) -> list[tuple[Any, Any]]:
        """Parameters and buffers of each layer, in the order in which they apply."""
        pairs = {}
        for kind in self._graphs:
            rows = unstack(buffers.get(kind, {}), len(weights[kind]))
            pairs[kind] = list(zip(weights[kind], rows, strict=True))
        if self.model.share_layers:
            return [pairs[kind][0] for kind in self.kinds]
        following = {kind: iter(of_kind) for kind, of_kind in pairs.items()}
        return [next(following[kind]) for kind in self.kinds]


def without_blocks(module: M6) -> M6:
    """A copy that can only embed and give logits."""
    # Merged anew: what was made outside of a trace cannot be changed inside of it.
    rest = nnx.merge(*nnx.split(module))
    rest.dense, rest.moe = None, None
    return rest


def sequences_of(batch: Batch) -> Sequences:
    """What the layers know of a batch; a batch without numbers counts from 0."""
    valid_BS = batch["modality"] != PADDING
    number_B = batch.get("number", jnp.arange(valid_BS.shape[0]))
    return Sequences(valid_BS, number_B, batch.get("key"))


def _of_layer(sequences: Sequences, layer: int | jax.Array) -> Sequences:
    """The same with the random keys of one layer."""
    if sequences.key_B is None:
        return sequences
    fold = jax.vmap(jax.random.fold_in, in_axes=(0, None))
    return dataclasses.replace(sequences, key_B=fold(sequences.key_B, layer))


def _block_function(model: Model, graph: nnx.GraphDef, axis: ExpertAxis) -> Callable:
    """The function (states, x_BSD, mask, sequences) of a block -> (x_BSD, MoEStats).

    Its backward recomputes what `model.remat` says.
    """

    def apply(states, x_BSD, mask, sequences):
        block, slots = _merged(graph, states)
        return block(x_BSD, mask, sequences, axis, slots)

    if model.remat == "none":
        return apply
    if model.remat == "exchange":
        return jax.checkpoint(apply)
    saved = jax.checkpoint_policies.save_only_these_names(EXCHANGE)
    if model.remat == "dots":
        saved = jax.checkpoint_policies.save_from_both_policies(
            saved, jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        )
    return jax.checkpoint(apply, policy=saved)


def _merged(graph: nnx.GraphDef, states: Any) -> tuple[Block, jax.Array | None]:
    """A block with its weights and buffers, and the expert of each of its slots."""
    weights, buffers = states
    buffers = dict(buffers)
    placement = buffers.pop(PLACEMENT, {})
    return nnx.merge(graph, weights, buffers), placement.get("slots")


def take_apart(tree: Any) -> Any:
    """A nested dict of a model with each stack of blocks as a list of its layers."""
    return {k: unstack(v) if k in STACKS else v for k, v in tree.items()}


def put_together(tree: Any) -> Any:
    """The reverse of `take_apart`."""
    return {k: stack(v) if k in STACKS else v for k, v in tree.items()}


def stack(layers: Sequence[Any]) -> Any:
    """Layers, each a tree of arrays, as one tree of arrays [layers, ...]."""
    return jax.tree.map(lambda *rows: jnp.stack(rows), *layers)


def unstack(stack: Any, count: int | None = None) -> list[Any]:
    """The layers of a tree of arrays [layers, ...], each a tree of arrays of its own.

    `count` is their number, for a tree that may have no arrays.

    lax.split, not indexing: its transpose is one concatenation, where L indexings
    would each make a gradient of the size of the whole stack.
    """
    leaves, tree = jax.tree.flatten(stack)
    if count is None:
        count = int(leaves[0].shape[0])
    apart = [jax.lax.split(leaf, [1] * count, axis=0) for leaf in leaves]
    return [
        jax.tree.unflatten(tree, [jnp.squeeze(part[i], 0) for part in apart])
        for i in range(count)
    ]


def map_experts(block: Any, function: Callable[[Any], Any]) -> Any:
    """A block's parameters, or a stack of them, with those of the experts changed."""
    moe = {**block["moe"], "experts": function(block["moe"]["experts"])}
    return {**block, "moe": moe}


def placement_of(buffers: Any) -> Any:
    """Where the experts are, [L, ...]; None where expert e is in slot e."""
    return buffers.get("moe", {}).get(PLACEMENT)


def with_placement(buffers: Any, placement: Any) -> Any:
    """The buffers with the experts elsewhere; None: where expert e is in slot e."""
    rest = {k: v for k, v in buffers.items() if k != "moe"}
    moe = {k: v for k, v in buffers.get("moe", {}).items() if k != PLACEMENT}
    if placement is not None:
        moe[PLACEMENT] = placement
    return {**rest, "moe": moe} if moe else rest


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
