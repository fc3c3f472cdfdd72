# SPDX-License-Identifier: Apache-2.0
"""Floor 5. Figures of a run, drawn from its metrics.jsonl and its pipeline's schedule.

    plots/loss.png            loss in all and per task
    plots/learning_rate.png   the schedule as it was applied
    plots/expert_load.png     per MoE layer: experts x steps, colour = load / mean load
    plots/device_load.png     the same of devices, where experts are on several
    plots/balance.png         load_max_over_mean and load_cv
    plots/pipeline.png        who does what when in a step, by the schedule's costs

A figure whose metrics were not logged is left out. Figures are objects of their own:
pyplot, its global state and its choice of a screen are never touched.

Legend: T logged steps, L MoE layers, E experts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxmoe import metrics_file
from jaxmoe.pipeline import draw
from jaxmoe.pipeline.simulate import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[dict[str, Any]]

_INK = "#222222"
_GRID = "#dddddd"
_COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
)  # Okabe-Ito
_MOST_LAYERS = 24  # drawn in one figure; of more, so many evenly chosen
_MOST_COLUMNS = 300  # of a heat map; more logged steps are averaged
_MANY = 100  # points of a line; with twice as many, its running mean is drawn too
_DPI = 130


def write_plots(
    workdir: str | os.PathLike[str], timeline: Timeline | None = None
) -> list[Path]:
    """Draws the figures of a run folder into plots/.

    Args:
      workdir: The run folder.
      timeline: Of its pipeline's schedule; None: it has no pipeline.

    Returns:
      The files written, in the order of the module's table.
    """
    rows = metrics_file.read(workdir)
    drawings: tuple[tuple[str, Callable[[Rows], Figure | None]], ...] = (
        ("loss", _loss),
        ("learning_rate", _learning_rate),
        ("expert_load", partial(_load_map, key="expert_load", what="expert")),
        ("device_load", partial(_load_map, key="device_load", what="device")),
        ("balance", _balance),
    )
    writers: list[tuple[str, Callable[[str], None]]] = [
        (name, partial(figure.savefig, format="png", dpi=_DPI))
        for name, draw_rows in drawings
        if (figure := draw_rows(rows)) is not None
    ]
    if timeline is not None:
        writers.append(("pipeline", partial(draw.write_figure, timeline)))
    written = []
    for name, write in writers:
        path = Path(workdir) / "plots" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}")
        write(str(temporary))
        os.replace(temporary, path)
        written.append(path)
    return written


# Parts -----------------------------------------------------------------------------


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def _dress(axes: Axes, *, x: str | None, y: str) -> None:
    """Labels, a faint grid and no box."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(True, color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, labelsize=9)
    axes.set_ylabel(y, color=_INK)
    if x:
        axes.set_xlabel(x, color=_INK)
        _whole_numbers(axes.xaxis)


def _words(key: str) -> str:
    return key.replace("_", " ")


def _whole_numbers(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=11, color=_INK)


def _series(rows: Rows, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of the lines that have a number under a key."""
    points = [
        (row["step"], row[key]) for row in rows if isinstance(row.get(key), int | float)
    ]
    table = np.asarray(points, np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _is_long(rows: Rows) -> bool:
    return len(rows) > 2 * _MANY


def _running_mean(values_T: np.ndarray) -> np.ndarray:
    """The mean over a window around each entry, of those entries that are finite."""
    window = np.ones(max(1, len(values_T) // _MANY * 3))
    there = np.isfinite(values_T)
    total = np.convolve(np.where(there, values_T, 0.0), window, "same")
    count = np.convolve(there, window, "same")
    return np.where(there, total / np.maximum(count, 1), np.nan)


def _line(
    axes: Axes, rows: Rows, key: str, label: str, *, noisy: bool = True, **style: Any
) -> bool:
    """Draws one metric over the steps; False if it was never logged.

    A long noisy series is drawn faintly as it is and boldly as its running mean.
    """
    steps, values = _series(rows, key)
    if not np.isfinite(values).any():
        return False
    values = np.where(np.isfinite(values), values, np.nan)
    if noisy and _is_long(rows):
        axes.plot(steps, values, color=style["color"], linewidth=0.6, alpha=0.3)
        values = _running_mean(values)
    marker = "o" if len(steps) <= 40 else None
    style = {"linewidth": 1.3, "markersize": 3, "marker": marker, **style}
    axes.plot(steps, values, label=label, **style)
    return True


def _mark_not_finite(axes: Axes, rows: Rows, key: str) -> None:
    """A dashed line where a metric was NaN or infinite: a gap alone is overlooked."""
    steps, values = _series(rows, key)
    for number, step in enumerate(steps[~np.isfinite(values)][:20]):
        label = "NaN or infinite" if number == 0 else None
        axes.axvline(step, color="#b00020", linestyle="--", linewidth=1, label=label)


# Figures ---------------------------------------------------------------------------


def _loss(rows: Rows) -> Figure | None:
    figure = _figure(7, 4.2)
    axes = figure.subplots()
    tasks = sorted({key for row in rows for key in row if key.startswith("loss_")})
    drawn = [
        _line(
            axes, rows, key, _words(key.removeprefix("loss_")), color=colour, alpha=0.85
        )
        for key, colour in zip(tasks, _COLOURS * len(tasks), strict=False)
    ]
    drawn.append(
        _line(axes, rows, "loss", "all tasks", color=_INK, linewidth=2, zorder=3)
    )
    if not any(drawn):
        return None
    _mark_not_finite(axes, rows, "loss")
    _dress(axes, x="step (updates)", y="loss (nats per target token)")
    _title(axes, "Training loss" + (", running mean" if _is_long(rows) else ""))
    if sum(drawn) > 1 or not drawn[-1]:
        axes.legend(frameon=False, fontsize=9, labelcolor=_INK, ncols=2)
    return figure


def _learning_rate(rows: Rows) -> Figure | None:
    figure = _figure(7, 3)
    axes = figure.subplots()
    style = {"color": _COLOURS[0], "linewidth": 1.8}
    if not _line(axes, rows, "learning_rate", "", noisy=False, **style):
        return None
    _dress(axes, x="step (updates)", y="learning rate")
    axes.set_ylim(bottom=0)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2), useMathText=True)
    _title(axes, "Learning rate")
    return figure


def _balance(rows: Rows) -> Figure | None:
    figure = _figure(7, 5)
    upper, lower = figure.subplots(2, 1, sharex=True)
    drawn = [
        _line(upper, rows, "load_max_over_mean", "experts", color=_COLOURS[0]),
        _line(upper, rows, "device_load_max_over_mean", "devices", color=_COLOURS[1]),
        _line(lower, rows, "load_cv", "", color=_COLOURS[0]),
    ]
    if not any(drawn):
        return None
    _dress(upper, x=None, y="largest / mean load")
    upper.axhline(1, color=_INK, linestyle=":", linewidth=1, label="even")
    upper.set_ylim(bottom=0.95)
    if any(drawn[:2]):
        upper.legend(frameon=False, fontsize=9, labelcolor=_INK, ncols=3)
    _title(upper, "Balance: the worst layer's largest load (1 = even)")
    _dress(lower, x="step (updates)", y="standard deviation / mean")
    lower.set_ylim(bottom=0)
    _title(lower, "Balance: spread of the loads, mean over the layers (0 = even)")
    return figure


def _loads(rows: Rows, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Logged steps [T] and loads [T, L, E]; lines of another shape than the last go."""
    found = [
        (row["step"], np.asarray(row[key], np.float64)) for row in rows if row.get(key)
    ]
    found = [(step, load) for step, load in found if load.ndim == 2 and load.size]
    found = [(step, load) for step, load in found if load.shape == found[-1][1].shape]
    steps = np.asarray([step for step, _ in found], np.float64)
    return steps, np.asarray([load for _, load in found])


def _thin(steps_T: np.ndarray, load_TLE: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Averages neighbouring steps until the columns can be told apart."""
    if len(steps_T) <= _MOST_COLUMNS:
        return steps_T, load_TLE
    parts = np.array_split(np.arange(len(steps_T)), _MOST_COLUMNS)
    steps = np.asarray([steps_T[part].mean() for part in parts])
    return steps, np.asarray([load_TLE[part].mean(0) for part in parts])


def _edges(steps_T: np.ndarray) -> np.ndarray:
    """The borders of the columns: half-way between steps, which may be uneven."""
    if len(steps_T) == 1:
        return steps_T[0] + np.asarray([-0.5, 0.5])
    middle = (steps_T[1:] + steps_T[:-1]) / 2
    first, last = 2 * steps_T[0] - middle[0], 2 * steps_T[-1] - middle[-1]
    return np.concatenate([[first], middle, [last]])


def _load_map(rows: Rows, *, key: str, what: str) -> Figure | None:
    steps_T, load_TLE = _loads(rows, key)
    if not len(steps_T):
        return None
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import TwoSlopeNorm

    order = np.unique(steps_T, return_index=True)[1]
    steps_T, load_TLE = _thin(steps_T[order], load_TLE[order])
    _, L, E = load_TLE.shape
    mean_TL1 = load_TLE.mean(-1, keepdims=True)
    counted = np.isfinite(mean_TL1) & (mean_TL1 > 0)
    unknown = np.full_like(load_TLE, np.nan)
    ratio_TLE = np.divide(load_TLE, mean_TL1, out=unknown, where=counted)
    layers = np.unique(np.linspace(0, L - 1, min(L, _MOST_LAYERS)).round().astype(int))
    columns = min(len(layers), 4 if len(layers) > 4 else 2)
    lines = -(-len(layers) // columns)
    figure = _figure(max(5.5, 3.1 * columns + 1), max(3.2, 2.1 * lines + 0.9))
    panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    finite = ratio_TLE[np.isfinite(ratio_TLE)]
    top = max(2.0, float(np.percentile(finite, 99.5))) if finite.size else 2.0
    norm = TwoSlopeNorm(1.0, vmin=0.0, vmax=top)
    edges = _edges(steps_T), np.arange(E + 1) - 0.5
    for place, layer in enumerate(layers):
        axes = panels.flat[place]
        axes.pcolormesh(
            *edges, ratio_TLE[:, layer].T, cmap="RdBu_r", norm=norm, rasterized=True
        )
        axes.set_facecolor("#bbbbbb")  # steps at which a layer counted nothing
        axes.set_title(f"MoE layer {layer}", loc="left", fontsize=9, color=_INK)
        axes.tick_params(colors=_INK, labelsize=8)
        for axis in (axes.xaxis, axes.yaxis):
            _whole_numbers(axis)
    for axes in panels.flat[len(layers) :]:
        axes.set_visible(False)
    chosen = "" if len(layers) == L else f" ({len(layers)} of {L} layers)"
    title = f"{what.capitalize()} load{chosen}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=_INK)
    figure.supxlabel("step (updates)", fontsize=10, color=_INK)
    figure.supylabel(what, fontsize=10, color=_INK)
    scale = ScalarMappable(norm, "RdBu_r")
    bar = figure.colorbar(
        scale, ax=panels, extend="max", aspect=15 + 8 * lines, pad=0.02
    )
    bar.set_label(f"tokens / mean over {what}s", color=_INK)
    bar.ax.tick_params(colors=_INK, labelsize=8)
    return figure
