# SPDX-License-Identifier: Apache-2.0
"""The command line: exit codes; a mistake gets one message and touches nothing."""

import json
import re
import signal
import subprocess
import sys

import pytest

from jaxmoe import __version__, checkpoint_folder, cli
from tests import helpers
from tests.helpers import ROOT, TEXT_ONLY, contents, metrics_of

CONFIG = helpers.run_config()
ARGUMENTS = helpers.arguments(CONFIG)


def mistake(capsys, arguments):
    """The one message of a command that ends with exit code 2 and compiles nothing."""
    with helpers.compilations() as compiled:
        code = cli.main(arguments)
    err = capsys.readouterr().err
    assert code == cli.EXIT_MISTAKE == 2, err
    # A conversion of one number is compiled where a process makes its first seed.
    assert all("convert_element_type" in name for name in compiled), compiled
    assert err.startswith("jaxmoe: ")
    assert err.count("jaxmoe: ") == 1
    assert "Traceback" not in err
    return err


# What is asked in the wrong way -------------------------------------------------------


@pytest.mark.parametrize("arguments", [[], ["--help"], ["train", "--help"], ["-h"]])
def test_help(arguments, capsys):
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert "usage: jaxmoe COMMAND" in out
    assert "--gin.SECTION.FIELD=VALUE" in out


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"jaxmoe {__version__}\n"


NEW_RUNS = [  # arguments, what the message says
    # names
    (["--gin.MoE.num_expert=16"], ("MoE.num_expert", "num_experts")),
    (["--gin.Moe.num_experts=16"], ("Moe.num_experts", "MoE")),
    (["--gin_bindings=unused = 3"], ("unused",)),
    (["--gin.Model.remat='dot'"], ("Model.remat='dot'", "'dots'", "'full'")),
    (["--gin.Optimizer.name='adam'"], ("Optimizer.name='adam'", "'adamw'")),
    # types and ranges
    (["--gin.Train.steps=1e3"], ("Train.steps", "1000.0", "a whole number")),
    (["--gin.Train.steps='10'"], ("Train.steps", "'10'", "a whole number")),
    (["--gin.Train.steps=True"], ("Train.steps", "True", "a whole number")),
    (["--gin.Optimizer.learning_rate='high'"], ("Optimizer.learning_rate", "'high'")),
    (["--gin.Train.steps=-1"], ("Train.steps=-1", "0")),
    (["--gin.MoE.top_k=9"], ("MoE.top_k=9", "MoE.num_experts=8")),
    # sizes
    (["--gin.MoE.num_experts=7"], ("MoE.num_experts=7", "Mesh.expert=2", "6 or 8")),
    (["--gin.Data.batch_size=12"], ("Data.batch_size=12", "8 or 16")),
    (["--gin.Train.accumulation=3"], ("Data.batch_size=32", "Train.accumulation=3")),
    (["--gin.Mesh.data=2"], ("Mesh.data=2 x Mesh.expert=2", "8 cpu device(s)")),
    (["--gin.Mesh.data=16"], ("with 8 CPU device(s)", "32 are needed")),
    (["--gin.Model.width=15"], ("Model.width=15", "Model.num_heads=2")),
    (
        ["--gin.Model.layer_pattern='dense,moe'"],
        ("Model.num_layers=1", "layer_pattern"),
    ),
    (["--gin.Model.vocab_size=100"], ("Model.vocab_size=100", "264")),
    (
        ["--gin.Data.source='digits'", "--gin.Model.sequence_length=8"],
        ("Model.sequence_length=8", "at least 28"),
    ),
    # files
    (["--gin_file=nowhere.gin"], ("nowhere.gin",)),
    (["--gin.Data.tokenizer='sentencepiece:nowhere'"], ("Data.tokenizer", "nowhere")),
    (["--gin.Train.init_from='nowhere'"], ("Train.init_from='nowhere'",)),
    # the machine
    (["--gin.Mesh.platform='tpu'"], ("Mesh.platform='tpu'", "jaxlib", "libtpu")),
    # the command line itself
    (["--workdirs=x"], ("--workdirs",)),
    (["--workdir"], ("--workdir",)),
    (["steps=3"], ("steps=3",)),
]


def replaced(arguments):
    """The run's arguments, those that are given again taken out."""
    given = {argument.partition("=")[0] for argument in arguments}
    return [a for a in ARGUMENTS if a.partition("=")[0] not in given] + arguments


@pytest.mark.parametrize(
    ("arguments", "parts"), NEW_RUNS, ids=[" ".join(a) for a, _ in NEW_RUNS]
)
def test_mistakes_in_a_new_run(arguments, parts, tmp_path, capsys):
    """Exit code 2, one message that names the field and what would work, before
    anything is compiled or written."""
    workdir = tmp_path / "run"
    err = mistake(capsys, ["train", f"--workdir={workdir}", *replaced(arguments)])
    for part in parts:
        assert part in err
    assert not workdir.exists()


def test_a_command_that_is_not_there(capsys):
    assert "'trian'" in mistake(capsys, ["trian"])


def test_a_folder_that_cannot_be_one(tmp_path, capsys):
    """A file as run folder, or inside a file: nothing happens to it."""
    (tmp_path / "file").write_text("precious")
    for workdir in (tmp_path / "file", tmp_path / "file" / "run"):
        err = mistake(capsys, ["train", f"--workdir={workdir}", *ARGUMENTS])
        assert str(tmp_path / "file") in err
    assert contents(tmp_path) == {"file": b"precious"}


def test_weights_of_a_folder_without_a_checkpoint(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    arguments = [*ARGUMENTS, f"--gin.Train.init_from='{tmp_path / 'empty'}'"]
    err = mistake(capsys, ["train", f"--workdir={tmp_path / 'run'}", *arguments])
    assert "no complete checkpoint" in err
    assert contents(tmp_path / "empty") == {}
    assert not (tmp_path / "run" / "config.gin").exists()


def test_a_mistake_costs_no_start_of_jax():
    """The message comes without importing JAX: in a fraction of a second."""
    code = """
import sys
from jaxmoe import cli
assert cli.main(["train", "--gin.MoE.top_k=9", "--workdir=nowhere"]) == 2
loaded = {"jax", "flax", "optax", "orbax", "grain", "matplotlib"} & set(sys.modules)
assert not loaded, loaded
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not (ROOT / "nowhere").exists()


# Runs that are there ------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished run."""
    workdir = tmp_path_factory.mktemp("cli") / "run"
    assert cli.main(["train", f"--workdir={workdir}", *ARGUMENTS]) == 0
    return workdir


@pytest.fixture(scope="module")
def unfinished(finished, tmp_path_factory):
    """The folder of that run as it was after step 20 of 21."""
    return helpers.rewound(finished, tmp_path_factory.mktemp("cli") / "unfinished")


def test_the_run_folder_is_complete(finished):
    """The run folder holds what is promised, and nothing unfinished."""
    names = {path.name for path in finished.iterdir()}
    assert names == {
        *("config.gin", "metrics.jsonl", "summary.json"),
        *("checkpoints", "plots", "tensorboard"),
    }
    assert {"loss.png", "expert_load.png", "device_load.png"} <= set(
        path.name for path in (finished / "plots").iterdir()
    )


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (
            ["--gin.MoE.num_experts=16"],
            ("router_kernel: saved float32[1, 16, 8], now float32[1, 16, 16]",),
        ),
        (["--gin.Optimizer.name='sgd'"], ("optimizer/0/mu/moe/moe/experts/up",)),
        (
            ["--gin.Model.ffn_width=64"],
            ("params/moe/moe/experts/up: saved float32[1, 8, 16, 32]",),
        ),
        (["--gin.Data.seed=1"], ("Data.seed was 0 and is 1",)),
        (["--gin.Data.batch_size=64"], ("Data.batch_size was 32 and is 64",)),
        (["--gin.Data.lm_weight=0.6"], ("Data.lm_weight was 0.5 and is",)),
    ],
)
def test_going_on_with_something_else(unfinished, change, parts, capsys):
    """Another model, optimizer or stream of data than what was saved: each difference
    is named, saved and now, and no byte on disk changes."""
    before = contents(unfinished)
    err = mistake(capsys, ["train", f"--workdir={unfinished}", *replaced(change)])
    for part in parts:
        assert part in err
    assert contents(unfinished) == before


def test_going_on_with_a_safe_difference(finished, unfinished, tmp_path, capsys):
    """Another logging interval or precision of products changes what comes, not what
    was saved: the run goes on, and tells each field, saved and now."""
    run = helpers.rewound(finished, tmp_path / "run")
    change = ["--gin.Train.log_every=5", "--gin.Checkpoint.keep=5"]
    assert cli.main(["train", f"--workdir={run}", *replaced(change)]) == 0
    out = capsys.readouterr().out
    assert "since step 20: Train.log_every was 1 and is 5" in out
    assert "since step 20: Checkpoint.keep was 3 and is 5" in out
    assert out.count("since step 20") == 2
    assert "cpu: mesh data 4 x expert 2 x pipe 1 (8 devices" in out
    assert metrics_of(run) == metrics_of(finished)
    assert "Train.log_every = 5" in (run / "config.gin").read_text("utf-8")


def test_eval_gives_the_figures_of_the_end(finished, capsys):
    """`eval --json` of a finished run: the last line is a JSON object with the figures
    that the run itself ended with, bitwise; the folder is only read."""
    before = contents(finished)
    assert cli.main(["eval", f"--workdir={finished}", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    summary = json.loads((finished / "summary.json").read_text())
    assert figures
    assert {name: summary[name] for name in figures} == figures
    assert {name for name in summary if name.startswith("eval_")} == set(figures)
    assert contents(finished) == before


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "is not a run folder"),
        (["--workdir=nowhere"], "--workdir=nowhere is not a run folder"),
        (["--workdir={run}", "--gin.MoE.num_experts=16"], "router_kernel: saved"),
        (["--workdir={run}", "--steps=3"], "--steps=3"),
        (["--workdir={run}", "--gin.Mesh.data=3"], "Mesh.data=3"),
    ],
)
def test_mistakes_of_eval(finished, arguments, part, capsys):
    """Exit code 2 and one message; the run is not touched."""
    before = contents(finished)
    arguments = [argument.format(run=finished) for argument in arguments]
    assert part in mistake(capsys, ["eval", *arguments])
    assert contents(finished) == before


def test_eval_of_a_run_without_a_checkpoint(finished, tmp_path, capsys):
    """The message speaks of the run folder."""
    (tmp_path / "config.gin").write_bytes((finished / "config.gin").read_bytes())
    err = mistake(capsys, ["eval", f"--workdir={tmp_path}"])
    assert f"'{tmp_path}' has no complete checkpoint" in err


# Processes ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("command", [["train.py"], ["-m", "jaxmoe", "train"]])
def test_a_process_of_its_own(finished, tmp_path, command):
    """Both ways to call it: exit code 0, and the losses are bitwise those of the run in
    this process."""
    done = subprocess.run(
        [sys.executable, *command, f"--workdir={tmp_path}", *ARGUMENTS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert metrics_of(tmp_path) == metrics_of(finished)
    assert "mesh data 4 x expert 2 x pipe 1" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_from_outside(tmp_path, number):
    """A running process that is told to stop saves, says so, and ends with 75; the same
    command goes on where it stood, without a gap in the metrics."""
    config = helpers.tiny_config(data=TEXT_ONLY, train={"steps": 3000})
    command = ["train", f"--workdir={tmp_path}", *helpers.arguments(config)]
    steps = []
    for _ in range(2):
        process = helpers.start(command, **helpers.COMPILING)
        for line in process.stderr:
            if re.match(r"step +\d+/3000", line):
                break
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 75, err
        assert "Traceback" not in err
        stopped = re.search(rf"stopped by {number.name} after step (\d+) of 3000", err)
        steps.append(int(stopped[1]))
    assert f"going on from step {steps[0]}" in out
    assert 0 < steps[0] < steps[1]
    assert [line["step"] for line in metrics_of(tmp_path)] == list(
        range(1, steps[1] + 1)
    )


def test_what_fails_at_run_time_is_exit_code_1(tmp_path, monkeypatch, capsys):
    """A disk that is full when the first checkpoint is written: one message with path
    and step, and no stack trace."""

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_folder, "commit", full)
    assert cli.main(["train", f"--workdir={tmp_path}", *ARGUMENTS]) == 1
    err = capsys.readouterr().err
    assert "step 10" in err
    assert "No space left on device" in err
    assert str(tmp_path) in err
    assert "Traceback" not in err
