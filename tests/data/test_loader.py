# SPDX-License-Identifier: Apache-2.0
"""The stream of batches: a pure function of configuration and position."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from jaxmoe.config import ConfigError, Data, Model
from jaxmoe.data import digits, tasks
from jaxmoe.data.loader import FORMAT, Loader, held_out_batches
from jaxmoe.data.records import Records, task_weights, vocab_size
from jaxmoe.data.tasks import IMAGE_TASKS, TASKS
from jaxmoe.data.tokenizer import BOS, CHINESE, ENGLISH, EOS, MASK, make_tokenizer

MODEL = Model(sequence_length=48, num_patches=16, patch_dim=4)
EVEN = {f"{task}_weight": 0.25 for task in TASKS}
# Everything that decides the stream, whatever the defaults are.
DATA = Data(
    source="digits",
    batch_size=64,
    seed=0,
    tokenizer="bytes",
    patch_size=2,
    shift_pixels=1,
    held_out=297,
    caption_weight=0.75,
    image_denoise_weight=0.05,
    text_denoise_weight=0.1,
    lm_weight=0.1,
    mask_fraction=0.3,
)
SMALL = dataclasses.replace(DATA, batch_size=12, **EVEN)
TOKENIZER = make_tokenizer("bytes")


@pytest.fixture
def make_loader():
    """Makes loaders whose threads end with the test."""
    loaders = []

    def make(data=SMALL, *, model=MODEL, microbatches=1, **options):
        loaders.append(Loader(data, model=model, microbatches=microbatches, **options))
        return loaders[-1]

    yield make
    for loader in loaders:
        loader.close()


def only(task, **options):
    weights = {f"{name}_weight": float(name == task) for name in TASKS}
    return dataclasses.replace(DATA, **weights, **options)


def take(loader, steps):
    return list(itertools.islice(loader, steps))


def flat(batch):
    """[M, b, ...] -> [M * b, ...]"""
    return {name: a.reshape(-1, *a.shape[2:]) for name, a in batch.items()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)
        assert one[name].dtype == other[name].dtype


def check_positions(batch):
    """Every position is a patch, text or padding, and has what belongs to it."""
    modality, decoder = batch["modality"], batch["decoder"]
    tokens, targets, task = batch["tokens"], batch["targets"], batch["task"]
    where = np.arange(modality.shape[-1])
    used = modality > 0
    length = used.sum(-1, keepdims=True)
    np.testing.assert_array_equal(used, where < length)  # padding comes last
    np.testing.assert_array_equal(batch["sequence"], used)
    np.testing.assert_array_equal(batch["positions"], where * used)
    num_patches = (modality == 1).sum(-1, keepdims=True)
    np.testing.assert_array_equal(modality == 1, where < num_patches)
    assert set(np.unique(num_patches)) <= {0, batch["patches"].shape[-2]}
    np.testing.assert_array_equal(tokens > 0, modality == 2)
    has_image = num_patches[..., 0] > 0
    assert not batch["patches"][~has_image].any()
    assert batch["patches"][has_image].any((-1, -2)).all()
    # The decoder is the end of the text, and has a loss everywhere.
    begin = length - decoder.sum(-1, keepdims=True)
    np.testing.assert_array_equal(decoder, (where >= begin) & used)
    np.testing.assert_array_equal(task > 0, decoder)
    np.testing.assert_array_equal(targets > 0, task > 0)
    assert (task.max(-1, keepdims=True) == task)[decoder].all()  # one task per row
    # Inside the decoder the target is the next token.
    following = decoder[..., :-1] & decoder[..., 1:]
    np.testing.assert_array_equal(
        targets[..., :-1][following], tokens[..., 1:][following]
    )
    assert not np.isin(targets[decoder], [BOS, MASK, ENGLISH, CHINESE]).any()


@pytest.mark.parametrize("microbatches", [1, 3])
def test_contract(make_loader, microbatches):
    for batch in take(make_loader(microbatches=microbatches), 5):
        lead = (microbatches, 12 // microbatches)
        kinds = {name: (a.dtype.name, a.shape) for name, a in batch.items()}
        integers = ("tokens", "modality", "sequence", "positions", "targets", "task")
        assert kinds == {
            "patches": ("float32", (*lead, 16, 4)),
            "decoder": ("bool", (*lead, 48)),
            **{name: ("int32", (*lead, 48)) for name in integers},
        }
        check_positions(batch)


def test_tasks_end_as_they_should(make_loader):
    """Captions and chunks end with the end, running text goes on."""
    batch = flat(next(make_loader(dataclasses.replace(SMALL, batch_size=400))))
    task = batch["task"].max(-1) - 1
    last = np.take_along_axis(
        batch["targets"], tasks.last_position(batch)[:, None], axis=1
    )[:, 0]
    ends = last == EOS
    lm = task == TASKS.index("lm")
    assert ends[~lm].all()
    assert ends[lm].mean() < 0.1
    assert (batch["modality"][lm] == 2).all()  # all positions are used
    assert (batch["targets"][~lm] == EOS).sum(-1).max() == 1


def test_captions_are_true(make_loader):
    """What the decoder must say is the caption of the image, in the language asked."""
    data = only("caption", batch_size=200, shift_pixels=0)
    batch = flat(next(make_loader(data)))
    images, labels = digits.load_digits(data.held_out, training=True)
    patches = digits.to_patches(images, data.patch_size)
    label_of = {p.tobytes(): label for p, label in zip(patches, labels, strict=True)}
    languages = []
    for row in range(200):
        language = {ENGLISH: "en", CHINESE: "zh"}[int(batch["tokens"][row, 16])]
        label = label_of[batch["patches"][row].tobytes()]
        said = TOKENIZER.decode(batch["targets"][row, 16:])
        assert said == digits.caption(label, language)
        languages.append(language)
    assert 60 < languages.count("en") < 140


def test_augmentation(make_loader):
    """Images move by up to so many pixels, in all directions, and nothing else."""
    data = only("caption", batch_size=300, shift_pixels=2)
    batch = flat(next(make_loader(data)))
    images, _ = digits.load_digits(data.held_out, training=True)
    steps = range(-2, 3)
    shifts = {}
    for dy, dx in itertools.product(steps, steps):
        moved = np.stack([digits.shift(image, dy, dx) for image in images])
        for patches in digits.to_patches(moved, data.patch_size):
            shifts.setdefault(patches.tobytes(), (dy, dx))
    seen = {shifts[patches.tobytes()] for patches in batch["patches"]}
    assert len(seen) == 25


def test_same_seed_same_batches(make_loader):
    for one, other in zip(take(make_loader(), 4), take(make_loader(), 4), strict=True):
        assert_same(one, other)


def test_stream_is_what_it_was(make_loader):
    """Saved positions keep their meaning.

    If this fails because examples are made differently on purpose, count up
    `loader.FORMAT`, so that older runs are refused instead of going on with other data,
    and write the new digits here.
    """
    assert FORMAT == 1
    weights = dict.fromkeys(EVEN, 0.0) | {
        "caption_weight": 0.75,
        "image_denoise_weight": 0.25,
    }
    data = dataclasses.replace(DATA, batch_size=8, **weights)
    batch = flat(next(make_loader(data)))
    rows = zip(batch["task"], batch["tokens"], batch["targets"], strict=True)
    said = [
        (int(task.max()), int(tokens[16]), TOKENIZER.decode(targets[targets > 0]))
        for task, tokens, targets in rows
    ]
    assert said == [
        (1, CHINESE, "数字四"),
        (1, CHINESE, "数字二"),
        (1, CHINESE, "数字二"),
        (2, ENGLISH, "digit zero"),
        (1, CHINESE, "数字八"),
        (1, CHINESE, "数字三"),
        (1, ENGLISH, "digit three"),
        (2, CHINESE, "数字七"),
    ]
    assert batch["patches"].astype(float).sum() == 136.875


def test_other_seed_other_batches(make_loader):
    one = next(make_loader())
    other = next(make_loader(dataclasses.replace(SMALL, seed=1)))
    assert (one["patches"] != other["patches"]).any()
    assert (one["tokens"] != other["tokens"]).any()


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_threads_change_nothing(make_loader, threads):
    data = dataclasses.replace(SMALL, num_threads=threads, prefetch_batches=2)
    for one, other in zip(
        take(make_loader(data), 6), take(make_loader(), 6), strict=True
    ):
        assert_same(one, other)


@pytest.mark.parametrize("microbatches", [2, 4])
def test_microbatches_split_the_same_sequences(make_loader, microbatches):
    """Microbatch m is sequences m * b .. (m + 1) * b - 1 of the step."""
    whole = take(make_loader(), 3)
    for one, split in zip(
        whole, take(make_loader(microbatches=microbatches), 3), strict=True
    ):
        assert_same(flat(one), flat(split))


def test_processes_make_the_rows_of_the_whole(make_loader):
    """Rows of two processes, side by side, are the batch of one."""
    whole = take(make_loader(microbatches=2), 3)
    first = take(make_loader(microbatches=2, rows=[0, 1, 4]), 3)
    second = take(make_loader(microbatches=2, rows=range(5, 1, -3)), 3)
    for step in range(3):
        for name, array in whole[step].items():
            np.testing.assert_array_equal(first[step][name], array[:, [0, 1, 4]])
            np.testing.assert_array_equal(second[step][name], array[:, [5, 2]])


@pytest.mark.parametrize("rows", [[6], [-1], [[0]]])
def test_rows_outside(rows):
    with pytest.raises(AssertionError):
        Loader(SMALL, model=MODEL, microbatches=2, rows=rows)


def test_epochs_have_every_record_in_another_order(make_loader):
    """1,500 images: each comes once per epoch, never in the same order again."""
    data = only("caption", batch_size=500, shift_pixels=0)
    seen = [flat(b)["patches"] for b in take(make_loader(data), 9)]
    keys = [p.tobytes() for p in np.concatenate(seen)]
    epochs = [keys[i * 1500 : (i + 1) * 1500] for i in range(3)]
    for epoch in epochs:
        assert len(set(epoch)) == 1500
    for one, other in itertools.combinations(epochs, 2):
        assert sum(map(str.__eq__, map(repr, one), map(repr, other))) < 15
    # Nor is an epoch of one seed that of another.
    other = make_loader(dataclasses.replace(data, seed=1))
    for batch in take(other, 3):
        rows = [p.tobytes() for p in flat(batch)["patches"]]
        assert all(rows != epoch[:500] for epoch in epochs)


def test_mixture(make_loader):
    """Shares are those of the weights, over the run and in each batch."""
    weights = task_weights(DATA)
    counts = np.zeros(4)
    data = dataclasses.replace(DATA, batch_size=200)
    for batch in take(make_loader(data), 5):
        task = flat(batch)["task"].max(-1) - 1
        in_batch = np.bincount(task, minlength=4)
        np.testing.assert_allclose(in_batch / 200, list(weights.values()), atol=0.01)
        counts += in_batch
    np.testing.assert_allclose(counts / 1000, [0.75, 0.05, 0.1, 0.1], atol=0.002)


def test_weights_need_not_sum_to_one():
    data = dataclasses.replace(
        DATA,
        caption_weight=3.0,
        image_denoise_weight=0.0,
        text_denoise_weight=0.0,
        lm_weight=1.0,
    )
    assert task_weights(data) == {"caption": 0.75, "lm": 0.25}
    text = dataclasses.replace(data, source="text")
    assert task_weights(text) == {"lm": 1.0}


@pytest.mark.parametrize("threads", [0, 2])
def test_resume_is_bitwise(make_loader, threads):
    """Stopped after 3 of 8 steps with 4 prefetched: the rest is as if never stopped."""
    data = dataclasses.replace(SMALL, num_threads=threads)
    unbroken = take(make_loader(data), 8)
    stopped = make_loader(data)
    take(stopped, 3)
    state = json.loads(json.dumps(stopped.state()))
    assert (state["step"], state["sample"]) == (3, 36)
    resumed = make_loader(data)
    next(resumed)
    resumed.restore(state)
    started = make_loader(data, start_step=3)
    assert resumed.state() == started.state() == stopped.state()
    for step in range(3, 8):
        for loader in (resumed, started, stopped):
            assert_same(next(loader), unbroken[step])
    assert resumed.state()["step"] == 8


def test_resume_with_other_microbatches_rows_and_threads(make_loader):
    unbroken = take(make_loader(), 6)
    state = make_loader(start_step=4).state()
    data = dataclasses.replace(SMALL, num_threads=1, prefetch_batches=1)
    resumed = make_loader(data, microbatches=3, rows=[1])
    resumed.restore(state)
    for step in (4, 5):
        rows = {name: a[[1, 5, 9]] for name, a in flat(unbroken[step]).items()}
        assert_same(flat(next(resumed)), rows)


def test_resume_refuses_other_data(make_loader):
    """Every field that differs is named with both values."""
    state = make_loader(start_step=2).state()
    data = dataclasses.replace(SMALL, seed=3, batch_size=24)
    other = make_loader(data, model=dataclasses.replace(MODEL, sequence_length=50))
    with pytest.raises(ConfigError) as error:
        other.restore(state)
    message = str(error.value)
    assert "Data.seed was 0 and is 3" in message
    assert "Data.batch_size was 12 and is 24" in message
    assert "Model.sequence_length was 48 and is 50" in message
    assert "before sequence 24" in message
    assert "lm_weight" not in message
    assert other.state()["step"] == 0
    text = make_loader(dataclasses.replace(SMALL, source="text"))
    with pytest.raises(ConfigError, match=r"content of digits was '.*' and is None"):
        text.restore(state)
    # The same weights on another scale decide nothing.
    scaled = dataclasses.replace(SMALL, **dict.fromkeys(EVEN, 2.0))
    make_loader(scaled).restore(state)


def test_held_out_is_never_trained_on(make_loader):
    """Over an epoch without augmentation, no held-out image and no held-out text."""
    data = only("caption", batch_size=750, shift_pixels=0)
    images, _ = digits.load_digits(data.held_out, training=False)
    held_out = digits.to_patches(images, data.patch_size)
    keys = {p.tobytes() for p in held_out}
    assert len(keys) == 297
    for batch in take(make_loader(data), 2):
        assert not keys & {p.tobytes() for p in flat(batch)["patches"]}
    texts = [
        Records(only("lm"), MODEL, names=("lm",), training=training)
        for training in (True, False)
    ]
    rng = np.random.default_rng(0)
    train, kept = (
        {r.example("lm", i, rng).targets.tobytes() for i in range(r.count("lm"))}
        for r in texts
    )
    assert not train & kept


@pytest.mark.parametrize("task", TASKS)
def test_held_out_batches(task):
    data = dataclasses.replace(DATA, seed=5)
    one = list(held_out_batches(data, MODEL, task, 16, 3))
    other = list(held_out_batches(DATA, MODEL, task, 16, 3))
    assert len(one) == 3
    for batch, again in zip(one, other, strict=True):
        assert batch["tokens"].shape == (1, 16, 48)
        check_positions(batch)
        assert set(np.unique(batch["task"])) == {0, 1 + TASKS.index(task)} - (
            {0} if task == "lm" else set()
        )
        assert_same(batch, again)
    assert (one[0]["tokens"] != one[1]["tokens"]).any()


def test_held_out_captions_are_true_and_in_both_languages():
    images, labels = digits.load_digits(DATA.held_out, training=False)
    (batch,) = held_out_batches(DATA, MODEL, "caption", 297, 1)
    batch = flat(batch)
    expected = digits.to_patches(images, DATA.patch_size)
    np.testing.assert_array_equal(batch["patches"], expected)
    for i, label in enumerate(labels):
        said = TOKENIZER.decode(batch["targets"][i, 16:])
        assert said == digits.caption(label, ("en", "zh")[i % 2])


def test_text_alone(make_loader):
    """Without images the patches may be none at all, and no image is loaded."""
    model = dataclasses.replace(MODEL, num_patches=0, patch_dim=7, sequence_length=20)
    data = dataclasses.replace(DATA, source="text", batch_size=8)
    batch = next(make_loader(data, model=model))
    assert batch["patches"].shape == (1, 8, 0, 7)
    assert set(np.unique(batch["task"])) <= {0, 3, 4}
    check_positions(batch)
    with pytest.raises(ConfigError, match="has no images, which the task 'caption'"):
        held_out_batches(data, model, "caption", 4, 1)


def test_sequences_longer_than_the_text(make_loader):
    model = dataclasses.replace(MODEL, sequence_length=1_000_000)
    batch = flat(next(make_loader(only("lm", batch_size=1), model=model)))
    length = int(tasks.last_position(batch)[0]) + 1
    assert 100_000 < length < 1_000_000
    assert batch["targets"][0, length - 1] == EOS
    assert not batch["targets"][0, length:].any()


def test_longest_text_between_ends(make_loader):
    """A chunk to restore never crosses the end of a block."""
    data = only("text_denoise", batch_size=1000)
    targets = flat(next(make_loader(data)))["targets"]
    assert ((targets == EOS).sum(-1) == 1).all()
    lengths = (targets > 0).sum(-1)
    assert lengths.max() == 24
    assert 12 <= lengths.min() < 24  # at least half a chunk remains


ERRORS = {
    "batch": (
        {"batch_size": 10},
        {},
        r"Data.batch_size=10 .*Train.accumulation=4 .*Set Data.batch_size to 12",
    ),
    "seed": ({"seed": 2**32}, {}, "Data.seed=4294967296 is too large"),
    "fraction": ({"mask_fraction": 1.5}, {}, "Data.mask_fraction=1.5 .*from 0 to 1"),
    "weights": (
        dict.fromkeys(EVEN, 0.0),
        {},
        "Data.caption_weight=0.0, .* choose no task",
    ),
    "text weights": (
        {"source": "text", "lm_weight": 0.0, "text_denoise_weight": 0.0},
        {},
        "Data.text_denoise_weight=0.0, Data.lm_weight=0.0 choose no task",
    ),
    "patch size": ({"patch_size": 3}, {}, "Data.patch_size=3 does not divide"),
    "patches": (
        {"patch_size": 4},
        {},
        "Set Model.num_patches=4 and Model.patch_dim=16",
    ),
    "patch dim": (
        {},
        {"patch_dim": 5},
        "Model.patch_dim=5 .*Set Model.num_patches=16 and Model.patch_dim=4",
    ),
    "length": (
        {},
        {"sequence_length": 39},
        "Model.sequence_length=39 .*'image_denoise'.*Set Model.sequence_length to at"
        " least 40, or Data.image_denoise_weight to 0",
    ),
    "caption length": (
        {"image_denoise_weight": 0.0},
        {"sequence_length": 27},
        "'caption'.*Model.sequence_length to at least 28",
    ),
    "vocabulary": (
        {},
        {"vocab_size": 263},
        "Model.vocab_size=263 .*264 tokens .*Data.tokenizer='bytes'",
    ),
    "held out": ({"held_out": 1797}, {}, "Data.held_out=1797"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    data, model, message = ERRORS[case]
    data = dataclasses.replace(DATA, **data)
    model = dataclasses.replace(MODEL, **model)
    with pytest.raises(ConfigError, match=message):
        Loader(data, model=model, microbatches=4)


def test_vocabulary():
    assert vocab_size(DATA, MODEL) == 264
    assert vocab_size(DATA, dataclasses.replace(MODEL, vocab_size=300)) == 300


def test_every_task_has_records():
    for training in (True, False):
        records = Records(DATA, MODEL, names=TASKS, training=training)
        for task in TASKS:
            count = records.count(task)
            assert count >= 100
            rng = np.random.default_rng(0)
            for index in (0, count - 1):
                example = records.example(task, index, rng)
                assert (example.patches is not None) == (task in IMAGE_TASKS)
