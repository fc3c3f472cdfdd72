# SPDX-License-Identifier: Apache-2.0
"""Runs of two processes with four simulated devices each, for real.

What they compute is compared with one process that has all eight devices.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys

import pytest

from jaxmoe import cli, gin_config
from jaxmoe.config import Mesh
from tests import helpers
from tests.helpers import ROOT, metrics_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_plots")]

CONFIG = helpers.run_config()

# What a process does when the figures of a step have come: {action} says so.
AT_STEP = """
import os, signal, sys, time
from jaxmoe import cli
from jaxmoe.metrics import Progress
original = Progress.step
def progress(self, number):
    original(self, number)
    {action}
Progress.step = progress
sys.exit(cli.main(sys.argv[1:]))
"""

# Data with an end that comes at another step in each process.
ENDING = """
import sys
from jaxmoe import cli
from jaxmoe.data.loader import Loader
original = Loader.__next__
def following(self):
    if self.state()["step"] == {last}:
        raise StopIteration
    return original(self)
Loader.__next__, Loader.ends = following, True
sys.exit(cli.main(sys.argv[1:]))
"""

OTHER_CODE = """
import sys
from jaxmoe import cli, processes
processes._code_version = lambda: "other"
sys.exit(cli.main(sys.argv[1:]))
"""

# What gloo prints as processes meet, in pieces: threads write it, and lines get mixed.
GREETING = re.compile(
    r"\[Gloo\]|Rank|is connected to|peer ranks\.|\d+"
    r"|Expected number of connected peer ranks is :"
)

AGREEING = """
import json, sys
from pathlib import Path
import jax
from jaxmoe import mesh, processes
from jaxmoe.config import ConfigError, Mesh
number, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
place = Mesh(coordinator=f"127.0.0.1:{port}", num_processes=2, process_id=number)
assert mesh.start_backend(place, {"all": "same"}) == "cpu"
assert mesh.start_backend(place, {"all": "same"}) == "cpu", "a second time is nothing"

def message(action):
    try:
        action()
    except ConfigError as error:
        return str(error)

def only_second():
    if number:
        raise ConfigError("no such file here")
    return "result"

processes._SHARED_S = 1.0
print(json.dumps([
    jax.device_count(),
    jax.local_device_count(),
    processes.gather("x" * number),
    processes.all_of(True),
    processes.all_of(not number),
    message(lambda: processes.compare({"data": str(number), "seed": "0"})),
    message(lambda: processes.together(only_second)),
    processes.together(lambda: number),
    message(lambda: processes.check_shared(folder / "shared")),
    message(lambda: processes.check_shared(folder / str(number))),
]), flush=True)
processes.leave(0)
"""


def free_port():
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def ended(*programs, **changes):
    """Runs processes together: (exit code, stdout, stderr) of each.

    Args:
      programs: Arguments of Python.
      changes: Of the environment.
    """
    # They find nothing compiled, see `mesh.start_backend`: little optimization.
    options = helpers.quick_options().items()
    flags = " ".join(f"--{name}={str(value).lower()}" for name, value in options)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags} | changes
    started = [
        subprocess.Popen(
            [sys.executable, *program],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for program in programs
    ]
    try:
        texts = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(p.returncode, *text) for p, text in zip(started, texts, strict=True)]


def train(workdir, *codes, config=CONFIG, mine=((), ()), **changes):
    """The command in two processes, or in as many as there are codes for it.

    Args:
      workdir: The run folder.
      codes: For each process a program in place of `-m jaxmoe`, or None.
      config: Of all.
      mine: Arguments of each.
      changes: Of the environment.
    """
    port = free_port()
    programs = []
    for number, code in enumerate(codes):
        programs.append(
            [
                *(["-c", code] if code else ["-m", "jaxmoe"]),
                *("train", f"--workdir={workdir}", *helpers.arguments(config)),
                f"--gin.Mesh.coordinator=127.0.0.1:{port}",
                "--gin.Mesh.num_processes=2",
                f"--gin.Mesh.process_id={number}",
                *mine[number],
            ]
        )
    return ended(*programs, **changes)


def steps_of(workdir):
    return sorted(int(p.name) for p in (workdir / "checkpoints").glob("[0-9]*"))


def losses(workdir):
    return {line["step"]: line["loss"] for line in metrics_of(workdir)}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The run of one process with eight devices, from beginning to end."""
    workdir = tmp_path_factory.mktemp("straight") / "run"
    arguments = ["train", f"--workdir={workdir}", *helpers.arguments(CONFIG)]
    assert cli.main(arguments) == 0
    return workdir


def test_killed_stopped_and_finished_by_one_process(straight, tmp_path):
    """Two processes train; one is killed, and the other ends by itself. The same
    command goes on, on a mesh whose exchange crosses the processes; one hangs, which
    both tell; it gets SIGTERM, and both stop and save at one step. One process alone
    finishes. The losses are those of one process all the way."""
    kill = "if number == 13: os.kill(os.getpid(), signal.SIGKILL)"
    mortal = helpers.changed(CONFIG, mesh={"heartbeat_timeout_s": 20})
    code = AT_STEP.format(action=kill)
    first, second = train(tmp_path, None, code, config=mortal)
    assert second[0] == -signal.SIGKILL, (first, second)
    if first[0] == -signal.SIGABRT:  # JAX's runtime, of versions whose exchange waits
        assert "stopped sending heartbeats" in first[2]
    else:
        assert first[0] == cli.EXIT_FAILED, first
        assert "process 0 of 2" in first[2] and "has probably gone" in first[2]
    assert "Traceback" not in first[2]
    assert 10 in steps_of(tmp_path)

    act = "if number == 11: time.sleep(3); os.kill(os.getpid(), signal.SIGTERM)"
    wait = "\n    if number > 11: time.sleep(0.3)"
    other = helpers.changed(
        CONFIG, mesh={"data": 1, "expert": 8}, train={"watchdog_s": 1.5}
    )
    code = AT_STEP.format(action=act + wait)
    first, second = train(tmp_path, None, code, config=other)
    assert first[0] == second[0] == cli.EXIT_STOPPED, (first, second)
    assert "going on from step 10" in first[1]
    stops = [
        re.search(r"stopped by .* after step (\d+) of", s[2])[1]
        for s in (first, second)
    ]
    assert stops[0] == stops[1]
    assert int(stops[0]) in steps_of(tmp_path)
    for number, (_, _, err) in enumerate((first, second)):
        assert f"process {number} of 2" in err and "no step ended for" in err
    assert "in progress" in second[2], "the line that hung"

    arguments = ["train", f"--workdir={tmp_path}", *helpers.arguments(CONFIG)]
    assert cli.main(arguments) == 0
    want = losses(straight)
    assert losses(tmp_path) == pytest.approx(want, rel=1e-5)
    assert list(want) == list(range(1, 22))
    summaries = [
        json.loads((w / "summary.json").read_text()) for w in (straight, tmp_path)
    ]
    for name in ("eval_loss_lm", "eval_accuracy_text_denoise"):
        assert summaries[1][name] == pytest.approx(summaries[0][name], rel=1e-5)


def test_data_that_ends_at_different_moments(straight, tmp_path):
    """Batches for 10 steps in one process and for 6 in the other: both end after step 6
    with a message and a checkpoint. Only the first one writes and prints, and what it
    writes names no process. Started again, there is nothing left to do."""
    first, second = train(tmp_path, ENDING.format(last=10), ENDING.format(last=6))
    assert first[0] == second[0] == 0, (first, second)
    assert "the data ended after step 6 of 21" in first[2]
    assert steps_of(tmp_path) == [6]
    want = {step: loss for step, loss in losses(straight).items() if step <= 6}
    assert losses(tmp_path) == pytest.approx(want, rel=1e-5)
    assert json.loads((tmp_path / "summary.json").read_text())["step"] == 6
    assert "Train.steps = 21" in first[1] and "eval_loss_lm" in first[1]
    assert GREETING.sub("", second[1]).strip() == ""
    assert "step " not in second[2]
    mesh = gin_config.load([str(tmp_path / "config.gin")]).config.mesh
    assert mesh == CONFIG.mesh and mesh.coordinator == Mesh().coordinator
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


def test_processes_that_differ_stop_together(tmp_path):
    """Another seed, number of experts and code: both end before anything is compiled or
    written, with one message that names the fields and who has which value."""
    first, second = train(
        tmp_path / "run",
        None,
        OTHER_CODE,
        mine=((), ("--gin.Train.seed=1", "--gin.MoE.num_experts=16")),
    )
    assert first[0] == second[0] == cli.EXIT_MISTAKE, (first, second)
    assert first[2] == second[2]
    host = socket.gethostname()
    for fact in (
        f"Train.seed is 0 in process 0 ({host}), 1 in process 1 ({host})",
        f"MoE.num_experts is 8 in process 0 ({host}), 16 in process 1 ({host})",
        "(code other) in process 1",
    ):
        assert fact in first[2]
    assert "Traceback" not in first[2]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ("cpu", "Mesh.platform='gpu', but JAX found only 'cpu'"),
        ("cuda", "JAX could not start a backend"),
    ],
)
def test_devices_that_are_not_there(tmp_path, found, said):
    """The same messages as in one process, in both, without a trace."""
    config = helpers.changed(CONFIG, mesh={"platform": "gpu"})
    workdir = tmp_path / "run"
    for code, _, err in train(workdir, None, None, config=config, JAX_PLATFORMS=found):
        assert (code, said in err) == (cli.EXIT_MISTAKE, True), err
        assert "Traceback" not in err and "Check failure" not in err
    assert not workdir.exists()


@pytest.mark.parametrize("number", [0, 1])
def test_only_one_process_starts(tmp_path, number):
    """Within the set time, with exit code 1 and no trace: how many of how many came, or
    that process 0 does not answer."""
    port = free_port()
    command = ["-m", "jaxmoe", "train", f"--workdir={tmp_path / 'run'}"]
    command += [
        f"--gin.Mesh.coordinator=127.0.0.1:{port}",
        "--gin.Mesh.num_processes=2",
    ]
    command += [f"--gin.Mesh.process_id={number}", "--gin.Mesh.start_timeout_s=1"]
    [(code, _, err)] = ended(command)
    said = ("1 of 2 processes arrived", "process 0 did not answer")[number]
    assert (code, said in err) == (cli.EXIT_FAILED, True), err
    assert "within 1 s" in err and "Traceback" not in err
    assert not (tmp_path / "run").exists()


def test_what_one_process_alone_can_see_is_known_to_all(tmp_path):
    """Values are gathered; different data, a mistake in one process and folders that
    are not shared give the same message in both."""
    port = str(free_port())
    programs = [["-c", AGREEING, str(n), port, str(tmp_path)] for n in (0, 1)]
    results = ended(*programs)
    assert [code for code, *_ in results] == [0, 0], results
    answers = [json.loads(out.splitlines()[-1]) for _, out, _ in results]
    host = socket.gethostname()
    assert answers[0][5:7] == answers[1][5:7] and answers[0][9] == answers[1][9]
    for number, answer in enumerate(answers):
        devices, local, gathered, yes, no, differs, failed, same, shared, split = answer
        assert (devices, local) == (8, 4)
        assert gathered == ["", "x"]
        assert (yes, no) == (True, False)
        assert f"data is 0 in process 0 ({host}), 1 in process 1" in differs
        assert "seed" not in differs
        assert failed == "process 1: no such file here"
        assert same == number
        assert shared is None
        assert f"is not that of process 1 ({host})" in split
        assert split.startswith(f"the folder {tmp_path / '0'} of process 0")
