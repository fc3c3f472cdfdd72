# SPDX-License-Identifier: Apache-2.0
"""Figures of a run: drawn from metrics.jsonl, whatever it holds and lacks."""

import math
import subprocess
import sys

import numpy as np
import pytest

from jaxmoe import metrics, plots, trainer
from jaxmoe.metrics import MetricsWriter
from jaxmoe.pipeline.schedule import build
from jaxmoe.pipeline.simulate import parse_costs, simulate
from tests import helpers

NAMES = ["loss.png", "learning_rate.png", "expert_load.png", "balance.png"]


def logged(workdir, steps, **series):
    """A run folder with one line per step; a series is a function of the step."""
    with MetricsWriter(workdir, resume_step=0) as writer:
        for step in steps:
            values = {key: value(step) for key, value in series.items()}
            writer.write(step, {key: v for key, v in values.items() if v is not None})
    return workdir


SERIES = {
    "loss": lambda step: 5 / step,
    "loss_caption": lambda step: 4 / step,
    "loss_lm": lambda step: 6 / step if step % 2 else None,  # not in every batch
    "learning_rate": lambda step: 1e-3 * step,
    "load_max_over_mean": lambda step: 1 + 1 / step,
    "load_cv": lambda step: 1 / step,
    "expert_load": lambda step: [[step, 2], [0, 0], [5, 5]],
}


def size(path):
    """Width and height from a PNG's header."""
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(header[16:20], "big"), int.from_bytes(header[20:], "big")


def test_draws_every_figure(tmp_path):
    written = plots.write_plots(logged(tmp_path, range(1, 8), **SERIES))
    assert written == [tmp_path / "plots" / name for name in NAMES]
    assert sorted(tmp_path.glob("plots/*")) == sorted(written)
    for path in written:
        width, height = size(path)
        assert 500 <= width <= 2500, path
        assert 300 <= height <= 2500, path


def test_a_pipeline_has_a_timeline(tmp_path):
    timeline = simulate(build("dualpipe", 2, 4), parse_costs(""))
    logged(tmp_path, range(1, 3), device_load=lambda step: [[step, 2]])
    names = [path.name for path in plots.write_plots(tmp_path, timeline)]
    assert names == ["device_load.png", "pipeline.png"]
    assert min(size(tmp_path / "plots" / "pipeline.png")) > 100
    assert sorted(p.name for p in tmp_path.glob("plots/*")) == names


def test_draws_again_over_the_old_figures(tmp_path):
    (first, *_) = plots.write_plots(logged(tmp_path, range(1, 3), **SERIES))
    before = first.read_bytes()
    plots.write_plots(logged(tmp_path, range(1, 30), **SERIES))
    assert first.read_bytes() != before


@pytest.mark.parametrize(
    "missing", ["loss", "learning_rate", "expert_load", "everything", "the file"]
)
def test_a_figure_without_its_metrics_is_left_out(tmp_path, missing):
    keys = {key: value for key, value in SERIES.items() if key != missing}
    if missing == "everything":
        keys = {"step_s": lambda _: 1.0}
    if missing != "the file":
        logged(tmp_path, range(1, 4), **keys)
    names = [path.name for path in plots.write_plots(tmp_path)]
    gone = {
        "learning_rate": ["learning_rate.png"],
        "expert_load": ["expert_load.png"],
        "everything": NAMES,
        "the file": NAMES,
    }
    assert names == [name for name in NAMES if name not in gone.get(missing, [])]


def test_what_is_not_finite_does_not_stop_the_drawing(tmp_path):
    odd = {
        "loss": lambda step: [1.0, math.nan, math.inf][step % 3],
        "learning_rate": lambda _: math.nan,
        "expert_load": lambda step: [[step, math.nan], [math.inf, 1], [0, 0]],
        "load_cv": lambda _: -math.inf,
    }
    names = [p.name for p in plots.write_plots(logged(tmp_path, range(1, 9), **odd))]
    assert names == ["loss.png", "expert_load.png"]


@pytest.mark.parametrize("shape", [(1, 1), (3, 8), (30, 2)])
@pytest.mark.parametrize("steps", [[10], [1, 5, 6, 100]])
def test_any_number_of_layers_experts_and_steps(tmp_path, shape, steps):
    rng = np.random.default_rng(0)
    load = {"expert_load": lambda _: rng.integers(0, 9, shape)}
    (path,) = plots.write_plots(logged(tmp_path, steps, **load))
    assert min(size(path)) >= 300


def test_a_changed_number_of_experts_draws_the_newest(tmp_path):
    load = {"expert_load": lambda step: [[1] * (4 if step < 3 else 8)]}
    rows = metrics.read(logged(tmp_path, range(1, 6), **load))
    steps, loads = plots._loads(rows, "expert_load")
    assert steps.tolist() == [3, 4, 5]
    assert loads.shape == (3, 1, 8)


def test_long_runs_are_averaged(tmp_path):
    """Columns keep the total load, lines their level."""
    steps = np.arange(1.0, 1001.0)
    load = np.random.default_rng(0).random((1000, 2, 3))
    few, thin = plots._thin(steps, load)
    assert len(few) == len(thin) == plots._MOST_COLUMNS
    assert few[0] < few[-1] <= 1000
    np.testing.assert_allclose(thin.mean(), load.mean(), rtol=0.01)
    level = np.full(500, 2.0)
    level[7] = math.nan
    smooth = plots._running_mean(level)
    np.testing.assert_array_equal(np.isnan(smooth), np.isnan(level))
    assert set(smooth[~np.isnan(smooth)]) == {2.0}
    names = [
        p.name for p in plots.write_plots(logged(tmp_path, range(1, 301), **SERIES))
    ]
    assert names == NAMES


def test_columns_meet_half_way_between_uneven_steps():
    assert plots._edges(np.array([10.0, 20.0, 40.0])).tolist() == [5, 15, 30, 50]
    assert plots._edges(np.array([7.0])).tolist() == [6.5, 7.5]


def test_neither_importing_nor_drawing_touches_pyplot(tmp_path):
    logged(tmp_path, range(1, 4), **SERIES)
    code = (
        "import sys; from jaxmoe import plots;"
        "assert 'matplotlib' not in sys.modules;"
        "assert len(plots.write_plots(sys.argv[1])) == 4;"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True, timeout=60)


def test_the_timeline_is_that_of_the_schedule_of_the_run():
    """By the configured schedule, microbatches and costs; none without a pipeline."""
    costs = "F=1,Bi=2,W=1"
    config = helpers.changed(
        helpers.run_config(), pipeline={"schedule": "1f1b", "costs": costs}
    )
    assert trainer._timeline(config, 1) is None
    timeline = trainer._timeline(config, 2)
    assert timeline.schedule == build("1f1b", 2, 4)
    assert timeline.makespan == (4 + 1) * (1 + 2 + 1)  # (microbatches + ranks - 1) each
