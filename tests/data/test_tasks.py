# SPDX-License-Identifier: Apache-2.0
"""The four tasks: every position of every example is accounted for, by hand."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxmoe.data import tasks
from jaxmoe.data.tasks import TASKS, Example
from jaxmoe.data.tokenizer import BOS, CHINESE, ENGLISH, EOS, MASK, make_tokenizer

TOKENIZER = make_tokenizer("bytes")
PATCHES = np.arange(1.0, 9.0, dtype=np.float32).reshape(4, 2)  # P = 4, D = 2
IDS = [20, 21, 22, 23]


def rng():
    return np.random.default_rng(0)


def lay_out(*examples, sequence_length=16):
    return tasks.assemble(
        examples, sequence_length=sequence_length, num_patches=4, patch_dim=2
    )


def pad(*values):
    return [*values, *[0] * (16 - len(values))]


def test_caption_by_hand():
    """Patches, then the language, then the caption; the last target is the end."""
    batch = lay_out(tasks.caption(PATCHES, IDS, language="zh", tokenizer=TOKENIZER))
    expected = {
        "tokens": pad(0, 0, 0, 0, CHINESE, 20, 21, 22, 23),
        "modality": pad(1, 1, 1, 1, 2, 2, 2, 2, 2),
        "decoder": pad(0, 0, 0, 0, 1, 1, 1, 1, 1),
        "sequence": pad(1, 1, 1, 1, 1, 1, 1, 1, 1),
        "positions": pad(0, 1, 2, 3, 4, 5, 6, 7, 8),
        "targets": pad(0, 0, 0, 0, 20, 21, 22, 23, EOS),
        "task": pad(0, 0, 0, 0, 1, 1, 1, 1, 1),
    }
    for name, row in expected.items():
        assert batch[name].astype(int).tolist() == [row], name
    np.testing.assert_array_equal(batch["patches"], [PATCHES])


def test_image_denoise_by_hand():
    example = tasks.image_denoise(
        PATCHES, IDS, language="en", tokenizer=TOKENIZER, mask_fraction=1.0, rng=rng()
    )
    batch = lay_out(example)
    tokens = pad(0, 0, 0, 0, ENGLISH, MASK, MASK, MASK, MASK, BOS, 20, 21, 22, 23)
    assert batch["tokens"].tolist() == [tokens]
    assert batch["decoder"].astype(int).tolist() == [pad(*[0] * 9, *[1] * 5)]
    assert batch["targets"].tolist() == [pad(*[0] * 9, 20, 21, 22, 23, EOS)]
    assert batch["task"].tolist() == [pad(*[0] * 9, *[2] * 5)]


def test_text_denoise_by_hand():
    ids = np.array(IDS, np.int32)
    example = tasks.text_denoise(ids, TOKENIZER, mask_fraction=0.0, rng=rng())
    batch = lay_out(example)
    assert batch["tokens"].tolist() == [pad(*IDS, BOS, *IDS)]
    assert batch["targets"].tolist() == [pad(0, 0, 0, 0, *IDS, EOS)]
    assert batch["task"].tolist() == [pad(0, 0, 0, 0, *[3] * 5)]
    assert batch["modality"].tolist() == [pad(*[2] * 9)]
    assert not batch["patches"].any()
    np.testing.assert_array_equal(example.encoder, ids)


def test_lm_by_hand():
    """All positions are used: the last target lies beyond the row."""
    ids = np.arange(100, 116, dtype=np.int32)
    batch = lay_out(tasks.lm(ids, TOKENIZER))
    assert batch["tokens"].tolist() == [[BOS, *ids[:-1].tolist()]]
    assert batch["targets"].tolist() == [ids.tolist()]
    assert batch["task"].tolist() == [[4] * 16]
    assert batch["decoder"].all()


def test_rows_do_not_touch():
    """A row is the same whatever stands beside it."""
    examples = [
        tasks.lm(np.arange(100, 116, dtype=np.int32), TOKENIZER),
        tasks.caption(PATCHES, IDS, language="en", tokenizer=TOKENIZER),
    ]
    both = lay_out(*examples)
    for row, example in enumerate(examples):
        for name, array in lay_out(example).items():
            np.testing.assert_array_equal(both[name][row], array[0], err_msg=name)


def test_shapes_and_types():
    batch = lay_out(tasks.caption(PATCHES, IDS, language="en", tokenizer=TOKENIZER))
    kinds = {name: (a.dtype.name, a.shape) for name, a in batch.items()}
    integers = ("tokens", "modality", "sequence", "positions", "targets", "task")
    assert kinds == {
        "patches": ("float32", (1, 4, 2)),
        "decoder": ("bool", (1, 16)),
        **{name: ("int32", (1, 16)) for name in integers},
    }


def test_no_patches_at_all():
    example = tasks.lm(np.array(IDS, np.int32), TOKENIZER)
    batch = tasks.assemble([example], sequence_length=4, num_patches=0, patch_dim=3)
    assert batch["patches"].shape == (1, 0, 3)


def test_too_long_is_refused():
    with pytest.raises(AssertionError, match="caption"):
        lay_out(
            tasks.caption(PATCHES, IDS, language="en", tokenizer=TOKENIZER),
            sequence_length=8,
        )


@hypothesis.given(
    st.integers(1, 60), st.floats(0, 1), st.integers(0, 2**32 - 1), st.booleans()
)
def test_mask_spans(n, fraction, seed, constant):
    """Exactly the wanted number is masked, the others stay; pieces are few."""
    ids = np.full(n, 50) if constant else np.arange(100, 100 + n)
    before = ids.copy()
    masked = tasks.mask_spans(
        ids, MASK, fraction=fraction, rng=np.random.default_rng(seed)
    )
    np.testing.assert_array_equal(ids, before)
    gone = masked == MASK
    wanted = min(n, max(1, round(fraction * n))) if fraction else 0
    assert gone.sum() == wanted
    np.testing.assert_array_equal(masked[~gone], ids[~gone])
    pieces = np.count_nonzero(np.diff(np.concatenate([[0], gone])) == 1)
    assert pieces <= -(-wanted // tasks.MEAN_SPAN)


def test_mask_spans_reach_every_position():
    rng = np.random.default_rng(1)
    seen = sum(
        tasks.mask_spans(np.zeros(20, int), 1, fraction=0.3, rng=rng)
        for _ in range(300)
    )
    assert seen.min() > 30  # of 90 expected; the ends are masked less often


@pytest.mark.parametrize("task", TASKS)
def test_min_sequence_length_is_tight(task):
    """The longest example fits into just as many positions, and no fewer."""
    ids = np.array(IDS, np.int32)
    needed = tasks.min_sequence_length(task, num_patches=4, caption_tokens=len(IDS))
    chunk = ids[: tasks.chunk_tokens(task, needed)]
    options = {"mask_fraction": 0.3, "rng": rng()}
    example = {
        "caption": lambda: tasks.caption(
            PATCHES, IDS, language="en", tokenizer=TOKENIZER
        ),
        "image_denoise": lambda: tasks.image_denoise(
            PATCHES, IDS, language="en", tokenizer=TOKENIZER, **options
        ),
        "text_denoise": lambda: tasks.text_denoise(chunk, TOKENIZER, **options),
        "lm": lambda: tasks.lm(chunk, TOKENIZER),
    }[task]()
    batch = lay_out(example, sequence_length=needed)
    assert batch["modality"].all()


def test_caption_prompt_begins_like_the_example():
    """A prompt is the training example without its caption."""
    prompt = tasks.caption_prompt(
        PATCHES, "zh", tokenizer=TOKENIZER, sequence_length=16
    )
    batch = lay_out(tasks.caption(PATCHES, IDS, language="zh", tokenizer=TOKENIZER))
    last = tasks.last_position(prompt)
    assert last == 4
    for name in ("tokens", "modality", "decoder", "sequence", "positions"):
        assert prompt[name].shape == (16,)
        begin = batch[name][0, : last + 1]
        np.testing.assert_array_equal(prompt[name][: last + 1], begin)
        assert not prompt[name][last + 1 :].any()
    assert not prompt["targets"].any()
    assert not prompt["task"].any()
    np.testing.assert_array_equal(prompt["patches"], PATCHES)


def test_last_position_of_many_rows():
    batch = lay_out(
        Example("caption", PATCHES, (), [ENGLISH], ()), Example("lm", None, (), IDS, ())
    )
    assert tasks.last_position(batch).tolist() == [4, 3]
