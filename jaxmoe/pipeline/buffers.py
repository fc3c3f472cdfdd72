# SPDX-License-Identifier: Apache-2.0
"""Floor 4. Buffers of slots, in which a rank keeps arrays from tick to tick."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe.pipeline.choose import turn_if


class Shelf:
    """Slots for the arrays of any one of several programs.

    Arrays of one shape and type of different programs share their place.
    """

    def __init__(
        self, lists: Sequence[list[jax.ShapeDtypeStruct]], slots: int, fill: float
    ):
        self._slots, self._fill = slots, fill
        self._shapes: list[tuple] = []
        self._places: list[list[int]] = []
        for arrays in lists:
            free = dict(enumerate(self._shapes))
            places = []
            for array in arrays:
                shape = (array.shape, array.dtype)
                place = next((i for i, s in free.items() if s == shape), None)
                if place is None:
                    place = len(self._shapes)
                    self._shapes.append(shape)
                free.pop(place, None)
                places.append(place)
            self._places.append(places)

    def empty(self) -> list[jax.Array]:
        return [
            full((self._slots + 1, *shape), dtype, self._fill)
            for shape, dtype in self._shapes
        ]

    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Of what a slot gets."""
        return [jax.ShapeDtypeStruct(*shape) for shape in self._shapes]

    def pack(
        self, number: int, arrays: Sequence[jax.Array], others: list[jax.Array]
    ) -> list[jax.Array]:
        """What a slot gets: arrays of program `number`, and others in other places."""
        packed = list(others)
        for place, array in zip(self._places[number], arrays, strict=True):
            packed[place] = array
        return packed

    def read(self, number: int, buffers: list[jax.Array], slot: jax.Array):
        return [read(buffers[place], slot) for place in self._places[number]]


def read(buffer: jax.Array, slot: jax.Array) -> jax.Array:
    """A slot of a buffer [slots, ...]; slot -1 is read as 0."""
    return jax.lax.dynamic_index_in_dim(buffer, jnp.maximum(slot, 0), keepdims=False)


def write(buffer: jax.Array, value: jax.Array, slot: jax.Array) -> jax.Array:
    """Writes a slot; slot -1 is the one that nobody reads."""
    slot = jnp.where(slot < 0, buffer.shape[0] - 1, slot)
    return jax.lax.dynamic_update_index_in_dim(buffer, value, slot, axis=0)


def write_if(
    buffers: list[jax.Array], values: list[jax.Array], slot: jax.Array
) -> list[jax.Array]:
    """Writes values into a slot of each buffer, in place; for slot -1 nothing."""

    def turn(_, buffers):
        return [write(b, v, slot) for b, v in zip(buffers, values, strict=True)]

    return turn_if(slot >= 0, turn, buffers)


def full(shape: tuple[int, ...], dtype: Any, fill: float) -> jax.Array:
    """What nobody reads: `fill`, or 0 where it has no such numbers."""
    floating = jnp.issubdtype(dtype, jnp.floating)
    return jnp.full(shape, fill if floating else 0, dtype)
