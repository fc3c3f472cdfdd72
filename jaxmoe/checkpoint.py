# SPDX-License-Identifier: Apache-2.0
"""Floor 5. Checkpoints: orbax moves the arrays, checkpoint_folder knows the complete.

Orbax writes and reads the shards of every process, onto any mesh. Around it stand what
it leaves open: a marker with a checksum per file, leaves compared by name, shape and
type before anything is read, errors that name path and step, and no mixing of two
histories when a run goes back.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxmoe import checkpoint_folder, processes, tree_names
from jaxmoe.checkpoint_folder import MARKER, Broken
from jaxmoe.config import ConfigError

ARRAYS = "arrays"
_TIMEOUT_S = 3600  # of one save, in seconds
_NONE, _FAILED = -1, -2  # what process 0 tells the others instead of a number

_log = logging.getLogger(__name__)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. Names `path` and `step`."""

    def __init__(self, message: str, *, path: Path, step: int | None = None):
        super().__init__(message)
        self.path = path
        self.step = step


@functools.cache
def _orbax() -> Any:
    """Orbax, imported when first needed: it would take 0.3 s of every start."""
    import orbax.checkpoint as ocp

    # Its background errors are raised again here as CheckpointError: no second trace,
    # not from its log, nor from its other tasks, nor from what ends after them.
    logging.getLogger("absl").addFilter(
        lambda r: r.levelno < logging.ERROR or "orbax" not in r.pathname
    )
    logging.getLogger("asyncio").addFilter(lambda r: "orbax" not in r.getMessage())
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    sys.unraisablehook = hook
    return ocp


def _restore_args(leaf: Any) -> Any:
    """How orbax shall give a leaf back: on the asked sharding, else as numpy."""
    ocp = _orbax()
    if getattr(leaf, "sharding", None) is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(
        sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype
    )


def _zeros(leaf: Any) -> Any:
    """An array without elements. Orbax stores none: they live in the marker alone."""
    if getattr(leaf, "sharding", None) is None:
        return np.zeros(leaf.shape, leaf.dtype)
    return jax.numpy.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)


def _as_asked(value: Any, leaf: Any) -> Any:
    """A restored value as array, or as the Python number that was asked for."""
    return value if hasattr(leaf, "shape") else np.asarray(value).item()


class Checkpointer:
    """The checkpoints of one run.

    In a run of several processes every method is called by all of them, in the same
    order: orbax writes each process's shards and meets in its own barriers; process 0
    alone decides, marks and removes, and tells the others what it found.

    Args:
      directory: The folder of the steps, usually <workdir>/checkpoints; local or
        mounted. A relative one is made absolute.
      keep: Complete steps kept, the newest ones; older ones are removed once a newer
        one is complete.
      keep_every, keep_best, best_metric: What is kept besides, see `Checkpoint` in
        jaxmoe.config; figures are those in `figures` of the notes of save().
      asynchronous: save() returns when the arrays are off the devices and the rest goes
        on in a thread. An error in it is raised by the next save(), wait() or close().
      read_only: Nothing is created or written; save() is an error.

    Raises:
      ConfigError: if the folder cannot be created or written.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 3,
        keep_every: int = 0,
        keep_best: int = 0,
        best_metric: str = "loss",
        asynchronous: bool = True,
        read_only: bool = False,
    ):
        self._folder = checkpoint_folder.CheckpointFolder(
            directory,
            keep=keep,
            keep_every=keep_every,
            keep_best=keep_best,
            best_metric=best_metric,
        )
        self._asynchronous = asynchronous
        self._read_only = read_only
        self._history: int | None = None  # the step this run went on from
        self._async_checkpointer: Any = None
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None
        if not read_only:
            self._folder.probe()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, processes.LostError):
            return  # the part of the process that has gone would be waited for
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            _log.error("%s", failure)  # do not hide the error that came first

    @property
    def directory(self) -> Path:
        """The folder of the steps, absolute."""
        return self._folder.path

    # Reading

    def steps(self) -> list[int]:
        """The steps with a marker and files of its sizes, rising. Nothing is hashed."""
        self.wait()
        return self._folder.steps()

    def latest(self) -> int | None:
        """The newest step that verifies, or None; a warning for each thing skipped."""
        self.wait()
        found = self._on_first(
            lambda: _NONE if (step := self._folder.latest()) is None else step
        )
        return None if found == _NONE else found

    def problem(self, step: int) -> str | None:
        """Why a step does not verify; None if it does."""
        self.wait()
        try:
            self._folder.verify(step)
        except Broken as reason:
            return str(reason)
        return None

    def extra(self, step: int) -> dict[str, Any]:
        """What save() was given as `extra`, after a round trip through JSON."""
        return self._body(step)["extra"]

    def config_text(self, step: int) -> str:
        """The config.gin of the run that saved this step."""
        return self._body(step)["config"]

    def leaves(self, step: int) -> list[dict[str, Any]]:
        """`name`, `shape` and `dtype` of each leaf saved at a step."""
        return self._body(step)["leaves"]

    def arrays(
        self, step: int, wanted: Callable[[str], bool] = lambda name: True
    ) -> dict[str, Any]:
        """The arrays saved at a step as they are, on the host, in nested dicts.

        Args:
          step: One that verifies.
          wanted: Which, by name.

        Raises:
          CheckpointError: if the step is not there or damaged.
        """
        asked = {
            tuple(leaf["name"].split("/")): jax.ShapeDtypeStruct(
                leaf["shape"], leaf["dtype"]
            )
            for leaf in self.leaves(step)
            if wanted(leaf["name"])
        }
        return self.restore(step, tree_names.nested(asked), partial=True)

    def restore(self, step: int, abstract_tree: Any, *, partial: bool = False) -> Any:
        """The tree saved at a step, on the mesh and shardings asked for.

        The next save() of this object goes on from here: see discard_after().

        Args:
          step: One that verifies, as latest() gives.
          abstract_tree: jax.ShapeDtypeStructs; with a .sharding the leaf comes as
            jax.Array, without as numpy array, for a Python number as that number.
          partial: Leaves that are saved but not asked for are left alone.

        Raises:
          ConfigError: naming every leaf that is missing, extra, or of another shape or
            type than saved. Nothing is cast, cut or filled.
          CheckpointError: if the step is not there or damaged.
        """
        self.wait()
        folder = self._folder[step]
        try:
            self._on_first(lambda: self._folder.verify(step) or 0)
        except Broken as reason:
            raise self._unusable(step, reason) from None
        saved = self.leaves(step)
        if partial:
            asked = tree_names.named_leaves(abstract_tree)
            saved = [leaf for leaf in saved if leaf["name"] in asked]
        if lines := tree_names.differences(saved, abstract_tree):
            raise ConfigError(
                f"the checkpoint {folder} does not fit the model and optimizer of this"
                f" run in {len(lines)} of its arrays:\n  " + "\n  ".join(lines) + "\n"
                "Names, shapes and types must be the same. Use the configuration that"
                f" is stored in {folder / MARKER}, or a new --workdir."
            )
        targets = tree_names.paths(abstract_tree)
        stored = {path: leaf for path, leaf in targets.items() if np.size(leaf)}
        item = tree_names.nested(stored)
        try:
            restored = self._read(folder / ARRAYS, item, partial) if item else {}
        except Exception as error:
            raise self._unusable(step, error) from error
        self._history = step
        return jax.tree.unflatten(
            jax.tree.structure(abstract_tree),
            [
                _as_asked(tree_names.lookup(restored, path), leaf)
                if path in stored
                else _zeros(leaf)
                for path, leaf in targets.items()
            ],
        )

    # Writing

    def save(
        self,
        step: int,
        tree: Any,
        extra: Mapping[str, Any] | None = None,
        config_text: str = "",
    ) -> None:
        """Saves a step; does nothing if it is complete already.

        When it returns, the arrays may be donated: orbax has copied them off, or (on
        CPU) holds a view, which makes jax copy instead of reusing the buffer.

        Steps above `step`, and after restore(k) all above k, belong to a history that
        this run does not continue; they are moved to discarded/ first.

        Args:
          step: Updates done so far.
          tree: Nested dicts (or any containers) of jax and numpy arrays and numbers.
          extra: Notes of the run, such as the position in the data; JSON.
          config_text: The run's config.gin.

        Raises:
          CheckpointError: for this save, or for an earlier one in the background.
          ValueError, TypeError: if `extra` is not JSON or two leaves have one name.
        """
        self.wait()
        step = int(step)
        assert step >= 0, step
        if self._read_only:
            raise ValueError(f"{self.directory} was opened with read_only=True")
        leaves = {
            path: leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
            for path, leaf in tree_names.paths(tree).items()
        }
        stored = {path: leaf for path, leaf in leaves.items() if leaf.size}
        if not stored:
            raise ValueError("the tree holds no numbers: there is nothing to save")
        body = {
            "leaves": [
                {"name": "/".join(path), **tree_names.describe(leaf)}
                for path, leaf in leaves.items()
            ],
            "extra": dict(extra or {}),
            "config": config_text,
        }
        body = json.loads(json.dumps(body, allow_nan=False))  # a copy, and surely JSON
        with self._naming(step):
            if not self._on_first(lambda: int(self._folder.begin(step, self._history))):
                return
            self._history = None
            self._io().save(
                self._folder[step] / ARRAYS,
                args=_orbax().args.PyTreeSave(tree_names.nested(stored)),
            )
        self._thread = threading.Thread(
            target=self._finish, args=(step, body), name=f"checkpoint-{step}"
        )
        self._thread.start()
        if not self._asynchronous:
            self.wait()

    def discard_after(self, step: int) -> None:
        """Moves every step above `step` out of the way: the run goes on from there.

        Steps with a marker go to discarded/, which is never read and keeps the newest
        `keep`; unfinished ones are removed. save() does this by itself.
        """
        self.wait()
        with self._naming(step):
            self._on_first(lambda: self._folder.discard_after(step) or 0)

    def wait(self) -> None:
        """Waits for the save in the background and raises its error, once.

        On another process than 0 this says that all have written their shards, not yet
        that process 0 has marked the step; latest() does.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Waits as wait() does and releases orbax's threads."""
        try:
            self.wait()
        finally:
            self._close_io()

    # Inside

    def _finish(self, step: int, body: dict[str, Any]) -> None:
        """The second half of a save, in its thread."""
        try:
            with self._naming(step):
                # With several processes this returns when all have written: orbax's
                # barrier. Only then may process 0 mark the step.
                self._io().wait_until_finished()
                if processes.is_first():
                    self._folder.commit(step, body)
        except CheckpointError as error:
            self._error = error

    @contextlib.contextmanager
    def _naming(self, step: int) -> Iterator[None]:
        """Turns whatever fails in a save into a CheckpointError with path and step."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            self._close_io()
            with contextlib.suppress(Exception):  # the first error is the one to tell
                if processes.is_first():
                    self._folder.abandon(step)
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to"
                f" {self._folder[step]}: {type(error).__name__}: {error}. Steps that"
                " were complete are left as they were. See to the space and the rights"
                " of that folder, then start again from the last complete step.",
                path=self._folder[step],
                step=step,
            ) from error

    def _on_first(self, action: Callable[[], int]) -> int:
        """Runs `action` on process 0 and gives its result to every process."""
        if not processes.several():
            return action()
        from jax.experimental import multihost_utils

        result, failure = 0, None
        if jax.process_index() == 0:
            try:
                result = action()
            except Exception as error:
                result, failure = _FAILED, error
        result = int(multihost_utils.broadcast_one_to_all(np.int32(result)))
        if failure is not None:
            raise failure
        if result == _FAILED:
            raise CheckpointError(
                f"process 0 failed at {self.directory}; its own message says why.",
                path=self.directory,
            )
        return result

    def _io(self) -> Any:
        if self._async_checkpointer is None:
            ocp = _orbax()
            self._async_checkpointer = ocp.AsyncCheckpointer(
                ocp.PyTreeCheckpointHandler(), timeout_secs=_TIMEOUT_S
            )
        return self._async_checkpointer

    def _read(self, path: Path, item: Any, partial: bool) -> Any:
        restore_args = jax.tree.map(_restore_args, item)
        return self._io().restore(
            path,
            args=_orbax().args.PyTreeRestore(
                item=item, restore_args=restore_args, partial_restore=partial
            ),
        )

    def _close_io(self) -> None:
        if self._async_checkpointer is not None:
            io, self._async_checkpointer = self._async_checkpointer, None
            with contextlib.suppress(Exception):  # wait() has raised what there was
                io.close()

    def _body(self, step: int) -> dict[str, Any]:
        self.wait()
        try:
            return checkpoint_folder.read_marker(self._folder[step])
        except Broken as reason:
            raise self._unusable(step, reason) from None

    def _unusable(self, step: int, reason: Exception) -> CheckpointError:
        there = ", ".join(map(str, self._folder.steps())) or "none"
        return CheckpointError(
            f"the checkpoint {self._folder[step]} cannot be used: {reason}. Only a"
            " complete and undamaged step can be restored. Steps that look complete:"
            f" {there}.",
            path=self._folder[step],
            step=step,
        )
