# SPDX-License-Identifier: Apache-2.0
"""Floor 7. `jaxmoe inspect`: what the checkpoints of a run hold, without devices.

    jaxmoe inspect DIR [--step=N] [--export=FILE.safetensors] [--json]

DIR is a run folder or its folder of checkpoints. Every file of every step is read and
compared with its checksum. Nothing of JAX is imported, but for --export.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from jaxmoe import checkpoint_folder, gin_config
from jaxmoe.checkpoint_folder import DISCARDED, MARKER, Broken, CheckpointFolder
from jaxmoe.config_base import mistake, shown_path

_UNITS = ("B", "KB", "MB", "GB", "TB")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    parser.add_argument("folder")
    parser.add_argument("--step", type=int, default=None)
    parser.add_argument("--export", default="")
    parser.add_argument("--json", action="store_true")


def run(options: argparse.Namespace) -> int:
    """Prints the steps, and the state and configuration of one of them.

    Returns:
      The exit code: 0, or 1 if the weights could not be read.

    Raises:
      ConfigError: if there is no such folder, or no such complete step.
    """
    folder = _folder(options.folder)
    steps = [_step(folder, number) for number in folder.numbers()]
    step = _chosen(folder, steps, options)
    found: dict[str, Any] = {"directory": str(folder.path), "steps": steps}
    found["discarded"] = _discarded(folder)
    found["latest"] = next((s["step"] for s in reversed(steps) if s["complete"]), None)
    _print_steps(found)
    if step is not None:
        found |= _state(folder[step])
        _print_state(found)
    if options.export:
        if not _export(folder, found, options.export):
            return 1
        found["export"] = os.path.abspath(options.export)
    if options.json:
        print(json.dumps(found))
    return 0


# Reading -----------------------------------------------------------------------------


def _folder(text: str) -> CheckpointFolder:
    path = Path(text)
    if (path / "checkpoints").is_dir():
        path = path / "checkpoints"
    folder = CheckpointFolder(path, keep=1)
    if not path.is_dir() or not folder.numbers():
        raise mistake(
            f"{shown_path(text)} holds no checkpoints",
            "it must be the folder of a run (--workdir) that saved, or the folder"
            " checkpoints/ in it",
            "Name such a folder",
        )
    return folder


def _chosen(
    folder: CheckpointFolder, steps: list[dict[str, Any]], options: argparse.Namespace
) -> int | None:
    """The step of which the state is shown; None if none is complete."""
    complete = [step["step"] for step in steps if step["complete"]]
    if options.step is None and (complete or not options.export):
        return complete[-1] if complete else None
    if options.step in complete:
        return options.step
    there = ", ".join(map(str, complete)) or "none"
    what = "no step" if options.step is None else f"--step={options.step}"
    raise mistake(
        f"{what} is complete in {shown_path(str(folder.path))}",
        f"a step can be looked into if all its files are as they were written; these"
        f" are: {there}",
        "Name one of them" if complete else "Start the run again",
    )


def _step(folder: CheckpointFolder, number: int) -> dict[str, Any]:
    """What is known of a step from outside; every file of it is read."""
    path, problem = folder[number], None
    try:
        folder.verify(number)
    except Broken as reason:
        problem = str(reason)
    files = [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else [path]
    marker = path / MARKER
    return {
        "step": number,
        "complete": problem is None,
        "problem": problem,
        "files": len(files),
        "bytes": sum(p.stat().st_size for p in files),
        "saved": marker.stat().st_mtime if marker.is_file() else None,
    }


def _discarded(folder: CheckpointFolder) -> list[int]:
    aside = folder.path / DISCARDED
    names = [p.name for p in aside.iterdir()] if aside.is_dir() else []
    return sorted(int(name) for name in names if name.isdecimal())


def _state(path: Path) -> dict[str, Any]:
    """The leaves of a step, their numbers by part, and its configuration."""
    body = checkpoint_folder.read_marker(path)
    parts: dict[str, dict[str, int]] = {}
    for leaf in body["leaves"]:
        part = parts.setdefault(_part(leaf["name"]), _nothing())
        numbers = math.prod(leaf["shape"])
        part["arrays"] += 1
        part["numbers"] += numbers
        part["bytes"] += numbers * _bytes_of(leaf["dtype"])
    params = [part for name, part in parts.items() if name.startswith("params")]
    return {
        "step": body["step"],
        "parameters": sum(part["numbers"] for part in params),
        "parts": parts,
        "leaves": body["leaves"],
        "extra": body["extra"],
        "config": body["config"],
    }


def _nothing() -> dict[str, int]:
    return {"arrays": 0, "numbers": 0, "bytes": 0}


def _part(name: str) -> str:
    """params/moe/experts for params/moe/moe/experts/up: where the numbers are."""
    path = name.split("/")
    if path[0] != "params":
        return path[0]
    inside = path[1:-1] or path[1:]
    if "experts" in inside:
        return f"params/{inside[0]}/experts"
    return f"params/{inside[0]}"


def _bytes_of(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def _export(folder: CheckpointFolder, found: dict[str, Any], file: str) -> bool:
    if not file.endswith(".safetensors"):
        raise mistake(
            f"--export={file!r}",
            "weights are written in the format safetensors",
            "Name a file that ends in .safetensors",
        )
    # Only this section: later versions may no longer know a field of another one.
    lines = [x for x in found["config"].splitlines() if x.startswith("Model.")]
    model = gin_config.load((), ["\n".join(lines)] if lines else ()).config.model
    # Arrays are read on the processor; an accelerator that is there may be in use.
    os.environ["JAX_PLATFORMS"] = "cpu"
    from jaxmoe.checkpoint import CheckpointError
    from jaxmoe.export import export

    try:
        tensors = export(folder.path, found["step"], model, file)
    except CheckpointError as failure:
        print(f"jaxmoe: {failure}", file=sys.stderr)
        return False
    print(f"\n{tensors} tensors of step {found['step']} written to {file}")
    return True


# Text --------------------------------------------------------------------------------


def _print_steps(found: dict[str, Any]) -> None:
    print(f"{found['directory']}\n\n{'step':>10}{'size':>12}{'files':>8}  saved")
    for step in found["steps"]:
        saved = step["saved"]
        when = (
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(saved)) if saved else "-"
        )
        state = "complete" if step["complete"] else f"broken: {step['problem']}"
        size = _size(step["bytes"])
        print(f"{step['step']:>10}{size:>12}{step['files']:>8}  {when:19}  {state}")
    if found["discarded"]:
        aside = ", ".join(map(str, found["discarded"]))
        print(f"left behind by a run that went back: {aside}")


def _print_state(found: dict[str, Any]) -> None:
    print(f"\nstate of step {found['step']}: {found['parameters']:,} parameters\n")
    print(f"{'part':32}{'arrays':>8}{'numbers':>18}{'size':>12}")
    for name, part in found["parts"].items():
        size = _size(part["bytes"])
        print(f"{name:32}{part['arrays']:>8}{part['numbers']:>18,}{size:>12}")
    print(f"\n{'array':64}{'type':>10}  shape")
    for leaf in found["leaves"]:
        shape = " x ".join(map(str, leaf["shape"])) or "-"
        print(f"{leaf['name']:64}{leaf['dtype']:>10}  {shape}")
    print(f"\nconfiguration of step {found['step']}:\n\n{found['config'].rstrip()}")


def _size(number: float) -> str:
    """1536 as '1.5 KB'."""
    for unit in _UNITS:
        if number < 1000 or unit == _UNITS[-1]:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    raise AssertionError
