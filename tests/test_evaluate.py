# SPDX-License-Identifier: Apache-2.0
"""Evaluation: the figures by hand, and captions that know nothing of the truth.

Legend: B sequences, S positions, V vocabulary.
"""

import functools
import math

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmoe.data import digits
from jaxmoe.data.loader import HeldOut, held_out_batches
from jaxmoe.data.tasks import TASKS
from jaxmoe.data.tokenizer import LANGUAGES, make_tokenizer
from jaxmoe.evaluate import Evaluator
from jaxmoe.generate import Generated
from jaxmoe.loss import LossSums
from jaxmoe.mesh import BATCH_AXES
from tests import helpers
from tests.data import own_files
from tests.helpers import TEXT_ONLY, tiny_config

CONFIG = tiny_config(
    model={"init_std": 0.4},
    moe={"capacity_factor": 0.25},  # in training most tokens would be dropped
    data={"text_denoise_weight": 0.0},
    train={"eval_batches": 2},
)


@functools.lru_cache
def evaluator(data, expert):
    """An evaluator of which the two programs are compiled quickly."""
    setup, state = (
        helpers.setup_of(CONFIG, data, expert),
        helpers.initial_state(CONFIG, data, expert),
    )
    found = Evaluator(setup)
    batch = helpers.batches(CONFIG)[0]
    rows = NamedSharding(setup.mesh, P(BATCH_AXES))
    whole = jax.device_put(batch, setup.batch_sharding)
    flat = jax.device_put({name: a[0] for name, a in batch.items()}, rows)
    for name, example in (("_losses", whole), ("_generate", flat)):
        program = getattr(found, name)
        quick = helpers.quickly(program, state.params, state.buffers, example)
        setattr(found, name, quick)
    return found


@functools.lru_cache
def evaluation(data=4, expert=2):
    state = helpers.initial_state(CONFIG, data, expert)
    return evaluator(data, expert)(state.params, state.buffers)


def test_figures_are_those_of_the_whole_model_on_one_device():
    """eval_loss = -sum log p(target) / targets over the held-out batches, in NumPy from
    logits of the model with experts that drop nothing; perplexity = exp(loss); accuracy
    = share of the targets with the largest logit. A task without weight has none."""
    figures = evaluation().figures
    setup = helpers.setup_of(CONFIG, 1, 1).for_inference()
    state = helpers.initial_state(CONFIG, 1, 1)
    module = nnx.merge(setup.graph, state.params, state.buffers)
    logits_of = jax.jit(lambda batch: module(batch)[0])
    for task in ("caption", "image_denoise", "lm"):
        nll = right = tokens = 0.0
        for batch in held_out_batches(CONFIG.data, CONFIG.model, task, 32, 2):
            one = {name: array[0] for name, array in batch.items()}
            logits = np.asarray(logits_of(one), np.float64)
            log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            chosen = np.take_along_axis(log_probs, one["targets"][..., None], -1)
            where = one["task"] == 1 + TASKS.index(task)
            nll -= chosen[..., 0][where].sum()
            right += (logits.argmax(-1) == one["targets"])[where].sum()
            tokens += where.sum()
        assert figures[f"eval_loss_{task}"] == pytest.approx(nll / tokens, rel=1e-5)
        assert figures[f"eval_accuracy_{task}"] == pytest.approx(right / tokens)
        assert figures[f"eval_perplexity_{task}"] == pytest.approx(
            math.exp(nll / tokens), rel=1e-4
        )
    assert not [name for name in figures if "text_denoise" in name]


def test_evaluation_is_deterministic():
    """A second evaluation gives the same figures and captions, bitwise."""
    state = helpers.initial_state(CONFIG, 4, 2)
    assert evaluator(4, 2)(state.params, state.buffers) == evaluation()


@pytest.mark.slow
def test_evaluators_agree_as_they_are_compiled_for_a_run():
    """Two evaluators, each compiled by itself, agree bitwise; and with the quickly
    compiled one up to rounding."""
    setup, state = helpers.setup_of(CONFIG, 4, 2), helpers.initial_state(CONFIG, 4, 2)
    first, second = (Evaluator(setup)(state.params, state.buffers) for _ in range(2))
    assert first == second
    assert first.figures == pytest.approx(evaluation().figures, rel=1e-5)
    assert first.captions == evaluation().captions


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(8, 1), (1, 8)])
def test_evaluation_is_the_same_on_every_mesh(mesh):
    """Figures up to rounding, captions exactly."""
    got, want = evaluation(*mesh), evaluation()
    assert got.figures == pytest.approx(want.figures, rel=1e-5)
    assert got.captions == want.captions


def test_a_pipeline_evaluates_the_same_sequences(monkeypatch):
    """32 per batch, though a training step has 4 microbatches of 8 on 2 ranks."""
    setup = helpers.setup_of(CONFIG, 2, 2, 2)
    assert setup.microbatches == 4
    seen = []
    found = Evaluator(setup)
    monkeypatch.setattr(
        found,
        "_losses",
        lambda params, buffers, batch: (
            seen.append(helpers.host(batch)) or LossSums.zeros(len(TASKS))
        ),
    )
    found._task_figures(None, None, "lm")
    want = held_out_batches(CONFIG.data, CONFIG.model, "lm", 32, 2)
    helpers.assert_same(seen, list(want))


def test_every_held_out_image_is_captioned_in_both_languages():
    """16 captions for 8 images, in a batch of 32 rows, with the truth of the labels."""
    captions = evaluation().captions
    labels = digits.load_digits(8, training=False).labels
    want = [(lang, digits.caption(int(n), lang)) for lang in LANGUAGES for n in labels]
    assert [(c.language, c.truth) for c in captions] == want


def test_captions_know_nothing_of_the_truth(monkeypatch):
    """With other truths the generated captions are the same, and none of them is right:
    nothing is teacher-forced."""
    want = [c.generated for c in evaluation().captions]
    assert len(set(want)) > 4, "the case would not show a leak"
    truths = {"en": "digit ?", "zh": "?"}
    monkeypatch.setattr(digits, "caption", lambda _, language: truths[language])
    state = helpers.initial_state(CONFIG, 4, 2)
    figures, captions = evaluator(4, 2)(state.params, state.buffers)
    assert [c.generated for c in captions] == want
    assert {c.truth for c in captions} == set(truths.values())
    assert figures["caption_exact_match"] == 0.0


def test_exact_match_counts_whole_captions():
    """All English captions right, and of the Chinese ones the first of 8, the others
    with a letter too many: 9 / 16, 1 and 1 / 8."""
    judged = Evaluator(helpers.setup_of(CONFIG, 4, 2))
    judged._task_figures = lambda *_: {}
    tokenizer = make_tokenizer(CONFIG.data.tokenizer)
    labels = digits.load_digits(8, training=False).labels
    answers = [digits.caption(int(n), lang) for lang in LANGUAGES for n in labels]
    answers[9:] = [answer + "x" for answer in answers[9:]]

    def generate(params, buffers, batch):
        rows = np.zeros((32, 40), np.int32)
        for row, answer in zip(rows, answers, strict=False):
            ids = [*tokenizer.encode(answer), tokenizer.eos_id]
            row[: len(ids)] = ids
        return Generated(rows, np.zeros(32), np.ones(32, bool))

    judged._generate = generate
    figures, captions = judged(None, None)
    assert [c.generated for c in captions] == answers
    assert figures == {
        "caption_exact_match": 9 / 16,
        "caption_exact_match_en": 1.0,
        "caption_exact_match_zh": 1 / 8,
    }


def test_a_text_run_has_no_captions():
    """Without captions in training there is nothing to generate, and with no batches
    nothing to measure."""
    config = tiny_config(data=TEXT_ONLY, train={"eval_batches": 0})
    state = helpers.initial_state(config, 4, 2)
    judged = Evaluator(helpers.setup_of(config, 4, 2))
    assert judged(state.params, state.buffers) == ({}, [])


def test_captions_of_own_images_by_language(tmp_path):
    """Of a source with 20 held-out English captions and some Chinese ones, as many as
    the batches of an evaluation hold; the English ones are right."""
    source = own_files.write(tmp_path, "jsonl", own_files.records(40))
    own = {"source": source, "held_out_share": 0.5}
    config = tiny_config(data=own, train={"eval_batches": 1})
    judged = Evaluator(helpers.setup_of(config, 4, 2))
    judged._task_figures = lambda *_: {}
    wanted = HeldOut(config.data, config.model).captions(32)
    assert len(wanted) < 32
    tokenizer = make_tokenizer(config.data.tokenizer)

    def generate(params, buffers, batch):
        rows = np.zeros((32, 40), np.int32)
        for row, (language, _, truth) in zip(rows, wanted, strict=False):
            said = truth if language == "en" else "?"
            ids = [*tokenizer.encode(said), tokenizer.eos_id]
            row[: len(ids)] = ids
        return Generated(rows, np.zeros(32), np.ones(32, bool))

    judged._generate = generate
    figures, captions = judged(None, None)
    assert [(c.language, c.truth) for c in captions] == [(w[0], w[2]) for w in wanted]
    english = sum(w.language == "en" for w in wanted)
    assert english == 20
    assert figures == {
        "caption_exact_match": english / len(wanted),
        "caption_exact_match_en": 1.0,
        "caption_exact_match_zh": 0.0,
    }
    assert len(HeldOut(config.data, config.model).captions(7)) == 7
