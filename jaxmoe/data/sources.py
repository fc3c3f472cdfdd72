# SPDX-License-Identifier: Apache-2.0
"""Floor 5. All sources of a run, built in or one's own, as one list of parts.

A part is a source with what each of its tasks weighs. The source is chosen first, by
its share in `Data.source`, then the task, by the weights of those for which it has
records.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import NamedTuple, Protocol

import numpy as np

from jaxmoe.config import ConfigError, Data, Model
from jaxmoe.config_source import Source, parse_sources, source_files
from jaxmoe.data.index import SHOWN, Index, held_out_records, make_index, part_of
from jaxmoe.data.own import OwnRecords
from jaxmoe.data.records import (
    Records,
    check_mask_fraction,
    check_sequence_length,
    fitting_vocab,
    possible_tasks,
    task_weights,
)
from jaxmoe.data.tasks import TASKS, Example
from jaxmoe.data.tokenizer import Tokenizer, make_tokenizer


class TaskRecords(Protocol):
    """What the stream needs of the records of a source."""

    def count(self, task: str) -> int: ...

    def sizes(self, task: str) -> np.ndarray: ...

    def example(self, task: str, index: int, rng: np.random.Generator) -> Example: ...


class Part(NamedTuple):
    """A source of one split.

    Attributes:
      source: where it comes from.
      records: its records.
      weights: its tasks' shares of all examples.
    """

    source: Source
    records: TaskRecords
    weights: dict[str, float]


class Sources(NamedTuple):
    """The sources of one split.

    Attributes:
      parts: those that have records.
      tokenizer: the one that `Data.tokenizer` names.
      content: what identifies each.
      broken: where each broken record stands, and why it is broken.
      notes: what the user should know of them.
    """

    parts: tuple[Part, ...]
    tokenizer: Tokenizer
    content: dict[str, str]
    broken: tuple[str, ...]
    notes: tuple[str, ...]

    def tasks(self) -> tuple[str, ...]:
        """The tasks that have records."""
        found = {task for part in self.parts for task in part.weights}
        return tuple(task for task in TASKS if task in found)

    def weight(self, task: str) -> float:
        """A task's share of all examples."""
        return sum(part.weights.get(task, 0.0) for part in self.parts)


def open_sources(data: Data, model: Model) -> Sources:
    """The sources to train on.

    Raises:
      ConfigError: if a source cannot be read or has nothing for the tasks that have a
        weight, or if data and model do not fit together.
    """
    tokenizer = make_tokenizer(data.tokenizer)
    check_mask_fraction(data)
    excluded = _held_out_digests(data, model)
    parts, content, broken, notes = [], {}, [], []
    if data.held_out_source:
        content["held-out source"] = f"{_digest_of(excluded):016x}"
    for number, source in enumerate(parse_sources(data.source), 1):
        weights = task_weights(data, source.kind)
        if source.built_in:
            records = _built_in(source, data, model, tuple(weights), training=True)
            content |= records.content
        else:
            fitting_vocab(tokenizer, data, model)
            index = _index(source, data, model)
            held_out = held_out_records(index, data.held_out_share)
            if data.held_out_source:
                held_out = np.isin(index.digest, excluded)
            records = _own(index, ~held_out, tokenizer, data, model, training=True)
            weights = _of_those_there(source, records, weights, data)
            check_sequence_length(tuple(weights), data, model, 1)
            content[f"source {number} ({source.kind})"] = index.content
            broken += index.broken
            notes += _notes(source, index, records)
        shares = {task: source.share * w for task, w in weights.items()}
        parts.append(Part(source, records, shares))
    return Sources(tuple(parts), tokenizer, content, tuple(broken), tuple(notes))


def trained_tasks(data: Data, model: Model) -> tuple[str, ...]:
    """The tasks that a run trains.

    Raises:
      ConfigError: if a source cannot be read.
    """
    found = set()
    for source in parse_sources(data.source):
        weights = task_weights(data, source.kind)
        there = weights if source.built_in else _index(source, data, model).items
        found |= {task for task in weights if task in there}
    return tuple(task for task in TASKS if task in found)


def open_held_out(data: Data, model: Model, names: tuple[str, ...]) -> Sources:
    """The records to evaluate on, for the given tasks; the weights do not count.

    Raises:
      ConfigError: as `open_sources`; that a task has no records is none.
    """
    tokenizer = make_tokenizer(data.tokenizer)
    fitting_vocab(tokenizer, data, model)
    found: list[tuple[Source, TaskRecords, tuple[str, ...]]] = []
    sources = parse_sources(data.source)
    for source in sources:
        here = tuple(n for n in names if n in possible_tasks(source.kind))
        if source.built_in and (here or len(sources) == 1):
            records = _built_in(source, data, model, here or names, training=False)
            found.append((source, records, here))
        elif not source.built_in and not data.held_out_source:
            index = _index(source, data, model)
            chosen = held_out_records(index, data.held_out_share)
            records = _own(index, chosen, tokenizer, data, model, training=False)
            found.append((source, records, here))
    if data.held_out_source:
        for source in parse_sources(data.held_out_source, "Data.held_out_source"):
            index = _index(source, data, model)
            every = np.ones(len(index.digest), bool)
            records = _own(index, every, tokenizer, data, model, training=False)
            found.append((source, records, names))
    parts = [
        Part(source, records, {name: 1.0 for name in here if records.count(name)})
        for source, records, here in found
    ]
    kept = tuple(part for part in parts if part.weights)
    return Sources(kept, tokenizer, {}, (), ())


def _built_in(
    source: Source,
    data: Data,
    model: Model,
    names: tuple[str, ...],
    *,
    training: bool,
) -> Records:
    alone = dataclasses.replace(data, source=source.kind)
    return Records(alone, model, names=names, training=training)


def _own(
    index: Index,
    chosen: np.ndarray,
    tokenizer: Tokenizer,
    data: Data,
    model: Model,
    *,
    training: bool,
) -> OwnRecords:
    items = {name: part_of(of_task, chosen) for name, of_task in index.items.items()}
    return OwnRecords(
        index, items, tokenizer=tokenizer, data=data, model=model, training=training
    )


def _held_out_digests(data: Data, model: Model) -> np.ndarray:
    """Of the records of `Data.held_out_source`, which are never trained on."""
    if not data.held_out_source:
        return np.zeros(0, np.uint64)
    sources = parse_sources(data.held_out_source, "Data.held_out_source")
    return np.concatenate([_index(source, data, model).digest for source in sources])


def _digest_of(digests: np.ndarray) -> int:
    """Identifies a set of records."""
    return int(np.bitwise_xor.reduce(np.unique(digests), initial=np.uint64(0)))


def _of_those_there(
    source: Source, records: OwnRecords, weights: dict[str, float], data: Data
) -> dict[str, float]:
    """The weights of the tasks that have records, summing to 1."""
    there = {task: w for task, w in weights.items() if records.count(task)}
    total = sum(there.values())
    if not there:
        has = [task for task in TASKS if records.count(task)]
        fields = ", ".join(f"Data.{task}_weight" for task in has)
        remedy = f"Set {fields} above 0" if has else "Set Data.held_out_share lower"
        raise ConfigError(
            f"Data.source: {source.path!r} has no records to train on for the tasks"
            f" that have a weight ({', '.join(weights)}): images with texts are for the"
            " image tasks, texts alone for the text tasks, if their 'tasks' do not say"
            f" otherwise. {remedy}, or leave the source out."
        )
    return {task: w / total for task, w in there.items()}


def _notes(source: Source, index: Index, records: OwnRecords) -> list[str]:
    notes = []
    if index.broken:
        few = "".join(f"\n  {name}" for name in index.broken[:SHOWN])
        more = "\n  ..." if len(index.broken) > SHOWN else ""
        notes.append(
            f"{source.path}: {len(index.broken)} of {len(index.digest)} records are"
            f" broken and left out:{few}{more}"
        )
    if left_out := index.reader.left_out:
        endings = ", ".join(
            f"{ending or 'none'} ({n})" for ending, n in left_out.items()
        )
        notes.append(
            f"{source.path}: files whose endings are neither of an image nor of a text"
            f" are not read: {endings}"
        )
    if cut := records.too_long():
        notes.append(
            f"{source.path}: {cut} of {records.count('caption')} captions are longer"
            " than the sequence has room for and are cut; a larger"
            " Model.sequence_length keeps them whole"
        )
    return notes


def _index(source: Source, data: Data, model: Model) -> Index:
    stamp = tuple(s for file in source_files(source) for s in _stamps(file))
    return _cached_index(
        source._replace(share=1.0),
        data.tokenizer,
        model.sequence_length,
        data.max_broken,
        stamp,
    )


@functools.lru_cache(maxsize=64)
def _cached_index(
    source: Source,
    tokenizer: str,
    sequence_length: int,
    max_broken: float,
    stamp: tuple,
) -> Index:
    """Training and evaluation of one run read a source once, while it is the same."""
    return make_index(
        source,
        make_tokenizer(tokenizer),
        sequence_length=sequence_length,
        max_broken=max_broken,
    )


def _stamps(path: str) -> list[tuple[str, int, int]]:
    """Name, size and time of change of a file, or of all below a folder."""
    found = [path]
    if os.path.isdir(path):
        walk = os.walk(path)
        found = sorted(
            os.path.join(at, name) for at, _, names in walk for name in names
        )
    states = ((name, os.stat(name)) for name in found if os.path.exists(name))
    return [(name, state.st_size, state.st_mtime_ns) for name, state in states]
