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
from jaxmoe.data import digits
from jaxmoe.data.loader import held_out_batches, held_out_images
from jaxmoe.data.records import task_weights
from jaxmoe.data.tasks import TASKS, caption_prompt
from jaxmoe.data.tokenizer import LANGUAGES, Language, make_tokenizer
from jaxmoe.generate import decode_rows, make_generator
from jaxmoe.loss import LossSums
from jaxmoe.mesh import BATCH_AXES
from jaxmoe.model import Batch
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
        self._tokenizer = make_tokenizer(setup.config.data.tokenizer)
        self._losses = self._make_losses()
        self._generate = self._make_generator()

    def __call__(
        self, params: Any, buffers: Any, stopped: Callable[[], bool] = _never
    ) -> Evaluation:
        """Evaluates every task that has a weight in training.

        Args:
          params, buffers: of the model.
          stopped: asked before each batch.

        Raises:
          EvaluationStopped: if `stopped` said so.

        Returns:
          Figures: `eval_loss_<task>` (nats per token), `eval_perplexity_<task>`,
          `eval_accuracy_<task>` (share of the target tokens), and where the run
          captions images `caption_exact_match` and `caption_exact_match_<language>`.
        """
        figures: dict[str, float] = {}
        tasks = task_weights(self._config.data)
        for task in tasks:
            figures |= self._task_figures(params, buffers, task, stopped)
        if "caption" not in tasks:
            return Evaluation(figures, [])
        captions = list(self._captions(params, buffers, stopped))
        right = {language: [] for language in LANGUAGES}
        for caption in captions:
            right[caption.language].append(caption.generated == caption.truth)
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
        for batch in held_out_batches(
            config.data, config.model, task, self._rows, config.train.eval_batches
        ):
            _check(stopped)
            batch = jax.device_put(batch, self._setup.batch_sharding)
            sums = self._losses(params, buffers, batch)
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
        """Captions of all held-out images in every language, written step by step."""
        config, tokenizer = self._config, self._tokenizer
        images, labels = held_out_images(config.data)
        patches = digits.to_patches(images, config.data.patch_size)
        wanted: list[tuple[Language, np.ndarray, str]] = [
            (language, patch, digits.caption(int(label), language))
            for language in LANGUAGES
            for patch, label in zip(patches, labels, strict=True)
        ]
        sharding = NamedSharding(self._setup.mesh, P(BATCH_AXES))
        for start in range(0, len(wanted), self._rows):
            _check(stopped)
            part = wanted[start : start + self._rows]
            filled = part + part[:1] * (self._rows - len(part))
            prompts = [
                caption_prompt(
                    patch,
                    language,
                    tokenizer=tokenizer,
                    sequence_length=config.model.sequence_length,
                )
                for language, patch, _ in filled
            ]
            batch: Batch = jax.tree.map(lambda *rows: np.stack(rows), *prompts)
            tokens = self._generate(params, buffers, jax.device_put(batch, sharding))
            texts = decode_rows(np.asarray(tokens), tokenizer.decode)
            for (language, _, truth), text in zip(part, texts, strict=False):
                yield Caption(language, truth, text)

    @property
    def _rows(self) -> int:
        """Sequences of a batch: of an accumulated part of training, on every mesh."""
        return self._config.data.batch_size // self._config.train.accumulation

    def _make_generator(self) -> Callable[[Any, Any, Batch], jax.Array]:
        truths = [digits.caption(n, lang) for n in range(10) for lang in LANGUAGES]
        longest = max(len(self._tokenizer.encode(truth)) for truth in truths)
        return make_generator(self._setup, longest + 1, self._tokenizer.eos_id)

    def _make_losses(self) -> Callable[[Any, Any, Batch], LossSums]:
        setup = self._setup

        def losses(params: Any, buffers: Any, batch: Batch) -> LossSums:
            one = jax.tree.map(lambda x: x[0], batch)
            sums, _ = setup.forward(setup.weights(params, buffers), buffers, one)
            return jax.lax.psum(sums, BATCH_AXES)

        return jax.jit(setup.per_device(losses, BATCH_SPEC, P()))
