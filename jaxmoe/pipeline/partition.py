# SPDX-License-Identifier: Apache-2.0
"""Floor 0. Which layers a stage holds, and which stages a rank.

Layers stay in their order; stages get as equal numbers of them as possible, the first
ones one more where they do not divide. A stage may be empty.

Legend: R ranks, S stages.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jaxmoe.pipeline.schedule import Schedule


class Layer(NamedTuple):
    """A layer of the model.

    Attributes:
      kind: 'dense' or 'moe'.
      place: where its weights are in the stack of its kind.
      ordinal: its place among the layers of its kind.
    """

    kind: str
    place: int
    ordinal: int


@dataclasses.dataclass(frozen=True)
class Partition:
    """The layers of every stage.

    Attributes:
      schedule: tells the stages of every rank.
      stages: per stage its layers.
    """

    schedule: Schedule
    stages: tuple[tuple[Layer, ...], ...]

    def kinds(self, stage: int) -> tuple[str, ...]:
        """The kinds of a stage's layers, in order: what its program depends on."""
        return tuple(layer.kind for layer in self.stages[stage])

    def held(self, direction: int, kind: str) -> tuple[tuple[Layer | None, ...], ...]:
        """Per rank, the layers of one kind that it holds for a direction.

        As many for every rank as the one with most has; None fills up.
        """
        schedule = self.schedule
        stages = [schedule.stage_of(r, direction) for r in range(schedule.num_ranks)]
        rows = [[la for la in self.stages[s] if la.kind == kind] for s in stages]
        most = max(map(len, rows))
        return tuple((*row, *[None] * (most - len(row))) for row in rows)

    def first_layers(self) -> tuple[int, ...]:
        """Per stage, the number in the model of its first layer."""
        sizes = [len(stage) for stage in self.stages]
        return tuple(sum(sizes[:stage]) for stage in range(len(sizes)))


def partition(kinds: tuple[str, ...], schedule: Schedule, *, shared: bool) -> Partition:
    """Cuts a model into the stages of a schedule.

    Args:
      kinds: of all layers, from the first to the last.
      schedule: has as many stages as are wanted.
      shared: all layers of a kind are the one at place 0.
    """
    seen: dict[str, int] = {}
    layers: list[Layer] = []
    for kind in kinds:
        ordinal = seen.get(kind, 0)
        layers.append(Layer(kind, 0 if shared else ordinal, ordinal))
        seen[kind] = ordinal + 1
    size, more = divmod(len(layers), schedule.num_stages)
    stages: list[tuple[Layer, ...]] = []
    for stage in range(schedule.num_stages):
        count = size + (stage < more)
        stages.append(tuple(layers[:count]))
        del layers[:count]
    return Partition(schedule, tuple(stages))
