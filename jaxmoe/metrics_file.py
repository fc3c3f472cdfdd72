# SPDX-License-Identifier: Apache-2.0
"""Floor 0. The format of metrics.jsonl: one JSON object per logged step, `step` first.

JSON has no NaN. What is not finite is written as the string "NaN", "Infinity" or
"-Infinity", and read() (like Python's float()) makes numbers of them again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

METRICS = "metrics.jsonl"
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_NAMES = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}

_log = logging.getLogger(__name__)


def plain(value: Any) -> Any:
    """A value as JSON takes it: arrays as lists, what is not finite as a string."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else _NAMES[repr(float(value))]
    array = np.asarray(value)
    if array.dtype == object:
        raise TypeError(
            f"a {type(value).__name__} is not a metric: use numbers or lists"
        )
    return plain(array.tolist())


def numbers(value: Any) -> Any:
    """The reverse of plain() for what is not finite."""
    if isinstance(value, dict):
        return {key: numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [numbers(item) for item in value]
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value


def _is_metric(values: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(values, dict) and isinstance(values.get("step"), int | float)


def lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The whole lines of a metrics file and what they say. Broken ones are left out."""
    with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
        for number, line in enumerate(file, 1):
            values = None
            with contextlib.suppress(ValueError):
                values = json.loads(line)
            if line.endswith("\n") and _is_metric(values):
                yield line, values
            elif line.endswith("\n"):  # half a line at the end is what a kill leaves
                _log.warning("skipped line %d of %s: it is not a metric", number, path)


def read(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The logged steps of a run folder, in the order written; none if there is no file.

    Half a line at the end, as a killed run leaves it, is left out.
    """
    path = Path(workdir) / METRICS
    if not path.exists():
        return []
    return [numbers(values) for _, values in lines(path)]
