# SPDX-License-Identifier: Apache-2.0
"""Floor 0. How long a collective takes on a network of chips, from published rates.

A TPU slice is a grid of chips; along each of its dimensions a chip has a link to either
side, and a dimension that is long enough is a ring. Messages go along the first
dimension, then the second, then the third, the shorter way round. The time of an
exchange or a permute is that of the busiest link; that of a gather, a reduction or a
scatter is that of rings over all dimensions at once. Between slices, and between the
hosts of GPUs, every device has its share of its host's network card. Latency is not
counted.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from jaxmoe.aot.chips import Chip

GPUS_PER_HOST = 8


@dataclasses.dataclass(frozen=True)
class Network:
    """Where the devices of a mesh are.

    Attributes:
      chip: their kind.
      coords: Per device, in the order of the flat mesh, its place in its slice.
      slices: Per device the number of its slice (TPU) or host (GPU).
      is_grid: whether links form a grid; else every pair in a slice has full rate.
    """

    chip: Chip
    coords: tuple[tuple[int, ...], ...]
    slices: tuple[int, ...]
    is_grid: bool = True

    @functools.cached_property
    def lengths(self) -> tuple[int, ...]:
        """Of the grid, along its dimensions."""
        return tuple(int(n) + 1 for n in np.max(self.coords, axis=0))

    @functools.cached_property
    def rings(self) -> tuple[bool, ...]:
        """Which dimensions are rings."""
        wraps = self.chip.wraps
        return tuple(n >= wraps and n % wraps == 0 and n > 2 for n in self.lengths)

    def exchange(self, groups: Sequence[Sequence[int]], size: int) -> float:
        """Seconds in which every device sends equal parts of `size` bytes to the
        members of its group."""
        return self._one(self._exchange, groups, size)

    def permute(self, pairs: Sequence[tuple[int, int]], size: int) -> float:
        """Seconds in which the first device of every pair sends `size` bytes to the
        other one."""
        pairs = [(a, b) for a, b in pairs if a != b]
        if not pairs:
            return 0.0
        crossing = [p for p in pairs if self.slices[p[0]] != self.slices[p[1]]]
        if crossing:
            return size / self.chip.slice_rate
        if not self.is_grid:
            return size / self.chip.link_rate
        ends = np.asarray(pairs)
        return size * self._busiest(ends[:, 0], ends[:, 1]) / self.chip.link_rate

    def gather(self, groups: Sequence[Sequence[int]], size: int) -> float:
        """Seconds of a gather to `size` bytes on every member, or of the scattering of
        sums of so many; an all-reduce is both."""
        return self._one(self._gather, groups, size)

    def across_slices(self) -> list[list[int]]:
        """Groups of devices that have the same place in every slice."""
        members: dict[int, list[int]] = {}
        for device, home in enumerate(self.slices):
            members.setdefault(home, []).append(device)
        return [list(group) for group in zip(*members.values(), strict=True)]

    def _one(self, seconds, groups, size: int) -> float:
        # Groups are alike; the first one stands for all but in the load of links.
        key = tuple(map(tuple, groups))
        return 0.0 if len(key[0]) < 2 else seconds(key, size)

    def _exchange(self, groups: tuple[tuple[int, ...], ...], size: int) -> float:
        members = len(groups[0])
        share = size / members
        homes = {self.slices[device] for device in groups[0]}
        if len(homes) > 1:
            abroad = members - members // len(homes)
            return share * abroad / self.chip.slice_rate
        if not self.is_grid:
            return share * (members - 1) / self.chip.link_rate
        return share * self._exchange_load(groups) / self.chip.link_rate

    @functools.lru_cache  # noqa: B019  networks live as long as the command
    def _exchange_load(self, groups: tuple[tuple[int, ...], ...]) -> float:
        """Messages over the busiest link when all members send one to each other."""
        here = [g for g in groups if self.slices[g[0]] == self.slices[groups[0][0]]]
        table = np.asarray(here)
        members = table.shape[1]
        a = np.repeat(table, members, axis=1).ravel()
        b = np.tile(table, (1, members)).ravel()
        return self._busiest(a[a != b], b[a != b])

    def _busiest(self, a: np.ndarray, b: np.ndarray) -> float:
        """Messages over the busiest link when each of `a` sends one to its `b`."""
        coords = np.asarray(self.coords)
        place, goal, weight = coords[a].copy(), coords[b], np.ones(len(a))
        most = 0.0
        for dim, (length, ring) in enumerate(
            zip(self.lengths, self.rings, strict=True)
        ):
            load = np.zeros((2, *self.lengths))
            ahead = goal[:, dim] - place[:, dim]
            if ring:
                ahead = (ahead + length // 2) % length - length // 2
                # Half way round both ways are equally long, and each takes a half.
                half = 2 * np.abs(ahead) == length
                weight = np.where(half, weight / 2, weight)
                ahead = np.concatenate([ahead, -ahead[half]])
                place = np.concatenate([place, place[half]])
                goal = np.concatenate([goal, goal[half]])
                weight = np.concatenate([weight, weight[half]])
            for step in range(int(np.abs(ahead).max(initial=0))):
                moving = np.abs(ahead) > step
                forward = ahead[moving] > 0
                links = (forward.astype(int), *place[moving].T)
                np.add.at(load, links, weight[moving])
                way = np.where(forward, 1, -1)
                place[moving, dim] = (place[moving, dim] + way) % length
            most = max(most, float(load.max()))
        return most

    def _gather(self, groups: tuple[tuple[int, ...], ...], size: int) -> float:
        group = groups[0]
        members = len(group)
        homes = {self.slices[device] for device in group}
        seconds = 0.0
        if len(homes) > 1:
            # Every slice's share crosses once to each other one, split over members.
            inside = members // len(homes)
            abroad = size * (len(homes) - 1) / len(homes) / inside
            seconds = abroad / self.chip.slice_rate
            group = tuple(d for d in group if self.slices[d] == self.slices[group[0]])
            if len(group) < 2:
                return seconds
        rate = self.chip.link_rate
        if self.is_grid:
            rate *= self._links(group)
        return seconds + size * (len(group) - 1) / len(group) / rate

    def _links(self, group: tuple[int, ...]) -> int:
        """Links over which a device of the group can receive at once, at its ends."""
        places = np.asarray([self.coords[device] for device in group])
        found = 0
        for dim in range(places.shape[1]):
            spread = len(np.unique(places[:, dim]))
            ring = self.rings[dim] and spread == self.lengths[dim]
            found += 0 if spread == 1 else 2 if ring else 1
        return max(1, found)


def grid(chip: Chip, coords: Sequence[Sequence[int]], slices: Sequence[int]) -> Network:
    """The chips of one or more TPU slices."""
    return Network(chip, tuple(tuple(c) for c in coords), tuple(slices))


def hosts(chip: Chip, count: int) -> Network:
    """GPUs, eight of a host on one switch."""
    slices = tuple(n // GPUS_PER_HOST for n in range(count))
    return Network(chip, tuple((n,) for n in range(count)), slices, is_grid=False)


def axis_of(groups: Sequence[Sequence[int]], shape: dict[str, int]) -> str:
    """Along which axes of the mesh the members of a group differ, 'data,expert'.

    Args:
      groups: numbers in the flat mesh; [] is one group of all.
      shape: axis -> devices along it, in the order of the mesh.
    """
    sizes = tuple(shape.values())
    group = groups[0] if groups else range(math.prod(sizes))
    places = np.asarray(np.unravel_index(np.asarray(group), sizes))
    differ = [len(set(row)) > 1 for row in places.tolist()]
    return ",".join(axis for axis, d in zip(shape, differ, strict=True) if d)
