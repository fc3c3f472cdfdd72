# SPDX-License-Identifier: Apache-2.0
"""Which records of a source are held out, and what is made of them."""

import dataclasses

import numpy as np
import pytest

from jaxmoe.config import ConfigError
from jaxmoe.data.loader import HeldOut, Loader, held_out_batches
from jaxmoe.data.tasks import TASKS
from tests.data import own_files
from tests.data.own_files import (
    CAPTIONS,
    DATA,
    MODEL,
    TOKENIZER,
    assert_same,
    rows_of,
    said,
)


def test_held_out_depends_on_the_records_alone(tmp_path, make_loader):
    """The same records are kept whatever their order, names and kind of file; those
    with the same image are on the same side."""
    rows = own_files.records(20)
    rows += [{**row, "en": f"again {n}"} for n, row in enumerate(rows[:20])]

    def kept(name, kind, rows):
        source = own_files.write(tmp_path / name, kind, rows)
        data = dataclasses.replace(DATA, source=source, **CAPTIONS)
        return {c.truth for c in HeldOut(data, MODEL).captions(100)}, data

    one, data = kept("one", "jsonl", rows)
    other, _ = kept("other", "parquet", rows[::-1])
    assert one == other
    numbers = [int(truth.split()[-1]) for truth in one if " " in truth]
    assert sorted(numbers) == sorted(2 * list(set(numbers)))
    assert len(set(numbers)) == 4  # 8 of 40 records
    loader = make_loader(data.source, epochs=1, **CAPTIONS)
    trained = {said(row) for row in rows_of(loader)}
    assert not trained & one
    assert len(trained) + len(one) == 45  # 40 English texts and 5 Chinese ones


def test_a_source_to_hold_out(tmp_path, make_loader):
    """What it holds is evaluated, and never trained on even if it is in the source."""
    rows = own_files.records(12)
    source = own_files.write(tmp_path / "all", "jsonl", rows)
    kept = own_files.write(tmp_path / "kept", "tar", rows[3:6])
    options = {"held_out_source": kept, **CAPTIONS}
    data = dataclasses.replace(DATA, source=source, **options)
    truths = {caption.truth for caption in HeldOut(data, MODEL).captions(100)}
    assert truths == {r[x] for r in rows[3:6] for x in ("en", "zh") if x in r}
    loader = make_loader(source, epochs=1, **options)
    state = loader.state()
    trained = {said(row) for row in rows_of(loader)}
    assert trained == {
        r[x] for r in rows[:3] + rows[6:] for x in ("en", "zh") if x in r
    }
    # What is held out decides what is trained on; its order does not.
    again = own_files.write(tmp_path / "again", "jsonl", rows[3:6][::-1])
    make_loader(source, **{**options, "held_out_source": again}).restore(state)
    fewer = own_files.write(tmp_path / "fewer", "jsonl", rows[3:5])
    with pytest.raises(ConfigError, match="content of held-out source was"):
        make_loader(source, **{**options, "held_out_source": fewer}).restore(state)


def test_nothing_held_out(make_loader, written):
    data = dataclasses.replace(DATA, source=written["tar"], held_out_share=0.0)
    held_out = HeldOut(data, MODEL)
    assert (held_out.tasks, held_out.captions(9)) == ((), [])
    assert list(held_out_batches(data, MODEL, "caption", 4, 2)) == []


def test_held_out_batches_are_the_same_at_every_call(written):
    data = dataclasses.replace(DATA, source=written["tar"])
    held_out = HeldOut(dataclasses.replace(data, seed=9), MODEL)
    assert held_out.tasks == ("caption", "image_denoise")
    for task in held_out.tasks:
        one = list(held_out.batches(task, 4, 2))
        for batch, again in zip(
            one, held_out_batches(data, MODEL, task, 4, 2), strict=True
        ):
            assert_same(batch, again)
            assert set(np.unique(batch["task"])) == {0, 1 + TASKS.index(task)}


def test_captions_that_are_too_long_are_cut_without_an_end(tmp_path, capsys):
    rows = own_files.records(4)
    rows[1]["en"] = "a" * 100
    source = own_files.write(tmp_path, "jsonl", rows)
    data = dataclasses.replace(
        DATA, source=source, held_out_share=0.0, epochs=1, **CAPTIONS
    )
    loader = Loader(data, model=MODEL, microbatches=1)
    assert "1 of 5 captions are longer than the sequence" in capsys.readouterr().out
    rows = [row["targets"] for row in rows_of(loader)]
    (long,) = [row for row in rows if (row[4:] == TOKENIZER.encode("a")[0]).all()]
    assert len(long[4:]) == 36
    denoised = dataclasses.replace(data, caption_weight=0.0, image_denoise_weight=1.0)
    for row in rows_of(Loader(denoised, model=MODEL, microbatches=1)):
        assert row["modality"].all() or said(row) != "a" * 17
