# SPDX-License-Identifier: Apache-2.0
"""Floor 0. A simulated schedule as a timeline: text, SVG or PNG; a row is a rank.

In text an operation is a letter and the number of its microbatch, with dashes up to its
end; dots are idle time. The letters are F forward, B backward, I backward for inputs
(Bi) and W backward for weights, small in direction 1. So `F5b2---` is the forward of
microbatch 5 in direction 0, overlapped with the backward of 2 in direction 1.

In figures a colour is a kind, its darker shade is direction 1, and an F&B has its
forward above its backward; colours are near those of the figure in DualPipe's README.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Iterator
from pathlib import Path

from jaxmoe.config_base import mistake, shown_path
from jaxmoe.pipeline.schedule import Operation
from jaxmoe.pipeline.simulate import Timeline

_LETTERS = {"F": "F", "B": "B", "Bi": "I", "W": "W"}
_NAMES = {
    "F": "forward",
    "B": "backward",
    "Bi": "backward for inputs",
    "W": "backward for weights",
}
_COLOURS = {  # kind: direction 0, direction 1
    "F": ("#fcd5a0", "#f0a24c"),
    "B": ("#b9dfb4", "#74bd74"),
    "Bi": ("#b5e3e0", "#6cc3bd"),
    "W": ("#b7d2ef", "#77a9dc"),
}
_TERMINAL = {"F": (223, 215), "B": (151, 114), "Bi": (152, 116), "W": (153, 111)}
_MOST_BLOCKS = 12  # blocks of text; a longer timeline is left to a figure

_UNIT = 24.0  # pixels for the shortest operation
_ROW = 26.0
_LEFT, _TOP, _BOTTOM = 62.0, 30.0, 62.0
_MOST_PIXELS = 12_000  # of a PNG; a longer one is drawn smaller


@dataclasses.dataclass(frozen=True)
class _Box:
    """A rectangle of a figure; times on the x axis, ranks on the y axis.

    Attributes:
      start: Its left edge.
      end: Its right edge.
      top: Its upper edge.
      height: Downwards.
      colour: Of its area.
      text: The microbatch.
      title: The operation with its times, for who points at it.
    """

    start: float
    end: float
    top: float
    height: float
    colour: str
    text: str
    title: str


def text(timeline: Timeline, *, width: int = 80, colour: bool = False) -> str:
    """The timeline in characters.

    Args:
      timeline: What to draw.
      width: Characters per line; a longer timeline goes on in blocks below.
      colour: Whether to colour it for a terminal.

    Returns:
      Lines, each with a newline; only a hint if it took more than 12 blocks.
    """
    schedule = timeline.schedule
    two_ways = schedule.num_directions == 2
    head = len(f"rank {schedule.num_ranks - 1}  ")
    per_time = _characters_per_time(timeline)
    total = round(timeline.makespan * per_time)
    room = max(width - head, 8)
    if total > room * _MOST_BLOCKS:
        return "The timeline is too long for text; a figure holds it.\n"
    room -= room % math.ceil(per_time)  # blocks begin at whole times
    rows = [_row(timeline, rank, per_time, total) for rank in range(schedule.num_ranks)]
    lines = []
    for first in range(0, total, room):
        block = slice(first, min(first + room, total))
        lines.append(" " * head + _ruler(total, per_time)[block])
        for rank, row in enumerate(rows):
            lines.append(f"rank {rank}".ljust(head) + _joined(row[block], colour))
    legend = "F forward, B backward, I backward for inputs, W backward for weights"
    lines.append(legend + ("; small in direction 1" if two_ways else ""))
    return "".join(f"{line.rstrip()}\n" for line in lines)


def write_figure(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Draws a timeline into a file, as SVG or PNG by the end of its name.

    Raises:
      ConfigError: for another end, or a file that cannot be written.
    """
    check_figure(path)
    try:
        if Path(path).suffix == ".svg":
            Path(path).write_text(svg(timeline), "utf-8")
        else:
            _write_png(timeline, path)
    except OSError as error:
        raise mistake(
            f"{shown_path(os.fspath(path))} cannot be written ({error.strerror})",
            "a figure goes into a folder that exists and can be written",
            "Name another file",
        ) from error


def check_figure(path: str | os.PathLike[str]) -> None:
    """Checks the name of a figure.

    Raises:
      ConfigError: if it ends neither with .svg nor with .png.
    """
    if Path(path).suffix not in (".svg", ".png"):
        raise mistake(
            f"{shown_path(os.fspath(path))} is no name of a figure",
            "figures are drawn as .svg or .png",
            f"Name it {shown_path(str(Path(path).with_suffix('.svg')))}",
        )


def svg(timeline: Timeline) -> str:
    """The timeline as an SVG document."""
    scale, width, height = _size(timeline)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}"'
        f' viewBox="0 0 {width:g} {height:g}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>',
        f'<text x="{_LEFT:g}" y="18" font-size="13">{_title(timeline)}</text>',
    ]
    for rank in range(timeline.schedule.num_ranks):
        y = _TOP + _ROW * (rank + 0.65)
        parts.append(f'<text x="8" y="{y:g}">rank {rank}</text>')
    for box in _boxes(timeline):
        x, y = _LEFT + box.start * scale, _TOP + box.top * _ROW
        w, h = (box.end - box.start) * scale, box.height * _ROW
        parts.append(
            f'<g><title>{box.title}</title><rect x="{x:.2f}" y="{y:.2f}"'
            f' width="{w:.2f}" height="{h:.2f}" fill="{box.colour}" stroke="#444444"'
            f' stroke-width="0.6"/><text x="{x + w / 2:.2f}" y="{y + h / 2 + 4:.2f}"'
            f' text-anchor="middle">{box.text}</text></g>'
        )
    bottom = _TOP + timeline.schedule.num_ranks * _ROW
    for time in _ticks(timeline):
        x = _LEFT + time * scale
        parts.append(
            f'<text x="{x:.2f}" y="{bottom + 14:g}" text-anchor="middle"'
            f' fill="#666666">{time:g}</text>'
        )
    for x, kind, direction, words in _legend(timeline):
        colour = _COLOURS[kind][direction]
        parts.append(
            f'<rect x="{x:g}" y="{bottom + 28:g}" width="14" height="14"'
            f' fill="{colour}" stroke="#444444" stroke-width="0.6"/>'
            f'<text x="{x + 20:g}" y="{bottom + 39:g}">{words}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _write_png(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """The same figure by matplotlib."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    scale, width, height = _size(timeline)
    figure = Figure(figsize=(width / 100, height / 100), dpi=100)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    font = {"fontsize": 7.5, "va": "center"}
    axes.text(_LEFT, 14, _title(timeline), fontsize=9.5, va="center")
    for rank in range(timeline.schedule.num_ranks):
        axes.text(8, _TOP + _ROW * (rank + 0.5), f"rank {rank}", **font)
    for box in _boxes(timeline):
        x, y = _LEFT + box.start * scale, _TOP + box.top * _ROW
        w, h = (box.end - box.start) * scale, box.height * _ROW
        axes.add_patch(Rectangle((x, y), w, h, fc=box.colour, ec="#444444", lw=0.5))
        axes.text(x + w / 2, y + h / 2, box.text, ha="center", **font)
    bottom = _TOP + timeline.schedule.num_ranks * _ROW
    for time in _ticks(timeline):
        x = _LEFT + time * scale
        axes.text(x, bottom + 10, f"{time:g}", ha="center", color="#666666", **font)
    for x, kind, direction, words in _legend(timeline):
        colour = _COLOURS[kind][direction]
        box = Rectangle((x, bottom + 28), 14, 14, fc=colour, ec="#444444", lw=0.5)
        axes.add_patch(box)
        axes.text(x + 20, bottom + 35, words, **font)
    figure.savefig(path, dpi=100 * min(1.0, _MOST_PIXELS / width))


# What both figures show ---------------------------------------------------------------


def _boxes(timeline: Timeline) -> Iterator[_Box]:
    """The rectangles of all operations; an F&B is two, one above the other."""
    lines = zip(timeline.schedule.ranks, timeline.times, strict=True)
    for rank, (line, spans) in enumerate(lines):
        for operation, (start, end) in zip(line, spans, strict=True):
            parts = operation.parts
            height = 0.92 / len(parts)
            for i, part in enumerate(parts):
                yield _Box(
                    start=start,
                    end=end,
                    top=rank + 0.04 + i * height,
                    height=height,
                    colour=_COLOURS[part.kind][part.direction],
                    text=str(part.microbatch),
                    title=f"{operation}, {start:g} to {end:g}".replace("&", "&amp;"),
                )


def _size(timeline: Timeline) -> tuple[float, float, float]:
    """Pixels per unit of time, and the width and height of a figure."""
    shortest = min(end - start for spans in timeline.times for start, end in spans)
    scale = _UNIT / shortest
    *_, (x, _, _, words) = _legend(timeline)
    legend = x + _legend_width(words)
    width = max(_LEFT + timeline.makespan * scale + 20, legend, 760.0)
    return scale, width, _TOP + timeline.schedule.num_ranks * _ROW + _BOTTOM


def _title(timeline: Timeline) -> str:
    schedule = timeline.schedule
    return (
        f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_microbatches}"
        f" microbatches; makespan {timeline.makespan:g}, bubble {timeline.bubble:g}"
    )


def _ticks(timeline: Timeline) -> list[float]:
    """About twenty round times."""
    step = 10 ** math.floor(math.log10(timeline.makespan / 10))
    step = next(n * step for n in (1, 2, 5, 10) if timeline.makespan / n / step <= 20)
    return [i * step for i in range(int(timeline.makespan / step) + 1)]


def _legend(timeline: Timeline) -> Iterator[tuple[float, str, int, str]]:
    """Where the colours that occur are explained: x, kind, direction, words."""
    lines = timeline.schedule.ranks
    kinds = {part.kind for line in lines for o in line for part in o.parts}
    x = _LEFT
    for kind in _NAMES:
        for direction in range(timeline.schedule.num_directions):
            if kind in kinds:
                words = _NAMES[kind] if direction == 0 else "direction 1"
                yield x, kind, direction, words
                x += _legend_width(words)


def _legend_width(words: str) -> float:
    """Pixels of a box with its words."""
    return 34 + 5.6 * len(words)


# Text ---------------------------------------------------------------------------------


def _label(operation: Operation) -> str:
    """Letters and microbatches, e.g. 'F5b2'."""
    words = ""
    for part in operation.parts:
        letter = _LETTERS[part.kind]
        words += f"{letter.lower() if part.direction else letter}{part.microbatch}"
    return words


def _characters_per_time(timeline: Timeline) -> float:
    """So many that every operation has room for its label: n or 1 / n."""
    pairs = {
        (len(_label(operation)), round(end - start, 9))
        for line, spans in zip(timeline.schedule.ranks, timeline.times, strict=True)
        for operation, (start, end) in zip(line, spans, strict=True)
    }
    number = _whole(max(length / time for length, time in pairs))
    if all(float(time * number).is_integer() for _, time in pairs):
        return number
    return _whole(max((length + 1) / time for length, time in pairs))  # for rounding


def _whole(number: float) -> float:
    """The next larger n or 1 / n."""
    return math.ceil(number) if number >= 1 else 1 / math.floor(1 / number)


def _row(
    timeline: Timeline, rank: int, per_time: float, total: int
) -> list[tuple[str, int]]:
    """The characters of a rank, each with its colour; 0 is none."""
    row = [(".", 0)] * total
    line, spans = timeline.schedule.ranks[rank], timeline.times[rank]
    for operation, (start, end) in zip(line, spans, strict=True):
        first, last = round(start * per_time), round(end * per_time)
        part = operation.parts[-1]
        colour = _TERMINAL[part.kind][part.direction]
        words = _label(operation).ljust(last - first, "-")
        if operation.backward:  # its forward keeps the colour of a forward
            size = len(_label(operation.parts[0]))
            front = _TERMINAL["F"][operation.direction]
            row[first : first + size] = [(c, front) for c in words[:size]]
            first, words = first + size, words[size:]
        row[first:last] = [(c, colour) for c in words]
    return row


def _joined(row: list[tuple[str, int]], colour: bool) -> str:
    """The characters as a string, with the codes of a terminal if colour is wanted."""
    if not colour:
        return "".join(character for character, _ in row)
    words = ""
    for number, group in itertools.groupby(row, key=lambda pair: pair[1]):
        run = "".join(character for character, _ in group)
        words += f"\x1b[30;48;5;{number}m{run}\x1b[0m" if number else run
    return words


def _ruler(total: int, per_time: float) -> str:
    """Times above the rows."""
    step = 5 * math.ceil(per_time) if per_time > 1 else 10
    words = ""
    for at in range(0, total, step):
        mark = f"{at / per_time:.0f}"
        words = words.ljust(at) + (mark if at + len(mark) <= total else "")
    return words.ljust(total)
