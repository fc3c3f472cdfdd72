# SPDX-License-Identifier: Apache-2.0
"""Generation: from the prompt and what was written so far, and nothing else.

Legend: B sequences, S positions, V vocabulary, N new tokens, K continuations.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmoe.data import digits
from jaxmoe.data.tasks import Example, assemble, caption_prompt
from jaxmoe.data.tokenizer import PAD, make_tokenizer
from jaxmoe.generate import Controls, _draw, decode_rows, make_generator, nucleus
from tests import helpers
from tests.helpers import tiny_config

# Weights so large that another image gives another text; tight capacity in training.
CONFIG = tiny_config(model={"init_std": 0.4}, moe={"capacity_factor": 0.5})
S = CONFIG.model.sequence_length
TOKENIZER = make_tokenizer(CONFIG.data.tokenizer)
LANGUAGES = ("en", "zh") * 4
PROMPT = CONFIG.model.num_patches + 1  # the image and the language's token
ROOM = S - PROMPT + 1  # the last token is predicted at the last position


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
    program = generating(data, expert, eos_id)
    return lambda batch: program(batch).tokens_BN


@functools.lru_cache
def generating(data=4, expert=2, eos_id=-1, **how):
    """(prompts, fields of the controls) -> Generated, as NumPy arrays."""
    setup = helpers.setup_of(CONFIG, data, expert).for_inference()
    state = helpers.initial_state(CONFIG, data, expert)
    shards = jax.sharding.NamedSharding(setup.mesh, jax.P(("data", "expert")))

    def arguments(batch, controls):
        batch = jax.device_put(batch, shards)
        return (
            state.params,
            state.buffers,
            batch,
            Controls(**{"max_tokens": S, **controls}),
        )

    program = make_generator(setup, S, eos_id, **how)
    numbered = prompts() | {"number": np.arange(8, dtype=np.int32)}
    run = helpers.quickly(program, *arguments(numbered, {}))

    def generate(batch, **controls):
        batch = {"number": numbered["number"], **batch}
        return helpers.host(run(*arguments(batch, controls)))

    return generate


@functools.lru_cache
def whole_model():
    """Decoder texts of equal length, for each image -> float64 [B, V]: log p of what
    comes next, by the whole model on one device, the sequences laid out anew."""
    setup = helpers.setup_of(CONFIG, 1, 1).for_inference()
    state = helpers.initial_state(CONFIG, 1, 1)
    module = nnx.merge(setup.graph, state.params, state.buffers)
    logits = jax.jit(lambda batch: module(batch)[0])

    def log_probs(texts):
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
        last = CONFIG.model.num_patches + len(texts[0]) - 1
        scores = np.asarray(logits(batch), np.float64)[:, last]
        return scores - np.log(np.exp(scores).sum(1, keepdims=True))

    return log_probs


def first_texts():
    return [[TOKENIZER.language_id(language)] for language in LANGUAGES]


@functools.lru_cache
def by_hand():
    """Tokens [B, N] by a loop in Python: for each token apply the whole model, and take
    the likeliest; and the sums of log p."""
    texts, total = first_texts(), np.zeros(len(LANGUAGES))
    for _ in range(ROOM):
        log_probs = whole_model()(texts)
        total += log_probs.max(1)
        for text, row in zip(texts, log_probs, strict=True):
            text.append(int(row.argmax()))
    return np.array([text[1:] for text in texts]), total


@pytest.mark.parametrize("mesh", [(4, 2), pytest.param((1, 8), marks=pytest.mark.slow)])
def test_greedy_is_the_argmax_of_full_forward_passes(mesh):
    """token_i = argmax p(. | image, language, token_0 .. token_{i-1}), for every i and
    row, until the sequence is full; behind that there is padding."""
    got = generating(*mesh)(prompts())
    tokens, log_prob = by_hand()
    np.testing.assert_array_equal(got.tokens_BN[:, :ROOM], tokens)
    np.testing.assert_array_equal(got.tokens_BN[:, ROOM:], PAD)
    np.testing.assert_allclose(got.log_prob_B, log_prob, rtol=1e-4)
    assert not got.ended_B.any()


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
        found = np.flatnonzero(whole[:ROOM] == eos)
        length = found[0] + 1 if len(found) else ROOM
        lengths.append(length)
        np.testing.assert_array_equal(row[:length], whole[:length])
        np.testing.assert_array_equal(row[length:], PAD)
    assert lengths[0] <= 4
    assert max(lengths) > lengths[0], "every row stopped together: a weak case"


def test_fewer_tokens_are_the_first_ones():
    """`max_tokens` cuts, and needs no other program; a row of padding stays empty."""
    batch = prompts()
    free = generating()(batch)
    empty = {
        name: array * (np.arange(8) != 3).reshape(-1, *[1] * (array.ndim - 1))
        for name, array in batch.items()
    }
    few = generating()(empty, max_tokens=5)
    np.testing.assert_array_equal(few.tokens_BN[:, 5:], PAD)
    others = np.arange(8) != 3
    np.testing.assert_array_equal(few.tokens_BN[others, :5], free.tokens_BN[others, :5])
    np.testing.assert_array_equal(few.tokens_BN[3], PAD)
    assert few.log_prob_B[3] == 0
    assert (few.log_prob_B[others] > free.log_prob_B[others]).all()


def test_nucleus_by_hand():
    """The fewest likeliest tokens with probability top_p together; ties stay."""
    logits = np.log([[0.5, 0.1, 0.3, 0.1], [0.25, 0.25, 0.25, 0.25]])
    for top_p, kept in [(0.4, "x..."), (0.5, "x..."), (0.6, "x.x."), (0.85, "xxxx")]:
        got = np.isfinite(nucleus(jnp.asarray(logits, jnp.float32), top_p))
        assert "".join(".x"[int(k)] for k in got[0]) == kept, top_p
        assert got[1].all()
    np.testing.assert_array_equal(np.isfinite(nucleus(logits, 1.0)), True)


def test_draws_have_the_probabilities_that_are_asked_for():
    """Frequencies over many sequences = softmax(logits / temperature) inside of the
    nucleus, and nothing outside of it."""
    logits = np.array([2.0, 0.0, 1.0, -1.0], np.float32)
    count = 20_000
    state = types.SimpleNamespace(count=0, log_prob_bK=np.zeros((count, 1), np.float32))
    controls = Controls(1, temperature=2.0, top_p=0.85, seed=5)
    rows = np.broadcast_to(logits, (count, 1, 4))
    draw = jax.jit(lambda rows, numbers: _draw(rows, state, controls, numbers)[1:])
    tokens, log_probs = draw(rows, np.arange(count))
    want = np.exp(logits / 2) * [1, 1, 1, 0]  # of the 4 shares 0.47, 0.17, 0.28, 0.1
    found = np.bincount(tokens[:, 0], minlength=4) / count
    np.testing.assert_allclose(found, want / want.sum(), atol=0.015)
    plain = logits - np.log(np.exp(logits).sum())
    np.testing.assert_allclose(log_probs[:, 0], plain[tokens[:, 0]], atol=1e-6)


@pytest.mark.slow
def test_draws_depend_on_seed_and_number_alone():
    """The same seed gives the same texts, another one others; a sequence keeps its text
    in another row, and on another mesh. Cold or narrow draws are greedy. All of this is
    one program for each mesh."""
    batch, draw = prompts(), generating(sample=True)
    with helpers.compilations() as compiled:
        first = draw(batch, seed=1).tokens_BN
        np.testing.assert_array_equal(draw(batch, seed=1).tokens_BN, first)
        assert (draw(batch, seed=2).tokens_BN != first).any(1).all()
        numbered = batch | {"number": np.arange(8, dtype=np.int32)}
        turned = {name: array[::-1].copy() for name, array in numbered.items()}
        np.testing.assert_array_equal(draw(turned, seed=1).tokens_BN, first[::-1])
        tokens, _ = by_hand()
        for how in ({"temperature": 1e-4}, {"top_p": 1e-6}):
            got = draw(batch, seed=1, **how).tokens_BN
            np.testing.assert_array_equal(got[:, :ROOM], tokens)
    assert not [name for name in compiled if "run" in name], compiled
    other = generating(1, 8, sample=True)(batch, seed=1).tokens_BN
    np.testing.assert_array_equal(other, first)


@functools.lru_cache
def beams_by_hand(width, length, eos):
    """Tokens and log p of each image's best text by beam search over lists."""
    found = [[(0.0, first)] for first in first_texts()]
    for _ in range(length):
        candidates = [[] for _ in found]
        for k in range(max(map(len, found))):
            texts = [beams[min(k, len(beams) - 1)] for beams in found]
            longest = max(len(text) for _, text in texts)
            done = [len(text) > 1 and text[-1] == eos for _, text in texts]
            rows = [text + [0] * (longest - len(text)) for _, text in texts]
            scores = whole_model()(rows)
            for row, (total, text) in enumerate(texts):
                if k >= len(found[row]):
                    continue
                if done[row]:
                    candidates[row].append((total, text))
                    continue
                for token in np.argsort(-scores[row])[:width]:
                    new = total + scores[row, token], [*text, int(token)]
                    candidates[row].append(new)
        found = [sorted(c, key=lambda x: -x[0])[:width] for c in candidates]
    return [beams[0] for beams in found]


@pytest.mark.slow
def test_beam_search_is_the_search_by_hand():
    """3 continuations, followed for 8 tokens over lists in Python by whole forward
    passes, give the same texts and sums of log p; some end before the others."""
    eos = int(by_hand()[0][0, 3])
    got = generating(eos_id=eos, beams=3)(prompts(), max_tokens=8)
    want = beams_by_hand(3, 8, eos)
    np.testing.assert_allclose(got.log_prob_B, [total for total, _ in want], rtol=1e-4)
    for row, (_, text) in zip(got.tokens_BN, want, strict=True):
        np.testing.assert_array_equal(row[: len(text) - 1], text[1:])
        np.testing.assert_array_equal(row[len(text) - 1 :], PAD)
    ended = [text[-1] == eos for _, text in want]
    assert got.ended_B.tolist() == ended
    assert any(ended) and not all(ended), "a weak case"
    greedy = generating(eos_id=eos)(prompts(), max_tokens=8)
    assert (got.log_prob_B > greedy.log_prob_B + 0.1).any(), "no better than greedy"


def test_decoded_rows_end_where_the_text_ends():
    """Tokens, end and padding -> text."""
    texts = ["digit one", "数字一"]
    ids = [[*TOKENIZER.encode(text), TOKENIZER.eos_id] for text in texts]
    rows = np.full((2, 20), PAD)
    for row, tokens in zip(rows, ids, strict=True):
        row[: len(tokens)] = tokens
    assert decode_rows(rows, TOKENIZER.decode) == texts
