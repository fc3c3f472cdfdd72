# SPDX-License-Identifier: Apache-2.0
"""Floor 7. `jaxmoe plan`: which slot of which device gets which expert, for a load.

    jaxmoe plan LOADS --replicas=P --groups=G --nodes=N --devices=D
                [--policy=reference|swap|incremental] [--previous=PLAN]
                [--figure=FILE] [--json]

LOADS is a JSON file of numbers [layers, experts], a .npy file of the same, or the
folder of a run, whose last logged load is taken. PLAN is what --json printed.

JAX is imported once the sizes and files are known to be right.

Legend: L layers, E experts, P slots, D devices, k slots of a device.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from jaxmoe import metrics_file
from jaxmoe.config_base import mistake, read_text, shown_path
from jaxmoe.eplb.sizes import POLICIES, check_policy, check_sizes
from jaxmoe.pipeline import draw

_NAMES = ("--replicas", "--groups", "--nodes", "--devices")
_MOST_DRAWN = 12  # layers of a figure; of more, those that are least even
_MOST_WORDS = 96  # slots of a layer whose experts are written into a figure
_FORMS = "loads are a .json or .npy file of [layers, experts], or the folder of a run"
_REMEDY = "Name a file that exists"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    parser.add_argument("loads")
    parser.add_argument("--replicas", type=int, required=True)
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--policy", default=POLICIES[0])
    parser.add_argument("--previous", default="")
    parser.add_argument("--figure", default="")
    parser.add_argument("--json", action="store_true")


def run(options: argparse.Namespace) -> int:
    """Prints the plan and its quality, and draws it.

    Returns:
      The exit code, 0.

    Raises:
      ConfigError: for a mistake in the options or in a file.
    """
    check_policy(options.policy, "--policy")
    if options.figure:
        draw.check_figure(options.figure)
    load_LE = read_loads(options.loads)
    (L, E), devices = load_LE.shape, options.devices
    sizes = (options.replicas, options.groups, options.nodes, devices)
    check_sizes(E, *sizes, names=_NAMES)
    previous_LP = None
    if options.previous:
        previous_LP = read_plan(options.previous, (L, options.replicas), E)

    import jax.numpy as jnp

    from jaxmoe.eplb import greedy, plan

    found = plan.rebalance_experts(
        load_LE, *sizes, policy=options.policy, previous=previous_LP
    )
    slots_LP = np.asarray(found.physical_to_logical)
    if previous_LP is None:
        _, nodes = greedy.nodes_used(options.groups, options.nodes)
        first = plan.initial_plan(L, E, options.replicas, devices, nodes)
        previous_LP = np.asarray(first.physical_to_logical)
    load_LD = np.asarray(plan.device_load(load_LE, found.physical_to_logical, devices))
    balance = [
        np.asarray(plan.max_over_mean(load_LE, jnp.asarray(of_LP), devices)).tolist()
        for of_LP in (previous_LP, slots_LP)
    ]
    moved = plan.moved(found.physical_to_logical, jnp.asarray(previous_LP), devices)
    moved = np.asarray(moved).tolist()
    if options.figure:
        _draw(options.figure, load_LE, slots_LP, devices)
    _print(slots_LP, load_LD, balance, moved)
    if options.json:
        figures = {
            **{name: np.asarray(of).tolist() for name, of in found._asdict().items()},
            "max_over_mean": balance[1],
            "moved": moved,
        }
        print(json.dumps(figures))
    return 0


# Files -------------------------------------------------------------------------------


def read_loads(path: str) -> np.ndarray:
    """The loads of a file or a run folder, float64 [layers, experts].

    Raises:
      ConfigError: if they cannot be read, or are not finite, not negative numbers.
    """
    if os.path.isdir(path):
        lines = metrics_file.read(path)
        found = [line["expert_load"] for line in lines if line.get("expert_load")]
        if not found:
            raise mistake(
                f"{shown_path(path)} has no loads",
                "a run of a model with experts logs them in metrics.jsonl as"
                " expert_load",
                "Name the folder of such a run, or a file",
            )
        values = found[-1]
    elif path.endswith(".npy"):
        values = _read_npy(path)
    else:
        values = _json(path, read_text(path, _FORMS, _REMEDY))
    load_LE = _table(values, np.float64)
    if load_LE is None or load_LE.ndim != 2 or 0 in load_LE.shape:
        shape = "no table" if load_LE is None else f"the shape {list(load_LE.shape)}"
        raise mistake(
            f"{shown_path(path)} has {shape}",
            "loads are numbers [layers, experts]",
            "Write a list with a list for each layer, also for one layer",
        )
    with np.errstate(over="ignore"):
        total_L = load_LE.astype(np.float32).sum(1)
    for layer, (load_E, total) in enumerate(zip(load_LE, total_L, strict=True)):
        wrong = [
            (expert, value)
            for expert, value in enumerate(load_E)
            if not (np.isfinite(value) and value >= 0)
        ]
        if wrong or not np.isfinite(total):
            where = (
                f"layer {layer}, expert {wrong[0][0]}" if wrong else f"layer {layer}"
            )
            value = f"{wrong[0][1]:g}" if wrong else "more than float32 holds"
            raise mistake(
                f"{shown_path(path)} has the load {value} in {where}",
                "a load is a finite number and not negative",
                "Correct the file",
            )
    return load_LE


def read_plan(path: str, shape: tuple[int, int], num_experts: int) -> np.ndarray:
    """The physical_to_logical of a plan that was printed with --json.

    Raises:
      ConfigError: if it cannot be read, or is no plan of these sizes.
    """
    rule = "a plan is the output of `jaxmoe plan --json`"
    text = read_text(path, rule, _REMEDY)
    try:
        values = json.loads(text)
    except ValueError:  # the whole output: the object is its last line
        values = _json(path, text.strip().rpartition("\n")[2])
    if isinstance(values, dict):
        values = values.get("physical_to_logical")
    slots_LP = _table(values, np.int64)
    if slots_LP is None:
        raise mistake(
            f"{shown_path(path)} has no table physical_to_logical",
            rule,
            "Name a file with it",
        )
    if slots_LP.shape != shape:
        raise mistake(
            f"--previous={shown_path(path)} has the shape {list(slots_LP.shape)}",
            f"with these loads and --replicas={shape[1]} it must be {list(shape)}",
            "Name a plan of the same layers and replicas",
        )
    for layer, slots_P in enumerate(slots_LP):
        if set(slots_P.tolist()) != set(range(num_experts)):
            raise mistake(
                f"--previous={shown_path(path)} is no plan for {num_experts} experts",
                f"in layer {layer} the experts 0 to {num_experts - 1} have a slot each,"
                " and no others",
                "Name a plan of the same experts",
            )
    return slots_LP.astype(np.int32)


def _json(path: str, text: str) -> Any:
    try:
        return metrics_file.numbers(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise mistake(
            f"{shown_path(path)} is not JSON",
            "what does not end in .npy is read as JSON",
            "Write a list with a list of numbers for each layer",
        ) from error


def _read_npy(path: str) -> np.ndarray:
    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        reason = getattr(error, "strerror", None) or "it is no array of numbers"
        raise mistake(
            f"{shown_path(path)} cannot be read ({reason})",
            _FORMS,
            "Write it with numpy.save",
        ) from error


def _table(values: Any, dtype: type) -> np.ndarray | None:
    """An array of numbers, or None if the values are none."""
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):  # rows of different lengths
        return None
    if array.dtype.kind not in "iuf" or (dtype is np.int64 and array.dtype.kind == "f"):
        return None
    return array.astype(dtype)


# Output ------------------------------------------------------------------------------


def _print(slots_LP, load_LD, balance, moved) -> None:
    """The plan, a line per device, and the quality, a line per layer."""
    devices = load_LD.shape[1]
    mean_L = load_LD.mean(1)
    print("layer  device  load/mean  experts")
    for layer, slots_P in enumerate(slots_LP):
        width = len(str(slots_P.max()))
        for device, slots_k in enumerate(slots_P.reshape(devices, -1)):
            ratio = load_LD[layer, device] / mean_L[layer] if mean_L[layer] else 1.0
            experts = " ".join(f"{expert:{width}}" for expert in slots_k)
            print(f"{layer:5}  {device:6}  {ratio:9.4f}  {experts}")
    print()
    print("layer  max/mean before  max/mean  moved")
    for layer, (before, after, slots) in enumerate(zip(*balance, moved, strict=True)):
        print(f"{layer:5}  {before:15.4f}  {after:8.4f}  {slots:5}")
    before, after = (np.mean(of) for of in balance)
    print(f"{'mean':>5}  {before:15.4f}  {after:8.4f}  {np.mean(moved):5.1f}")


def _draw(path: str, load_LE, slots_LP, devices: int) -> None:
    """Draws a bar per device, in it a piece per slot; a row per layer."""
    from matplotlib.figure import Figure

    (L, E), P = load_LE.shape, slots_LP.shape[1]
    share_LP = np.stack(
        [
            (load_E / np.maximum(np.bincount(slots_P, minlength=E), 1))[slots_P]
            for load_E, slots_P in zip(load_LE, slots_LP, strict=True)
        ]
    )
    mean_L = np.maximum(load_LE.sum(1) / devices, np.finfo(float).tiny)
    share_LDk = (share_LP / mean_L[:, None]).reshape(L, devices, -1)
    worst = np.argsort(-share_LDk.sum(2).max(1), kind="stable")[:_MOST_DRAWN]
    size = (max(5.0, min(0.45 * devices, 16.0)), 0.6 + 1.7 * len(worst))
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    panels = figure.subplots(len(worst), 1, sharex=True, squeeze=False)[:, 0]
    for axes, layer in zip(panels, sorted(worst), strict=True):
        bottom_D = np.zeros(devices)
        experts_Dk = slots_LP[layer].reshape(devices, -1)
        order_Dk = np.argsort(-share_LDk[layer], axis=1, kind="stable")
        for place_D in order_Dk.T:
            at = np.arange(devices), place_D
            part_D = share_LDk[layer][at]
            bars = axes.bar(
                *(np.arange(devices), part_D),
                bottom=bottom_D,
                color="#b7d2ef",
                edgecolor="white",
                linewidth=0.5,
            )
            if P <= _MOST_WORDS:
                words = [str(expert) for expert in experts_Dk[at]]
                axes.bar_label(bars, words, label_type="center", fontsize=7)
            bottom_D += part_D
        axes.axhline(1.0, color="#d55e00", linewidth=0.8)
        axes.set_ylabel(f"layer {layer}\nload / mean", fontsize=8)
        axes.set_title(f"max/mean {bottom_D.max():.4f}", loc="right", fontsize=8)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    panels[-1].set_xlabel("device; a piece is a slot with its expert")
    try:
        figure.savefig(path, format=Path(path).suffix[1:], dpi=130)
    except OSError as error:
        raise mistake(
            f"{shown_path(path)} cannot be written ({error.strerror})",
            "a figure goes into a folder that exists and can be written",
            "Name another file",
        ) from error
