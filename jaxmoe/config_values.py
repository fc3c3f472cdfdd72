# SPDX-License-Identifier: Apache-2.0
"""Floor 0. One value of the configuration: what its field takes, and what was meant.

The types are those written at the fields in `config.py`: whole numbers, numbers, truth
values, strings and named choices, some of them or None.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from jaxmoe.config import SECTIONS
from jaxmoe.config_base import (
    ConfigError,
    check_bounds,
    choice,
    mistake,
    nearest,
    shown,
)


class Field(NamedTuple):
    """A field, by its name on the command line, and what its type takes."""

    name: str
    field: dataclasses.Field[Any]
    kind: type  # int, float, bool or str
    choices: tuple[str, ...]  # words that it takes; all that a str with choices takes
    optional: bool  # whether it takes None


def _fields() -> Iterator[Field]:
    for section in SECTIONS:
        hints = typing.get_type_hints(section)
        for field in dataclasses.fields(section):
            hint = hints[field.name]
            union = typing.get_origin(hint) in (typing.Union, types.UnionType)
            members = typing.get_args(hint) if union else (hint,)
            words = [m for m in members if typing.get_origin(m) is Literal]
            yield Field(
                f"{section.__name__}.{field.name}",
                field,
                next((m for m in members if m in (int, float, bool)), str),
                tuple(word for m in words for word in typing.get_args(m)),
                types.NoneType in members,
            )


FIELDS = {field.name: field for field in _fields()}


def typed(field: Field, value: Any, place: str) -> Any:
    """Checks a value, and makes a whole number a float where the field is one.

    Args:
      field: The field.
      value: What was read for it.
      place: Where it was read, for the message.

    Raises:
      ConfigError: if type or range are wrong, with the value that was probably meant.
    """
    name = field.name
    if value is None and field.optional:
        return None
    if type(value) is str and value in field.choices:
        return value
    if type(value) is int and field.kind is float:
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
    if type(value) is not field.kind or (field.kind is str and field.choices):
        raise mistake(
            f"{name}={shown(value)} ({place}) is {_described(field, value)}",
            f"it takes {_takes(field)}",
            f"Write {name}={_better(field, value)}",
        )
    if isinstance(value, str) and not value.isprintable():
        raise mistake(
            f"{name}={shown(value)} ({place}) has characters that cannot be printed",
            "text and paths are printable",
            f"Write {name}={''.join(filter(str.isprintable, value))!r}",
        )
    check_bounds(name, field.field, value, place=f" ({place})")
    return value


def _described(field: Field, value: object) -> str:
    if isinstance(value, str) and field.kind is str:
        return "unknown"
    names: dict[type, str] = {
        str: "a string",
        bool: "True or False",
        int: "a whole number",
    }
    names |= {float: "a decimal number", types.NoneType: "no value"}
    return names.get(type(value), f"a {type(value).__name__}")


def _takes(field: Field) -> str:
    kinds = {int: "a whole number", float: "a number", bool: "True or False"}
    words = [kinds[field.kind]] if field.kind in kinds else []
    words += [repr(word) for word in field.choices]
    words += ["None"] if field.optional else []
    return choice(words or ["a string in quotes"])


def _better(field: Field, value: Any) -> str:
    """The value that was probably meant, as text, or the default."""
    meant: list[Any] = []
    if isinstance(value, str):
        word = value.strip().lower()
        meant += [best] if (best := nearest(word, field.choices)) else []
        if field.kind is bool and word in ("true", "yes", "on", "1"):
            meant.append(True)
        elif field.kind is bool and word in ("false", "no", "off", "0"):
            meant.append(False)
        elif field.optional and word in ("none", "null", ""):
            meant.append(None)
        elif field.kind in (int, float):
            try:
                value = float(word)
            except ValueError:
                value = None
    elif field.kind is bool and value in (0, 1):
        meant.append(bool(value))
    elif field.kind is str and not field.choices and isinstance(value, int | float):
        meant.append(str(value))
    if isinstance(value, float) and math.isfinite(value):
        both = [math.floor(value), math.ceil(value)] if field.kind is int else [value]
        meant += dict.fromkeys(both)
    return choice(
        [repr(m) for m in meant if _fits(field, m)] or [repr(field.field.default)]
    )


def _fits(field: Field, value: Any) -> bool:
    try:
        check_bounds(field.name, field.field, value)
    except ConfigError:
        return False
    return True


def check_name(scope: str, selector: str, field: str, place: str) -> str:
    """Checks the name of a field, or of a macro, which has no `field`.

    Args:
      scope: What gin calls the part before '/'.
      selector: The section, or the macro.
      field: The field, or ''.
      place: Where it was read, for the message.

    Returns:
      The name, as 'MoE.top_k'.

    Raises:
      ConfigError: if there is a scope, or no such field, with the one that was meant.
    """
    name = f"{selector}.{field}" if field else selector
    if scope:
        raise mistake(
            f"{scope}/{name} ({place}) has the scope {scope!r}",
            "there is one value for all, so nothing would use it",
            f"Write {name}",
        )
    if field and name not in FIELDS:
        raise mistake(
            f"{name} ({place}) does not exist",
            "only fields of the configuration can be set",
            f"Write {_like(selector, field)}",
        )
    return name


def _like(selector: str, field: str) -> str:
    """The known field that was probably meant, or all that there are."""
    sections = [section.__name__ for section in SECTIONS]
    section = selector if selector in sections else nearest(selector, sections)
    inside = [name for name in FIELDS if name.startswith(f"{section}.")]
    names = {name.split(".")[1]: name for name in [*FIELDS, *inside]}  # inside wins
    best = next((name for name in names if name.lower() == field.lower()), "")
    best = best or nearest(field, [name.split(".")[1] for name in inside])
    best = best or nearest(field, names)
    if best:
        return names[best]
    return choice(inside) if inside else f"a field of {choice(sections)}"
