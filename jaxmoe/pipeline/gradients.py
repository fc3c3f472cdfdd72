# SPDX-License-Identifier: Apache-2.0
"""Floor 4. The gradients of a step through a pipeline, per device.

  masters --cast, all-to-all over pipe, all-gather--> layers of this rank's stages
  batch --embedding, spread over the ranks--> inputs of stage 0
  --ticks (`execute`)--> gradients of the layers, of the head, of the inputs
  --reduce-scatter, all-to-all over pipe--> master layout

Masters stay in the order of the model, split over `pipe` inside every layer; so nothing
of the state knows the schedule. With two directions a stage is on two ranks; both get
it from the same masters, and both gradients are added there.

Legend: A accumulated parts, M microbatches of one, b sequences of a microbatch on this
device, S positions, D width, R ranks, n layers of a kind on a rank.
"""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxmoe import config_derived, sharding
from jaxmoe import loss as loss_lib
from jaxmoe import model as model_lib
from jaxmoe.config import Model, MoE
from jaxmoe.eplb.placement import Move, carry, carry_back, plan_move
from jaxmoe.layers.attention import attention_mask
from jaxmoe.loss import LossSums
from jaxmoe.model import STACKS, Batch
from jaxmoe.moe.exchange import ExpertAxis
from jaxmoe.moe.router import MoEStats
from jaxmoe.pipeline.execute import AXIS, Pipeline, run
from jaxmoe.pipeline.lower import TickTable
from jaxmoe.pipeline.partition import partition
from jaxmoe.pipeline.stage import StagePrograms
from jaxmoe.pipeline.sums import Layers, Sums

EMBEDDED = ("tokens", "patches", "modality", "positions")  # what the embedding reads


class PipelinedGradients:
    """Gradients of one model by one table of ticks.

    Args:
      model, moe: their configurations.
      network: how the model is applied.
      table: the ticks.
      axis: the devices along `expert`.
      mesh: the mesh.
      compute_specs, master_specs: layouts of the parameters, nested as they are.
      num_sequences: sequences of a whole step.
      num_tasks: tasks that are told apart in the losses.
      alternating, fill: see `execute.Pipeline`.
    """

    def __init__(
        self,
        model: Model,
        moe: MoE,
        *,
        network: model_lib.Network,
        table: TickTable,
        axis: ExpertAxis,
        mesh: Mesh,
        compute_specs: Any,
        master_specs: Any,
        num_sequences: int,
        num_tasks: int,
        alternating: bool = False,
        fill: float = 0.0,
    ):
        self.model, self.moe, self.table = model, moe, table
        self.axis = axis
        # Where a W may wait, Bi has the experts' weight gradients by themselves.
        self.splits = table.slots.deferred > 0
        self.mesh, self.num_tasks = mesh, num_tasks
        self.alternating, self.fill = alternating, fill
        self.loops = mesh.devices.flat[0].platform == "cpu"  # see `choose`
        self.compute_specs, self.master_specs = compute_specs, master_specs
        kinds = config_derived.layer_kinds(model)
        self.num_moe, self.num_sequences = kinds.count("moe"), num_sequences
        tokens = num_sequences * model.sequence_length
        self.routing_groups = tokens // config_derived.group_tokens(model, moe)
        self.partition = partition(kinds, table.schedule, shared=model.share_layers)
        self.network, self.kinds = network, tuple(dict.fromkeys(kinds))
        directions = range(table.schedule.num_directions)
        self.traced: Pipeline | None = None  # of the last trace, for reports
        # Per direction and kind, [R, n]: where the weights and the statistics belong.
        self.places = [self._table(d, "place") for d in directions]
        self.ordinals = [self._table(d, "ordinal") for d in directions]

    def places_of_stages(self) -> list[tuple[int, int]]:
        """(stage, a direction in which it is passed) of every stage."""
        schedule = self.table.schedule
        return [(s, schedule.direction_of(s, 0)) for s in range(schedule.num_stages)]

    def _table(self, direction: int, field: str) -> dict[str, np.ndarray]:
        return {
            kind: np.array(
                [
                    [getattr(layer, field) if layer else -1 for layer in row]
                    for row in self.partition.held(direction, kind)
                ],
                np.int32,
            ).reshape(self.table.schedule.num_ranks, -1)
            for kind in self.kinds
        }

    def __call__(
        self, params: Any, buffers: Any, batch: Batch, target_tokens: jax.Array
    ) -> tuple[Any, LossSums, MoEStats | None]:
        """(gradients in the master layout, losses, statistics [MoE layers, ...]).

        Args:
          params: this device's part of the masters.
          buffers: state without gradient, whole.
          batch: arrays [A * M, b, ...].
          target_tokens: target tokens of the whole step.
        """
        params = model_lib.compute_weights(params, self.model)
        ends = {name: part for name, part in params.items() if name not in STACKS}
        specs = self._specs(ends)
        move = self._move(buffers)
        with jax.named_scope("weights"):
            ends = sharding.gather(ends, *specs)
            weights = self._collect(params, move)
        rows = [self._rows(buffers, places) for places in self.places]
        M = self.table.schedule.num_microbatches
        A = batch["tokens"].shape[0] // M
        parts = jax.tree.map(lambda x: x.reshape(A, M, *x.shape[1:]), batch)
        one = partial(self._part, ends, weights, rows, target_tokens)

        sums, dends = self._zeros(weights, ends), _zeros_of(ends)
        if A == 1:
            sums, dends = one((sums, dends), jax.tree.map(lambda x: x[0], parts))
        else:
            (sums, dends), _ = jax.lax.scan(
                lambda carry, part: (one(carry, part), None), (sums, dends), parts
            )
        dends = jax.tree.map(jnp.add, dends, sums.head)
        with jax.named_scope("gradients"):
            gradients = sharding.scatter_sum(dends, *specs, self.mesh)
            gradients |= self._distribute(sums, move)
        losses = jax.lax.psum(sums.finish, AXIS)
        return gradients, losses, self._statistics(sums)

    def _part(self, ends, weights, rows, target_tokens, carry, batch: Batch):
        """Adds one pass of M microbatches to (sums, gradients of embeddings)."""
        sums, dends = carry
        step = _Pass(self, rows, batch, target_tokens)
        inputs_MbSD, pull = step.embed(ends)
        stages = step.programs(weights, inputs_MbSD)
        pipeline = Pipeline(
            self.table,
            stages,
            step.context,
            step.finish,
            alternating=self.alternating,
            fill=self.fill,
            loops=self.loops,
        )
        self.traced = pipeline
        sums, dinputs_MbSD = run(pipeline, weights, ends, inputs_MbSD, sums)
        more = pull(dinputs_MbSD)
        return sums, jax.tree.map(lambda t, m: t + m.astype(t.dtype), dends, more)

    def _move(self, buffers: Any) -> Move | None:
        """What brings the experts of this rank's layers into their slots."""
        placement = model_lib.placement_of(buffers)
        if placement is None:
            return None
        places = jnp.asarray(np.maximum(self._all_places("moe"), 0))
        mine = places[jax.lax.axis_index(AXIS)]
        rows_nE, slots_nP = placement["rows"][mine], placement["slots"][mine]
        return plan_move(rows_nE, slots_nP, self.axis.size)

    def _collect(self, params: Any, move: Move | None) -> list[Layers]:
        """Per direction, the layers of this rank's stage."""
        weights: list[Layers] = [{} for _ in self.places]
        for kind in self.kinds:
            places = self._all_places(kind)
            specs = self._specs(params[kind], kind)
            stack = sharding.gather_layers(params[kind], *specs, places)
            if move and kind == "moe":
                with jax.named_scope("move"):
                    stack = model_lib.map_experts(stack, partial(carry, move))
            layers = iter(model_lib.unstack(stack, places.shape[1]))
            for found, of_direction in zip(weights, self.places, strict=True):
                n = of_direction[kind].shape[1]
                found[kind] = list(itertools.islice(layers, n))
        return weights

    def _distribute(self, sums: Sums, move: Move | None) -> dict[str, Any]:
        """Gradients of all directions' layers, added in the master layout."""
        found = {}
        for kind in self.kinds:
            layers = [layer for of in sums.weights for layer in of[kind]]
            stack = model_lib.stack(layers)
            if move and kind == "moe":
                with jax.named_scope("move"):
                    stack = model_lib.map_experts(stack, partial(carry_back, move))
            found[kind] = sharding.scatter_sum_layers(
                stack,
                *self._specs(None, kind),
                self._all_places(kind),
                layers=self._stack_size(kind),
                mesh=self.mesh,
            )
        return found

    def _all_places(self, kind: str) -> np.ndarray:
        """Where the layers of all directions belong, one direction after the other."""
        return np.concatenate([places[kind] for places in self.places], axis=1)

    def _stack_size(self, kind: str) -> int:
        kinds = config_derived.layer_kinds(self.model)
        return 1 if self.model.share_layers else kinds.count(kind)

    def _specs(self, tree: Any, kind: str | None = None) -> tuple[Any, Any]:
        """Compute and master layouts of one stack, or of the parts named in `tree`."""
        both = self.compute_specs, self.master_specs
        if kind is not None:
            return both[0][kind], both[1][kind]
        compute, master = ({name: specs[name] for name in tree} for specs in both)
        return compute, master

    def _rows(self, buffers: Any, places: dict[str, np.ndarray]) -> Layers:
        """As `_collect`, of the state without gradient, which every rank has whole."""
        rank = jax.lax.axis_index(AXIS)
        layers = {}
        for kind, table in places.items():
            mine = jnp.asarray(np.maximum(table, 0))[rank]
            stack = jax.tree.map(lambda x, mine=mine: x[mine], buffers.get(kind, {}))
            layers[kind] = model_lib.unstack(stack, table.shape[1])
        return layers

    def _zeros(self, weights: list[Layers], ends: Any) -> Sums:
        rows = [table["moe"].shape[1] if self.num_moe else 0 for table in self.places]
        E = self.moe.num_experts
        return Sums(
            weights=_zeros_of(weights),
            head=_zeros_of(ends),
            stage=[MoEStats.zeros(n, E) if self.num_moe else None for n in rows],
            finish=LossSums.zeros(self.num_tasks),
        )

    def _statistics(self, sums: Sums) -> MoEStats | None:
        """The statistics of all MoE layers of the model, in order."""
        if not self.num_moe:
            return None
        rank = jax.lax.axis_index(AXIS)
        total = MoEStats.zeros(self.num_moe, self.moe.num_experts)
        for ordinals, stats in zip(self.ordinals, sums.stage, strict=True):
            table = ordinals["moe"]
            where = jnp.asarray(np.where(table < 0, self.num_moe, table))[rank]
            total = jax.tree.map(
                lambda t, s, where=where: t.at[where].add(s, mode="drop"), total, stats
            )
        return jax.lax.psum(total, AXIS)


class _Pass:
    """The functions of one pass of microbatches: embedding, layers, head.

    Args:
      static: what does not change from step to step.
      rows: per direction, this rank's layers of the state without gradient.
      batch: arrays [M, b, ...].
      target_tokens: target tokens of the whole step.
    """

    def __init__(
        self,
        static: PipelinedGradients,
        rows: list[Layers],
        batch: Batch,
        target_tokens: jax.Array,
    ):
        self._static, self._rows, self._batch = static, rows, batch
        self._target_tokens = target_tokens
        self._first_layers = jnp.asarray(static.partition.first_layers())

    def embed(self, ends: Any):
        """(inputs of stage 0 [M, b, S, D], what takes their gradient back to `ends`).

        Every rank embeds its part of the microbatches.
        """
        M, b, S = self._batch["tokens"].shape
        R = self._static.table.schedule.num_ranks
        each = -(-M // R)
        mine = jax.lax.axis_index(AXIS) * each + jnp.arange(each)
        rows = {n: self._batch[n][jnp.minimum(mine, M - 1)] for n in EMBEDDED}
        rows = jax.tree.map(lambda x: x.reshape(each * b, *x.shape[2:]), rows)

        def part(ends):
            return self._static.network.ends(ends).embed(rows)

        x_BSD, pull = jax.vjp(part, ends)
        x_mbSD = x_BSD.reshape(each, b, S, -1)
        inputs = jax.lax.all_gather(x_mbSD, AXIS, axis=0, tiled=True)[:M]

        def back(gradient_MbSD: jax.Array) -> Any:
            more = jnp.zeros((R * each - M, *gradient_MbSD.shape[1:]), x_BSD.dtype)
            whole = jnp.concatenate([gradient_MbSD, more])
            # Zeros but on the rank where a microbatch entered.
            part = jax.lax.psum_scatter(whole, AXIS, scatter_dimension=0, tiled=True)
            return pull(part.reshape(x_BSD.shape))[0]

        return inputs, back

    def context(self, microbatch: jax.Array, stage: jax.Array, direction: int) -> Any:
        """What a stage needs of a microbatch, by its number; nothing of it is sent."""
        names = ("sequence", "decoder", "modality", "number", "key")
        batch = self._of(microbatch, *(n for n in names if n in self._batch))
        return {
            "mask": attention_mask(batch["sequence"], batch["decoder"]),
            "sequences": model_lib.sequences_of(batch),
            "first_layer": self._first_layers[stage],
            "buffers": self._rows[direction],
        }

    def finish(self, ends: Any, y_BSD: jax.Array, microbatch: jax.Array):
        """(share of the cross-entropy, losses) of one microbatch."""
        batch = self._of(microbatch, "targets", "task")
        logits_BSV = self._static.network.ends(ends).logits(y_BSD)
        sums = loss_lib.loss_sums(
            logits_BSV, batch["targets"], batch["task"], self._static.num_tasks
        )
        return loss_lib.task_loss(sums, self._target_tokens), sums

    def _of(self, microbatch: jax.Array, *names: str) -> Batch:
        microbatch = jnp.maximum(microbatch, 0)
        take = partial(jax.lax.dynamic_index_in_dim, index=microbatch, keepdims=False)
        return {name: take(self._batch[name]) for name in names}

    def programs(self, weights: list[Layers], inputs_MbSD: jax.Array):
        """Per stage, the kinds of its layers and its programs."""
        static = self._static
        abstract = partial(
            jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
        )
        number = jax.ShapeDtypeStruct((), jnp.int32)
        one_layer = {k: v[0] for w in weights for k, v in w.items() if v}
        made: dict[tuple, StagePrograms] = {}
        stages = []
        for stage, direction in static.places_of_stages():
            kinds = static.partition.kinds(stage)
            context = jax.eval_shape(
                lambda m, s, d=direction: self.context(m, s, d), number, number
            )
            key = (kinds, jax.tree.structure(context))
            if key not in made:
                layers = partial(self._layers, kinds)
                apart = dataclasses.replace(static.axis, weights_apart=static.splits)
                made[key] = StagePrograms(
                    partial(layers, apart),
                    whole=partial(layers, static.axis) if static.splits else None,
                    weights=abstract([one_layer[kind] for kind in kinds]),
                    x=jax.ShapeDtypeStruct(inputs_MbSD.shape[1:], inputs_MbSD.dtype),
                    context=context,
                    recompute=static.model.remat in ("full", "exchange"),
                )
            stages.append((kinds, made[key]))
        return stages

    def _layers(
        self, kinds: tuple[str, ...], axis: ExpertAxis, layers: list, x_BSD, context
    ):
        """((output, share of the routers' losses), statistics or None)."""
        static = self._static
        following = {kind: iter(rows) for kind, rows in context["buffers"].items()}
        x_BSD, stats = static.network.layers(
            kinds,
            [(w, next(following[k])) for k, w in zip(kinds, layers, strict=True)],
            x_BSD,
            mask=context["mask"],
            sequences=context["sequences"],
            axis=axis,
            first_layer=context["first_layer"],
        )
        share = jnp.zeros((), jnp.float32)
        if stats is None:
            return (x_BSD, share), None
        share += loss_lib.routing_loss(
            stats,
            static.moe,
            routing_groups=static.routing_groups,
            sequences=static.num_sequences,
        )
        return (x_BSD, share), stats


def _zeros_of(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), tree)
