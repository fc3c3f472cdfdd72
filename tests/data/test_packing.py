# SPDX-License-Identifier: Apache-2.0
"""Packed rows: every example once and in order, apart from its neighbours."""

import dataclasses
import itertools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxmoe.config import Data, Model
from jaxmoe.data import tasks
from jaxmoe.data.loader import Loader
from jaxmoe.data.packing import Packer
from jaxmoe.data.tasks import NOTHING, TASKS
from jaxmoe.data.tokenizer import make_tokenizer
from jaxmoe.layers.attention import attention_mask
from jaxmoe.model import sequences_of, take_apart
from jaxmoe.moe.exchange import ExpertAxis
from tests import helpers
from tests.data import own_files
from tests.helpers import tiny_config

TOKENIZER = make_tokenizer("bytes")
MODEL = Model(sequence_length=64, num_patches=8, patch_dim=16)
DATA = Data(batch_size=8, patch_size=4, num_threads=0, packing=True)


# The plan --------------------------------------------------------------------------


@hypothesis.given(
    st.lists(st.integers(1, 10), min_size=1, max_size=60),
    st.integers(1, 5),
    st.integers(0, 3),
)
def test_every_example_once_and_in_order(sizes, rows, image):
    """Rows never overflow, a step takes the examples that come next, and the first one
    that is left does not fit into any row: no example could have come earlier."""
    patches = [min(size, image) for size in sizes]
    packer = Packer(
        lambda n: (sizes[n], patches[n]),
        rows=rows,
        positions=10,
        patches=6,
        limit=len(sizes),
    )
    seen, step = [], 0
    while packer.first(step) < len(sizes):
        plan = packer.plan(step)
        assert len(plan) == rows
        numbers = [n for row in plan for n in row]
        first = packer.first(step)
        assert sorted(numbers) == list(range(first, first + len(numbers)))
        used = [
            (sum(sizes[n] for n in row), sum(patches[n] for n in row)) for row in plan
        ]
        assert all(a <= 10 and b <= 6 for a, b in used)
        following = first + len(numbers)
        if following < len(sizes):
            size, image_size = sizes[following], patches[following]
            assert all(a + size > 10 or b + image_size > 6 for a, b in used)
        seen += sorted(numbers)
        step += 1
    assert seen == list(range(len(sizes)))
    assert packer.plan(step) == [[]] * rows
    # From a known position on, and backwards, the plan is the same.
    again = Packer(
        lambda n: (sizes[n], patches[n]),
        rows=rows,
        positions=10,
        patches=6,
        limit=len(sizes),
    )
    again.begin(step - 1, packer.first(step - 1))
    assert again.plan(step - 1) == packer.plan(step - 1)
    assert again.plan(0) == packer.plan(0)


# Rows ------------------------------------------------------------------------------


def example(task, length, seed):
    """An example of a task over random tokens, and with a random image."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(20, 200, length)
    patches = rng.random((4, 16), np.float32)
    spoken = {"language": "en", "tokenizer": TOKENIZER}
    masked = {"mask_fraction": 0.3, "rng": rng}
    if task == "caption":
        return tasks.caption(patches, ids.tolist(), **spoken)
    if task == "image_denoise":
        return tasks.image_denoise(patches, ids.tolist(), **spoken, **masked)
    if task == "text_denoise":
        return tasks.text_denoise(ids, TOKENIZER, **masked)
    return tasks.lm(ids, TOKENIZER)


EXAMPLES = [example(task, 2 + n, n) for n, task in enumerate(TASKS)]


def laid_out(*examples, lengths=None, size=40):
    return tasks.assemble(
        examples, sequence_length=size, num_patches=8, patch_dim=16, lengths=lengths
    )


def test_a_packed_row_is_its_examples_one_after_the_other():
    """Field by field, with positions from 0 and numbers from 1; an empty row between
    two others is empty."""
    batch = laid_out(*EXAMPLES[:3], NOTHING, EXAMPLES[3], lengths=[3, 1, 1])
    apart = [laid_out(e) for e in EXAMPLES]
    sizes = [int((one["modality"] > 0).sum()) for one in apart]
    start = 0
    for number, (one, size) in enumerate(zip(apart[:3], sizes[:3], strict=True), 1):
        for name, array in one.items():
            if name != "patches":
                part = batch[name][0, start : start + size]
                want = array[0, :size] * (number if name == "sequence" else 1)
                np.testing.assert_array_equal(part, want, err_msg=name)
        start += size
    for name, array in batch.items():
        if name != "patches":
            assert not array[0, start:].any()
        assert not array[1].any()
        np.testing.assert_array_equal(array[2], apart[3][name][0])
        assert array.dtype == apart[0][name].dtype
    images = [e.patches for e in EXAMPLES[:3] if e.patches is not None]
    np.testing.assert_array_equal(batch["patches"][0], np.concatenate(images))


# The stream ------------------------------------------------------------------------


def loader_of(**options):
    data = dataclasses.replace(DATA, **options)
    model = MODEL if data.packing else dataclasses.replace(MODEL, num_patches=4)
    return Loader(data, model=model, microbatches=1)


def texts(batches):
    """What every example of a stream must say, by row and place."""
    found = []
    for batch in batches:
        for row, targets in zip(batch["sequence"][0], batch["targets"][0], strict=True):
            for number in range(1, row.max() + 1):
                ids = targets[row == number]
                found.append(tuple(ids[ids > 0].tolist()))
    return found


def test_packing_changes_which_row_and_nothing_else():
    """The examples of the packed stream are those of the unpacked one."""
    weights = {"caption_weight": 0.7, "lm_weight": 0.1, "image_denoise_weight": 0.2}
    packed = texts(itertools.islice(loader_of(**weights), 6))
    plain = texts(itertools.islice(loader_of(packing=False, **weights), 40))
    assert 1.5 * 6 * 8 < len(packed) <= len(plain)
    assert sorted(packed) == sorted(plain[: len(packed)])


def test_packing_leaves_less_padding(tmp_path):
    """Of captions of very different lengths."""
    rows = own_files.records(40)
    for number, row in enumerate(rows):
        row["en"] = "word " * (1 + number % 9)
    source = own_files.write(tmp_path, "jsonl", rows)
    padding = []
    for packing in (False, True):
        data = dataclasses.replace(
            own_files.DATA, source=source, packing=packing, batch_size=8, epochs=3
        )
        patches = 12 if packing else 4
        model = Model(sequence_length=100, num_patches=patches, patch_dim=48)
        batches = list(Loader(data, model=model, microbatches=1))
        used = np.concatenate([b["modality"] > 0 for b in batches[:-1]])
        padding.append(1 - used.mean())
    assert padding[0] > 0.6 and padding[1] < 0.3


# The model -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def network():
    """A dropless model of a dense and an expert layer: embed and (x, batch) -> logits.

    Their weights are constants of what is compiled."""
    config = tiny_config()
    setup, state = helpers.setup_of(config, 1, 1), helpers.initial_state(config, 1, 1)
    given = helpers.host((state.params, state.buffers))
    params, buffers = jax.tree.map(jnp.asarray, given)
    weights, net = take_apart(params), setup.network

    def logits(x, batch):
        x, _ = net.layers(
            net.kinds,
            net.in_order(weights, buffers),
            x,
            mask=attention_mask(batch["sequence"], batch["decoder"]),
            sequences=sequences_of(batch),
            axis=ExpertAxis(),
        )
        return net.ends(weights).logits(x)

    return lambda batch: net.ends(weights).embed(batch), logits


def test_gradient_to_a_neighbour_is_exactly_zero(network):
    """Row: four examples, one of each task. The loss of each one, differentiated by the
    vectors that enter the layers: zero, bitwise, wherever another example stands, and
    not zero inside."""
    embed, logits = network
    batch = jax.tree.map(jnp.asarray, laid_out(*EXAMPLES, lengths=[4]))

    @jax.jit
    def gradient(number):
        def loss(x):
            scores = jax.nn.log_softmax(logits(x, batch))
            target = batch["targets"][..., None]
            chosen = jnp.take_along_axis(scores, target, -1)[..., 0]
            counts = (batch["sequence"] == number) & (batch["task"] > 0)
            return -jnp.sum(chosen * counts)

        return jax.grad(loss)(embed(batch))

    compiled = helpers.quickly(gradient, 1)
    for number in range(1, 5):
        found = np.abs(np.asarray(compiled(number)))[0].max(-1)
        inside = np.asarray(batch["sequence"][0] == number)
        assert (found[~inside] == 0.0).all()
        assert (found[inside] > 0.0).mean() > 0.5


def test_logits_are_those_of_the_example_alone(network):
    """Up to rounding, whatever the neighbours."""
    embed, logits = network
    rows = laid_out(*EXAMPLES, *EXAMPLES, lengths=[4, 1, 1, 1, 1])
    run = jax.jit(lambda batch: logits(embed(batch), batch))
    found = np.asarray(helpers.quickly(run, rows)(rows))
    for number in range(1, 5):
        inside = rows["sequence"][0] == number
        alone = found[number][: inside.sum()]
        np.testing.assert_allclose(found[0][inside], alone, rtol=1e-4, atol=1e-5)
