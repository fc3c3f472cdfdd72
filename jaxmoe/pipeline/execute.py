# SPDX-License-Identifier: Apache-2.0
"""Floor 4. Runs a table of ticks on every rank at once, inside a shard_map.

One `lax.scan` over ticks. In a tick a rank takes its branch of one `lax.switch`: the
operations of the tick, with the programs of the stages and the direction of each built
in, so that weights are used where they lie. Then what it made travels by four
ppermutes, which every rank issues in every tick, is written into the buffers and added
to the sums, outside the switch: a branch copies whatever it is given and gives back,
the whole buffer, all gradients. Branches differ only along `pipe`: the devices of an
exchange over `expert` always take the same one. The head and the loss stand before the
switch, in a `lax.cond` that only the last stage enters, when its backward begins:
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
from jaxmoe.pipeline.buffers import Shelf, full, read, write
from jaxmoe.pipeline.lower import COLUMNS, TickTable
from jaxmoe.pipeline.stage import StagePrograms, Tree

AXIS = "pipe"
Kinds = tuple[str, ...]  # of a stage's layers
Layers = dict[str, list[Tree]]  # by kind, those of one stage in order
Row = dict[str, jax.Array]  # a tick of this rank: column -> number


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
      alternating: the forward and the backward of a tick take turns at every exchange
        of tokens; else the compiler orders them.
      fill: what places hold that nobody reads; None for what the memory happens to
        hold. A test makes it NaN, and nothing changes.
    """

    table: TickTable
    stages: Sequence[tuple[Kinds, StagePrograms]]
    context: Callable[[jax.Array, jax.Array, int], Tree]
    finish: Callable[[Tree, jax.Array, jax.Array], tuple[jax.Array, Tree]]
    alternating: bool = False
    fill: float | None = 0.0


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["weights", "head", "stage", "finish"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Sums:
    """What ticks add to.

    Attributes:
      weights: per direction, gradients of the weights that this rank has for it.
      head: gradients of the head's weights.
      stage: per direction, statistics of the MoE layers, [layers, ...]; or None.
      finish: statistics of the head.
    """

    weights: list[Layers]
    head: Tree
    stage: list[Tree]
    finish: Tree


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
    works, work_of = list_works(pipeline)
    gradients_of = np.array([work.gradients_of() for work in works])[work_of]
    table = pipeline.table.columns
    columns = np.stack([work_of, gradients_of, *(table[c] for c in COLUMNS)], axis=1)
    rank = jax.lax.axis_index(AXIS)
    mine = jnp.take(jnp.asarray(columns), rank, axis=2)  # [ticks, columns]
    branches = _Branches(pipeline, weights, head, inputs_MbSD, sums)
    M = inputs_MbSD.shape[0]

    def tick(carry, numbers):
        buffers, sums, gradients = carry
        row = dict(zip(("work", "gradients_of", *COLUMNS), numbers, strict=True))
        dy, sums = branches.output_gradient(row, buffers, sums)
        steps = [partial(branches, work) for work in works]
        made = jax.lax.switch(row["work"], steps, row, buffers, dy)
        sums = branches.add(row, sums, made)
        with jax.named_scope("ticks"):
            buffers = branches.keep(row, buffers, made)
        enters = (row["b_stage"] == 0) & (row["b_microbatch"] >= 0)
        where = jnp.where(enters, row["b_microbatch"], M)
        gradients = write(gradients, made.gradient, where)
        return (buffers, sums, gradients), None

    room = jnp.zeros((M + 1, *inputs_MbSD.shape[1:]), inputs_MbSD.dtype)
    carry = (branches.empty(), sums, room)
    (_, sums, gradients), _ = jax.lax.scan(tick, carry, mine)
    return sums, gradients[:M]


class Work(NamedTuple):
    """What a rank does in a tick, but for the microbatches: one branch.

    Attributes:
      kinds: as in `TickTable.branches`.
      directions: of the forward, of the backward and of the W; -1 for none.
      stages: of each, the first stage that has the same programs; -1 for none.
    """

    kinds: tuple[str, ...]
    directions: tuple[int, int, int]
    stages: tuple[int, int, int]

    def gradients_of(self) -> int:
        """The direction whose weights get gradients; -1 for none."""
        if "W" in self.kinds:
            return self.directions[2]
        return self.directions[1] if "B" in self.kinds else -1


def list_works(pipeline: Pipeline) -> tuple[list[Work], np.ndarray]:
    """The distinct works of a pipeline, in the order of the branches, and the number of
    the one that each [tick, rank] has."""
    table, columns = pipeline.table, pipeline.table.columns
    programs = [id(programs) for _, programs in pipeline.stages]
    first = [programs.index(program) for program in programs]
    found: dict[Work, int] = {}
    work_of = np.zeros_like(columns["branch"])
    for place in np.ndindex(work_of.shape):
        f, b, w = (int(columns[f"{letter}_direction"][place]) for letter in "fbw")
        stages = [int(columns[f"{letter}_stage"][place]) for letter in "fbw"]
        f_stage, b_stage, w_stage = (first[s] if s >= 0 else -1 for s in stages)
        work = Work(
            table.branches[columns["branch"][place]],
            (f, b, w),
            (f_stage, b_stage, w_stage),
        )
        work_of[place] = found.setdefault(work, len(found))
    return list(found), work_of


def parts_of_ticks(pipeline: Pipeline) -> dict[str, np.ndarray]:
    """What runs beside the branch in some ticks: named scope -> [ticks, ranks]."""
    works, work_of = list_works(pipeline)
    columns, schedule = pipeline.table.columns, pipeline.table.schedule
    last = columns["b_stage"] == schedule.num_stages - 1
    found = {"head": last & (columns["b_microbatch"] >= 0)}
    gradients_of = np.array([work.gradients_of() for work in works])[work_of]
    for d in range(schedule.num_directions):
        found[f"weights_{d}"] = gradients_of == d
        found[f"statistics_{d}"] = columns["f_direction"] == d
    return found


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
    """What a branch leaves, of one size whatever the branch."""

    activation: jax.Array
    gradient: jax.Array
    stash: list[jax.Array]
    deferred: list[jax.Array]
    weights: Layers
    statistics: Tree


class _Branches:
    """The bodies of the switch, and the buffers that they share."""

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
        self._statistics = max(sums.stage, key=_rows)
        self._last = len(pipeline.stages) - 1
        slots, stages = pipeline.table.slots, pipeline.stages
        saved = [programs.saved for _, programs in stages]
        deferred = [programs.deferred for _, programs in stages]
        self._fill = pipeline.fill or 0.0
        self._stash = Shelf(saved, slots.stash, self._fill)
        # Without any W no Bi leaves anything.
        deferred = deferred if slots.deferred else [[]] * len(stages)
        self._deferred = Shelf(deferred, slots.deferred, self._fill)

    def empty(self) -> Buffers:
        slots, fill = self._pipeline.table.slots, self._fill
        shape, dtype = self._inputs.shape[1:], self._inputs.dtype
        return Buffers(
            activations=full((slots.activations + 1, *shape), dtype, fill),
            gradients=full((slots.gradients + 1, *shape), dtype, fill),
            stash=self._stash.empty(),
            outputs=full((slots.stash + 1, *shape), dtype, fill),
            deferred=self._deferred.empty(),
        )

    def output_gradient(self, row: Row, buffers: Buffers, sums: Sums):
        """(gradient of the output of the tick's backward, sums)."""

        def of_loss():
            y = read(buffers.outputs, row["b_stash"])
            finish = jax.value_and_grad(
                self._pipeline.finish, argnums=(0, 1), has_aux=True
            )
            (_, found), (dhead, dy) = finish(self._head, y, row["b_microbatch"])
            return dy, dhead, found

        def arrived():
            _, *others = jax.eval_shape(of_loss)
            return read(buffers.gradients, row["b_inbox"]), *self._unread(others)

        last = row["b_stage"] == self._last
        with jax.named_scope("head"):
            dy, dhead, found = jax.lax.cond(last, of_loss, arrived)
            head = _add_if(last, sums.head, dhead)
            finish = _add_if(last, sums.finish, found)
        return dy, dataclasses.replace(sums, head=head, finish=finish)

    def __call__(self, work: Work, row: Row, buffers: Buffers, dy: jax.Array) -> Made:
        """One tick of one rank: reads buffers, leaves what it made."""
        made = self._nothing()
        forward, backward = None, None
        if work.directions[0] >= 0:
            forward = self._forward(work, row, buffers)
        if work.directions[1] >= 0:
            backward = self._backward(work, row, buffers, dy)
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

    def _nothing(self) -> Made:
        """What nobody reads, but for the statistics."""
        inputs = jax.ShapeDtypeStruct(self._inputs.shape[1:], self._inputs.dtype)
        shelves = self._stash.shapes(), self._deferred.shapes()
        unread = self._unread((inputs, inputs, *shelves, self._layers))
        zeros = jax.tree.map(jnp.zeros_like, self._statistics)
        return Made(*unread, statistics=zeros)

    def _unread(self, shapes: Tree) -> Tree:
        """Arrays that nobody reads."""
        leaves, tree = jax.tree.flatten(shapes)
        if self._pipeline.fill is None:
            made = [jax.lax.empty(x.shape, x.dtype) for x in leaves]
        else:
            # Each of another value: equal ones would be made once, and then copied.
            values = [self._fill + 1e-30 * i for i in range(len(leaves))]
            pairs = zip(leaves, values, strict=True)
            made = [full(x.shape, x.dtype, value) for x, value in pairs]
        return jax.tree.unflatten(tree, made)

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
        return programs.forward(_pick(self._weights[direction], kinds), x, context)

    def _forward_made(self, work: Work, results: list, made: Made) -> Made:
        """The output, what goes into the stash, and the statistics."""
        stage = work.stages[0]
        _, programs = self._pipeline.stages[stage]
        y, statistics, saved = programs.forward_results(results)
        return made._replace(
            activation=y,
            stash=self._stash.pack(stage, saved, made.stash),
            statistics=_write_first(made.statistics, statistics),
        )

    def _backward(self, work: Work, row: Row, buffers: Buffers, dy: jax.Array) -> Walk:
        direction, stage = work.directions[1], work.stages[1]
        kinds, programs = self._pipeline.stages[stage]
        step = programs.backward if "B" in work.kinds else programs.backward_inputs
        return step(
            _pick(self._weights[direction], kinds),
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
        return made._replace(gradient=dx, weights=_put(made.weights, kinds, dweights))

    def _weight_gradients(
        self, work: Work, row: Row, buffers: Buffers, made: Made
    ) -> Made:
        direction, stage = work.directions[2], work.stages[2]
        kinds, programs = self._pipeline.stages[stage]
        dweights = programs.backward_weights(
            _pick(self._weights[direction], kinds),
            self._pipeline.context(row["w_microbatch"], row["w_stage"], direction),
            self._deferred.read(stage, buffers.deferred, row["w_deferred"]),
        )
        return made._replace(weights=_put(made.weights, kinds, dweights))

    def add(self, row: Row, sums: Sums, made: Made) -> Sums:
        """Adds what the tick made to the sums of its directions."""
        weights, stage = list(sums.weights), list(sums.stage)
        for d, layers in enumerate(sums.weights):
            more = {kind: made.weights[kind][: len(layers[kind])] for kind in layers}
            with jax.named_scope(f"weights_{d}"):
                weights[d] = _add_if(row["gradients_of"] == d, layers, more)
            more = jax.tree.map(lambda m, t: m[: len(t)], made.statistics, stage[d])
            with jax.named_scope(f"statistics_{d}"):
                stage[d] = _add_if(row["f_direction"] == d, stage[d], more)
        return dataclasses.replace(sums, weights=weights, stage=stage)

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
            return [write(b, v, slot) for b, v in zip(buffers, values, strict=True)]

        finished = jnp.where(row["f_stage"] == self._last, row["f_stash"], -1)
        return Buffers(
            activations=arrivals(buffers.activations, made.activation, "a", "f_local"),
            gradients=arrivals(buffers.gradients, made.gradient, "g", "b_local"),
            stash=shelf(buffers.stash, made.stash, row["f_stash"]),
            outputs=write(buffers.outputs, made.activation, finished),
            deferred=shelf(buffers.deferred, made.deferred, row["b_deferred"]),
        )


def _pick(layers: Layers, kinds: Kinds) -> list[Tree]:
    """The layers of a stage in the order in which they are applied."""
    following = {kind: iter(of_kind) for kind, of_kind in layers.items()}
    return [next(following[kind]) for kind in kinds]


def _put(layers: Layers, kinds: Kinds, of_stage: Tree) -> Layers:
    """The layers with those of a stage in the first places of their kinds."""
    layers = {kind: list(of_kind) for kind, of_kind in layers.items()}
    seen = dict.fromkeys(layers, 0)
    for kind, layer in zip(kinds, of_stage, strict=True):
        layers[kind][seen[kind]] = layer
        seen[kind] += 1
    return layers


def _rows(statistics: Tree) -> int:
    return max((len(leaf) for leaf in jax.tree.leaves(statistics)), default=0)


def _write_first(rows: Tree, first: Tree) -> Tree:
    """Writes the first rows; a stage may have fewer MoE layers than another."""
    if first is None:
        return rows
    return jax.tree.map(lambda r, f: r.at[: len(f)].set(f), rows, first)


def _add_if(condition: jax.Array, total: Tree, more: Tree) -> Tree:
    """total + more where the condition holds, else total.

    A loop of one turn or none adds in place; a conditional would copy the total.
    """
    return jax.lax.fori_loop(
        0,
        condition.astype(jnp.int32),
        lambda _, total: jax.tree.map(lambda t, m: t + m.astype(t.dtype), total, more),
        total,
    )
