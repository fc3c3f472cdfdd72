# SPDX-License-Identifier: Apache-2.0
"""Whole runs whose folder can no longer be written."""

import resource
import time
from pathlib import Path

import pytest

from jaxmoe import cli
from jaxmoe.checkpoint import Checkpointer
from tests.helpers import changed, metrics_of
from tests.runs import CONFIG, at_step, train

pytestmark = pytest.mark.usefixtures("no_plots")


def wait_for_step_10(run):
    """Its save, in the background, may still be going on after step 12."""
    while not (run / "checkpoints" / "10" / "complete.json").exists():
        time.sleep(0.01)


@pytest.mark.parametrize(
    "what", ["run folder", pytest.param("checkpoints", marks=pytest.mark.slow)]
)
def test_a_folder_that_is_renamed_during_the_run(tmp_path, monkeypatch, capsys, what):
    """After step 12: the next thing to be written fails the run, exit code 1 and one
    message with the path; what was saved before is whole, and nothing is made anew in
    the old place."""
    run, moved = tmp_path / "run", tmp_path / "moved"
    folder = run if what == "run folder" else run / "checkpoints"

    def rename():
        wait_for_step_10(run)
        folder.rename(moved)

    at_step(monkeypatch, 12, rename)
    assert train(run) == cli.EXIT_FAILED
    err = capsys.readouterr().err
    assert "cannot be written" in err or "could not be written" in err
    assert str(run) in err
    assert "Traceback" not in err
    assert not folder.exists()
    left = moved / "checkpoints" if what == "run folder" else moved
    with Checkpointer(left, read_only=True) as checkpoints:
        assert checkpoints.latest() == 10


@pytest.mark.slow
@pytest.mark.parametrize("what", ["full", "read-only"])
def test_a_disk_that_takes_no_more(tmp_path, monkeypatch, capsys, what):
    """After step 12: the save of step 20 fails the run, exit code 1, one message with
    step and path. What was saved before is whole, and once there is room the same run
    goes on from it to the end.

    A limit on the size of files stands for a full disk, and mkdir that is refused for
    one that is read-only: root may write there all the same.
    """
    run, mkdir = tmp_path / "run", Path.mkdir
    wide = changed(CONFIG, model={"ffn_width": 4096})  # arrays beyond the limit
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def refuse(path, *args, **kwargs):
        if run / "checkpoints" in path.parents:
            raise PermissionError(13, "Permission denied", str(path))
        mkdir(path, *args, **kwargs)

    def takes_no_more():
        wait_for_step_10(run)
        if what == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        else:
            patch.setattr(Path, "mkdir", refuse)

    with monkeypatch.context() as patch:
        at_step(patch, 12, takes_no_more)
        try:
            assert train(run, wide) == cli.EXIT_FAILED
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    err = capsys.readouterr().err
    assert "step 20" in err and str(run / "checkpoints" / "20") in err
    assert ("File too large" if what == "full" else "Permission denied") in err
    assert "Traceback" not in err and "asyncio" not in err
    with Checkpointer(run / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.steps() == [10]
    assert train(run, wide) == 0
    assert [line["step"] for line in metrics_of(run)] == list(range(1, 22))
