# SPDX-License-Identifier: Apache-2.0
"""Floor 0. What the configuration is made of: fields with a range, errors in words.

An error of the user has three parts: the fact with its values, the rule, and a remedy
that names values which work. The functions at the end find such values.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LARGEST_INT = 2**31 - 1  # counters are int32


class ConfigError(ValueError):
    """A mistake of the user: fact, rule, remedy. The command line exits with 2."""


def mistake(fact: str, rule: str, remedy: str) -> ConfigError:
    """An error in three parts: what is wrong, why, and what would work."""
    return ConfigError(f"{fact}: {rule}. {remedy}.")


def option(
    default: Any,
    doc: str,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
) -> Any:
    """A configuration field with its documentation and its range.

    Args:
      default: Its value when nothing sets it.
      doc: What it means, and in which unit.
      low: The smallest allowed value.
      above: A number that the value must exceed, instead of `low`.
      high: The largest allowed value; whole numbers end at 2**31 - 1 anyway.
      below: A number that the value must stay below, instead of `high`.
    """
    bounds = {"low": low, "above": above, "high": high, "below": below}
    return dataclasses.field(default=default, metadata={"doc": doc, **bounds})


def check_bounds(
    name: str, field: dataclasses.Field[Any], value: object, *, place: str = ""
) -> None:
    """Checks one number against the range of its field; anything else passes.

    Args:
      name: As on the command line, e.g. 'MoE.top_k'.
      field: The field, made by `option`.
      value: The value.
      place: What the message adds to the value, e.g. ' (command line)'.

    Raises:
      ConfigError: if the value is outside, or not a finite number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    bounds = field.metadata
    low, above, high, below = (bounds[k] for k in ("low", "above", "high", "below"))
    if isinstance(value, int) and high is None and below is None:
        high = LARGEST_INT
    if isinstance(value, float) and not math.isfinite(value):
        fact, rule = "is no value", "NaN and infinity are refused"
    elif low is not None and value < low:
        fact, rule = "is too small", f"it must be at least {low:g}"
    elif above is not None and value <= above:
        fact, rule = "is too small", f"it must be above {above:g}"
    elif high is not None and value > high:
        fact, rule = "is too large", f"it must be at most {high}"
    elif below is not None and value >= below:
        fact, rule = "is too large", f"it must be below {below:g}"
    else:
        return
    raise mistake(
        f"{name}={shown(value)}{place} {fact}",
        rule,
        f"Set {name}={field.default!r} (the default)",
    )


def check_multiple(
    name: str,
    value: int,
    parts_name: str,
    parts: int,
    *,
    rule: str = "it must be a multiple",
    step: int = 1,
    low: int = 1,
) -> None:
    """Checks that a value can be split into equal parts.

    Args:
      name: The value, as on the command line.
      value: The value.
      parts_name: The number of parts, as on the command line.
      parts: The number of parts.
      rule: What the message gives as the rule.
      step: What a better value must be a multiple of besides.
      low: The smallest better value.

    Raises:
      ConfigError: naming both, with the nearest numbers that fit.
    """
    if value % parts:
        raise mistake(
            f"{name}={value} cannot be split evenly by {parts_name}={parts}",
            rule,
            f"Set {name}={near(value, math.lcm(parts, step), low)}, or"
            f" {parts_name}={choice(closest(all_divisors(value), parts))}",
        )


def check_tokenizer_spec(spec: str) -> None:
    """Checks a value of `Data.tokenizer`, and that its file exists.

    Raises:
      ConfigError: if it has another form, or there is no such file.
    """
    kind, _, path = spec.partition(":")
    known = ("bytes", "sentencepiece", "tokenizers")
    if spec == "bytes":
        return
    if kind not in known[1:] or not path:
        best = nearest(kind, known) or "bytes"
        raise mistake(
            f"Data.tokenizer={spec!r} is unknown",
            "it must be 'bytes', 'sentencepiece:FILE' or 'tokenizers:FILE'",
            f"Set Data.tokenizer={best if best == 'bytes' else best + ':FILE'!r}",
        )
    if not os.path.isfile(os.path.expanduser(path)):
        raise mistake(
            f"Data.tokenizer={spec!r} names no file",
            f"the part behind the colon is a file's path, and there is no {path!r}",
            "Give the right path, or set Data.tokenizer='bytes'",
        )


def check_run_folder(path: str) -> None:
    """Checks a value of `Train.init_from`.

    Raises:
      ConfigError: if there is no such folder.
    """
    if path and not os.path.isdir(path):
        raise mistake(
            f"Train.init_from={path!r} is not a folder",
            "it is the run folder (--workdir) of an earlier training",
            "Give its path, or set Train.init_from='' to start from random weights",
        )


def near(value: int, step: int, low: int = 1) -> str:
    """The multiples of `step` on both sides of `value`, from `low` on: '56 or 64'."""
    first = -(-low // step) * step
    below = value // step * step
    found = {max(first, below), max(first, below + step)}
    return choice(sorted(found - {value}))


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word most like `word`, whatever its case; '' if none is like it."""
    words = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), words, n=1)
    return words[found[0]] if found else ""


def all_divisors(value: int) -> list[int]:
    """The divisors of `value`, from 1 on."""
    small = [n for n in range(1, math.isqrt(value) + 1) if value % n == 0]
    return sorted({*small, *(value // n for n in small)})


def closest(values: Iterable[int], wish: int) -> list[int]:
    """The six values nearest to `wish`, in rising order."""
    return sorted(sorted(values, key=lambda n: abs(n - wish))[:6])


def choice(values: Iterable[object]) -> str:
    """A list in words, e.g. '1, 2 or 3'."""
    words = [str(value) for value in values]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def shown(value: object) -> str:
    """A value as Python writes it, in at most 60 characters."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write out integers of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}..."


def shown_path(path: str) -> str:
    """A path in messages: relative where it is below the current folder."""
    try:
        relative = os.path.relpath(path)
    except (ValueError, OSError):  # no path, another drive, no current folder
        relative = os.pardir
    text = printable(path if relative.startswith(os.pardir) else relative)
    return text if len(text) <= 200 else f"...{text[-197:]}"


def read_text(path: str, rule: str, remedy: str) -> str:
    """A text file in UTF-8.

    Raises:
      ConfigError: with this rule and remedy, if it cannot be read.
    """
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise mistake(
            f"{shown_path(path)} cannot be read ({reason})", rule, remedy
        ) from error


def printable(text: str) -> str:
    """A text with escapes in place of what cannot be printed."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
