# SPDX-License-Identifier: Apache-2.0
"""Floor 5. Reads a Chrome trace, plain or gzip, into columns; one event at a time.

A trace is an object with the list `traceEvents`, or that list alone, which may end
without its bracket. Kept are complete events ('X') and pairs of 'B' and 'E'. Neither
the text nor its events are ever whole in memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import io
import json
import math
import os
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from jaxmoe.config_base import ConfigError, mistake, shown_path

_CHUNK = 1 << 20  # characters
_RULE = "a trace is Chrome's JSON, plain or .gz, as JAX and PyTorch profilers write it"
_REMEDY = "Name a .trace.json.gz, a .json, or the folder given to jax.profiler"
_AGAIN = "Copy or profile it again"
_ENDINGS = (".trace.json.gz", ".trace.json")
_Name = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Line:
    """A thread or stream of the trace.

    Attributes:
      process: Number or name of its process; for PyTorch the device.
      process_name: As the trace gives it, '' if it does not.
      label: Of the process, e.g. 'GPU 0' (PyTorch).
      thread_name: As the trace gives it, '' if it does not.
    """

    process: int | str
    process_name: str
    label: str
    thread_name: str


@dataclasses.dataclass(frozen=True)
class Trace:
    """The events in columns.

    Attributes:
      path: As messages show it.
      names: The different names, each with its hlo_category ('' without).
      categories: The different categories.
      lines: The threads and streams.
      name, category, line: Indices into those, int64 per event.
      start_us, end_us: Microseconds, float64 per event.
      device: The device that the event itself names, -1 without, int64 per event.
      correlation: What ties a kernel to its launch, -1 without, int64 per event.
      hlo: Whether it is an operation of XLA, bool per event.
      step: Whether it is a jax.profiler.StepTraceAnnotation, bool per event.
      left_out: Events without a usable time.
    """

    path: str
    names: list[_Name]
    categories: list[str]
    lines: list[Line]
    name: np.ndarray
    category: np.ndarray
    line: np.ndarray
    start_us: np.ndarray
    end_us: np.ndarray
    device: np.ndarray
    correlation: np.ndarray
    hlo: np.ndarray
    step: np.ndarray
    left_out: int


def find(path: str | os.PathLike[str]) -> Path:
    """The trace file: the path itself, or the newest below a folder.

    Raises:
      ConfigError: if there is none, or the newest profile has one for each of several
        hosts.
    """
    path = Path(path)
    if not path.is_dir():
        return path
    found = [file for file in path.rglob("*") if file.name.endswith(_ENDINGS)]
    shown = shown_path(str(path))
    if not found:
        raise mistake(
            f"{shown} has no trace",
            "a folder of jax.profiler has plugins/profile/DATE/HOST.trace.json.gz",
            "Name another folder, or a file",
        )
    newest = max(found, key=lambda file: (file.stat().st_mtime_ns, str(file)))
    beside = sorted(file for file in found if file.parent == newest.parent)
    if len(beside) > 1:
        raise mistake(
            f"{shown} has {len(beside)} traces in {newest.parent.name}",
            "one trace is looked at at a time",
            f"Name one, e.g. {shown_path(str(beside[0]))}",
        )
    return newest


def read(path: str | os.PathLike[str]) -> Trace:
    """Reads a trace.

    Raises:
      ConfigError: if the file cannot be read or is no trace.
    """
    shown = shown_path(os.fspath(path))
    columns = _Columns()
    try:
        with _opened(path) as file:
            for event in _events(_Scanner(file), shown):
                columns.add(event)
    except ConfigError:
        raise
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise mistake(
            f"{shown} is damaged or cut off",
            "gzip has to end with its checksum",
            _AGAIN,
        ) from error
    except OSError as error:
        reason = error.strerror or "it is no file"
        raise mistake(f"{shown} cannot be read ({reason})", _RULE, _REMEDY) from error
    except (ValueError, RecursionError) as error:
        raise mistake(f"{shown} is not JSON", _RULE, _REMEDY) from error
    if not columns.phases:
        raise mistake(f"{shown} is JSON but no trace", _RULE, _REMEDY)
    return columns.trace(shown)


# JSON, piece by piece ----------------------------------------------------------------


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[TextIO]:
    """The text of a file, unpacked if its first bytes say so."""
    with open(path, "rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        plain: Any = gzip.GzipFile(fileobj=file) if packed else file
        yield io.TextIOWrapper(plain, "utf-8-sig", errors="replace", newline="\n")


class _Scanner:
    """Takes one value after another from a JSON text."""

    def __init__(self, file: TextIO):
        self._file, self._text, self._at = file, "", 0
        # Names of kernels and processes are not always clean.
        self._decode = json.JSONDecoder(strict=False).raw_decode

    def _more(self) -> bool:
        rest = self._text[self._at :]
        new = self._file.read(max(_CHUNK, len(rest)))
        self._text, self._at = rest + new, 0
        return bool(new)

    def peek(self) -> str:
        """The next character that is no space; '' at the end."""
        while True:
            while self._at < len(self._text):
                character = self._text[self._at]
                if character not in " \t\r\n":
                    return character
                self._at += 1
            if not self._more():
                return ""

    def take(self, characters: str) -> str:
        """The next character, which has to be one of these."""
        found = self.peek()
        if not found or found not in characters:
            raise ValueError(f"{found!r} where one of {characters!r} was expected")
        self._at += 1
        return found

    def value(self) -> Any:
        """The next value."""
        self.peek()
        while True:
            try:
                value, end = self._decode(self._text, self._at)
            except ValueError:
                if not self._more():
                    raise
                continue
            if end == len(self._text) and self._more():
                continue  # a number may go on
            self._at = end
            return value


def _events(scanner: _Scanner, shown: str) -> Iterator[Any]:
    """The elements of the list of events.

    Raises:
      ConfigError: if there is no such list, or it is cut off.
      ValueError: if the text is not JSON.
    """
    first = scanner.peek()
    if not first:
        raise mistake(f"{shown} is empty", _RULE, _REMEDY)
    if first == "[":
        yield from _elements(scanner, shown, closed=False)
        return
    if first != "{":
        scanner.value()  # raises if it is not even JSON
        raise mistake(f"{shown} is JSON but no trace", _RULE, _REMEDY)
    scanner.take("{")
    found = False
    mark = "," if scanner.peek() != "}" else scanner.take("}")
    while mark == ",":
        key = scanner.value()
        scanner.take(":")
        if key == "traceEvents" and scanner.peek() == "[":
            found = True
            yield from _elements(scanner, shown, closed=True)
        else:
            scanner.value()
        mark = scanner.take(",}")
    if not found:
        fact = f"{shown} has no list traceEvents"
        raise mistake(fact, _RULE, _REMEDY)


def _elements(scanner: _Scanner, shown: str, *, closed: bool) -> Iterator[Any]:
    """The elements of a list, which may lack its end unless it has to be `closed`."""
    scanner.take("[")
    while scanner.peek() not in ("]", ""):
        try:
            value = scanner.value()
        except ValueError:
            if scanner.peek() != "{":
                raise
            raise mistake(
                f"{shown} is cut off or broken in the middle of an event",
                "every event of a trace is whole",
                _AGAIN,
            ) from None
        yield value
        if scanner.peek() not in ("]", ""):
            scanner.take(",")
    if scanner.peek():
        scanner.take("]")
    elif closed:
        raise mistake(
            f"{shown} is cut off", "the list traceEvents ends with a bracket", _AGAIN
        )


# Events to columns -------------------------------------------------------------------


class _Columns:
    """Collects events."""

    def __init__(self):
        self.phases = 0
        self._left_out = 0
        self._names: dict[_Name, int] = {}
        self._categories: dict[str, int] = {}
        self._lines: dict[tuple[Any, Any], int] = {}
        self._open: dict[int, list[Any]] = {}
        self._words: dict[tuple[str, Any, Any], str] = {}
        self._whole = {
            name: array("q")
            for name in ("name", "category", "line", "device", "correlation")
        }
        self._times = {name: array("d") for name in ("start_us", "end_us")}
        self._marks = {name: array("b") for name in ("hlo", "step")}

    def add(self, event: Any) -> None:
        """Takes one event; what is none is passed over."""
        if not isinstance(event, dict):
            return
        phase = event.get("ph")
        self.phases += isinstance(phase, str)
        if phase == "X":
            self._complete(event, event.get("ts"), event.get("dur"))
        elif phase == "M":
            self._describe(event)
        elif phase == "B":
            self._open.setdefault(self._line(event), []).append(event)
        elif phase == "E":
            opened = self._open.get(self._line(event))
            if not opened:
                self._left_out += 1
                return
            begin = opened.pop()
            start, end = _number(begin.get("ts")), _number(event.get("ts"))
            duration = None if start is None or end is None else end - start
            self._complete(begin, start, duration)

    def _complete(self, event: dict[str, Any], start: Any, duration: Any) -> None:
        start, duration = _number(start), _number(duration)
        if start is None or duration is None or duration < 0:
            self._left_out += 1
            return
        args = _arguments(event)
        name = str(event.get("name", "")), str(args.get("hlo_category", ""))
        category = str(event.get("cat", ""))
        whole = self._whole
        whole["name"].append(self._names.setdefault(name, len(self._names)))
        number = self._categories.setdefault(category, len(self._categories))
        whole["category"].append(number)
        whole["line"].append(self._line(event))
        whole["device"].append(_index(args, "device", "device_ordinal"))
        whole["correlation"].append(_index(args, "correlation", "correlation_id"))
        self._times["start_us"].append(start)
        self._times["end_us"].append(start + duration)
        self._marks["hlo"].append("hlo_op" in args)
        self._marks["step"].append("step_num" in args)

    def _describe(self, event: dict[str, Any]) -> None:
        """Metadata: names of processes and threads."""
        args = _arguments(event)
        pid, tid = _key(event.get("pid")), _key(event.get("tid"))
        if event.get("name") == "process_name":
            self._words["process", pid, None] = str(args.get("name", ""))
        elif event.get("name") == "process_labels":
            self._words["label", pid, None] = str(args.get("labels", ""))
        elif event.get("name") == "thread_name":
            self._words["thread", pid, tid] = str(args.get("name", ""))

    def _line(self, event: dict[str, Any]) -> int:
        key = _key(event.get("pid")), _key(event.get("tid"))
        return self._lines.setdefault(key, len(self._lines))

    def trace(self, shown: str) -> Trace:
        """All that was added; what was begun and not ended is left out."""
        words = self._words
        lines = [
            Line(
                pid,
                words.get(("process", pid, None), ""),
                words.get(("label", pid, None), ""),
                words.get(("thread", pid, tid), ""),
            )
            for pid, tid in self._lines
        ]
        columns = {name: np.array(of, np.int64) for name, of in self._whole.items()}
        columns |= {name: np.array(of, np.float64) for name, of in self._times.items()}
        columns |= {name: np.array(of, np.bool_) for name, of in self._marks.items()}
        return Trace(
            path=shown,
            names=list(self._names),
            categories=list(self._categories),
            lines=lines,
            left_out=self._left_out + sum(map(len, self._open.values())),
            **columns,
        )


def _arguments(event: dict[str, Any]) -> dict[str, Any]:
    found = event.get("args")
    return found if isinstance(found, dict) else {}


def _key(value: Any) -> int | str:
    """A number or name of a process or thread."""
    return value if type(value) in (int, str) else str(value)


def _index(args: dict[str, Any], *names: str) -> int:
    """The first of these arguments that is a whole number, -1 without."""
    for name in names:
        value = args.get(name)
        if type(value) is str and value.isdecimal() and len(value) < 18:
            value = int(value)
        if type(value) is int and 0 <= value < 1 << 60:
            return value
    return -1


def _number(value: Any) -> float | None:
    """A finite number, also one that is written as a string."""
    if type(value) not in (int, float, str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
