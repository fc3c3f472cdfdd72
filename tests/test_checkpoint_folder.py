# SPDX-License-Identifier: Apache-2.0
"""The folder of the checkpoints: every damage is seen, and the right steps go."""

import logging
import os
import random
import shutil

import jax.numpy as jnp
import pytest

from jaxmoe.checkpoint import Checkpointer
from jaxmoe.checkpoint_folder import Broken, CheckpointFolder, write_atomically


def opened(path, keep=9):
    folder = CheckpointFolder(path, keep=keep)
    folder.probe()
    return folder


def write(folder, step, history=None, figures=None):
    """Saves a step of two small files; False if it was complete."""
    if not folder.begin(step, history):
        return False
    (folder[step] / "arrays" / "d").mkdir(parents=True)
    (folder[step] / "arrays" / "d" / "data").write_bytes(bytes(range(256)) * (step + 1))
    (folder[step] / "arrays" / "tree").write_text(f"tree of {step}")
    folder.commit(step, {"extra": {"step": step, "figures": figures or {}}})
    return True


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Steps 1 and 2 as orbax writes them."""
    path = tmp_path_factory.mktemp("real")
    with Checkpointer(path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": jnp.arange(999.0) * step, "b": jnp.ones(3)})
    return path


def names(folder):
    return sorted(p.relative_to(folder) for p in folder.rglob("*") if p.is_file())


def flip(path, rng):
    content = bytearray(path.read_bytes())
    bit = rng.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


DAMAGE = {
    "flipped": lambda path: flip(path, random.Random(str(path.name))),
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\n "),
    "empty": lambda path: os.truncate(path, 0),
    "missing": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "swapped": lambda path: path.write_bytes(path.read_bytes()[::-1]),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_to_any_file_of_a_step_is_seen(real, tmp_path, damage, caplog):
    """The step before is taken, and one line of warning names the file."""
    files = names(real / "2")
    assert len(files) >= 8
    for name in files:
        copy = tmp_path / name.name
        shutil.copytree(real, copy)
        DAMAGE[damage](copy / "2" / name)
        caplog.clear()
        assert CheckpointFolder(copy, keep=9).latest() == 1, name
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert record.getMessage().startswith(f"skipped checkpoint {copy / '2'}: ")
        assert name.name in record.getMessage()
        shutil.rmtree(copy)


def test_an_extra_file_is_seen_but_not_those_of_file_managers(real, tmp_path, caplog):
    for place in ("2", "2/arrays", "2/arrays/d"):
        copy = tmp_path / "copy"
        shutil.copytree(real, copy)
        for harmless in (".DS_Store", "desktop.ini", ".nfs0001"):
            (copy / place / harmless).write_text("x")
        assert CheckpointFolder(copy, keep=9).latest() == 2
        (copy / place / "more").write_text("x")
        assert CheckpointFolder(copy, keep=9).latest() == 1
        assert "more does not belong there" in caplog.text
        shutil.rmtree(copy)


def test_every_bit_of_the_marker_counts(tmp_path):
    folder = opened(tmp_path)
    write(folder, 1)
    marker = folder[1] / "complete.json"
    original, rng = marker.read_bytes(), random.Random(0)
    for _ in range(300):
        flip(marker, rng)
        with pytest.raises(Broken):
            folder.verify(1)
        marker.write_bytes(original)
    folder.verify(1)


def test_a_renamed_step_is_not_another_step(tmp_path, caplog):
    folder = opened(tmp_path)
    write(folder, 1)
    folder[1].rename(folder[5])
    assert folder.latest() is None
    assert "complete.json is that of step 1" in caplog.text


def test_damage_after_a_step_was_verified_is_seen(tmp_path):
    folder = opened(tmp_path)
    write(folder, 1)
    assert folder.latest() == 1
    flip(folder[1] / "arrays" / "d" / "data", random.Random(0))
    assert folder.latest() is None


def test_what_is_not_a_step_is_skipped_with_a_warning(tmp_path, caplog):
    folder = opened(tmp_path)
    write(folder, 3)
    for name in ("5", "5.orbax-checkpoint-tmp", "12", "007", "-1", "x"):
        (tmp_path / name).mkdir()
    (tmp_path / "9").write_text("a file")
    (tmp_path / "notes.txt").write_text("stray")
    (tmp_path / ".hidden").write_text("")
    (tmp_path / "12" / "arrays").mkdir()
    assert folder.latest() == 3
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        *(
            f"skipped {tmp_path / name}: it is not a checkpoint"
            for name in ("-1", "007", "5.orbax-checkpoint-tmp", "notes.txt", "x")
        ),
        f"skipped checkpoint {tmp_path / '12'}:"
        " complete.json is missing: the save was not finished",
        f"skipped checkpoint {tmp_path / '9'}: it is not a folder",
        f"skipped checkpoint {tmp_path / '5'}:"
        " complete.json is missing: the save was not finished",
    ]
    assert folder.steps() == [3]


def test_leftovers_do_not_block_the_next_save_of_their_step(tmp_path):
    folder = opened(tmp_path)
    write(folder, 3)
    (tmp_path / "5" / "arrays.orbax-checkpoint-tmp").mkdir(parents=True)
    (tmp_path / "5.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "6").write_text("a file")
    write(folder, 5)
    assert folder.latest() == 5
    (tmp_path / "6").symlink_to(tmp_path / "3")
    write(folder, 6)
    assert folder.latest() == 6
    assert folder.steps() == [3, 5, 6]
    assert [p.name for p in tmp_path.glob("*tmp*")] == []


def test_a_complete_step_is_left_and_a_damaged_one_written_again(tmp_path):
    folder = opened(tmp_path)
    assert write(folder, 1)
    assert not write(folder, 1)
    flip(folder[1] / "arrays" / "tree", random.Random(0))
    assert write(folder, 1)
    assert folder.latest() == 1


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_keeps_the_newest_complete_steps(tmp_path, keep):
    folder = opened(tmp_path, keep)
    for step in range(1, 7):
        write(folder, step)
        if step == 4:  # a step that is broken is not one of those kept
            (folder[4] / "complete.json").unlink()
    assert folder.numbers() == {1: [6], 2: [5, 6], 3: [3, 5, 6]}[keep]


@pytest.mark.parametrize(
    ("rules", "left"),
    [
        ({"keep_every": 3}, [3, 6, 8]),
        ({"keep_best": 2}, [2, 5, 8]),  # losses 1.0 and 1.5
        ({"keep_best": 1, "best_metric": "eval_accuracy_lm"}, [4, 8]),
        ({"keep_best": 9, "best_metric": "eval_loss_lm"}, [8]),  # nobody has it
        ({"keep_every": 4, "keep_best": 1}, [4, 5, 8]),
    ],
)
def test_keeps_every_so_many_and_the_best(tmp_path, rules, left):
    """Beside the newest one; figures of each step in its marker, some without."""
    losses = {1: 3.0, 2: 1.5, 3: 4.0, 4: 2.0, 5: 1.0, 7: 5.0}
    folder = CheckpointFolder(tmp_path, keep=1, **rules)
    folder.probe()
    for step in range(1, 9):
        figures = {"eval_accuracy_lm": 0.9 if step == 4 else 0.1}
        if step in losses:
            figures["loss"] = losses[step]
        write(folder, step, figures=figures)
    assert folder.numbers() == left


def test_a_history_that_was_left_has_no_best_step(tmp_path):
    folder = CheckpointFolder(tmp_path, keep=1, keep_best=1)
    folder.probe()
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
        write(folder, step, figures={"loss": loss})
    write(folder, 2, history=1, figures={"loss": 9.0})
    assert folder.numbers() == [2]
    write(folder, 3, figures={"loss": 8.0})
    assert folder.numbers() == [3]


def test_nothing_goes_before_the_new_step_is_complete(tmp_path):
    folder = opened(tmp_path, keep=1)
    write(folder, 1)
    folder.begin(2, None)
    assert CheckpointFolder(tmp_path, keep=1).latest() == 1
    folder.abandon(2)
    assert folder.numbers() == [1]


def test_going_back_moves_the_later_history_aside(tmp_path):
    """Unfinished ones are removed; a second time replaces the first; `keep` remain."""
    folder = opened(tmp_path, keep=2)
    write(folder, 1)
    for step in (2, 3, 4):
        shutil.copytree(folder[1], folder[step])
    folder[5].mkdir()
    folder.discard_after(1)
    aside = tmp_path / "discarded"
    assert folder.numbers() == [1]
    assert sorted(p.name for p in aside.iterdir()) == ["3", "4"]
    assert folder.latest() == 1
    write(folder, 4)
    write(folder, 3, history=1)
    assert folder.numbers() == [1, 3]
    assert sorted(p.name for p in aside.iterdir()) == ["3", "4"]
    folder.check_writer()
    assert '"step": 4' in (aside / "4" / "complete.json").read_text()


def test_atomic_writing_never_leaves_half_a_file(tmp_path, monkeypatch):
    path = tmp_path / "f"
    write_atomically(path, "one")

    def fail(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "two")
    assert path.read_text() == "one"
