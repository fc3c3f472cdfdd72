# SPDX-License-Identifier: Apache-2.0
"""Floor 5. The stream of batches, the same on any mesh and after any restart.

Example number i of the run is a pure function of the configuration and i: which source
and task it is, which record, how it is augmented. Step s holds examples s * B ..
(s + 1) * B - 1, and a process makes only the rows it keeps. So a position in the stream
is one number, and what was prefetched before a stop costs nothing. With `Data.packing`
a row holds several examples, and the position is two numbers: step and first example.
A fingerprint of all that decides the stream is saved with it, so that a run never goes
on with other data unnoticed.

Legend: M microbatches, B sequences of a step, b = B / M, or the rows kept of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxmoe.config import ConfigError, Data, Model
from jaxmoe.config_derived import image_patches
from jaxmoe.data import digits
from jaxmoe.data.fields import BrokenRecord, DataError
from jaxmoe.data.mixture import Mixture, Skipped
from jaxmoe.data.own import OwnRecords
from jaxmoe.data.packing import Packer
from jaxmoe.data.sources import Sources, open_held_out, open_sources, trained_tasks
from jaxmoe.data.tasks import NOTHING, TASKS, Batch, Example, assemble
from jaxmoe.data.tokenizer import LANGUAGES, Language

# Counts up when the same configuration begins to give other examples.
FORMAT = 1

_SEED_LIMIT = 2**32  # of grain
_HELD_OUT_SEED = 0x6D36
_FEWEST_TRIED = 100  # records, before their broken share means anything


class _Made(NamedTuple):
    """A batch as a thread makes it; None behind the last."""

    batch: Batch | None
    tried: int
    skipped: tuple[str, ...]


class Loader(Iterator[Batch]):
    """The batches of a training run; without end, unless `Data.epochs` is set.

    A batch holds the arrays of `tasks.assemble` with the leading dimensions [M, b].

    Attributes:
      report: is told, in words, of records that are broken; prints by default.
    """

    def __init__(
        self,
        data: Data,
        *,
        model: Model,
        microbatches: int,
        rows: Sequence[int] | None = None,
        start_step: int = 0,
    ):
        """Loads the sources and starts at a step.

        Args:
          data: What to read.
          model: The shape of a sequence.
          microbatches: M; divides the batch.
          rows: The rows in [0, B / M) of every microbatch that this process keeps, in
            this order; None: all.
          start_step: The first step to be delivered.

        Raises:
          ConfigError: if data and model do not fit together, or a source cannot be
            read.
        """
        _check_loader(data, microbatches)
        self._data, self._model, self._microbatches = data, model, microbatches
        self._sources = open_sources(data, model)
        size = data.batch_size // microbatches
        kept = np.arange(size) if rows is None else np.asarray(rows, np.int64)
        assert kept.ndim == 1 and set(kept) <= set(range(size)), rows
        self._num_rows = len(kept)
        # [M, b] -> [M * b]: the numbers inside a step
        self._numbers = (
            (np.arange(microbatches)[:, None] * size + kept).ravel().tolist()
        )
        self.report: Callable[[str], None] = _print
        for note in self._sources.notes:
            self.report(note)
        self._broken = set(self._sources.broken)
        self._tried = self._failed = 0
        patches = image_patches(data)[0]
        self._examples = Mixture(self._sources, seed=data.seed, image_patches=patches)
        self._limit = sys.maxsize // 2
        if data.epochs is not None:
            self._limit = self._examples.examples_of(data.epochs)
        self._packer = self._make_packer() if data.packing else None
        self._iterator = iter(self._batch_stream())
        self._step = 0
        self._seek(start_step)

    def __next__(self) -> Batch:
        """The batch of the next step.

        Raises:
          StopIteration: behind the last one, in every process at the same step.
          DataError: if too many records are broken.
        """
        made = next(self._iterator)
        if made.batch is None:
            raise StopIteration
        self._step += 1
        self._count(made)
        return made.batch

    @property
    def ends(self) -> bool:
        """Whether the stream has an end."""
        return self._data.epochs is not None

    def figures(self) -> dict[str, float]:
        """What is to be logged of the data: `broken_records`, those met so far.

        There is none where nothing can be broken, in digits and text.
        """
        if all(part.source.built_in for part in self._sources.parts):
            return {}
        return {"broken_records": float(len(self._broken))}

    def state(self) -> dict[str, Any]:
        """Where the stream stands: the next batch to be delivered. Fit for JSON.

        Returns:
          step: Number of the next batch.
          sample: Number of its first example.
          fingerprint: All that decides the stream. Neither the microbatches nor the
            rows of a process are part of it.
        """
        return {
            "step": self._step,
            "sample": self._first(self._step),
            "fingerprint": self._fingerprint(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on where another loader stood.

        Args:
          state: What `state` returned there.

        Raises:
          ConfigError: if that loader read a different stream.
        """
        saved, now = state["fingerprint"], self._fingerprint()
        names = [*now, *(name for name in saved if name not in now)]
        different = [
            f"{name} was {saved.get(name)!r} and is {now.get(name)!r}"
            for name in names
            if saved.get(name) != now.get(name)
        ]
        if different:
            raise ConfigError(
                f"the data differs from that of the saved run: {'; '.join(different)}."
                " A run goes on only with the sequences it began with (it stood before"
                f" sequence {state['sample']}). Set what differs back, or start a new"
                " run, with Train.init_from for the weights."
            )
        if self._packer:
            self._packer.begin(state["step"], state["sample"])
        self._seek(state["step"])

    def close(self) -> None:
        """Stops the threads that prepare batches."""
        self._iterator.close()

    def _seek(self, step: int) -> None:
        self._iterator.set_state({"next_index": step})
        self._step = step

    def _first(self, step: int) -> int:
        """The number of the first example of a step."""
        if self._packer:
            return self._packer.first(step)
        return min(step * self._data.batch_size, self._limit)

    def _make_packer(self) -> Packer:
        return Packer(
            self._examples.size,
            rows=self._data.batch_size,
            positions=self._model.sequence_length,
            patches=self._model.num_patches,
            limit=self._limit,
        )

    def _batch_stream(self):
        """grain's dataset of steps: each element is a batch, made by one thread."""
        import grain  # here, because importing it takes a second

        threads = min(self._data.num_threads, self._data.prefetch_batches)
        options = grain.ReadOptions(
            num_threads=threads,
            prefetch_buffer_size=self._data.prefetch_batches if threads else 0,
        )
        steps = grain.MapDataset.range(sys.maxsize // self._data.batch_size)
        return steps.map(self._make).to_iter_dataset(options)

    def _make(self, step: int) -> _Made:
        """The examples of a step, as a batch."""
        first = self._first(step)
        if first >= self._limit:
            return _Made(None, 0, ())
        if self._packer:
            plan = self._packer.plan(step)
            rows = [plan[number] for number in self._numbers]
        else:
            numbers = (first + number for number in self._numbers)
            rows = [[n] if n < self._limit else [] for n in numbers]
        made = [self._examples[number] for row in rows for number in row]
        skipped = tuple(m.reason for m in made if isinstance(m, Skipped))
        rest = iter(NOTHING if isinstance(m, Skipped) else m for m in made)
        examples = [next(rest) if row else NOTHING for row in rows for _ in row or [0]]
        lengths = [max(1, len(row)) for row in rows] if self._packer else None
        lead = (self._microbatches, self._num_rows)
        return _Made(_shaped(examples, self._model, lead, lengths), len(made), skipped)

    def _count(self, made: _Made) -> None:
        """Names the records of a batch that are broken, and stops if they are many."""
        self._tried += made.tried
        self._failed += len(made.skipped)
        for reason in dict.fromkeys(made.skipped):
            if reason not in self._broken:
                self._broken.add(reason)
                self.report(f"skipped: {reason}")
        most = self._data.max_broken
        if self._tried >= _FEWEST_TRIED and self._failed > most * self._tried:
            raise DataError(
                f"{self._failed} of the {self._tried} records read so far are broken,"
                f" the last {made.skipped[-1] if made.skipped else 'before this step'}."
                f" At most Data.max_broken={most} of them may be. Mend or remove them,"
                " or set Data.max_broken higher; the run goes on from its last"
                " checkpoint."
            )

    def _fingerprint(self) -> dict[str, Any]:
        data, model, sources = self._data, self._model, self._sources
        parts = sources.parts
        own = [part for part in parts if not part.source.built_in]
        fields = ["seed", "batch_size", "mask_fraction"]
        if own or "digits" in sources.content:
            fields += ["patch_size", "shift_pixels"]
        if "digits" in sources.content:
            fields += ["held_out"]
        if own:
            fields += ["image_size", "image_mode"]
        if own and not data.held_out_source:
            fields += ["held_out_share"]
        if data.packing:
            fields += ["packing"]
        # Where files lie decides nothing, only what they hold.
        source = ",".join(part.source.kind for part in parts)
        shares = {}
        if len(parts) > 1:
            shares = {"shares": [round(part.source.share, 6) for part in parts]}
        return {
            "format": FORMAT,
            "Data.source": source,
            **shares,
            **{f"Data.{name}": getattr(data, name) for name in fields},
            **{f"Data.{name}_weight": sources.weight(name) for name in TASKS},
            "Data.tokenizer": sources.tokenizer.fingerprint,
            **{
                f"Model.{name}": getattr(model, name)
                for name in ("sequence_length", "num_patches", "patch_dim")
            },
            **{f"content of {name}": value for name, value in sources.content.items()},
        }


class HeldOutCaption(NamedTuple):
    """An image that is not trained on, and what is to be said of it."""

    language: Language
    patches: np.ndarray  # float32 [P, D]
    truth: str


class HeldOut:
    """What a run is evaluated on, the same at every call.

    Attributes:
      tasks: those that the run trains and that have held-out records.
    """

    def __init__(self, data: Data, model: Model):
        """Opens the held-out part of every source.

        Raises:
          ConfigError: if data and model do not fit together, or a source cannot be
            read.
        """
        self._data, self._model = data, model
        self._sources = open_held_out(data, model, trained_tasks(data, model))
        self.tasks = self._sources.tasks()

    def batches(self, task: str, batch_size: int, num_batches: int) -> Iterator[Batch]:
        """As `held_out_batches`, of one of `tasks`."""
        return _batches(self._sources, self._model, task, batch_size, num_batches)

    def captions(self, limit: int) -> list[HeldOutCaption]:
        """The captions to be generated, by language.

        Every image of digits in both languages, and each caption of other sources; of
        these so many at most, from the first on. Images that cannot be decoded are left
        out.
        """
        found: list[HeldOutCaption] = []
        for part in self._sources.parts:
            if "caption" not in part.weights:
                continue
            if isinstance(part.records, OwnRecords):
                found += _own_captions(part.records, limit)
                limit -= min(limit, part.records.count("caption"))
            else:
                found += _digits_captions(self._data)
        order = {language: number for number, language in enumerate(LANGUAGES)}
        return sorted(found, key=lambda caption: order[caption.language])

    def longest_caption(self) -> int:
        """Tokens of the longest of all held-out captions."""
        encode = self._sources.tokenizer.encode
        longest = 0
        for part in self._sources.parts:
            if "caption" not in part.weights:
                continue
            if isinstance(part.records, OwnRecords):
                longest = max(longest, part.records.longest("caption"))
            else:
                truths = (digits.caption(n, of) for n in range(10) for of in LANGUAGES)
                longest = max(longest, *(len(encode(truth)) for truth in truths))
        return longest


def held_out_batches(
    data: Data, model: Model, task: str, batch_size: int, num_batches: int
) -> Iterator[Batch]:
    """Yields batches of one task over held-out records, the same at every call.

    Nothing is packed, and a broken record leaves its row empty.

    Args:
      data: What to read; its seed and augmentation do not count.
      model: The shape of a sequence.
      task: One of TASKS, whatever its weight in training.
      batch_size: b of the shape [1, b, ...].
      num_batches: Batches; beyond the last record the first ones come again. Without
        any record there are none.

    Raises:
      ConfigError: if data and model do not fit together.
    """
    sources = open_held_out(data, model, (task,))
    return _batches(sources, model, task, batch_size, num_batches)


def _batches(
    sources: Sources, model: Model, task: str, batch_size: int, num_batches: int
) -> Iterator[Batch]:
    # The records of the first source, then those of the next.
    records = [
        (part.records, index)
        for part in sources.parts
        if task in part.weights
        for index in range(part.records.count(task))
    ]
    for batch in range(num_batches if records else 0):
        examples: list[Example] = []
        for number in range(batch * batch_size, (batch + 1) * batch_size):
            key = [_HELD_OUT_SEED, TASKS.index(task), number]
            of, index = records[number % len(records)]
            try:
                examples.append(of.example(task, index, np.random.default_rng(key)))
            except BrokenRecord:
                examples.append(NOTHING)
        yield _shaped(examples, model, (1, batch_size))


def _own_captions(records: OwnRecords, limit: int) -> Iterator[HeldOutCaption]:
    for index in range(min(limit, records.count("caption"))):
        try:
            language, truth = records.caption(index)
            yield HeldOutCaption(language, records.patches(index), truth)
        except BrokenRecord:
            continue


def _digits_captions(data: Data) -> Iterator[HeldOutCaption]:
    images, labels = digits.load_digits(data.held_out, training=False)
    patches = digits.to_patches(images, data.patch_size)
    for language in LANGUAGES:
        for patch, label in zip(patches, labels, strict=True):
            truth = digits.caption(int(label), language)
            yield HeldOutCaption(language, patch, truth)


def _shaped(
    examples: list[Example],
    model: Model,
    lead: tuple[int, int],
    lengths: list[int] | None = None,
) -> Batch:
    """Assembles examples and splits the first dimension in two."""
    batch = assemble(
        examples,
        sequence_length=model.sequence_length,
        num_patches=model.num_patches,
        patch_dim=model.patch_dim,
        lengths=lengths,
    )
    return {name: a.reshape(*lead, *a.shape[1:]) for name, a in batch.items()}


def _print(text: str) -> None:
    print(text, flush=True)


def _check_loader(data: Data, microbatches: int) -> None:
    if data.batch_size % microbatches:
        enough = -(-data.batch_size // microbatches) * microbatches
        raise ConfigError(
            f"Data.batch_size={data.batch_size} cannot be split into"
            f" Train.accumulation={microbatches} microbatches: it must be a multiple."
            f" Set Data.batch_size to {enough}, for example."
        )
    if not data.seed < _SEED_LIMIT:
        raise ConfigError(
            f"Data.seed={data.seed} is too large: it must be below {_SEED_LIMIT}."
            " Set Data.seed to a smaller number."
        )
