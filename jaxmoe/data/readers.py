# SPDX-License-Identifier: Apache-2.0
"""Floor 5. Records by their number, from files that are made for it or indexed once.

A reader gives the fields of record i and says where the bytes of its image are; what
they mean is told by `fields`. Records that cannot be read at all raise `BrokenRecord`.
Readers keep no file open, so that threads can share them.
"""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxmoe.config_base import mistake, shown_path
from jaxmoe.data.fields import BrokenRecord
from jaxmoe.data.tokenizer import LANGUAGES

BLOCK_BYTES = 2000  # of running text that make a record, and the rest of the line

_TEXTS = {"txt": "text", **{f"{language}.txt": language for language in LANGUAGES}}

_ENDS = 4096  # bytes at both ends of an image by which it is known again


class Blob(NamedTuple):
    """Bytes in a file."""

    file: str
    offset: int
    size: int


Image = Blob | bytes | memoryview


class Raw(NamedTuple):
    """The fields of a record, unchecked, and its image."""

    fields: dict[str, Any]
    image: Image | None


class Reader(Protocol):
    """Random access to the records of one source.

    Attributes:
      left_out: number of files of each ending that were not read.
    """

    left_out: dict[str, int]

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """Where the record stands, for messages."""
        ...

    def raw(self, index: int) -> Raw:
        """The record.

        Raises:
          BrokenRecord: if it cannot be read.
        """
        ...


def image_bytes(image: Image) -> bytes | memoryview:
    """The encoded image, all of it.

    Raises:
      BrokenRecord: if its file is gone.
    """
    return _part(image, 0, image.size) if isinstance(image, Blob) else image


def image_identity(image: Image) -> bytes:
    """Size and both ends: cheap, and never the same for two images of a data set.

    Raises:
      BrokenRecord: if its file is gone.
    """
    size = image.size if isinstance(image, Blob) else len(image)
    if size <= 2 * _ENDS:
        return bytes(image_bytes(image))
    if isinstance(image, Blob):
        ends = _part(image, 0, _ENDS) + _part(image, size - _ENDS, _ENDS)
    else:
        ends = bytes(image[:_ENDS]) + bytes(image[-_ENDS:])
    return size.to_bytes(8, "little") + ends


def _part(blob: Blob, start: int, size: int) -> bytes:
    try:
        with open(blob.file, "rb") as file:
            file.seek(blob.offset + start)
            return file.read(size)
    except OSError as error:
        raise BrokenRecord(_unreadable(blob.file, error)) from error


class JsonLines:
    """A record per line; an image is named by a path relative to the file's folder."""

    def __init__(self, files: list[str]):
        self.left_out: dict[str, int] = {}
        self._files = files
        lines = [
            (number, *line)
            for number, file in enumerate(files)
            for line in _lines(file)
        ]
        # [records, 4]: file, number of the line, offset, size
        self._lines = np.array(lines, np.int64).reshape(-1, 4)

    def __len__(self) -> int:
        return len(self._lines)

    def name(self, index: int) -> str:
        file, number, *_ = self._lines[index].tolist()
        return f"{shown_path(self._files[file])}, line {number}"

    def raw(self, index: int) -> Raw:
        number, _, offset, size = self._lines[index].tolist()
        file = self._files[number]
        fields = json_fields(_part(Blob(file, offset, size), 0, size))
        path = fields.pop("image", None)
        if path is None:
            return Raw(fields, None)
        if not isinstance(path, str) or not path:
            raise BrokenRecord(f"'image' is {str(path)[:40]!r}, not a path")
        path = os.path.join(os.path.dirname(file), os.path.expanduser(path))
        return Raw(fields, _whole(path))


class Members:
    """Files of one name and different endings, in a folder or in tar shards.

    cat.jpg with cat.txt, cat.en.txt, cat.zh.txt or cat.json, which holds fields as a
    line of `JsonLines` does. In a tar file the name ends at the first dot, as in
    WebDataset. A text alone is running text, and becomes several records as in
    `PlainText`.
    """

    def __init__(self, files: list[str], *, folder: bool):
        walk = _folder_members if folder else _tar_members
        images = _image_endings()
        known = images | _TEXTS.keys() | {"json"}
        found: dict[tuple[str, str], dict[str, Blob]] = {}
        self.left_out: dict[str, int] = {}
        for place, path, blob in (m for file in files for m in walk(file)):
            stem, _, ending = os.path.basename(path).partition(".")
            while folder and ending.lower() not in known and "." in ending:
                more, _, ending = ending.partition(".")  # of a name with dots
                stem = f"{stem}.{more}"
            ending = ending.lower()
            if not stem or ending not in known:
                ending = os.path.splitext(path)[1].lower()
                self.left_out[ending] = self.left_out.get(ending, 0) + 1
                continue
            key = place, os.path.join(os.path.dirname(path), stem)
            kind = "image" if ending in images else ending
            found.setdefault(key, {}).setdefault(kind, blob)
        self._members = [
            (key, part) for key, parts in found.items() for part in _split(parts)
        ]

    def __len__(self) -> int:
        return len(self._members)

    def name(self, index: int) -> str:
        (place, key), parts = self._members[index]
        start = next(iter(parts.values())).offset if len(parts) == 1 else 0
        return f"{shown_path(place)}, {key}" + (f", byte {start}" if start else "")

    def raw(self, index: int) -> Raw:
        _, parts = self._members[index]
        fields: dict[str, Any] = {}
        for ending, blob in parts.items():
            if ending == "json":
                fields |= json_fields(_part(blob, 0, blob.size))
            elif ending != "image":
                fields[_TEXTS[ending]] = text_of(_part(blob, 0, blob.size))
        return Raw(fields, parts.get("image"))


class PlainText:
    """Running text, cut at line ends into records of some 2,000 bytes."""

    def __init__(self, files: list[str]):
        self.left_out: dict[str, int] = {}
        self._blobs = [blob for file in files for blob in _blocks(_whole(file))]

    def __len__(self) -> int:
        return len(self._blobs)

    def name(self, index: int) -> str:
        blob = self._blobs[index]
        return f"{shown_path(blob.file)}, byte {blob.offset}"

    def raw(self, index: int) -> Raw:
        blob = self._blobs[index]
        return Raw({"text": text_of(_part(blob, 0, blob.size))}, None)


def json_fields(content: bytes) -> dict[str, Any]:
    """A JSON object.

    Raises:
      BrokenRecord: if it is something else.
    """
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BrokenRecord(f"it is not JSON ({error})") from error
    if not isinstance(fields, dict):
        raise BrokenRecord(f"it is a {type(fields).__name__}, not an object")
    return fields


def text_of(content: bytes) -> str:
    """A text in UTF-8.

    Raises:
      BrokenRecord: if it is not.
    """
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise BrokenRecord(f"its text is not UTF-8 ({error.reason})") from error


def _whole(file: str) -> Blob:
    try:
        return Blob(file, 0, os.stat(file).st_size)
    except OSError as error:
        raise BrokenRecord(_unreadable(file, error)) from error


def _unreadable(file: str, error: OSError) -> str:
    return f"{shown_path(file)} cannot be read ({error.strerror})"


def _lines(file: str) -> Iterator[tuple[int, int, int]]:
    """Number, offset and size of each line that is not blank."""
    offset = 0
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, offset, len(line)
            offset += len(line)


def _blocks(text: Blob) -> Iterator[Blob]:
    """Running text in whole lines, of so many bytes at least."""
    start, size, blank = text.offset, 0, True
    with open(text.file, "rb") as lines:
        lines.seek(start)
        left = text.size
        while left and (line := lines.readline(left)):
            left -= len(line)
            size += len(line)
            blank = blank and not line.strip()
            if size >= BLOCK_BYTES and not blank:
                yield Blob(text.file, start, size)
                start, size, blank = start + size, 0, True
    if not blank:
        yield Blob(text.file, start, size)


def _split(parts: dict[str, Blob]) -> Iterator[dict[str, Blob]]:
    """The records of the files of one name: one, but of a long text alone."""
    ending, blob = next(iter(parts.items()))
    if len(parts) > 1 or ending not in _TEXTS or blob.size <= BLOCK_BYTES:
        yield parts
        return
    for block in _blocks(blob):
        yield {ending: block}


def _folder_members(folder: str) -> Iterator[tuple[str, str, Blob]]:
    """(folder, path below it, bytes) of every file, in the order of the names."""
    for path in sorted(Path(folder).rglob("*")):
        inside = path.relative_to(folder)
        if path.is_file() and not any(part[0] == "." for part in inside.parts):
            yield folder, str(inside), Blob(str(path), 0, path.stat().st_size)


def _tar_members(file: str) -> Iterator[tuple[str, str, Blob]]:
    try:
        with tarfile.open(file, "r:") as archive:
            for member in archive:
                if member.isfile():
                    blob = Blob(file, member.offset_data, member.size)
                    yield file, member.name, blob
    except tarfile.TarError as error:
        raise mistake(
            f"{shown_path(file)} is no tar file ({error})",
            "records are read in any order, so it must be whole and not compressed",
            "Write it anew with `tar -cf`",
        ) from error


def _image_endings() -> set[str]:
    from PIL import Image  # here, because it loads all its formats

    return {ending.removeprefix(".") for ending in Image.registered_extensions()}
