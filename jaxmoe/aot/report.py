# SPDX-License-Identifier: Apache-2.0
"""Floor 7. An estimate as text, as figures for JSON, and as a picture of one tick."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from jaxmoe.aot.chips import GIB
from jaxmoe.aot.estimate import Estimate
from jaxmoe.aot.timing import Timed


def figures(estimate: Estimate) -> dict[str, Any]:
    """What `--json` prints. Times and shares are missing where nothing was compiled."""
    sizes = estimate.sizes
    found: dict[str, Any] = {
        "topology": estimate.topology.name,
        "chips": estimate.chips,
        "mesh": {"data": sizes.data, "expert": sizes.expert, "pipe": sizes.pipe},
        "microbatches": estimate.microbatches,
        "compile_s": estimate.compile_s,
        "bytes_per_chip": estimate.bytes,
        "memory_per_chip": estimate.topology.chip.memory,
        "fits": estimate.fits,
    }
    if estimate.timed is None:
        return found
    return found | {
        "flops_per_chip": estimate.flops,
        "model_flops": estimate.model_flops,
        "recomputed": estimate.recomputed,
        "step_s": estimate.timed.seconds,
        "exposed_s": estimate.timed.seconds - estimate.timed.compute,
        "tokens_per_s": estimate.tokens / estimate.timed.seconds,
        "mfu": estimate.mfu,
        "hidden_fraction": estimate.hidden_fraction(),
        "operations": {
            kind: {
                "seconds": timed.seconds,
                "compute_s": timed.compute,
                "runs": runs,
            }
            for kind, (timed, runs) in estimate.kinds.items()
        },
        "collectives": [vars(row) for row in estimate.rows],
        "assumed": list(estimate.assumed),
    }


def text(estimate: Estimate) -> str:
    """The report for a person."""
    chip, memory = estimate.topology.chip, estimate.topology.chip.memory
    lines = [
        f"{estimate.topology.name}: {estimate.chips} devices, {estimate.sizes},"
        f" {estimate.microbatches} microbatches,"
        f" compiled in {estimate.compile_s:.0f} s",
        f"memory      {estimate.bytes / GIB:.2f} of {memory / GIB:.0f} GiB per device: "
        + ("fits" if estimate.fits else "does not fit"),
    ]
    if not estimate.fits:
        lines += [f"            {line}" for line in remedies(estimate)]
    timed = estimate.timed
    if timed is None:
        return "\n".join(lines)
    lines += [
        f"operations  {estimate.flops / 1e12:.3g} TFLOP per device and step,"
        f" {estimate.recomputed:.1%} of them recomputed; the model needs"
        f" {estimate.model_flops / estimate.chips / 1e12:.3g}",
        f"step        {timed.seconds:.4g} s estimated, {timed.compute:.4g} s of it"
        f" computation of a mean device;"
        f" {estimate.tokens / timed.seconds:.4g} tokens/s,"
        f" MFU {estimate.mfu:.1%} of {chip.flops / 1e12:.0f} TFLOP/s",
    ]
    if hidden := estimate.hidden_fraction():
        shares = ", ".join(f"{kind} {share:.1%}" for kind, share in hidden.items())
        lines.append(f"exchange    of tokens, hidden: {shares}")
    for kind, (run, runs) in estimate.kinds.items():
        lines.append(
            f"{kind:11} {1e3 * run.seconds:.3g} ms, {1e3 * run.compute:.3g} of them"
            f" computation; {runs:.3g} runs per device"
        )
    lines += ["", _table(estimate), "", "Assumed:"]
    return "\n".join([*lines, *(f"- {line}" for line in estimate.assumed)])


def remedies(estimate: Estimate) -> list[str]:
    """What makes a step smaller, for one that does not fit."""
    over = estimate.bytes / estimate.topology.chip.memory
    return [
        f"It needs {over:.2f} times the memory. Any of these makes it smaller:",
        "more devices along Mesh.expert or Mesh.pipe: fewer weights on each;",
        "Train.accumulation, or more Pipeline.microbatches: fewer tokens at a time;",
        "Model.remat='full': fewer activations;",
        "Optimizer.name='adafactor': less state.",
    ]


def _table(estimate: Estimate) -> str:
    head = ("collective", "axis", "", "inside", "GB", "count", "ms", "hidden")
    rows = [
        (
            row.kind,
            row.axis or "none",
            "async" if row.asynchronous else "sync",
            row.inside,
            f"{row.bytes / 1e9:.3f}",
            f"{row.count:.3g}",
            f"{1e3 * row.seconds:.2f}",
            f"{row.hidden / row.seconds:.0%}" if row.seconds else "",
        )
        for row in estimate.rows
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    )


def write_timeline(estimate: Estimate, path: str) -> None:
    """One run of the F&B of a pipeline, or the step of one without, as an SVG in HTML.

    Args:
      estimate: with times.
      path: of the file to write.
    """
    kind = next((k for k in estimate.kinds if k in ("F&B", "F&Bi")), "")
    timed = estimate.kinds[kind][0] if kind else estimate.timed
    Path(path).write_text(_page(timed, kind or "step", estimate), encoding="utf-8")


_COLOURS = {"compute": "#4878a8", "wait": "#c44e52"}
_WIDTH, _ROW = 1400, 34


def _page(timed: Timed | None, kind: str, estimate: Estimate) -> str:
    events = timed.events if timed else ()
    lanes = list(dict.fromkeys(["compute", *(e.lane for e in events)]))
    end = max((e.end for e in events), default=1.0)
    boxes = []
    for event in events:
        x, wide = (_WIDTH * t / end for t in (event.begin, event.end - event.begin))
        y = 30 + _ROW * lanes.index(event.lane)
        colour = _COLOURS.get(event.lane, "#dd8452")
        label = html.escape(f"{event.label}: {1e6 * (event.end - event.begin):.1f} us")
        boxes.append(
            f'<rect x="{130 + x:.2f}" y="{y}" width="{max(wide, 0.3):.2f}" height="24"'
            f' fill="{colour}"><title>{label}</title></rect>'
        )
    names = [
        f'<text x="4" y="{46 + _ROW * i}">{html.escape(lane or "other")}</text>'
        for i, lane in enumerate(lanes)
    ]
    title = html.escape(
        f"{kind} on {estimate.topology.name}, as the compiler scheduled it:"
        f" {1e3 * end:.3g} ms"
    )
    height = 50 + _ROW * len(lanes)
    return (
        f"<!DOCTYPE html><meta charset='utf-8'><title>{title}</title>\n"
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH + 150}"'
        f' height="{height}" font-family="sans-serif" font-size="14">\n'
        f'<text x="4" y="18">{title}</text>\n'
        + "\n".join([*names, *boxes])
        + "\n</svg>\n"
    )
