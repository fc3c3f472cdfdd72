# SPDX-License-Identifier: Apache-2.0
"""Floor 4. Runs a table of ticks on every rank at once, inside a shard_map.

One `lax.scan` over ticks. In a tick a rank takes one step of several (`choose`): the
operations of the tick, with the programs of the stages and the direction of each built
in, so that weights are used where they lie; on CPU one of several forwards, then one of
several backwards, then a W. What a step does not make, nobody reads in that tick. Then
what was made travels by four ppermutes, which every rank issues in every tick, and is
written into the buffers, outside of the steps. Steps differ only along `pipe`: the
devices of an exchange over `expert` always take the same one. The head and the loss are
a step of their own before, which only the last stage takes, when its backward begins:
logits never wait for their turn.

  inbox of activations, of gradients    what arrived and waits
  stash      what a forward leaves for its backward
  outputs    those of the last stage, beside the stash
  deferred   what a Bi leaves for its W
Each has one slot more than the table needs, for what goes nowhere.

Legend: M microbatches, R ranks, b sequences of a microbatch on this device, S
positions, D width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.pipeline.alternate import Walk, alternate
from jaxmoe.pipeline.buffers import Shelf, full, read, write, write_if
from jaxmoe.pipeline.choose import Row, choose
from jaxmoe.pipeline.lower import COLUMNS, TickTable
from jaxmoe.pipeline.stage import StagePrograms, Tree
from jaxmoe.pipeline.sums import (
    Kinds,
    Layers,
    Sums,
    add,
    add_if,
    first_of,
    first_rows,
    num_rows,
    pick,
    put,
    write_first,
)
from jaxmoe.pipeline.works import Choice, Work, gradients_of, list_choices

AXIS = "pipe"


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """What is to be run.

    Attributes:
      table: the ticks.
      stages: per stage, the kinds of its layers and its programs. Stages with the same
        programs share the object.
      context: (microbatch, stage, direction) -> what a stage gets besides its input.
      finish: (weights of the head, output of the last stage, microbatch) -> (share of
        the loss, statistics).
      alternating: the forward and the backward of a work take turns at every exchange
        of tokens; else the compiler orders them. With loops no work has both.
      fill: what unused places hold; a test makes it NaN, and nothing changes.
      loops: steps are chosen by loops, see `choose`.
    """

    table: TickTable
    stages: Sequence[tuple[Kinds, StagePrograms]]
    context: Callable[[jax.Array, jax.Array, int], Tree]
    finish: Callable[[Tree, jax.Array, jax.Array], tuple[jax.Array, Tree]]
    alternating: bool = False
    fill: float = 0.0
    loops: bool = True

    def choices(self) -> list[Choice]:
        """What is chosen in a tick, one after another."""
        programs = [programs for _, programs in self.stages]
        return list_choices(self.table, programs, apart=self.loops)


def run(
    pipeline: Pipeline,
    weights: list[Layers],
    head: Tree,
    inputs_MbSD: jax.Array,
    sums: Sums,
) -> tuple[Sums, jax.Array]:
    """Carries out the table.

    Args:
      pipeline: the static side.
      weights: per direction, the layers of the stage that this rank holds for it.
      head: weights of the head, the same on every rank.
      inputs_MbSD: inputs of stage 0, of every microbatch.
      sums: what to add to.

    Returns:
      The sums, and the gradient of the inputs: zeros but for the microbatches that
      enter here.
    """
    choices = pipeline.choices()
    columns = {name: pipeline.table.columns[name] for name in COLUMNS}
    columns |= {choice.name: choice.work_of for choice in choices}
    columns["gradients_of"] = gradients_of(choices)
    rank = jax.lax.axis_index(AXIS)
    table = jnp.asarray(np.stack(list(columns.values()), axis=1))
    mine = jnp.take(table, rank, axis=2)  # [ticks, columns]
    steps = _Steps(pipeline, weights, head, inputs_MbSD, sums)
    take = partial(choose, loops=pipeline.loops)
    M = inputs_MbSD.shape[0]

    def tick(carry, numbers):
        buffers, made, sums, gradients = carry
        row = dict(zip(columns, numbers, strict=True))
        made = made._replace(dy=read(buffers.gradients, row["b_inbox"]))
        ends = row["b_stage"] == steps.last
        with jax.named_scope("head"):
            of_head = [None, partial(steps.head, buffers)]
            row, (made, sums) = take(ends.astype(jnp.int32), of_head, row, (made, sums))
            if not pipeline.loops:
                sums = steps.add_head(row, made, sums)
        for choice in choices:
            of_works = [
                partial(steps.work, work, buffers) if work.kinds else None
                for work in choice.works
            ]
            number = row[choice.name]
            row, (made, sums) = take(number, of_works, row, (made, sums))
        if not pipeline.loops:
            sums = steps.add(row, made, sums)
        with jax.named_scope("ticks"):
            buffers = steps.keep(row, buffers, made)
        enters = (row["b_stage"] == 0) & (row["b_microbatch"] >= 0)
        where = jnp.where(enters, row["b_microbatch"], M)
        gradients = write(gradients, made.gradient, where)
        return (buffers, made, sums, gradients), None

    room = jnp.zeros((M + 1, *inputs_MbSD.shape[1:]), inputs_MbSD.dtype)
    carry = (steps.empty(), steps.nothing(), sums, room)
    (_, _, sums, gradients), _ = jax.lax.scan(tick, carry, mine)
    return sums, gradients[:M]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["activations", "gradients", "stash", "outputs", "deferred"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Buffers:
    """What a rank keeps from tick to tick, [slots + 1, ...]."""

    activations: jax.Array
    gradients: jax.Array
    stash: list[jax.Array]
    outputs: jax.Array
    deferred: list[jax.Array]


class Made(NamedTuple):
    """What the ticks of a rank made last.

    Attributes:
      dy: gradient of the output of this tick's backward.
      activation, gradient: output of the forward; gradient of the backward's input.
      stash, deferred: what goes into a slot of the buffers.
      weights: gradients of the weights of a direction.
      statistics: of the forward, [MoE layers, ...]; zero beyond those of the stage.
      head, finish: gradients of the head's weights, and its statistics.
    """

    dy: jax.Array
    activation: jax.Array
    gradient: jax.Array
    stash: list[jax.Array]
    deferred: list[jax.Array]
    weights: Layers
    statistics: Tree
    head: Tree
    finish: Tree


Carry = tuple[Made, Sums]


class _Steps:
    """What a rank can do in a tick, and the buffers that it has for it."""

    def __init__(
        self,
        pipeline: Pipeline,
        weights: list[Layers],
        head: Tree,
        inputs_MbSD: jax.Array,
        sums: Sums,
    ):
        self._pipeline, self._weights, self._head = pipeline, weights, head
        self._inputs = inputs_MbSD
        # Of one direction: of the one that has most.
        self._layers = {
            kind: max((layers[kind] for layers in weights), key=len)
            for kind in weights[0]
        }
        self._statistics = max(sums.stage, key=num_rows)
        self._sums = sums
        self.last = len(pipeline.stages) - 1
        slots, stages = pipeline.table.slots, pipeline.stages
        saved = [programs.saved for _, programs in stages]
        deferred = [programs.deferred for _, programs in stages]
        self._stash = Shelf(saved, slots.stash, pipeline.fill)
        # Without any W no Bi leaves anything.
        deferred = deferred if slots.deferred else [[]] * len(stages)
        self._deferred = Shelf(deferred, slots.deferred, pipeline.fill)

    def empty(self) -> Buffers:
        slots, fill = self._pipeline.table.slots, self._pipeline.fill
        shape, dtype = self._inputs.shape[1:], self._inputs.dtype
        return Buffers(
            activations=full((slots.activations + 1, *shape), dtype, fill),
            gradients=full((slots.gradients + 1, *shape), dtype, fill),
            stash=self._stash.empty(),
            outputs=full((slots.stash + 1, *shape), dtype, fill),
            deferred=self._deferred.empty(),
        )

    def nothing(self) -> Made:
        """Before the first tick."""
        shape, dtype = self._inputs.shape[1:], self._inputs.dtype
        inputs = jax.ShapeDtypeStruct(shape, dtype)
        shapes = Made(
            *(inputs, inputs, inputs),  # pyright: ignore[reportArgumentType]
            *(self._stash.shapes(), self._deferred.shapes()),  # pyright: ignore
            *(self._layers, self._statistics, self._head, self._sums.finish),
        )
        fill = self._pipeline.fill
        return jax.tree.map(lambda x: full(x.shape, x.dtype, fill), shapes)

    def head(self, buffers: Buffers, row: Row, carry: Carry) -> Carry:
        """The gradient of the last stage's output."""
        made, sums = carry
        finish = jax.value_and_grad(self._pipeline.finish, argnums=(0, 1), has_aux=True)
        y = read(buffers.outputs, row["b_stash"])
        (_, found), (dhead, dy) = finish(self._head, y, row["b_microbatch"])
        if not self._pipeline.loops:
            return made._replace(dy=dy, head=dhead, finish=found), sums
        head, finish = add(sums.head, dhead), add(sums.finish, found)
        sums = dataclasses.replace(sums, head=head, finish=finish)
        return made._replace(dy=dy), sums

    def work(self, work: Work, buffers: Buffers, row: Row, carry: Carry) -> Carry:
        """The operations of one tick."""
        made, sums = carry
        if not self._pipeline.loops:
            # Even less than to pass on what is there.
            empty = jax.tree.map(lambda x: jax.lax.empty(x.shape, x.dtype), made)
            return self._work(work, buffers, row, empty._replace(dy=made.dy)), sums
        new = self._work(work, buffers, row, made)
        weights, stage = list(sums.weights), list(sums.stage)
        if (d := work.gradients_of()) >= 0:
            weights[d] = add(weights[d], first_of(new.weights, weights[d]))
        if (d := work.directions[0]) >= 0:
            stage[d] = add(stage[d], first_rows(new.statistics, stage[d]))
        sums = dataclasses.replace(sums, weights=weights, stage=stage)
        return new._replace(weights=made.weights, statistics=made.statistics), sums

    def _work(self, work: Work, buffers: Buffers, row: Row, made: Made) -> Made:
        forward, backward = None, None
        if work.directions[0] >= 0:
            forward = self._forward(work, row, buffers)
        if work.directions[1] >= 0:
            backward = self._backward(work, row, buffers, made.dy)
        if forward and backward and self._pipeline.alternating:
            results, gradients = alternate(forward, backward)
        else:
            with jax.named_scope("F"):
                results = forward.run() if forward else []
            with jax.named_scope("B" if "B" in work.kinds else "Bi"):
                gradients = backward.run() if backward else []
        if forward:
            made = self._forward_made(work, results, made)
        if backward:
            made = self._backward_made(work, gradients, made)
        if "W" in work.kinds:
            with jax.named_scope("W"):
                made = self._weight_gradients(work, row, buffers, made)
        return made

    def _forward(self, work: Work, row: Row, buffers: Buffers) -> Walk:
        direction = work.directions[0]
        kinds, programs = self._pipeline.stages[work.stages[0]]
        microbatch = row["f_microbatch"]
        x = jnp.where(
            row["f_stage"] == 0,
            read(self._inputs, microbatch),
            read(buffers.activations, row["f_inbox"]),
        )
        context = self._pipeline.context(microbatch, row["f_stage"], direction)
        return programs.forward(pick(self._weights[direction], kinds), x, context)

    def _forward_made(self, work: Work, results: list, made: Made) -> Made:
        """The output, what goes into the stash, and the statistics."""
        stage = work.stages[0]
        _, programs = self._pipeline.stages[stage]
        y, statistics, saved = programs.forward_results(results)
        return made._replace(
            activation=y,
            stash=self._stash.pack(stage, saved, made.stash),
            statistics=write_first(self._statistics, statistics),
        )

    def _backward(self, work: Work, row: Row, buffers: Buffers, dy: jax.Array) -> Walk:
        direction, stage = work.directions[1], work.stages[1]
        kinds, programs = self._pipeline.stages[stage]
        step = programs.backward if "B" in work.kinds else programs.backward_inputs
        return step(
            pick(self._weights[direction], kinds),
            self._pipeline.context(row["b_microbatch"], row["b_stage"], direction),
            self._stash.read(stage, buffers.stash, row["b_stash"]),
            dy,
        )

    def _backward_made(self, work: Work, results: list, made: Made) -> Made:
        """The gradient of the input, and those of the weights or what W gets."""
        stage = work.stages[1]
        kinds, programs = self._pipeline.stages[stage]
        if "B" not in work.kinds:
            deferred = self._deferred.pack(stage, results[1:], made.deferred)
            return made._replace(gradient=results[0], deferred=deferred)
        dx, dweights = programs.backward_results(results)
        return made._replace(gradient=dx, weights=put(made.weights, kinds, dweights))

    def _weight_gradients(
        self, work: Work, row: Row, buffers: Buffers, made: Made
    ) -> Made:
        direction, stage = work.directions[2], work.stages[2]
        kinds, programs = self._pipeline.stages[stage]
        dweights = programs.backward_weights(
            pick(self._weights[direction], kinds),
            self._pipeline.context(row["w_microbatch"], row["w_stage"], direction),
            self._deferred.read(stage, buffers.deferred, row["w_deferred"]),
        )
        return made._replace(weights=put(made.weights, kinds, dweights))

    def add(self, row: Row, made: Made, sums: Sums) -> Sums:
        """Adds what a work made. In a branch of a switch the sums would be copied."""
        weights, stage = list(sums.weights), list(sums.stage)
        for d, (layers, rows) in enumerate(zip(weights, stage, strict=True)):
            with jax.named_scope(f"weights_{d}"):
                more = first_of(made.weights, layers)
                weights[d] = add_if(row["gradients_of"] == d, layers, more)
            with jax.named_scope(f"statistics_{d}"):
                more = first_rows(made.statistics, rows)
                stage[d] = add_if(row["f_direction"] == d, rows, more)
        return dataclasses.replace(sums, weights=weights, stage=stage)

    def add_head(self, row: Row, made: Made, sums: Sums) -> Sums:
        """Adds what the head made, in the same way."""
        ends = row["b_stage"] == self.last
        head = add_if(ends, sums.head, made.head)
        finish = add_if(ends, sums.finish, made.finish)
        return dataclasses.replace(sums, head=head, finish=finish)

    def keep(self, row: Row, buffers: Buffers, made: Made) -> Buffers:
        """Sends what the tick made, and writes it and what arrived into the buffers."""
        columns, R = (
            self._pipeline.table.columns,
            self._pipeline.table.schedule.num_ranks,
        )
        ways = {
            "right": [(r, r + 1) for r in range(R - 1)],
            "left": [(r + 1, r) for r in range(R - 1)],
        }

        def arrivals(buffer, value, letter, local):
            """Writes what comes from both sides, and what stays on this rank."""
            for way, pairs in ways.items():
                if (columns[f"{letter}_{way}"] >= 0).any():
                    arrived = jax.lax.ppermute(value, AXIS, pairs)
                    buffer = write(buffer, arrived, row[f"{letter}_{way}"])
            if (columns[local] >= 0).any():
                buffer = write(buffer, value, row[local])
            return buffer

        def shelf(buffers, values, slot):
            if self._pipeline.loops:
                return write_if(buffers, values, slot)
            return [write(b, v, slot) for b, v in zip(buffers, values, strict=True)]

        finished = jnp.where(row["f_stage"] == self.last, row["f_stash"], -1)
        return Buffers(
            activations=arrivals(buffers.activations, made.activation, "a", "f_local"),
            gradients=arrivals(buffers.gradients, made.gradient, "g", "b_local"),
            stash=shelf(buffers.stash, made.stash, row["f_stash"]),
            outputs=write(buffers.outputs, made.activation, finished),
            deferred=shelf(buffers.deferred, made.deferred, row["b_deferred"]),
        )
