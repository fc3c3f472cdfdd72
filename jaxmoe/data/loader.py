# SPDX-License-Identifier: Apache-2.0
"""Floor 5. The endless stream of batches, the same on any mesh and after any restart.

Example number i of the run is a pure function of the configuration and i: which task it
is, which record, how it is augmented. Step s holds examples s * B .. (s + 1) * B - 1,
and a process makes only the rows it keeps. So a position in the stream is one number,
and what was prefetched before a stop costs nothing. A fingerprint of all that decides
the stream is saved with it, so that a run never goes on with other data unnoticed.

Legend: M microbatches, B sequences of a step, b = B / M, or the rows kept of them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxmoe.config import ConfigError, Data, Model
from jaxmoe.data import digits
from jaxmoe.data.records import Records, task_weights
from jaxmoe.data.tasks import TASKS, Batch, Example, assemble

# Counts up when the same configuration begins to give other examples.
FORMAT = 1

_SEED_LIMIT = 2**32  # of grain
_PROPORTION_UNIT = 10_000  # grain mixes by whole numbers
_HELD_OUT_SEED = 0x6D36


class Loader(Iterator[Batch]):
    """The batches of a training run, without end.

    A batch holds the arrays of `tasks.assemble` with the leading dimensions [M, b].
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
          ConfigError: if data and model do not fit together.
        """
        _check_loader(data, microbatches)
        self._weights = task_weights(data)
        self._records = Records(data, model, names=tuple(self._weights), training=True)
        self._data, self._model, self._microbatches = data, model, microbatches
        size = data.batch_size // microbatches
        kept = np.arange(size) if rows is None else np.asarray(rows, np.int64)
        assert kept.ndim == 1 and set(kept) <= set(range(size)), rows
        self._num_rows = len(kept)
        # [M, b] -> [M * b]: the numbers inside a step
        self._numbers = (
            (np.arange(microbatches)[:, None] * size + kept).ravel().tolist()
        )
        self._examples = _example_stream(self._records, self._weights, data.seed)
        self._iterator = iter(self._batch_stream())
        self._step = 0
        self._seek(start_step)

    def __next__(self) -> Batch:
        """The batch of the next step."""
        batch = next(self._iterator)
        self._step += 1
        return batch

    def state(self) -> dict[str, Any]:
        """Where the stream stands: the next batch to be delivered. Fit for JSON.

        Returns:
          step: Number of the next batch.
          sample: Number of its first sequence.
          fingerprint: All that decides the stream. Neither the microbatches nor the
            rows of a process are part of it.
        """
        return {
            "step": self._step,
            "sample": self._step * self._data.batch_size,
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
        self._seek(state["step"])

    def close(self) -> None:
        """Stops the threads that prepare batches."""
        self._iterator.close()

    def _seek(self, step: int) -> None:
        self._iterator.set_state({"next_index": step})
        self._step = step

    def _batch_stream(self):
        """grain's dataset of steps: each element is a batch, made by one thread."""
        import grain  # here, because importing it takes a second

        threads = min(self._data.num_threads, self._data.prefetch_batches)
        options = grain.ReadOptions(
            num_threads=threads,
            prefetch_buffer_size=self._data.prefetch_batches if threads else 0,
        )
        steps = grain.MapDataset.range(sys.maxsize // self._data.batch_size)
        return steps.map(self._batch).to_iter_dataset(options)

    def _batch(self, step: int) -> Batch:
        first = step * self._data.batch_size
        examples: list[Any] = [
            self._examples[first + number] for number in self._numbers
        ]
        return _shaped(examples, self._model, (self._microbatches, self._num_rows))

    def _fingerprint(self) -> dict[str, Any]:
        data, model, records = self._data, self._model, self._records
        fields = ["source", "seed", "batch_size", "mask_fraction"]
        if "digits" in records.content:
            fields += ["patch_size", "shift_pixels", "held_out"]
        return {
            "format": FORMAT,
            **{f"Data.{name}": getattr(data, name) for name in fields},
            **{f"Data.{name}_weight": self._weights.get(name, 0.0) for name in TASKS},
            "Data.tokenizer": records.tokenizer.fingerprint,
            **{
                f"Model.{name}": getattr(model, name)
                for name in ("sequence_length", "num_patches", "patch_dim")
            },
            **{f"content of {name}": value for name, value in records.content.items()},
        }


def held_out_batches(
    data: Data, model: Model, task: str, batch_size: int, num_batches: int
) -> Iterator[Batch]:
    """Yields batches of one task over held-out records, the same at every call.

    Args:
      data: What to read; its seed and augmentation do not count.
      model: The shape of a sequence.
      task: One of TASKS, whatever its weight in training.
      batch_size: b of the shape [1, b, ...].
      num_batches: Batches; beyond the last record the first ones come again.

    Raises:
      ConfigError: if data and model do not fit together.
    """
    records = Records(data, model, names=(task,), training=False)

    def batches() -> Iterator[Batch]:
        for batch in range(num_batches):
            examples = []
            for number in range(batch * batch_size, (batch + 1) * batch_size):
                key = [_HELD_OUT_SEED, TASKS.index(task), number]
                rng = np.random.default_rng(key)
                index = number % records.count(task)
                examples.append(records.example(task, index, rng))
            yield _shaped(examples, model, (1, batch_size))

    return batches()


def held_out_images(data: Data) -> digits.Digits:
    """The held-out images with their labels, in the order of `held_out_batches`."""
    return digits.load_digits(data.held_out, training=False)


def _example_stream(records: Records, weights: dict[str, float], seed: int):
    """grain's dataset of examples: endless, mixed by the weights."""
    import grain

    streams = []
    for task in weights:
        make = _example_maker(records, task, seed)
        chance = np.random.SeedSequence([seed, TASKS.index(task)]).generate_state(1)
        endless = grain.MapDataset.range(sys.maxsize)
        streams.append(endless.random_map(make, seed=int(chance[0])))
    proportions = [max(1, round(_PROPORTION_UNIT * w)) for w in weights.values()]
    mixed = grain.MapDataset.mix(streams, proportions)
    # grain sets a dataset up at its first access, and not thread-safely.
    for dataset in (*streams, mixed):
        dataset[0]
    return mixed


def _example_maker(records: Records, task: str, seed: int):
    """Makes a task's example from its number, each epoch in another order."""
    count = records.count(task)

    # grain's own shuffle takes 20 microseconds an element, as much as all the rest.
    # Several epochs are kept, as threads may be in different ones.
    @functools.lru_cache(maxsize=16)
    def order(epoch: int) -> list[int]:
        rng = np.random.default_rng([seed, TASKS.index(task), epoch])
        return rng.permutation(count).tolist()

    def make(number: int, rng: np.random.Generator) -> Example:
        epoch, place = divmod(number, count)
        return records.example(task, order(epoch)[place], rng)

    return make


def _shaped(examples: list[Example], model: Model, lead: tuple[int, int]) -> Batch:
    """Assembles examples and splits the first dimension in two."""
    batch = assemble(
        examples,
        sequence_length=model.sequence_length,
        num_patches=model.num_patches,
        patch_dim=model.patch_dim,
    )
    return {name: a.reshape(*lead, *a.shape[1:]) for name, a in batch.items()}


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
