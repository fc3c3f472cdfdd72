# SPDX-License-Identifier: Apache-2.0
"""Small models, batches, meshes and runs, shared by the tests of the training floors.

Legend: M microbatches, B sequences of a step, S positions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxmoe import cli, gin_config
from jaxmoe.config import SECTIONS, Config
from jaxmoe.config_checks import check
from jaxmoe.data.loader import Loader
from jaxmoe.data.records import vocab_size
from jaxmoe.mesh import AXES
from jaxmoe.train_step import Setup, TrainState

ROOT = Path(__file__).parents[1]

MESHES = ((8, 1), (4, 2), (2, 4), (1, 8), (1, 1))  # data x expert

# Two layers, one of each kind; all four tasks, so that rows differ in their targets.
_TINY: dict[str, dict[str, Any]] = {
    "model": {
        "num_layers": 2,
        "layer_pattern": "dense,moe",
        "width": 16,
        "num_heads": 2,
        "ffn_width": 32,
        "sequence_length": 40,
        "num_patches": 4,
        "patch_dim": 16,
        "init_std": 0.1,
    },
    "moe": {"num_experts": 8, "top_k": 2},
    "optimizer": {"warmup_steps": 4, "learning_rate": 0.01},
    "data": {
        "batch_size": 32,
        "patch_size": 4,
        "held_out": 8,
        "num_threads": 0,
        "caption_weight": 0.4,
        "image_denoise_weight": 0.2,
        "text_denoise_weight": 0.2,
        "lm_weight": 0.2,
    },
    "train": {"steps": 12, "log_every": 1, "eval_batches": 1},
}

# Little optimization. The fusion emitters compile small programs more slowly, and the
# branches of a pipeline twice as fast.
_QUICK: dict[str, Any] = {"xla_backend_optimization_level": 0}
_QUICK_PLAIN: dict[str, Any] = {**_QUICK, "xla_cpu_use_fusion_emitters": False}

# The environment of a process that finds nothing compiled.
COMPILING = {"JAX_ENABLE_COMPILATION_CACHE": "0"}

# Neither images nor generated captions: the shortest run.
TEXT_ONLY = {"source": "text", "text_denoise_weight": 0.5, "lm_weight": 0.5}


def tiny_config(**overrides: dict[str, Any]) -> Config:
    """A model that compiles in seconds.

    Args:
      overrides: by section, as model={'remat': 'full'}, on top of the tiny values.
    """
    sections = {}
    for section in SECTIONS:
        name = section.__name__.lower()
        fields = _TINY.get(name, {}) | overrides.pop(name, {})
        sections[name] = section(**fields)
    assert not overrides, f"no such sections: {list(overrides)}"
    config = Config(**sections)
    check(config)
    return config


def exacting_config() -> Config:
    """A tiny model with everything that could depend on the mesh: drops, auxiliary
    losses, all tasks. Tests of several files share what is compiled for it."""
    return tiny_config(
        moe={"capacity_factor": 1.0, "balance_loss": 0.05, "z_loss": 0.01}
    )


def mesh_of(data: int, expert: int, pipe: int = 1) -> Mesh:
    """A mesh over the first data * expert * pipe of the 8 devices."""
    devices = np.asarray(jax.devices()[: data * expert * pipe])
    devices = devices.reshape(data, expert, pipe)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


@functools.lru_cache
def setup_of(config: Config, data: int = 8, expert: int = 1, pipe: int = 1) -> Setup:
    """The setup of a configuration on data x expert x pipe devices."""
    vocab = vocab_size(config.data, config.model)
    return Setup(config, mesh_of(data, expert, pipe), vocab)


@functools.lru_cache
def step_of(config: Config, data: int = 8, expert: int = 1):
    """The compiled train step (state, batch) of `setup_of`; it donates the state."""
    setup = setup_of(config, data, expert)
    return quickly(setup.train_step(), setup.abstract_state, batches(config)[0])


@functools.lru_cache
def gradients_of(config: Config, data: int = 8, expert: int = 1):
    """The compiled (params, buffers, batch) -> (gradients, StepMetrics)."""
    setup = setup_of(config, data, expert)
    layout, state = setup.state_sharding, setup.abstract_state
    shardings = (layout.params, layout.buffers, setup.batch_sharding)
    gradients = jax.jit(setup.loss_and_gradients, in_shardings=shardings)
    return quickly(gradients, state.params, state.buffers, batches(config)[0])


def quickly(function: Any, *args: Any, pipelined: bool = False) -> Any:
    """A jitted function compiled for these arguments with little optimization.

    What it computes is the same up to rounding; its collectives are the same.
    """
    options = quick_options(pipelined)
    return function.lower(*args).compile(compiler_options=options)


@functools.lru_cache
def quick_options(pipelined: bool = False) -> dict[str, Any]:
    """Compiler options that save time; those that this version of XLA knows."""
    trivial = jax.jit(lambda x: x).lower(1.0)
    for options in (_QUICK,) if pipelined else (_QUICK_PLAIN, _QUICK):
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            trivial.compile(compiler_options=options)
            return options
    return {}


def initial_state(config: Config, data: int = 8, expert: int = 1) -> TrainState:
    """The initial state, without compiling its creation for every mesh."""
    layout = setup_of(config, data, expert).state_sharding
    return jax.device_put(_initial_state(config), layout, may_alias=False)


@functools.lru_cache
def _initial_state(config: Config) -> TrainState:
    create = jax.jit(setup_of(config, 1, 1)._initial_state)
    return host(quickly(create)())


@functools.lru_cache
def batches(config: Config, count: int = 1) -> tuple[dict[str, np.ndarray], ...]:
    """The first batches of a run; arrays are [M, B / M, ...]."""
    microbatches = config.train.accumulation
    loader = Loader(config.data, model=config.model, microbatches=microbatches)
    found = tuple(next(loader) for _ in range(count))
    loader.close()
    return found


def changed(config: Config, **overrides: dict[str, Any]) -> Config:
    """The configuration with other values in some sections."""
    return dataclasses.replace(
        config,
        **{
            name: dataclasses.replace(getattr(config, name), **fields)
            for name, fields in overrides.items()
        },
    )


def losses_of(config: Config, data: int, expert: int, steps: int) -> list[float]:
    """The losses of the first steps from the initial weights."""
    state = initial_state(config, data, expert)
    step = step_of(config, data, expert)
    losses = []
    for batch in batches(config, steps):
        state, metrics = step(state, batch)
        losses.append(loss_of(metrics))  # waits: one step in flight
    return losses


def loss_of(metrics: Any) -> float:
    """The task loss of a step, as the trainer logs it."""
    return float(np.sum(metrics.sums.nll) / np.sum(metrics.sums.tokens))


def host(tree: Any) -> Any:
    """Every leaf as a NumPy array."""
    return jax.tree.map(np.asarray, tree)


def assert_same(got: Any, want: Any) -> None:
    """Every leaf is bitwise the same."""
    want_leaves = jax.tree_util.tree_leaves_with_path(host(want))
    got_leaves = jax.tree_util.tree_leaves_with_path(host(got))
    assert [path for path, _ in got_leaves] == [path for path, _ in want_leaves]
    for (path, a), (_, b) in zip(got_leaves, want_leaves, strict=True):
        same = a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        assert same, jax.tree_util.keystr(path)


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """Collects the names of the programs that are compiled or taken from a cache."""
    found: list[str] = []

    def listen(event: str, seconds: float, **what: Any) -> None:
        if event.endswith("backend_compile_duration"):
            found.append(what.get("fun_name", ""))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def script(path: Path) -> Any:
    """A Python file outside the package, as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Runs ------------------------------------------------------------------------------


def run_config() -> Config:
    """A run of seconds: 21 steps on running text, a checkpoint every 10, on 4 x 2."""
    return tiny_config(
        mesh={"data": 4, "expert": 2, "pipe": 1},
        model={"num_layers": 1, "layer_pattern": "moe"},
        data=TEXT_ONLY,
        optimizer={"schedule": "linear"},
        checkpoint={"every_steps": 10, "keep": 3},
        train={"steps": 21, "eval_every": 20},
    )


def rewound(run: Path, folder: Path) -> Path:
    """A copy of a finished run of `run_config` as it was after step 20."""
    shutil.copytree(run, folder)
    shutil.rmtree(folder / "checkpoints" / "21")
    (folder / "summary.json").unlink()
    return folder


def arguments(config: Config) -> list[str]:
    """The command-line options that give this configuration."""
    found = []
    for section in dataclasses.fields(config):
        part = getattr(config, section.name)
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if value != field.default:
                found.append(f"--gin.{type(part).__name__}.{field.name}={value!r}")
    assert gin_config.load((), [a.removeprefix("--gin.") for a in found])
    return found


def assert_told(arguments: Sequence[str], parts: Sequence[str], capsys: Any) -> None:
    """The command ends with exit code 2 and one message, which has these parts."""
    assert cli.main(arguments) == cli.EXIT_MISTAKE
    err = capsys.readouterr().err
    assert err.startswith("jaxmoe: ")
    assert "Traceback" not in err
    for part in parts:
        assert part in err


def metrics_of(workdir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what the clock decides."""
    lines = (workdir / "metrics.jsonl").read_text("utf-8").splitlines()
    clock = ("step_s", "tokens_per_s")
    return [
        {name: value for name, value in json.loads(line).items() if name not in clock}
        for line in lines
    ]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file and folder below a folder, by its path."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
    }


def start(command: Sequence[str], **changes: str) -> subprocess.Popen:
    """Starts `python -m jaxmoe` with simulated devices of its own."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", **changes}
    return subprocess.Popen(
        [sys.executable, "-m", "jaxmoe", *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
