# SPDX-License-Identifier: Apache-2.0
"""Train.profile_steps: a trace, its figures, and the losses of a run without it."""

import json

import jax
import pytest

from jaxmoe import cli, plots, profile
from jaxmoe.config import Train
from jaxmoe.config_checks import profiled_steps
from jaxmoe.profile import Profile
from tests import helpers

CONFIG = helpers.changed(helpers.run_config(), train={"steps": 5, "eval_every": 0})


@pytest.fixture(autouse=True)
def no_plots(monkeypatch):
    monkeypatch.setattr(plots, "write_plots", lambda *_: None)


def train(workdir, **fields):
    config = helpers.changed(CONFIG, train=fields) if fields else CONFIG
    return cli.main(["train", f"--workdir={workdir}", *helpers.arguments(config)])


def figures_of(workdir):
    return json.loads((workdir / "profile" / "overlap.json").read_text("utf-8"))


def test_a_run(tmp_path, capsys):
    """Steps 3 and 4 are in the trace; the losses are bitwise those without it. The
    folder of the run is what `jaxmoe overlap` takes."""
    plain, profiled = tmp_path / "plain", tmp_path / "profiled"
    assert train(plain) == 0
    assert not (plain / "profile").exists()
    assert train(profiled, profile_steps="3-4") == 0
    assert helpers.metrics_of(profiled) == helpers.metrics_of(plain)
    assert "profile: communication" in capsys.readouterr().err
    figures = figures_of(profiled)
    assert figures["sections"]["train"]["count"] == 2
    assert len(figures["devices"]) == 8
    assert {"all_to_all", "all_gather"} <= set(figures["classes"])
    assert figures["classes"]["all_to_all"]["kernels"] > 0
    assert 0 < figures["communication_ms"] <= figures["span_ms"]
    assert cli.main(["overlap", str(profiled), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == figures


class _State:
    """Stands for a train state after so many updates."""

    def __init__(self, step):
        self.step = step


jax.tree_util.register_pytree_node(
    _State, lambda state: ((state.step,), None), lambda _, leaves: _State(*leaves)
)


def counting(state, batch):
    return _State(state.step + 1), batch


def stepped(folder, text, first, last, lines):
    """Goes through steps as the trainer does; returns how many were annotated."""
    config = Train(steps=100, profile_steps=text)
    with Profile(config, folder, lines.append) as running:
        step = running.around(counting)
        state = _State(first - 1)
        for number in range(first, last + 1):
            state, batch = step(state, number)
            assert (state.step, batch) == (number, number)


def test_a_run_that_goes_on_inside(tmp_path, monkeypatch):
    """Profiled is what is left of the steps, and what was done when the run stopped."""
    seen = []
    monkeypatch.setattr(
        jax.profiler, "start_trace", lambda folder, **_: seen.append("start")
    )
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: seen.append("stop"))
    lines = []
    for first, last, expected in (
        (1, 3, []),
        (1, 20, ["start", "stop"]),
        (6, 20, ["start", "stop"]),
        (1, 6, ["start", "stop"]),
        (8, 20, []),
    ):
        seen.clear()
        stepped(tmp_path, "5-7", first, last, lines)
        assert seen == expected, (first, last)
    # Nothing was written here: told, and no reason to lose the run.
    assert len(lines) == 3 and all("profile" in line for line in lines)


def test_a_full_trace_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(profile, "_MOST_EVENTS", 1)
    lines = []
    double = jax.jit(lambda x: x * 2)

    def step(state, batch):
        return _State(state.step + 1), double(batch)

    train = Train(steps=9, profile_steps="1")
    with Profile(train, tmp_path, lines.append) as running:
        running.around(step)(_State(0), 1.0)
    assert "communication 0.0 ms, hidden none" in lines[0]
    assert "profile fewer" in lines[1]


@pytest.mark.parametrize(
    ("text", "steps"),
    [("", []), ("7", [7]), ("1-2", [1, 2]), (" 9 - 11 ", [9, 10, 11])],
)
def test_texts(text, steps):
    assert list(profiled_steps(Train(profile_steps=text))) == steps
