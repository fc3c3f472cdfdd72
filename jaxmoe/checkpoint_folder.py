# SPDX-License-Identifier: Apache-2.0
"""Floor 0. The folder of the checkpoints: which steps are complete, which must go.

    <folder>/<step>/arrays/...      whatever wrote the arrays
    <folder>/<step>/complete.json   the marker, written last: size and SHA-256 of every
                                    file, what the step holds, a checksum of itself
    <folder>/discarded/<step>/      left behind by a run that went back
    <folder>/writer.json            which run writes here

A step is saved if, and only if, the marker is there and every file is as it states. A
writer that is killed at any moment therefore leaves a complete step or none, and a
damaged step is skipped at start instead of failing, or being trained on, later.
"""

from __future__ import annotations

import concurrent.futures
import errno
import functools
import hashlib
import json
import logging
import os
import shutil
import socket
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxmoe.config import ConfigError

MARKER = "complete.json"
WRITER = "writer.json"
DISCARDED = "discarded"
_HARMLESS = (
    ".DS_Store",
    ".nfs",
    "desktop.ini",
    "Thumbs.db",
)  # file managers' and NFS's
_FORMAT = 1
_NO_DIR_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM)

_log = logging.getLogger(__name__)

Signature = tuple[tuple[str, int, int], ...]


class Broken(Exception):
    """Why a step does not verify."""


# One file --------------------------------------------------------------------------


def _sync_dir(path: Path) -> None:
    """Makes a folder's entries durable, where the file system can."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _NO_DIR_SYNC:
            raise


def write_atomically(path: Path, text: str) -> None:
    """Writes a text file: at any moment the old or the new one is there, whole."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _sync_dir(path.parent)


def _files(folder: Path) -> dict[str, Path]:
    """Every file below a step's folder but the marker, by its relative name."""
    found = {}
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root, name)
            relative = path.relative_to(folder).as_posix()
            if relative != MARKER and not name.startswith(_HARMLESS):
                found[relative] = path
    return dict(sorted(found.items()))


def _digest(path: Path, sync: bool) -> dict[str, Any]:
    with path.open("r+b") if sync else path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if sync:
            os.fsync(file.fileno())
        return {"size": file.tell(), "sha256": digest}


def _digests(files: Mapping[str, Path], *, sync: bool = False) -> dict[str, Any]:
    """Size and SHA-256 per file, several at a time; with `sync`, makes them durable."""
    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        digests = pool.map(functools.partial(_digest, sync=sync), files.values())
        return dict(zip(files, digests, strict=True))


# One step --------------------------------------------------------------------------


def _sealed(body: dict[str, Any]) -> str:
    """The text of a marker, always written alike: its content and the checksum."""
    digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return json.dumps({**body, "checksum": digest}, indent=1) + "\n"


def read_marker(folder: Path) -> dict[str, Any]:
    """The content of a marker that is as it was written; the files are not looked at.

    Raises:
      Broken: if it is not.
    """
    try:
        text = (folder / MARKER).read_bytes().decode()
        body = json.loads(text)
        body.pop("checksum")
        intact = _sealed(body) == text
    except FileNotFoundError:
        raise Broken(f"{MARKER} is missing: the save was not finished") from None
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise Broken(f"{MARKER} cannot be read ({error})") from None
    if not intact:
        raise Broken(f"the checksum of {MARKER} differs")
    if body.get("format") != _FORMAT:
        raise Broken(f"its format is {body.get('format')!r}, not {_FORMAT}")
    if str(body.get("step")) != folder.name:
        raise Broken(f"{MARKER} is that of step {body.get('step')}")
    return body


def check_sizes(folder: Path) -> tuple[dict[str, Any], Signature]:
    """The quick half of the verification: marker, names and sizes of the files.

    Returns:
      The marker's content, and a signature that changes when a file is written to.

    Raises:
      Broken: if one of them is not as it was written.
    """
    try:
        if not folder.is_dir():
            raise Broken("it is not a folder")
        body = read_marker(folder)
        stated, files = body["files"], _files(folder)
        for name in sorted(set(stated) ^ set(files)):
            state = "is missing" if name in stated else "does not belong there"
            raise Broken(f"the file {name} {state}")
        stats = {name: path.stat() for name, path in files.items()}
    except OSError as error:
        raise Broken(f"it cannot be read ({error})") from None
    for name, stat in stats.items():
        if stat.st_size != (size := stated[name]["size"]):
            raise Broken(f"the file {name} has {stat.st_size} bytes instead of {size}")
    return body, tuple((name, s.st_size, s.st_mtime_ns) for name, s in stats.items())


def verify(folder: Path, known: Signature | None = None) -> Signature:
    """Reads every file of a step and compares it with the marker.

    Args:
      folder: The step's folder, named by its number.
      known: The signature of the last time; if it is still the same, nothing is read.

    Raises:
      Broken: naming the first file that is not as it was written.
    """
    body, signature = check_sizes(folder)
    if signature != known:
        try:
            digests = _digests(_files(folder))
        except OSError as error:
            raise Broken(f"it cannot be read ({error})") from None
        for name, digest in digests.items():
            if digest != body["files"].get(name):
                raise Broken(f"the checksum of the file {name} differs")
    return signature


def commit(folder: Path, body: dict[str, Any]) -> Signature:
    """Makes the files that are there durable, then writes the marker that names them.

    Args:
      folder: The step's folder, named by its number.
      body: What the marker shall hold beside the files; `step` must be in it.
    """
    digests = _digests(_files(folder), sync=True)
    for root, _, _ in os.walk(folder, topdown=False):
        _sync_dir(Path(root))
    _sync_dir(folder.parent)
    marker = _sealed({"format": _FORMAT, **body, "files": digests})
    write_atomically(folder / MARKER, marker)
    return check_sizes(folder)[1]


def remove(path: Path) -> None:
    """Removes a step, its marker first, so that what a kill leaves is not complete."""
    if path.is_dir() and not path.is_symlink():
        (path / MARKER).unlink(missing_ok=True)
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# All steps -------------------------------------------------------------------------


class CheckpointFolder:
    """The steps of one run, and the rules by which they come and go.

    Args:
      path: The folder. A relative one is made absolute.
      keep: Complete steps kept, the newest ones.
      keep_every: Complete steps that this divides are kept too; 0: none.
      keep_best: So many complete steps are kept too: those whose figure `best_metric`
        is best, the later of equal ones. A step without that figure is none of them.
      best_metric: Name of a figure; higher is better for `..accuracy..`, `..match`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep: int,
        keep_every: int = 0,
        keep_best: int = 0,
        best_metric: str = "loss",
    ):
        if "://" in os.fspath(path):
            raise ConfigError(
                f"the checkpoint folder {os.fspath(path)!r} is a URL; it must be a"
                " folder. Mount the bucket (for instance with gcsfuse) and name the"
                " mounted folder in --workdir."
            )
        if keep < 1:
            raise ConfigError(
                f"Checkpoint.keep={keep}: at least 1 checkpoint must be kept. Set it to"
                " 1 or more."
            )
        self.path = Path(os.path.abspath(path))
        self._keep, self._keep_every, self._keep_best = keep, keep_every, keep_best
        self._metric = best_metric
        self._id = uuid.uuid4().hex
        self._claimed = False
        self._verified: dict[int, Signature] = {}

    def __getitem__(self, step: int) -> Path:
        return self.path / str(step)

    def numbers(self) -> list[int]:
        """The steps of which there is anything at all, rising."""
        names = (
            [entry.name for entry in self.path.iterdir()] if self.path.is_dir() else []
        )
        return sorted(int(n) for n in names if n.isdecimal() and n == str(int(n)))

    def steps(self) -> list[int]:
        """The steps with a marker and files of its sizes, rising. Nothing is hashed."""
        return [step for step in self.numbers() if self._looks_complete(step)]

    def verify(self, step: int) -> None:
        """Raises Broken unless every file of the step is as it was written."""
        self._verified[step] = verify(self[step], self._verified.get(step))

    def latest(self) -> int | None:
        """The newest step that verifies, or None; a warning for each thing skipped."""
        self._warn_of_strays()
        for step in reversed(self.numbers()):
            try:
                self.verify(step)
                return step
            except Broken as reason:
                _log.warning("skipped checkpoint %s: %s", self[step], reason)
        return None

    def probe(self) -> None:
        """Creates the folder and finds out at the start whether one can write to it.

        Raises:
          ConfigError: if not.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".probe-{self._id}"
            probe.write_text("x", encoding="utf-8")
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"the checkpoint folder {self.path} cannot be written: {error}. A run"
                " must be able to create and write it. Choose another --workdir."
            ) from error

    def begin(self, step: int, history: int | None) -> bool:
        """Makes room for a step; False if it is complete already.

        Args:
          step: What is about to be saved.
          history: The step this run goes on from, if it went back: later ones are
            another history's, as are those after `step`.
        """
        self.check_writer()
        self.discard_after(step if history is None else min(step, history))
        try:
            self.verify(step)
            return False
        except Broken:
            pass
        leftovers = self.path.glob(f"{step}.orbax-checkpoint-tmp*")
        for leftover in (self[step], *leftovers):
            remove(leftover)
        self[step].mkdir()  # not its parents: a folder that went away is an error
        return True

    def commit(self, step: int, body: dict[str, Any]) -> None:
        """Marks a step as complete; only then do older ones go."""
        self.check_writer()
        self._verified[step] = commit(self[step], {"step": step, **body})
        older = [number for number in self.numbers() if number < step]
        complete = [number for number in older if self._looks_complete(number)]
        for number in set(older) - self._kept([*complete, step]):
            self._verified.pop(number, None)
            remove(self[number])

    def _kept(self, complete: list[int]) -> set[int]:
        """Which of the complete steps stay, by the three rules."""
        kept = set(complete[-self._keep :])
        if self._keep_every:
            kept |= {number for number in complete if number % self._keep_every == 0}
        if self._keep_best:
            sign = 1 if "accuracy" in self._metric or "match" in self._metric else -1
            ranked = sorted(
                (sign * figure, number)
                for number in complete
                if (figure := self._figure(number)) is not None
            )
            kept |= {number for _, number in ranked[-self._keep_best :]}
        return kept

    def _figure(self, step: int) -> float | None:
        try:
            return read_marker(self[step])["extra"]["figures"][self._metric]
        except (Broken, KeyError, TypeError):
            return None

    def abandon(self, step: int) -> None:
        """After a failed save: gives the space back, if this run still writes here."""
        self.check_writer()
        if not (self[step] / MARKER).exists():
            remove(self[step])

    def discard_after(self, step: int) -> None:
        """Moves later steps aside, to discarded/; removes those without a marker."""
        aside = self.path / DISCARDED
        for number in self.numbers():
            if number <= step:
                continue
            self._verified.pop(number, None)
            if not (self[number] / MARKER).exists():
                remove(self[number])
                continue
            aside.mkdir(exist_ok=True)
            remove(aside / str(number))
            os.replace(self[number], aside / str(number))
            _log.warning("moved %s to %s: the run went back", self[number], aside)
        if aside.is_dir():
            old = sorted(aside.iterdir(), key=lambda path: path.stat().st_ctime_ns)
            for path in old[: -self._keep]:
                remove(path)

    def check_writer(self) -> None:
        """Refuses a folder that was replaced, or that another run has taken over.

        The first call writes down that this run writes here from now on. A folder that
        was renamed or unmounted, and made anew by a library, does not hold that note.
        """
        if not self._claimed:
            owner = {"id": self._id, "pid": os.getpid(), "host": socket.gethostname()}
            write_atomically(self.path / WRITER, json.dumps(owner) + "\n")
            self._claimed = True
        try:
            owner = json.loads((self.path / WRITER).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise OSError("the folder was removed or replaced during the run") from None
        if owner["id"] != self._id:
            raise OSError(
                f"another run (process {owner['pid']} on {owner['host']}) has begun to"
                " write to this folder; stop one of the two"
            )

    def _looks_complete(self, step: int) -> bool:
        try:
            check_sizes(self[step])
        except Broken:
            return False
        return True

    def _warn_of_strays(self) -> None:
        if not self.path.is_dir():
            return
        known = {str(step) for step in self.numbers()} | {WRITER, DISCARDED}
        for entry in sorted(self.path.iterdir()):
            if entry.name not in known and not entry.name.startswith((".", *_HARMLESS)):
                _log.warning("skipped %s: it is not a checkpoint", entry)
