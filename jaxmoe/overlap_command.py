# SPDX-License-Identifier: Apache-2.0
"""Floor 7. `jaxmoe overlap`: how much communication of a profile is hidden.

    jaxmoe overlap TRACE [--pattern=CLASS=REGEX]... [--section=REGEX]
                   [--figure=FILE] [--json]

TRACE is a file of jax.profiler (CPU, GPU, TPU) or of the PyTorch profiler, or a folder
in which the newest one is taken. Nothing of JAX is imported.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from jaxmoe import trace_file, trace_kernels
from jaxmoe.config_base import mistake, printable, shown_path
from jaxmoe.overlap import Figures, Overlap, Part, analyse
from jaxmoe.pipeline import draw

_MOST_SECTIONS = 20  # in text: those with most communication
_MOST_NAME = 32  # characters of a name
_COLOURS = {
    "computation": "#b7d2ef",
    "communication, hidden": "#74bd74",
    "communication, exposed": "#d55e00",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    parser.add_argument("trace")
    parser.add_argument("--pattern", action="append", default=[])
    parser.add_argument("--section", default="")
    parser.add_argument("--figure", default="")
    parser.add_argument("--json", action="store_true")


def run(options: argparse.Namespace) -> int:
    """Prints busy, hidden and exposed times, and draws them.

    Returns:
      The exit code, 0.

    Raises:
      ConfigError: for a mistake in the options or in the file.
    """
    patterns = trace_kernels.check_patterns(options.pattern)
    trace_kernels.check_regex("--section", options.section)
    if options.figure:
        draw.check_figure(options.figure)
    trace = trace_file.read(trace_file.find(options.trace))
    overlap = analyse(trace, patterns, options.section)
    if options.figure:
        _draw(options.figure, overlap)
    print(f"{trace.path}\n")
    _print(overlap)
    if options.json:
        print(json.dumps(overlap.to_json()))
    return 0


# Text --------------------------------------------------------------------------------


def _print(overlap: Overlap) -> None:
    """Three tables: devices, classes and sections; times in milliseconds."""
    print(_head("device", "span ms", "compute ms"))
    for device in overlap.devices:
        print(_line(device.name, device.figures))
    if len(overlap.devices) > 1:
        print(_line("mean", overlap.figures))
    print(f"\n{_head('class', '', 'kernels')}")
    classes = overlap.figures.classes
    for name, part in sorted(classes.items(), key=lambda x: -x[1].busy_ms):
        print(_row(name, "", f"{part.kernels:g}", part))
    if not classes:
        print("no communication")
    sections = sorted(
        overlap.sections.items(),
        key=lambda item: -item[1].figures.communication.busy_ms,
    )
    if sections:
        print(f"\n{_head('section', 'span ms', 'compute ms')}")
    for name, section in sections[:_MOST_SECTIONS]:
        count = f" x{section.count}" if section.count > 1 else ""
        print(_line(name, section.figures, count))
    if len(sections) > _MOST_SECTIONS:
        print(f"and {len(sections) - _MOST_SECTIONS} more; --json has all")
    if overlap.left_out:
        print(f"\n{overlap.left_out} events without a usable time were left out")


def _head(*names: str) -> str:
    first, *numbers = names
    words = (*numbers, "busy ms", "hidden", "exposed ms")
    return f"{first:{_MOST_NAME}}" + "".join(f"{word:>12}" for word in words)


def _line(name: str, figures: Figures, count: str = "") -> str:
    times = f"{figures.span_ms:.2f}", f"{figures.compute_ms:.2f}"
    return _row(name, *times, figures.communication, count)


def _row(name: str, first: str, second: str, part: Part, count: str = "") -> str:
    name, room = printable(name), _MOST_NAME - len(count)
    name = (name if len(name) <= room else f"{name[: room - 3]}...") + count
    share = part.hidden_fraction
    hidden = "-" if share is None else f"{share:.1%}"
    words = first, second, f"{part.busy_ms:.2f}", hidden, f"{part.exposed_ms:.2f}"
    return f"{name:{_MOST_NAME}}" + "".join(f"{word:>12}" for word in words)


# Figure ------------------------------------------------------------------------------


def _draw(path: str, overlap: Overlap) -> None:
    """Draws two lanes per device: computation, and communication below it."""
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    devices = overlap.devices
    size = 12.0, min(1.3 + 0.55 * len(devices), 40.0)
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    axes = figure.subplots()
    for row, device in enumerate(devices):
        lanes = zip(
            (device.compute, device.communication, device.exposed),
            (row - 0.4, row, row),
            _COLOURS.values(),
            strict=True,
        )
        for spans, top, colour in lanes:
            axes.add_collection(
                PolyCollection(list(_boxes(spans, top, 0.38)), facecolor=colour)
            )
    end = max((d.figures.span_ms for d in devices), default=0.0)
    ends = [
        spans[-1, 1]
        for d in devices
        for spans in (d.compute, d.communication)
        if len(spans)
    ]
    axes.set_xlim(0, max([end, *ends]) or 1)
    axes.set_ylim(len(devices) - 0.5, -0.5)
    axes.set_yticks(range(len(devices)), [printable(d.name)[:32] for d in devices])
    axes.set_xlabel("milliseconds since the first kernel")
    share = overlap.figures.communication.hidden_fraction
    if share is not None:
        axes.set_title(f"{share:.1%} of communication hidden", loc="right", fontsize=9)
    patches = [Patch(color=colour, label=name) for name, colour in _COLOURS.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, fontsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    try:
        figure.savefig(path, format=Path(path).suffix[1:], dpi=130)
    except OSError as error:
        raise mistake(
            f"{shown_path(path)} cannot be written ({error.strerror})",
            "a figure goes into a folder that exists and can be written",
            "Name another file",
        ) from error


def _boxes(spans: np.ndarray, top: float, height: float) -> np.ndarray:
    """The corners [n, 4, 2] of a rectangle for each interval."""
    x = spans[:, [0, 1, 1, 0]]
    y = np.broadcast_to([top, top, top + height, top + height], x.shape)
    return np.stack([x, y], axis=-1)
