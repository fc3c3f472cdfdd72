# SPDX-License-Identifier: Apache-2.0
"""Checkpoints when something goes wrong: an error with path and step, nothing lost."""

import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import checkpoint_folder
from jaxmoe.checkpoint import Checkpointer, CheckpointError
from jaxmoe.config import ConfigError

ROOT = Path(__file__).parents[1]


def fails(checkpointer, step, tree):
    """The error of a save, at the latest at the next call."""
    with pytest.raises(CheckpointError) as error:
        checkpointer.save(step, tree)
        checkpointer.wait()
    return error.value


@pytest.fixture(params=[True, False], ids=["async", "sync"])
def checkpointer(request, tmp_path):
    """A checkpointer with step 1 complete, in tmp_path/run/checkpoints."""
    directory = tmp_path / "run" / "checkpoints"
    checkpointer = Checkpointer(directory, asynchronous=request.param)
    checkpointer.save(1, {"a": jnp.arange(3)})
    checkpointer.wait()
    yield checkpointer
    checkpointer.close()


def test_a_full_disk_is_an_error_and_the_next_save_works(checkpointer):
    """The file size limit stands for a disk that fills up in the middle of a file."""
    big = {"a": np.random.default_rng(0).standard_normal(1 << 20)}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        error = fails(checkpointer, 2, big)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.step == 2
    assert str(checkpointer.directory / "2") in str(error)
    assert "step 2" in str(error)
    assert checkpointer.latest() == 1
    assert not (checkpointer.directory / "2").exists(), "the space was not given back"
    checkpointer.save(2, big)
    assert checkpointer.latest() == 2
    assert (checkpointer.restore(2, big)["a"] == big["a"]).all()


def test_the_error_of_a_background_save_is_raised_by_the_next_one(
    tmp_path, monkeypatch
):
    def full(*_):
        raise OSError(28, "No space left on device")

    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"a": jnp.ones(2)})
        checkpointer.wait()
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint_folder, "commit", full)
            checkpointer.save(2, {"a": jnp.ones(2)})
            with pytest.raises(
                CheckpointError, match=r"step 2.*No space left"
            ) as error:
                checkpointer.save(3, {"a": jnp.ones(2)})
        assert (error.value.step, error.value.path) == (2, tmp_path / "2")
        assert checkpointer.steps() == [1]
        checkpointer.save(3, {"a": jnp.ones(2)})  # raised once, then it goes on
        assert checkpointer.steps() == [1, 3]


@pytest.mark.parametrize("instead", ["nothing", "empty folder", "file"])
def test_a_folder_that_went_away_is_an_error(checkpointer, tmp_path, instead):
    """Renamed, unmounted or replaced: never written anew elsewhere, in silence."""
    directory, moved = checkpointer.directory, tmp_path / "moved"
    directory.rename(moved)
    if instead == "empty folder":
        directory.mkdir()
    if instead == "file":
        directory.write_text("")
    error = fails(checkpointer, 2, {"a": jnp.arange(3)})
    assert str(directory / "2") in str(error)
    assert Checkpointer(moved, read_only=True).steps() == [1]
    if instead == "nothing":
        assert not directory.exists()


def test_a_folder_that_goes_away_during_a_save_is_an_error(
    checkpointer, tmp_path, monkeypatch
):
    commit = checkpoint_folder.CheckpointFolder.commit

    def rename_first(folder, *args):
        folder.path.rename(tmp_path / "moved")
        folder[2].mkdir(parents=True)  # as tensorstore does for what it still writes
        commit(folder, *args)

    monkeypatch.setattr(checkpoint_folder.CheckpointFolder, "commit", rename_first)
    fails(checkpointer, 2, {"a": jnp.arange(3)})
    assert Checkpointer(tmp_path / "moved", read_only=True).steps() == [1]


def test_a_folder_that_becomes_read_only_is_an_error(checkpointer, monkeypatch):
    mkdir = Path.mkdir

    def refuse(path, *args, **kwargs):
        if checkpointer.directory in path.parents:
            raise PermissionError(13, "Permission denied", str(path))
        mkdir(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert "Permission denied" in str(fails(checkpointer, 2, {"a": jnp.arange(3)}))
    assert checkpointer.steps() == [1]


def test_of_two_runs_in_one_folder_the_older_one_stops(checkpointer):
    with Checkpointer(checkpointer.directory) as other:
        assert other.latest() == 1  # looking on takes nothing over
        checkpointer.save(2, {"a": jnp.arange(3)})
        checkpointer.wait()
        other.save(3, {"a": jnp.arange(3)})
        other.wait()
        assert "another run" in str(fails(checkpointer, 4, {"a": jnp.arange(3)}))
        assert other.steps() == [1, 2, 3]


def test_a_damaged_step_is_not_restored(checkpointer):
    marker = checkpointer.directory / "1" / "complete.json"
    marker.write_text(marker.read_text().replace("int32", "int64"))
    with pytest.raises(CheckpointError, match=r"checksum of complete\.json differs"):
        checkpointer.restore(1, {"a": np.zeros(3, np.int64)})
    assert checkpointer.problem(1) == "the checksum of complete.json differs"
    assert checkpointer.latest() is None


def test_a_first_error_is_not_hidden_by_that_of_closing(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_folder, "commit", lambda *_: 1 / 0)
    with pytest.raises(KeyError), Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"a": jnp.ones(2)})
        raise KeyError
    with pytest.raises(CheckpointError), Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"a": jnp.ones(2)})


def test_folders_that_cannot_be_used_are_the_users_mistake(tmp_path):
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file", tmp_path / "file" / "checkpoints"):
        with pytest.raises(ConfigError, match=r"cannot be written.*Choose another"):
            Checkpointer(directory)
    with pytest.raises(ConfigError, match="URL"):
        Checkpointer("gs://bucket/run")
    with pytest.raises(ConfigError, match="keep=0"):
        Checkpointer(tmp_path, keep=0)


def test_reading_creates_nothing(tmp_path):
    with Checkpointer(tmp_path / "none", read_only=True) as checkpointer:
        assert checkpointer.latest() is None
        assert checkpointer.steps() == []
        with pytest.raises(ValueError, match="read_only"):
            checkpointer.save(1, {"a": jnp.ones(1)})
    assert not (tmp_path / "none").exists()


def test_a_relative_folder_is_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Checkpointer("ck") as checkpointer:
        monkeypatch.chdir("/")
        checkpointer.save(1, {"a": jnp.ones(1)})
        assert checkpointer.latest() == 1
    assert (tmp_path / "ck" / "1" / "complete.json").exists()


# Other processes ---------------------------------------------------------------------

IMPORTS = """
import sys, jax, jaxmoe.checkpoint
assert not {'orbax', 'tensorstore'} & {name.partition('.')[0] for name in sys.modules}
jaxmoe.checkpoint.Checkpointer(sys.argv[1], read_only=True).latest()
jax.config.update('jax_num_cpu_devices', 3)  # raises when a backend has started
"""

SAVES = """
import os, sys, jax, jax.numpy as jnp
jax.config.update('jax_num_cpu_devices', 8)
from jaxmoe.checkpoint import Checkpointer
directory, mode = sys.argv[1:]
with Checkpointer(directory, keep=2, asynchronous=mode == 'async') as checkpointer:
    start = checkpointer.latest() or 0
    mesh = jax.make_mesh((8,), ('a',))
    at = jax.NamedSharding(mesh, jax.P('a'))
    for step in range(start + 1, start + 10**6):
        w = jax.device_put(jnp.full((8, 4096), step, jnp.float32), at)
        checkpointer.save(step, {'w': w, 'step': step}, {'step': step}, 'x' * step)
        if step == start + 3:
            print('going', flush=True)
"""


def python(code, *arguments, **kwargs):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], env=environment, **kwargs
    )


def test_importing_starts_neither_orbax_nor_a_backend(tmp_path):
    assert python(IMPORTS, tmp_path).wait(60) == 0


def kill_and_look(directory, mode, delay_s):
    """Kills a process that saves; the newest step left is as it was saved."""
    process = python(SAVES, directory, mode, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "going\n"
    time.sleep(delay_s)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    with Checkpointer(directory, read_only=True) as checkpointer:
        step = checkpointer.latest()
        assert step is not None
        assert len(checkpointer.steps()) <= 3
        restored = checkpointer.restore(
            step, {"w": np.zeros((8, 4096), np.float32), "step": 0}
        )
        assert restored["step"] == step
        assert (restored["w"] == step).all()
        assert checkpointer.extra(step) == {"step": step}
        assert checkpointer.config_text(step) == "x" * step
    return step


def kills(directory, mode, times):
    steps = [0]
    rng = random.Random(times)
    for _ in range(times):
        steps.append(kill_and_look(directory, mode, rng.uniform(0, 0.3)))
        assert steps[-1] >= steps[-2] + 2, "step start + 2 was complete before the kill"


def test_a_kill_leaves_a_complete_step(tmp_path):
    kills(tmp_path, "async", 2)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_twenty_kills_leave_complete_steps(tmp_path, mode):
    kills(tmp_path, mode, 20)


PROCESSES = """
import sys, jax, numpy as np
port, index, directory = sys.argv[1:]
jax.config.update('jax_num_cpu_devices', 4)
jax.config.update('jax_cpu_collectives_implementation', 'gloo')
jax.distributed.initialize(f'localhost:{port}', 2, int(index))
from jaxmoe.checkpoint import Checkpointer
mesh = jax.make_mesh((2, 4), ('a', 'b'), axis_types=(jax.sharding.AxisType.Auto,) * 2)
whole = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
def placed(x, *spec):
    at = jax.NamedSharding(mesh, jax.P(*spec))
    return jax.make_array_from_callback(x.shape, at, lambda i: x[i])
def tree(step):
    return {'w': placed(whole + step, 'a', 'b'), 'r': placed(whole[0] + step)}
with Checkpointer(directory, keep=2) as checkpointer:
    start = checkpointer.latest() or 0
    for step in range(start + 1, start + 4):
        checkpointer.save(step, tree(step), {'n': step})
    assert checkpointer.latest() == start + 3
    checkpointer.save(start + 3, tree(0))  # complete: does nothing, on both
    assert checkpointer.extra(start + 3) == {'n': start + 3}
    other = {'w': placed(whole, 'b', 'a'), 'r': placed(whole[0], 'a')}
    restored = checkpointer.restore(start + 2, other)
    for shard in restored['w'].addressable_shards:
        assert (np.asarray(shard.data) == (whole + start + 2)[shard.index]).all()
    checkpointer.save(start + 4, tree(0))
    assert checkpointer.latest() == start + 4
    assert checkpointer.steps() == [start + 2, start + 4]
"""


@pytest.mark.slow
def test_two_processes_write_one_checkpoint(tmp_path):
    """Shards of both, one marker, by process 0; then again, going on from there."""
    for _ in range(2):
        with socket.socket() as listener:
            listener.bind(("localhost", 0))
            port = listener.getsockname()[1]
        both = [python(PROCESSES, port, index, tmp_path) for index in (0, 1)]
        assert [process.wait(120) for process in both] == [0, 0]
    assert (tmp_path / "8" / "arrays" / "ocdbt.process_1").is_dir()
    with Checkpointer(tmp_path, read_only=True) as checkpointer:
        whole = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
        asked = {"w": whole, "r": whole[0]}
        restored = checkpointer.restore(6, asked)
        assert all((restored[name] == asked[name] + 6).all() for name in asked)
