# SPDX-License-Identifier: Apache-2.0
"""Floor 5. How much communication of a trace is hidden under computation.

On each device the times of the communication kernels are united, likewise those of the
computing ones. Communication is hidden where both run, exposed where it runs alone.

Intervals are arrays [n, 2] of beginnings and ends, apart and in order.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxmoe import trace_kernels
from jaxmoe.trace_file import Trace
from jaxmoe.trace_kernels import Kernels

_STEPS = "Steps"  # the line of a device on which jax.profiler marks its steps
_ANNOTATIONS = ("user_annotation", "gpu_user_annotation")  # of PyTorch


@dataclasses.dataclass(frozen=True)
class Part:
    """Times of one kind of communication, in milliseconds.

    Attributes:
      kernels: Their number.
      busy_ms: In which it ran.
      exposed_ms: In which it ran and nothing was computed.
    """

    kernels: float
    busy_ms: float
    exposed_ms: float

    @property
    def hidden_ms(self) -> float:
        """In which it ran while something was computed."""
        return self.busy_ms - self.exposed_ms

    @property
    def hidden_fraction(self) -> float | None:
        """Hidden of busy time, None without communication."""
        return self.hidden_ms / self.busy_ms if self.busy_ms else None

    def to_json(self) -> dict[str, Any]:
        return {
            "kernels": _rounded(self.kernels),
            "busy_ms": _rounded(self.busy_ms),
            "hidden_ms": _rounded(self.hidden_ms),
            "exposed_ms": _rounded(self.exposed_ms),
            "hidden_fraction": _rounded(self.hidden_fraction),
        }


@dataclasses.dataclass(frozen=True)
class Figures:
    """Times of a device, of a section of it, or their mean over devices.

    Attributes:
      span_ms: From the first kernel to the end of the last.
      compute_ms: In which something was computed.
      communication: All of it.
      classes: The parts of it, by their names.
    """

    span_ms: float
    compute_ms: float
    communication: Part
    classes: dict[str, Part]

    @property
    def busy(self) -> bool:
        """Whether anything ran."""
        return self.compute_ms > 0 or self.communication.busy_ms > 0

    def to_json(self) -> dict[str, Any]:
        whole = self.communication
        return {
            "span_ms": _rounded(self.span_ms),
            "compute_ms": _rounded(self.compute_ms),
            "communication_ms": _rounded(whole.busy_ms),
            "hidden_ms": _rounded(whole.hidden_ms),
            "hidden_fraction": _rounded(whole.hidden_fraction),
            "exposed_ms": _rounded(whole.exposed_ms),
            "classes": {name: part.to_json() for name, part in self.classes.items()},
        }


@dataclasses.dataclass(frozen=True)
class Device:
    """What ran on one device; intervals are milliseconds [n, 2], apart and in order.

    Attributes:
      name: e.g. 'GPU 0'.
      figures: Its times.
      compute: When something was computed.
      communication: When something was communicated.
      exposed: When something was communicated and nothing computed.
    """

    name: str
    figures: Figures
    compute: np.ndarray
    communication: np.ndarray
    exposed: np.ndarray


@dataclasses.dataclass(frozen=True)
class Section:
    """Times of what an annotation holds; the mean over the devices that it ran on.

    Attributes:
      count: How often the annotation occurs.
      figures: Of all its occurrences together.
    """

    count: int
    figures: Figures


@dataclasses.dataclass(frozen=True)
class Overlap:
    """The whole analysis.

    Attributes:
      figures: The mean over devices.
      devices: One by one.
      sections: By the names of the annotations.
      left_out: Events that had no usable time.
    """

    figures: Figures
    devices: tuple[Device, ...]
    sections: dict[str, Section]
    left_out: int

    def to_json(self) -> dict[str, Any]:
        """What --json prints: times in milliseconds."""
        return {
            **self.figures.to_json(),
            "devices": [
                {"device": device.name, **device.figures.to_json()}
                for device in self.devices
            ],
            "sections": {
                name: {"count": section.count, **section.figures.to_json()}
                for name, section in self.sections.items()
            },
            "left_out_events": self.left_out,
        }


def analyse(
    trace: Trace, patterns: Sequence[tuple[str, str]] = (), section: str = ""
) -> Overlap:
    """Times of computation and communication in a trace.

    Args:
      trace: The events.
      patterns: As for `trace_kernels.find`.
      section: A regular expression; events with such names, besides annotations, are
        sections too. '': none.

    Raises:
      ConfigError: if no kernel is found.
    """
    kernels = trace_kernels.find(trace, patterns)
    names = kernels.devices
    devices, held = [], {}
    for number in sorted(range(len(kernels.devices)), key=lambda n: _natural(names[n])):
        name = names[number]
        mine = np.flatnonzero(kernels.device == number)
        if not len(mine):
            continue
        compute = _union(kernels, mine[kernels.computes[mine]])
        exchange = _union(kernels, mine[kernels.communicates[mine]])
        held[number] = _Held(mine, compute)
        figures = _figures(kernels, held[number], mine)
        exposed = without(exchange, compute)
        devices.append(Device(name, figures, compute, exchange, exposed))
    sections = _sections(trace, kernels, held, section)
    figures = mean([device.figures for device in devices])
    return Overlap(figures, tuple(devices), sections, trace.left_out)


@dataclasses.dataclass(frozen=True)
class _Held:
    """Kernels of a device, and when it computes."""

    index: np.ndarray
    compute: np.ndarray


def _union(kernels: Kernels, index: np.ndarray) -> np.ndarray:
    return union(kernels.start_ms[index], kernels.end_ms[index])


def _figures(
    kernels: Kernels,
    held: _Held,
    index: np.ndarray,
    window: np.ndarray | None = None,
) -> Figures:
    """Times of some kernels of a device, inside a window if there is one.

    They are hidden under all that the device computes, also for others.
    """
    if window is not None:
        first, last = (window[0, 0], window[-1, 1]) if len(window) else (0.0, 0.0)
        index = index[
            (kernels.end_ms[index] > first) & (kernels.start_ms[index] < last)
        ]
    kind = kernels.kind[index]

    def times(chosen: np.ndarray) -> np.ndarray:
        found = _union(kernels, index[chosen])
        return found if window is None else common(found, window)

    def part(chosen: np.ndarray) -> Part:
        busy = times(chosen)
        exposed = length(without(busy, held.compute))
        return Part(int(chosen.sum()), length(busy), exposed)

    numbers = [int(number) for number in np.unique(kind) if number > 1]
    classes = {kernels.classes[number]: part(kind == number) for number in numbers}
    if window is None:
        span = float(kernels.end_ms[index].max() - kernels.start_ms[index].min())
    else:
        span = length(window)
    return Figures(span, length(times(kind == 0)), part(kind > 1), classes)


def mean(figures: Sequence[Figures]) -> Figures:
    """The mean of times; a class that one of them lacks is 0 there."""
    names = dict.fromkeys(name for each in figures for name in each.classes)

    def part(parts: list[Part]) -> Part:
        columns = zip(*(dataclasses.astuple(one) for one in parts), strict=True)
        return Part(*(sum(column) / len(figures) for column in columns))

    return Figures(
        sum(each.span_ms for each in figures) / len(figures),
        sum(each.compute_ms for each in figures) / len(figures),
        part([each.communication for each in figures]),
        {n: part([f.classes[n] for f in figures if n in f.classes]) for n in names},
    )


# Sections ----------------------------------------------------------------------------


def _sections(
    trace: Trace, kernels: Kernels, held: dict[int, _Held], pattern: str
) -> dict[str, Section]:
    """Figures of what annotations hold.

    A kernel belongs to the annotations around its launch on the same thread, where the
    trace tells launches. An annotation around none of them, unless it is PyTorch's on
    the host, holds what runs while it lasts.
    """
    occurrences: dict[str, list[int]] = {}
    for event in _annotations(trace, kernels, pattern):
        occurrences.setdefault(trace.names[trace.name[event]][0], []).append(event)
    launches = _Launches(trace, kernels)
    sections = {}
    for name, events in occurrences.items():
        figures = []
        of_kernel = launches.occurrence(events)
        on_host = trace.categories[trace.category[events[0]]] == _ANNOTATIONS[0]
        if not (launches.known and on_host) and (of_kernel < 0).all():
            of_kernel = None  # launched by another thread, or not told
        for number, device in held.items():
            if of_kernel is None:
                window = _window(trace, kernels, events, number)
                found = _figures(kernels, device, device.index, window)
                figures += [found] if found.busy else []
                continue
            index = device.index[of_kernel[device.index] >= 0]
            if len(index):
                found = _figures(kernels, device, index)
                span = _spans(kernels, index, of_kernel[index], len(events))
                figures.append(dataclasses.replace(found, span_ms=span))
        if figures:
            sections[name] = Section(len(events), mean(figures))
    return sections


def _spans(
    kernels: Kernels, index: np.ndarray, occurrence: np.ndarray, count: int
) -> float:
    """From the first kernel of an occurrence to the end of its last, summed."""
    start, end = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(start, occurrence, kernels.start_ms[index])
    np.maximum.at(end, occurrence, kernels.end_ms[index])
    return float((end - start)[np.isfinite(start)].sum())


def _annotations(trace: Trace, kernels: Kernels, pattern: str) -> list[int]:
    """The events that are sections.

    PyTorch's annotations on the host, or without those the ones on the device; the
    steps that jax.profiler marks on devices, or without those the ones on the host;
    and what has a name that `pattern` finds.
    """
    categories = np.array(trace.categories)
    on_steps = np.array([line.thread_name == _STEPS for line in trace.lines], bool)
    groups = [categories[trace.category] == name for name in _ANNOTATIONS]
    groups += [on_steps[trace.line], trace.step]
    chosen = next((group for group in groups if group.any()), groups[0])
    if pattern:
        search = re.compile(pattern).search
        ends = "end: "  # how JAX on CPU marks that an operation is over
        named = [bool(search(n)) and not n.startswith(ends) for n, _ in trace.names]
        chosen = chosen | np.array(named, bool)[trace.name]
    return np.flatnonzero(chosen & (kernels.device < 0)).tolist()


def _window(
    trace: Trace, kernels: Kernels, events: list[int], device: int
) -> np.ndarray:
    """When one of some annotations lasts: those of this device, and of no device."""
    of = [
        kernels.process.get(trace.lines[trace.line[event]].process) for event in events
    ]
    chosen = [e for e, d in zip(events, of, strict=True) if d in (None, device)]
    return _union(kernels, np.array(chosen, np.int64))


class _Launches:
    """Which kernels were launched inside which annotations.

    Attributes:
      known: Whether the trace tells the launches of kernels.
    """

    def __init__(self, trace: Trace, kernels: Kernels):
        self._trace = trace
        told = trace.correlation >= 0
        launch = np.flatnonzero(told & (kernels.device < 0))
        kernel = np.flatnonzero(told & (kernels.device >= 0))
        launch = launch[np.argsort(trace.correlation[launch], kind="stable")]
        numbers = trace.correlation[launch]
        at = np.searchsorted(numbers, trace.correlation[kernel])
        at = np.minimum(at, max(len(launch) - 1, 0))
        fits = numbers[at] == trace.correlation[kernel] if len(launch) else at < 0
        kernel, launch = kernel[fits], launch[at[fits]] if len(launch) else launch
        # In the order of lines and times, so that annotations hold stretches of it.
        order = np.lexsort((trace.start_us[launch], trace.line[launch]))
        self._kernel, self._launch = kernel[order], launch[order]
        self.known = bool(len(kernel))

    def occurrence(self, annotations: list[int]) -> np.ndarray:
        """In which of them, by its place, an event was launched; -1: in none.

        The launch was on the thread of the annotation. The later one counts.
        """
        trace = self._trace
        line, start = trace.line[self._launch], trace.start_us[self._launch]
        found = np.full(len(trace.name), -1)
        for place, event in enumerate(annotations):
            first, last = np.searchsorted(
                line, [trace.line[event], trace.line[event] + 1]
            )
            times = start[first:last]
            begin = first + np.searchsorted(times, trace.start_us[event])
            end = first + np.searchsorted(times, trace.end_us[event])
            found[self._kernel[begin:end]] = place
        return found


# Intervals ---------------------------------------------------------------------------


def union(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The times covered by any of some intervals, which may overlap; empty ones go."""
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    start, end = start[end > start], end[end > start]
    if not len(start):
        return np.zeros((0, 2))
    reached = np.maximum.accumulate(end)
    first = np.append(True, start[1:] > reached[:-1])
    return np.stack([start[first], reached[np.append(first[1:], True)]], axis=1)


def length(intervals: np.ndarray) -> float:
    """The sum of their lengths."""
    return float((intervals[:, 1] - intervals[:, 0]).sum())


def common(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The times that are in both."""
    return _swept(a, b, 3)


def without(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The times that are in the first and not in the second."""
    return _swept(a, b, 1)


def _swept(a: np.ndarray, b: np.ndarray, wanted: int) -> np.ndarray:
    """The times where 1 (inside a) plus 2 (inside b) is the wanted number."""
    times = np.concatenate([a[:, 0], a[:, 1], b[:, 0], b[:, 1]])
    steps = np.repeat([1, -1, 2, -2], [len(a), len(a), len(b), len(b)])
    order = np.argsort(times, kind="stable")
    times, state = times[order], np.cumsum(steps[order])
    return union(*(x[state[:-1] == wanted] for x in (times[:-1], times[1:])))


def _natural(name: str) -> list[tuple[str, int]]:
    """A key that sorts 'GPU 10' behind 'GPU 9'."""
    return [(word, int(n or 0)) for word, n in re.findall(r"(\D*)(\d{0,18})", name)]


def _rounded(value: float | None) -> float | None:
    """Milliseconds to the nanosecond."""
    return None if value is None else round(float(value), 6)
