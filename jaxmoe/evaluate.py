# SPDX-License-Identifier: Apache-2.0
"""Floor 6. Evaluation on held-out data: loss per task, and captions word for word.

Deterministic: the same weights give the same figures, on any mesh up to rounding.
Experts drop no token here, whatever the training capacity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmoe.config import Config
from jaxmoe.data.loader import HeldOut
from jaxmoe.data.tasks import TASKS, caption_prompt
from jaxmoe.data.tokenizer import Language, make_tokenizer
from jaxmoe.generate import Generated, decode_rows, make_generator
from jaxmoe.loss import LossSums
from jaxmoe.mesh import BATCH_AXES
from jaxmoe.model import Batch
from jaxmoe.sharding import put
from jaxmoe.train_step import BATCH_SPEC, Setup


class EvaluationStopped(Exception):
    """Somebody asked to stop before the end."""


def _never() -> bool:
    return False


class Caption(NamedTuple):
    """A generated caption beside the truth."""

    language: Language
    truth: str
    generated: str


class Evaluation(NamedTuple):
    """Figures by name, and every generated caption."""

    figures: dict[str, float]
    captions: list[Caption]


def _check(stopped: Callable[[], bool]) -> None:
    if stopped():
        raise EvaluationStopped


class Evaluator:
    """Evaluates the weights of one run; compiles at its first use."""

    def __init__(self, setup: Setup):
        self._setup = setup.for_inference()
        self._config: Config = setup.config
        self._held_out = HeldOut(setup.config.data, setup.config.model)
        self._tokenizer = make_tokenizer(setup.config.data.tokenizer)
        self._losses = self._make_losses()
        self._generate = self._make_generator()

    def __call__(
        self, params: Any, buffers: Any, stopped: Callable[[], bool] = _never
    ) -> Evaluation:
        """Evaluates every task that has a weight in training and held-out records.

        Args:
          params, buffers: of the model.
          stopped: asked before each batch.

        Raises:
          EvaluationStopped: if `stopped` said so.

        Returns:
          Figures: `eval_loss_<task>` (nats per token), `eval_perplexity_<task>`,
          `eval_accuracy_<task>` (share of the target tokens), and where the run
          captions images `caption_exact_match` and `caption_exact_match_<language>`,
          for every language in which there are captions.
        """
        figures: dict[str, float] = {}
        for task in self._held_out.tasks:
            figures |= self._task_figures(params, buffers, task, stopped)
        captions = list(self._captions(params, buffers, stopped))
        if not captions:
            return Evaluation(figures, [])
        right: dict[Language, list[bool]] = {}
        for caption in captions:
            match = caption.generated == caption.truth
            right.setdefault(caption.language, []).append(match)
        every = [match for matches in right.values() for match in matches]
        figures["caption_exact_match"] = float(np.mean(every))
        for language, matches in right.items():
            figures[f"caption_exact_match_{language}"] = float(np.mean(matches))
        return Evaluation(figures, captions)

    def _task_figures(
        self,
        params: Any,
        buffers: Any,
        task: str,
        stopped: Callable[[], bool] = _never,
    ) -> dict[str, float]:
        config, which = self._config, TASKS.index(task)
        total = np.zeros(3)
        for batch in self._held_out.batches(
            task, self._rows, config.train.eval_batches
        ):
            _check(stopped)
            batch = put(batch, self._setup.batch_sharding)
            sums = jax.device_get(self._losses(params, buffers, batch))
            total += [float(x[which]) for x in (sums.nll, sums.correct, sums.tokens)]
        nll, correct, tokens = total
        if not tokens:
            return {}
        return {
            f"eval_loss_{task}": nll / tokens,
            f"eval_perplexity_{task}": math.exp(min(nll / tokens, 700.0)),
            f"eval_accuracy_{task}": correct / tokens,
        }

    def _captions(
        self, params: Any, buffers: Any, stopped: Callable[[], bool]
    ) -> Iterator[Caption]:
        """Captions of the held-out images, written step by step.

        Of digits all; of other sources no more than the batches of an evaluation hold.
        """
        config, tokenizer = self._config, self._tokenizer
        wanted = self._held_out.captions(config.train.eval_batches * self._rows)
        sharding = NamedSharding(self._setup.mesh, P(BATCH_AXES))
        for start in range(0, len(wanted), self._rows):
            _check(stopped)
            part = wanted[start : start + self._rows]
            filled = part + part[:1] * (self._rows - len(part))
            prompts = [
                caption_prompt(
                    one.patches,
                    one.language,
                    tokenizer=tokenizer,
                    sequence_length=config.model.sequence_length,
                )
                for one in filled
            ]
            batch: Batch = jax.tree.map(lambda *rows: np.stack(rows), *prompts)
            new = self._generate(params, buffers, put(batch, sharding))
            texts = decode_rows(np.asarray(new.tokens_BN), tokenizer.decode)
            for one, text in zip(part, texts, strict=False):
                yield Caption(one.language, one.truth, text)

    @property
    def _rows(self) -> int:
        """Sequences of a batch: of an accumulated part of training, on every mesh."""
        return self._config.data.batch_size // self._config.train.accumulation

    def _make_generator(self) -> Callable[[Any, Any, Batch], Generated]:
        longest = self._held_out.longest_caption() + 1  # and the end
        longest = min(longest, self._config.model.sequence_length)
        return make_generator(self._setup, longest, self._tokenizer.eos_id)

    def _make_losses(self) -> Callable[[Any, Any, Batch], LossSums]:
        setup = self._setup

        def losses(params: Any, buffers: Any, batch: Batch) -> LossSums:
            one = jax.tree.map(lambda x: x[0], batch)
            sums, _ = setup.forward(setup.weights(params, buffers), buffers, one)
            return jax.lax.psum(sums, BATCH_AXES)

        return jax.jit(setup.per_device(losses, BATCH_SPEC, P()))
