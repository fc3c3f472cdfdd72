# SPDX-License-Identifier: Apache-2.0
"""Floor 0. What `Data.source` names: one or several sources, each with a weight.

The words 'digits' and 'text' are data that need no file. Anything else is a path, and
what lies there is told by its ending alone; a folder has none. A path may have the wild
cards of a shell, and then names all files that fit, in the order of their names.
"""

from __future__ import annotations

import glob
import os
import re
from typing import NamedTuple

from jaxmoe.config_base import choice, mistake, nearest, shown_path

BUILT_IN = ("digits", "text")
KINDS = {
    ".jsonl": "jsonl",
    ".tar": "tar",
    ".array_record": "array_record",
    ".arrayrecord": "array_record",
    ".parquet": "parquet",
    ".txt": "txt",
}
TEXT_KINDS = ("text", "txt")  # sources without images

_WEIGHT = re.compile(r"(.*?)(?:\*\s*([0-9]*\.?[0-9]+))?", re.DOTALL)


class Source(NamedTuple):
    """One source: where, of which kind, and its share of all examples."""

    path: str
    kind: str  # one of BUILT_IN, 'folder', or a value of KINDS
    share: float  # all shares of a mixture sum to 1

    @property
    def built_in(self) -> bool:
        return self.kind in BUILT_IN


def parse_sources(text: str, name: str = "Data.source") -> tuple[Source, ...]:
    """Reads the value of `Data.source` or `Data.held_out_source`.

    Args:
      text: Sources with commas between them, each with '*WEIGHT' behind it or not.
      name: The field, for messages.

    Raises:
      ConfigError: if a part names nothing that is there and of a known kind.
    """
    found: list[tuple[str, str, float]] = []
    for part in text.split(","):
        match = _WEIGHT.fullmatch(part.strip())
        assert match is not None  # it matches everything
        path, weight = match[1].strip(), float(match[2] or 1)
        found.append((path, _kind(path, f"{name}={text!r}", name), weight))
    total = sum(weight for _, _, weight in found)
    if not all(weight > 0 for _, _, weight in found):
        raise mistake(
            f"{name}={text!r} has a weight of 0",
            "a source that is named takes part",
            "Leave that source out, or give it a weight above 0",
        )
    return tuple(Source(path, kind, weight / total) for path, kind, weight in found)


def named_kinds(text: str) -> set[str]:
    """The kinds of sources by their names alone: nothing has to be there."""
    kinds = set()
    for part in text.split(","):
        match = _WEIGHT.fullmatch(part.strip())
        assert match is not None  # it matches everything
        path = match[1].strip()
        kind = path if path in BUILT_IN else KINDS.get(_ending(path), "folder")
        kinds.add(kind)
    return kinds


def source_files(source: Source) -> list[str]:
    """The files, or the folder, of a source that is not built in."""
    return _expanded(source.path)


def _expanded(path: str) -> list[str]:
    path = os.path.expanduser(path)
    return [path] if os.path.exists(path) else sorted(glob.glob(path, recursive=True))


def _kind(path: str, fact: str, name: str) -> str:
    if path in BUILT_IN:
        return path
    files = _expanded(path) if path else []
    if not files:
        best = nearest(path, BUILT_IN)
        raise mistake(
            f"{fact}: there is no {path!r}",
            "a source is 'digits', 'text', a folder, or a file, with '*WEIGHT' behind"
            " it or not, and commas between several",
            f"Set {name}={best!r}" if best else "Give the right path",
        )
    if len(files) == 1 and os.path.isdir(files[0]):
        return "folder"
    kinds = {KINDS.get(_ending(file), "") for file in files}
    if len(kinds) > 1 or "" in kinds:
        odd = next((f for f in files if not KINDS.get(_ending(f))), files[-1])
        raise mistake(
            f"{fact}: {shown_path(odd)} is of no known kind, or not of the kind of the"
            " others",
            f"the ending tells the kind: {choice(KINDS)}; or it is a folder",
            "Rename the file, or name files of one kind",
        )
    return kinds.pop()


def _ending(path: str) -> str:
    return os.path.splitext(path)[1].lower()
