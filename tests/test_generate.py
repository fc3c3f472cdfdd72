# SPDX-License-Identifier: Apache-2.0
"""Generation: greedy, from the image and what was written so far, and nothing else.

Legend: B sequences, S positions, V vocabulary, N new tokens.
"""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from jaxmoe.data import digits
from jaxmoe.data.tasks import Example, assemble, caption_prompt
from jaxmoe.data.tokenizer import PAD, make_tokenizer
from jaxmoe.generate import decode_rows, make_generator
from tests import helpers
from tests.helpers import tiny_config

# Weights so large that another image gives another text; tight capacity in training.
CONFIG = tiny_config(model={"init_std": 0.4}, moe={"capacity_factor": 0.5})
S = CONFIG.model.sequence_length
TOKENIZER = make_tokenizer(CONFIG.data.tokenizer)
LANGUAGES = ("en", "zh") * 4
PROMPT = CONFIG.model.num_patches + 1  # the image and the language's token


@functools.lru_cache
def images():
    found = digits.load_digits(8, training=False).images
    return digits.to_patches(found, CONFIG.data.patch_size)


def prompts():
    rows = [
        caption_prompt(patches, language, tokenizer=TOKENIZER, sequence_length=S)
        for patches, language in zip(images(), LANGUAGES, strict=True)
    ]
    return jax.tree.map(lambda *arrays: np.stack(arrays), *rows)


@functools.lru_cache
def generator(eos_id=-1, data=4, expert=2):
    """Prompts -> tokens [B, S]: more new tokens than there is room for."""
    setup = helpers.setup_of(CONFIG, data, expert).for_inference()
    state = helpers.initial_state(CONFIG, data, expert)
    shards = jax.sharding.NamedSharding(setup.mesh, jax.P(("data", "expert")))
    run = helpers.quickly(
        make_generator(setup, S, eos_id),
        state.params,
        state.buffers,
        jax.device_put(prompts(), shards),
    )

    def generate(batch):
        batch = jax.device_put(batch, shards)
        return np.asarray(run(state.params, state.buffers, batch))

    return generate


@functools.lru_cache
def by_hand():
    """The same by a loop in Python: for each token, lay out the sequences anew as in
    training, apply the whole model on one device, and take the likeliest token."""
    setup = helpers.setup_of(CONFIG, 1, 1).for_inference()
    state = helpers.initial_state(CONFIG, 1, 1)
    module = nnx.merge(setup.graph, state.params, state.buffers)
    logits = jax.jit(lambda batch: module(batch)[0])
    texts = [[TOKENIZER.language_id(language)] for language in LANGUAGES]
    for last in range(PROMPT - 1, S - 1):
        examples = [
            Example("caption", patches, (), text, ())
            for patches, text in zip(images(), texts, strict=True)
        ]
        batch = assemble(
            examples,
            sequence_length=S,
            num_patches=CONFIG.model.num_patches,
            patch_dim=CONFIG.model.patch_dim,
        )
        scores = np.asarray(logits(batch))[:, last]
        for text, row in zip(texts, scores, strict=True):
            text.append(int(row.argmax()))
    return np.array([text[1:] for text in texts])


@pytest.mark.parametrize("mesh", [(4, 2), pytest.param((1, 8), marks=pytest.mark.slow)])
def test_greedy_is_the_argmax_of_full_forward_passes(mesh):
    """token_i = argmax p(. | image, language, token_0 .. token_{i-1}), for every i and
    row, until the sequence is full; behind that there is padding."""
    tokens = generator(data=mesh[0], expert=mesh[1])(prompts())
    room = S - PROMPT
    np.testing.assert_array_equal(tokens[:, :room], by_hand())
    np.testing.assert_array_equal(tokens[:, room:], PAD)


def test_the_text_depends_on_the_image_and_the_language():
    """Other images give other texts, the same image the same text, whatever the row."""
    batch = prompts()
    first = generator()(batch)
    assert len(np.unique(first, axis=0)) == len(first)
    turned = {name: array[::-1].copy() for name, array in batch.items()}
    np.testing.assert_array_equal(generator()(turned), first[::-1])
    swapped = batch | {"patches": batch["patches"][::-1].copy()}
    assert (generator()(swapped) != first).any(1).all()
    spoken = batch["tokens"].copy()
    spoken[:, PROMPT - 1] = spoken[::-1, PROMPT - 1]  # en <-> zh
    assert (generator()(batch | {"tokens": spoken}) != first).any(1).all()


def test_nothing_is_teacher_forced():
    """Targets, and tokens that stand behind the prompt, change nothing, bitwise."""
    batch = prompts()
    rng = np.random.default_rng(0)
    told = {name: array.copy() for name, array in batch.items()}
    told["targets"] = rng.integers(0, 200, batch["targets"].shape, np.int32)
    told["task"] = np.ones_like(batch["task"])
    told["tokens"][:, PROMPT:] = rng.integers(0, 200, (8, S - PROMPT))
    np.testing.assert_array_equal(generator()(told), generator()(batch))


def test_the_end_token_stops_its_row_alone():
    """A row is cut behind its first end token and padded; rows without one go on."""
    free = generator()(prompts())
    eos = int(free[0, 3])
    stopped = generator(eos)(prompts())
    lengths = []
    for row, whole in zip(stopped, free, strict=True):
        found = np.flatnonzero(whole[: S - PROMPT] == eos)
        length = found[0] + 1 if len(found) else S - PROMPT
        lengths.append(length)
        np.testing.assert_array_equal(row[:length], whole[:length])
        np.testing.assert_array_equal(row[length:], PAD)
    assert lengths[0] <= 4
    assert max(lengths) > lengths[0], "every row stopped together: a weak case"


def test_decoded_rows_end_where_the_text_ends():
    """Tokens, end and padding -> text."""
    texts = ["digit one", "数字一"]
    ids = [[*TOKENIZER.encode(text), TOKENIZER.eos_id] for text in texts]
    rows = np.full((2, 20), PAD)
    for row, tokens in zip(rows, ids, strict=True):
        row[: len(tokens)] = tokens
    assert decode_rows(rows, TOKENIZER.decode) == texts
