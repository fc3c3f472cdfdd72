# SPDX-License-Identifier: Apache-2.0
"""Floor 5. What a source of one's own holds: one reading of all records at the start.

Every text of every record becomes an item of each of its tasks; running text that is
longer than a sequence becomes several. What is kept is a few numbers per item: images
are neither decoded nor, where they are files of their own, read but for both ends.

Which records are held out depends on what they hold, not on their order or names: those
with the smallest digests. Records with the same image, or without one with the same
texts, have the same digest and are on the same side.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxmoe.config import ConfigError
from jaxmoe.config_base import mistake, shown_path
from jaxmoe.config_source import KINDS, Source, source_files
from jaxmoe.data.columns import ArrayRecords, ParquetTable
from jaxmoe.data.fields import BrokenRecord, Fields, parse_fields
from jaxmoe.data.readers import (
    JsonLines,
    Members,
    PlainText,
    Raw,
    Reader,
    image_identity,
)
from jaxmoe.data.tasks import IMAGE_TASKS, TASKS, chunk_tokens
from jaxmoe.data.tokenizer import Tokenizer

SHOWN = 3  # broken records that a message names

_MEASURED = 100  # texts from which the bytes of a token are known


class Items(NamedTuple):
    """The items of a task: arrays of one length, one entry per example of an epoch."""

    record: np.ndarray  # int64, number of the record
    text: np.ndarray  # int32, which of its texts
    piece: np.ndarray  # int32, which piece of the text
    tokens: np.ndarray  # int32, tokens of the text or piece, without special ones


class Index(NamedTuple):
    """A source that has been read once.

    Attributes:
      reader: gives its records.
      items: of every task that it has records for.
      digest: uint64 [records], by which records are held out; 0 for broken ones.
      content: identifies all that was read.
      broken: where each broken record stands, and why it is broken.
      piece_bytes: of running text, by task.
    """

    reader: Reader
    items: dict[str, Items]
    digest: np.ndarray
    content: str
    broken: tuple[str, ...]
    piece_bytes: dict[str, int]


def open_reader(source: Source) -> Reader:
    """The reader of a source that is not built in.

    Raises:
      ConfigError: if its files are not what their endings say.
    """
    files = source_files(source)
    readers: dict[str, Callable[[list[str]], Reader]] = {
        "jsonl": JsonLines,
        "txt": PlainText,
        "tar": lambda tars: Members(tars, folder=False),
        "folder": lambda folders: Members(folders, folder=True),
        "array_record": ArrayRecords,
        "parquet": ParquetTable,
    }
    try:
        return readers[source.kind](files)
    except OSError as error:
        raise mistake(
            f"Data.source: {shown_path(error.filename or source.path)} cannot be read"
            f" ({error.strerror or error})",
            "all files of a source are read at the start",
            "Give a path that can be read",
        ) from error


def make_index(
    source: Source, tokenizer: Tokenizer, *, sequence_length: int, max_broken: float
) -> Index:
    """Reads all records of a source once.

    Args:
      source: Not a built-in one.
      tokenizer: Counts the tokens.
      sequence_length: To which running text is cut.
      max_broken: Share of the records that may be broken.

    Raises:
      ConfigError: if the source has no records, or too many broken ones.
    """
    reader = open_reader(source)
    if not len(reader):
        other = _named_inside(source)
        raise mistake(
            f"Data.source: {source.path!r} holds no records",
            "a folder holds images with texts of the same name (cat.jpg, cat.txt) or"
            " texts alone, a file at least one record",
            f"Name {shown_path(other) if other else 'the file or folder with them'}",
        )
    piece_bytes = _piece_bytes(reader, tokenizer, sequence_length)
    rows: dict[str, list[tuple[int, int, int, int]]] = {name: [] for name in TASKS}
    digest = np.zeros(len(reader), np.uint64)
    content, broken = hashlib.sha256(), []
    for record in range(len(reader)):
        try:
            raw = reader.raw(record)
            fields = parse_fields(raw.fields, has_image=raw.image is not None)
            identity = _identity(raw, fields)
        except BrokenRecord as error:
            broken.append(f"{reader.name(record)}: {error}")
            continue
        content.update(identity + repr(fields).encode())
        digest[record] = _number(identity)
        for name in fields.tasks:
            size = 0 if name in IMAGE_TASKS else piece_bytes[name]
            for text, (_, words) in enumerate(fields.texts):
                whole = words.encode()
                for piece in range(num_pieces(whole, size)):
                    tokens = len(tokenizer.encode(piece_of(whole, size, piece)))
                    rows[name].append((record, text, piece, tokens))
    _check_broken(source, len(reader), broken, max_broken)
    return Index(
        reader,
        {name: _items(of_task) for name, of_task in rows.items() if of_task},
        digest,
        content.hexdigest()[:16],
        tuple(broken),
        piece_bytes,
    )


def held_out_records(index: Index, share: float) -> np.ndarray:
    """Which records are kept from training: bool [records].

    The share is rounded to a whole number, at least 1 unless it is 0 or there is only
    one record. Records of one digest with the last of them are kept too.
    """
    good = index.digest[index.digest > 0]
    count = min(max(1, round(share * len(good))), len(good) - 1) if share else 0
    if count < 1:
        return np.zeros(len(index.digest), bool)
    last = np.partition(good, count - 1)[count - 1]
    return (index.digest > 0) & (index.digest <= last)


def part_of(items: Items, chosen: np.ndarray) -> Items:
    """The items of the chosen records, bool [records]."""
    kept = chosen[items.record]
    return Items(*(array[kept] for array in items))


def num_pieces(content: bytes, size: int) -> int:
    """How many pieces of at most `size` bytes a text is cut into; 0: it is not cut."""
    if not size or len(content) <= size:
        return 1
    return -(-len(content) // _step(size))


def piece_of(content: bytes, size: int, number: int) -> str:
    """A piece of a text in UTF-8, found without cutting the others.

    A piece ends behind a blank if there is one near its end, else behind a character.
    """
    count = num_pieces(content, size)
    start, end = (
        _cut(content, size, at) if 0 < at < count else at // count * len(content)
        for at in (number, number + 1)
    )
    return content[start:end].decode("utf-8")


def _step(size: int) -> int:
    """Bytes from one cut to the next, before it moves back to a blank."""
    return max(1, size - _back(size))


def _back(size: int) -> int:
    return max(3, min(16, size // 16))  # a character has 4 bytes at most


def _cut(content: bytes, size: int, number: int) -> int:
    end = number * _step(size)
    blank = content.rfind(b" ", end - _back(size), end)
    if blank >= 0:
        return blank + 1
    while content[end] & 0xC0 == 0x80:  # inside a character
        end -= 1
    return end


def _piece_bytes(
    reader: Reader, tokenizer: Tokenizer, sequence_length: int
) -> dict[str, int]:
    """Bytes of running text that make about as many tokens as a task has room for."""
    size = tokens = 0
    for record in range(min(len(reader), _MEASURED)):
        try:
            raw = reader.raw(record)
            fields = parse_fields(raw.fields, has_image=raw.image is not None)
        except BrokenRecord:
            continue
        for _, text in fields.texts:
            part = text[: 10 * _MEASURED]
            size += len(part.encode())
            tokens += len(tokenizer.encode(part))
    ratio = size / tokens if tokens else 1.0
    chunks = {n: chunk_tokens(n, sequence_length) for n in ("text_denoise", "lm")}
    return {name: max(4, int(chunk * ratio)) for name, chunk in chunks.items()}


def _identity(raw: Raw, fields: Fields) -> bytes:
    if raw.image is not None:
        return image_identity(raw.image)
    return repr(fields.texts).encode()


def _number(identity: bytes) -> int:
    """A number from 1 on that is spread evenly."""
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest()) | 1


def _items(rows: list[tuple[int, int, int, int]]) -> Items:
    record, text, piece, tokens = np.array(rows, np.int64).T
    return Items(record, *(a.astype(np.int32) for a in (text, piece, tokens)))


def _check_broken(
    source: Source, count: int, broken: list[str], max_broken: float
) -> None:
    if len(broken) > max_broken * count or len(broken) == count:
        other = _named_inside(source)
        few = "; ".join(broken[:SHOWN]) + ("; ..." if len(broken) > SHOWN else "")
        raise ConfigError(
            f"{len(broken)} of the {count} records of {source.path!r} are broken:"
            f" {few}. At most Data.max_broken={max_broken} of them may be, and not"
            " all. Mend or remove them"
            + ("." if len(broken) == count else ", or set Data.max_broken higher.")
            + (f" Or name {shown_path(other)}, which is in that folder." * bool(other))
        )


def _named_inside(source: Source) -> str:
    """A file in a folder that is a source of its own, '' if there is none."""
    if source.kind != "folder":
        return ""
    folder = source_files(source)[0]
    found = (os.path.join(folder, name) for name in sorted(os.listdir(folder)))
    kinds = [ending for ending in KINDS if ending != ".txt"]
    return next((f for f in found if os.path.splitext(f)[1].lower() in kinds), "")
