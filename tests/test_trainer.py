# SPDX-License-Identifier: Apache-2.0
"""Whole runs: metrics, checkpoints, stops and restarts, bitwise.

A run that is killed is a process of its own; what goes on from it, and what it is
compared with, run here: so equal losses are equal across processes.
"""

import contextlib
import dataclasses
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from jaxmoe import cli, tree_names
from jaxmoe.checkpoint import Checkpointer
from jaxmoe.evaluate import Evaluator
from jaxmoe.optim import learning_rate
from jaxmoe.train_step import Setup
from jaxmoe.trainer import Trainer
from tests import helpers
from tests.helpers import MESHES, ROOT, contents, metrics_of
from tests.runs import CONFIG, at_step, steps_of, train

pytestmark = pytest.mark.usefixtures("no_plots")


def saved(workdir, step):
    """All arrays of a checkpoint, by name."""
    with Checkpointer(workdir / "checkpoints", read_only=True) as checkpoints:
        return checkpoints.arrays(step), checkpoints.extra(step)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The folder of CONFIG's run from beginning to end, which traced its step once."""
    workdir = tmp_path_factory.mktemp("straight") / "run"
    traces = []
    original = Setup.step

    @functools.wraps(original)  # the program's name is part of its place in the cache
    def step(*arguments):
        traces.append(arguments)
        return original(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Setup, "step", step)
        assert train(workdir) == 0
    assert len(traces) == 1, "the step is traced and compiled once per run"
    return workdir


def test_21_steps_with_a_save_every_10(straight):
    """Checkpoints 10, 20 and 21: N = N updates done, the position in the data is batch
    N, and the last step is saved."""
    assert steps_of(straight) == [10, 20, 21]
    for step in (10, 21):
        tree, extra = saved(straight, step)
        assert int(tree["step"]) == step
        assert extra["data"]["step"] == step
        assert int(tree["optimizer"]["0"]["count"]) == step


def test_the_run_folder(straight):
    """metrics.jsonl has a line per logged step with the promised figures, summary.json
    the last ones; config.gin reads back to the same configuration."""
    lines = metrics_of(straight)
    assert [line["step"] for line in lines] == list(range(1, 22))
    promised = {
        *("step", "loss", "grad_norm", "learning_rate", "balance_loss"),
        *("load_max_over_mean", "load_cv", "dropped_fraction"),
        *("loss_text_denoise", "loss_lm"),
    }
    assert all(promised <= set(line) for line in lines)
    for line in lines:  # 4 of the 8 experts are on either device along `expert`
        (load_E,), (load_X,) = line["expert_load"], line["device_load"]
        assert load_X == [sum(load_E[:4]), sum(load_E[4:])]
        worst = max(load_X) * 2 / sum(load_X)
        assert line["device_load_max_over_mean"] == pytest.approx(worst)
    evaluated = [line["step"] for line in lines if "eval_loss_lm" in line]
    assert evaluated == [20], "Train.eval_every"
    first = json.loads((straight / "metrics.jsonl").read_text().splitlines()[0])
    assert first["step_s"] > 0
    assert first["tokens_per_s"] == pytest.approx(32 * 40 / first["step_s"])
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5
    summary = json.loads((straight / "summary.json").read_text())
    assert summary["step"] == 21
    assert summary["mesh"] == "data 4 x expert 2 x pipe 1"
    assert summary["compile_s"] > 0
    assert summary["step_s"] > 0
    assert {"eval_loss_lm", "eval_loss_text_denoise"} <= set(summary)
    assert (straight / "tensorboard").is_dir()
    loaded = helpers.gin_config.load([str(straight / "config.gin")])
    assert loaded.config == CONFIG


def test_the_learning_rate_that_is_logged_is_the_one_used(straight):
    """Line t holds rate(t - 1): 4 steps of warm-up, then the linear decay."""
    rate = learning_rate(CONFIG.optimizer, 21)
    want = [float(np.asarray(rate(step))) for step in range(21)]
    assert [line["learning_rate"] for line in metrics_of(straight)] == want
    assert want[3] == pytest.approx(max(want))


def test_the_figures_are_those_of_the_step(straight):
    """The lines of steps 1 to 3 are what the step gives outside the trainer: losses by
    task, gradient norm, loads per routing group."""
    state = helpers.initial_state(CONFIG, 4, 2)
    lines = metrics_of(straight)
    for line, batch in zip(lines, helpers.batches(CONFIG, 3), strict=False):
        state, metrics = helpers.step_of(CONFIG, 4, 2)(state, batch)
        assert line["loss"] == pytest.approx(helpers.loss_of(metrics), rel=1e-5)
        assert line["grad_norm"] == pytest.approx(float(metrics.grad_norm), rel=1e-5)
        nll, tokens = np.asarray(metrics.sums.nll), np.asarray(metrics.sums.tokens)
        assert line["loss_lm"] == pytest.approx(nll[3] / tokens[3], rel=1e-5)
        groups = 32  # one sequence each
        balance = float(metrics.stats.balance_loss[0]) / groups
        assert line["balance_loss"] == pytest.approx(balance, rel=1e-5)
        assert line["dropped_fraction"] == 0.0
        assert line["expert_load"] == np.asarray(metrics.stats.load_E).tolist()


def test_a_new_run_from_the_weights_alone(straight, tmp_path):
    """Train.init_from: the first loss is that of the finished run's weights, evaluated
    on the first batch; step, rate, optimizer and data begin anew."""
    assert train(tmp_path, CONFIG, f"--gin.Train.init_from={str(straight)!r}") == 0
    fresh = helpers.initial_state(CONFIG, 4, 2)
    layout = jax.tree.map(lambda leaf: leaf.sharding, fresh.params)
    params = jax.device_put(saved(straight, 21)[0]["params"], layout)
    state = dataclasses.replace(fresh, params=params)
    step = helpers.step_of(CONFIG, 4, 2)
    _, metrics = step(state, helpers.batches(CONFIG)[0])
    lines, before = metrics_of(tmp_path), metrics_of(straight)
    assert lines[0]["loss"] == pytest.approx(helpers.loss_of(metrics), rel=1e-5)
    assert lines[0]["loss"] < before[0]["loss"] - 0.5
    for name in ("step", "learning_rate"):
        assert [line[name] for line in lines] == [line[name] for line in before]
    assert steps_of(tmp_path) == [10, 20, 21]
    tree, extra = saved(tmp_path, 21)
    assert int(tree["step"]) == int(tree["optimizer"]["0"]["count"]) == 21
    assert extra["data"] == saved(straight, 21)[1]["data"]


def test_a_finished_run_does_nothing_and_says_so(straight, capsys):
    """The same command again at 21 of 21: no file changes."""
    before = contents(straight)
    assert train(straight) == 0
    assert "has all 21 steps already: nothing to do" in capsys.readouterr().out
    assert contents(straight) == before


def test_sigterm_saves_and_the_same_command_goes_on(
    straight, tmp_path, monkeypatch, capsys
):
    """SIGTERM after step 12: exit code 75 and a checkpoint at the next step's end; the
    same command goes on, and losses, rates, counters, weights, optimizer and position
    in the data are bitwise those of the run without a stop."""
    handlers = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
    with monkeypatch.context() as patch:
        at_step(patch, 12, lambda: signal.raise_signal(signal.SIGTERM))
        assert train(tmp_path) == cli.EXIT_STOPPED == 75
    assert "stopped by SIGTERM after step 13 of 21" in capsys.readouterr().err
    assert steps_of(tmp_path) == [10, 13]
    assert not (tmp_path / "summary.json").exists()
    assert [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert train(tmp_path) == 0
    assert "going on from step 13" in capsys.readouterr().out
    assert metrics_of(tmp_path) == metrics_of(straight)
    assert steps_of(tmp_path) == [13, 20, 21]
    for step in (20, 21):
        helpers.assert_same(saved(tmp_path, step)[0], saved(straight, step)[0])
        assert saved(tmp_path, step)[1] == saved(straight, step)[1]


@pytest.mark.slow
def test_a_signal_while_the_step_compiles(tmp_path):
    """SIGTERM before the first step: exit code 75 within seconds, nothing saved, no
    stack trace; the compiler is not waited for."""
    command = ["train", f"--workdir={tmp_path}", *helpers.arguments(CONFIG)]
    process = helpers.start(command, **helpers.COMPILING)
    for line in process.stdout:
        if line.startswith("run folder"):
            break
    while not (tmp_path / "config.gin").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    before_s = time.monotonic()
    out, err = process.communicate(timeout=300)
    assert process.returncode == cli.EXIT_STOPPED, err
    assert time.monotonic() - before_s < 10
    assert "stopped by SIGTERM before a step was made" in err
    assert "Traceback" not in err
    assert steps_of(tmp_path) == []
    assert not (tmp_path / "metrics.jsonl").exists(), out


@pytest.mark.parametrize("times", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_signal_during_an_evaluation(straight, tmp_path, monkeypatch, capsys, times):
    """SIGTERM, once or twice, when an evaluation after step 20 begins: it ends before
    its next batch, step 20 is saved, and the run goes on from there."""
    run = helpers.rewound(straight, tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "20")
    original = Evaluator._task_figures

    def signalled(*arguments):
        for _ in range(times):
            signal.raise_signal(signal.SIGTERM)
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "_task_figures", signalled)
        assert train(run) == cli.EXIT_STOPPED
    assert "after step 20 of 21" in capsys.readouterr().err
    assert steps_of(run) == [10, 20]
    assert metrics_of(run)[:19] == metrics_of(straight)[:19]
    helpers.assert_same(saved(run, 20)[0], saved(straight, 20)[0])
    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "_task_figures", signalled)
        assert train(run) == cli.EXIT_STOPPED
    assert "in the last evaluation" in capsys.readouterr().err
    assert steps_of(run) == [10, 20, 21]
    assert not (run / "summary.json").exists()


def test_signals_during_a_save(straight, tmp_path, monkeypatch, capsys):
    """SIGTERM twice as step 10 begins to be written: that save is finished, so is the
    one after the step that follows."""
    original = Checkpointer.save

    def signalled(self, step, *arguments):
        if step == 10:
            signal.raise_signal(signal.SIGTERM)
        original(self, step, *arguments)
        if step == 10:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, "save", signalled)
        assert train(tmp_path) == cli.EXIT_STOPPED
    assert "after step 11 of 21" in capsys.readouterr().err
    with Checkpointer(tmp_path / "checkpoints", read_only=True) as checkpoints:
        assert [checkpoints.problem(step) for step in (10, 11)] == [None, None]
    assert metrics_of(tmp_path) == metrics_of(straight)[:11]
    helpers.assert_same(saved(tmp_path, 10)[0], saved(straight, 10)[0])


def killed(workdir, step, changes):
    """A process of its own that gets SIGKILL when the figures of `step` have come."""
    code = f"""
import os, signal, sys
from jaxmoe import cli
from jaxmoe.evaluate import Evaluator
from jaxmoe.metrics import Progress
original = Progress.step
def progress(self, number):
    original(self, number)
    if number == {step}:
        os.kill(os.getpid(), signal.SIGKILL)
Progress.step = progress
sys.exit(cli.main(sys.argv[1:]))
"""
    command = ["train", f"--workdir={workdir}", *helpers.arguments(CONFIG)]
    return subprocess.run(
        [sys.executable, "-c", code, *command],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | changes,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("step", "caches"),
    [
        (17, True),
        *(pytest.param(n, False, marks=pytest.mark.slow) for n in (5, 11, 20)),
    ],
)
def test_resuming_after_kill_9_is_bitwise(straight, tmp_path, step, caches):
    """kill -9 in another process, whatever was being written; the rest of the run, in
    this process, gives bitwise the losses and the state of never having stopped."""
    done = killed(tmp_path, step, {} if caches else helpers.COMPILING)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "summary.json").exists()
    before = metrics_of(tmp_path)
    assert before == metrics_of(straight)[: len(before)]
    assert train(tmp_path) == 0
    assert metrics_of(tmp_path) == metrics_of(straight)
    helpers.assert_same(saved(tmp_path, 21)[0], saved(straight, 21)[0])


@pytest.mark.slow
def test_kills_at_any_moment_lose_nothing(straight, tmp_path):
    """kill -9 from outside at four moments, in start, compilation, steps or saves; then
    the same command to the end: bitwise the run without a kill."""
    rng = np.random.default_rng(0)
    command = ["train", f"--workdir={tmp_path}", *helpers.arguments(CONFIG)]
    for seconds in rng.uniform(2, 20, size=4):
        process = helpers.start(command, **helpers.COMPILING)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=seconds)
        process.kill()
        process.communicate()
    process = helpers.start(command, **helpers.COMPILING)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert metrics_of(tmp_path) == metrics_of(straight)
    helpers.assert_same(saved(tmp_path, 21)[0], saved(straight, 21)[0])


@pytest.mark.parametrize("mesh", MESHES)
def test_a_checkpoint_restores_on_every_mesh(straight, mesh):
    """Written on 4 x 2: on any mesh every array has the same content, bitwise, in the
    layout that this mesh asks for."""
    own = helpers.setup_of(CONFIG, *mesh).abstract_state
    with Checkpointer(straight / "checkpoints", read_only=True) as checkpoints:
        state = checkpoints.restore(20, own)
    layouts = jax.tree.map(
        lambda leaf, like: leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim),
        state,
        own,
    )
    assert all(jax.tree.leaves(layouts))
    want = tree_names.named_leaves(saved(straight, 20)[0])
    helpers.assert_same(tree_names.named_leaves(state), want)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 8), (8, 1), (2, 4)])
def test_a_run_goes_on_on_another_mesh(straight, tmp_path, mesh, capsys):
    """Begun on 4 x 2, gone on from step 20 on another mesh: the loss of step 21 and the
    weights after it are the same up to rounding; what changed is told."""
    run = helpers.rewound(straight, tmp_path / "run")
    data, expert = mesh
    config = helpers.changed(CONFIG, mesh={"data": data, "expert": expert})
    assert train(run, config) == 0
    out = capsys.readouterr().out
    assert f"since step 20: Mesh.expert was 2 and is {expert}" in out
    want, got = metrics_of(straight), metrics_of(run)
    assert got[:-1] == want[:-1]
    assert got[-1]["loss"] == pytest.approx(want[-1]["loss"], rel=1e-5)
    assert got[-1]["grad_norm"] == pytest.approx(want[-1]["grad_norm"], rel=1e-4)
    ours, theirs = (saved(folder, 21)[0]["params"] for folder in (run, straight))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), ours, theirs)


def with_a_fault(monkeypatch, step, fault):
    """Changes (state, batch) on their way into one step of the next run."""
    original = Trainer._compile

    def compile_with_a_fault(self, lowered):
        train_step, count = original(self, lowered), iter(range(1, 22))

        def faulty(state, batch):
            if next(count) == step:
                state, batch = fault(state, batch)
            return train_step(state, batch)

        return faulty

    monkeypatch.setattr(Trainer, "_compile", compile_with_a_fault)


def nan_in_the_router(state, batch):
    params = jax.tree.map(lambda leaf: leaf, state.params)
    router = params["moe"]["moe"]["router"]
    kernel = np.array(router["router_kernel"])
    kernel[0, 3, 5] = np.nan
    router["router_kernel"] = jax.device_put(kernel, router["router_kernel"].sharding)
    return dataclasses.replace(state, params=params), batch


def nan_in_the_patches(state, batch):
    """No text sees them, so the loss is finite; the gradient of their kernel is not."""
    patches = np.full(batch["patches"].shape, np.nan, np.float32)
    patches = jax.device_put(patches, batch["patches"].sharding)
    return state, {**batch, "patches": patches}


@pytest.mark.parametrize(
    "nonfinite", ["stop", pytest.param("skip", marks=pytest.mark.slow)]
)
def test_nan_stops_the_run_and_nothing_of_it_is_saved(
    tmp_path, monkeypatch, capsys, nonfinite
):
    """NaN in one router weight before step 12: exit code 1 at step 12 with one message
    that names it, and no checkpoint of that state. Skipping does not help there."""
    with_a_fault(monkeypatch, 12, nan_in_the_router)
    config = helpers.changed(
        CONFIG, checkpoint={"every_steps": 2}, train={"nonfinite": nonfinite}
    )
    assert train(tmp_path, config) == cli.EXIT_FAILED == 1
    err = capsys.readouterr().err
    assert "step 12: loss nan" in err
    assert "the parameter moe/router/router_kernel of layer 0 (moe)" in err
    assert "Both must be finite" in err
    assert "Traceback" not in err
    assert steps_of(tmp_path)[-1] == 10
    assert [line["step"] for line in metrics_of(tmp_path)] == list(range(1, 12))
    assert not (tmp_path / "summary.json").exists()


def test_a_step_is_skipped_where_that_is_configured(
    straight, tmp_path, monkeypatch, capsys
):
    """A gradient that is not finite at step 12 of 21: the run goes on, the step is
    counted and named, later learning rates are those of one update less."""
    with_a_fault(monkeypatch, 12, nan_in_the_patches)
    config = helpers.changed(CONFIG, train={"nonfinite": "skip"})
    assert train(tmp_path, config) == 0
    err = capsys.readouterr().err
    assert "the gradient of embedder/patch/patch_kernel" in err
    assert "Its update was skipped" in err
    lines, want = metrics_of(tmp_path), metrics_of(straight)
    assert [line["skipped_steps"] for line in lines] == [0] * 11 + [1] * 10
    assert lines[11]["grad_norm"] == "NaN"
    rates = [line["learning_rate"] for line in want]
    assert [line["learning_rate"] for line in lines] == [*rates[:12], *rates[11:20]]
    assert steps_of(tmp_path) == [10, 20, 21]
    tree, _ = saved(tmp_path, 21)
    assert (int(tree["step"]), int(tree["optimizer"]["0"]["count"])) == (21, 20)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(tree))


@pytest.mark.slow
def test_a_rate_that_is_far_too_large(tmp_path, capsys):
    """SGD at a rate of 1e30: step 2 has no finite loss; exit code 1."""
    sgd = {"name": "sgd", "learning_rate": 1e30, "warmup_steps": 0}
    config = helpers.changed(CONFIG, optimizer=sgd, checkpoint={"every_steps": 2})
    assert train(tmp_path, config) == 1
    assert "step 2: loss" in capsys.readouterr().err
    assert steps_of(tmp_path) == []
    assert [line["step"] for line in metrics_of(tmp_path)] == [1]
