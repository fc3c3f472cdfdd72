# SPDX-License-Identifier: Apache-2.0
"""Sources of one's own: every kind of file, what is broken, what is held out."""

import dataclasses
import json
import os

import numpy as np
import pytest

from jaxmoe.config import ConfigError
from jaxmoe.data import digits, sources
from jaxmoe.data.fields import DataError
from jaxmoe.data.images import decode
from jaxmoe.data.loader import HeldOut, Loader
from jaxmoe.data.tasks import TASKS
from jaxmoe.data.tokenizer import CHINESE, ENGLISH
from tests.data import own_files
from tests.data.own_files import (
    CAPTIONS,
    DATA,
    KINDS,
    MODEL,
    RUNNING,
    TOKENIZER,
    assert_same,
    rows_of,
    said,
    take,
)

# Kinds of files --------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_the_same_batches(make_loader, written, kind):
    """The same records in the same order are the same stream, whatever holds them."""
    want = take(make_loader(written["jsonl"]), 8)
    for one, other in zip(take(make_loader(written[kind]), 8), want, strict=True):
        assert_same(one, other)


def test_examples_are_what_the_records_say(make_loader, written):
    """Each caption stands behind its own image, in its own language."""
    rows = own_files.records(12)
    truth = {}
    for row in rows:
        image = decode(row["image"], 8, "rgb")
        patches = digits.to_patches(image[None], 4)[0]
        for language, token in (("en", ENGLISH), ("zh", CHINESE)):
            if language in row:
                truth[patches.tobytes(), token] = row[language]
    loader = make_loader(written["tar"], shift_pixels=0, epochs=1, **CAPTIONS)
    seen = {}
    for row in rows_of(loader):
        assert (row["modality"][:4] == 1).all()
        seen[row["patches"].tobytes(), int(row["tokens"][4])] = said(row)
    assert seen.items() <= truth.items()
    held_out = HeldOut(dataclasses.replace(DATA, source=written["tar"]), MODEL)
    left = {caption.truth for caption in held_out.captions(100)}
    assert {*seen.values(), *left} == set(truth.values())
    assert not set(seen.values()) & left


def test_shards_and_folders_within_folders(tmp_path, make_loader, capsys):
    """A path with wild cards names all shards, in the order of their names."""
    rows = own_files.records(9)
    for shard in range(3):
        part = rows[shard * 3 : shard * 3 + 3]
        own_files.write(tmp_path / "jsonl" / str(shard), "jsonl", part)
        own_files.write(tmp_path / "folder" / str(shard), "folder", part)
    for number, name in ((0, "000.png"), (1, "001.en.txt")):  # names with dots
        old = tmp_path / "folder" / str(number) / name
        for file in old.parent.glob(name[:3] + ".*"):
            file.rename(file.with_name(file.name.replace(name[:3], f"{name[:3]}.1.v2")))
    (tmp_path / "folder" / ".hidden").write_text("not a record")
    (tmp_path / "folder" / "readme.md").write_text("nor is this")
    (tmp_path / "folder" / "unnamed").write_text("nor this")
    shards = make_loader(str(tmp_path / "jsonl" / "*" / "data.jsonl"))
    capsys.readouterr()
    nested = make_loader(str(tmp_path / "folder"))
    told = capsys.readouterr().out
    assert "neither of an image nor of a text are not read: .md (1), none (1)\n" in told
    for one, other in zip(take(shards, 5), take(nested, 5), strict=True):
        assert_same(one, other)


def test_several_texts_and_tasks(tmp_path, make_loader):
    """A list has several captions; `tasks` narrows what a record is for, or widens."""
    image = own_files.encoded(own_files.picture(0))
    rows = [
        {"image": image, "en": ["one", "two"], "zh": "三"},
        {"image": image, "text": "四", "language": "zh", "tasks": ["lm", "caption"]},
        {"en": "running text", "zh": None},
        {"text": "only denoised", "tasks": ["text_denoise"]},
    ]
    source = own_files.write(tmp_path, "jsonl", rows)
    data = dataclasses.replace(DATA, source=source)
    read = sources._index(sources.parse_sources(source)[0], data, MODEL)
    counts = {task: len(items.record) for task, items in read.items.items()}
    assert counts == {"caption": 4, "image_denoise": 3, "lm": 2, "text_denoise": 2}
    loader = make_loader(source, held_out_share=0.0, epochs=1, **CAPTIONS)
    words = {(said(row), int(row["tokens"][4])) for row in rows_of(loader)}
    assert words == {
        *(("one", ENGLISH), ("two", ENGLISH)),
        *(("三", CHINESE), ("四", CHINESE)),
    }


def test_parquet_as_hugging_face_writes_it(tmp_path, make_loader):
    """A struct of bytes and path, or the path of a file beside the table."""
    rows = own_files.records(6)
    own_files.write(tmp_path, "jsonl", rows)
    want = take(make_loader(str(tmp_path / "data.jsonl")), 3)
    for name, image in (
        ("struct", lambda row, number: {"bytes": row["image"], "path": "x.png"}),
        ("path", lambda row, number: f"{number:03}.png"),
    ):
        changed = [{**row, "image": image(row, i)} for i, row in enumerate(rows)]
        folder = tmp_path / name
        source = own_files.write(folder, "parquet", changed)
        if name == "path":
            for number, row in enumerate(rows):
                (folder / f"{number:03}.png").write_bytes(row["image"])
        for one, other in zip(take(make_loader(source), 3), want, strict=True):
            assert_same(one, other)


def test_an_epoch_of_plain_text_has_all_of_it(tmp_path, make_loader):
    """Blocks of whole lines, pieces of whole characters: nothing is lost, and only the
    end of a block is followed by the end token."""
    lines = [f"Zeile {n}: über Öl und 汉字 und so weiter, {n * n}." for n in range(200)]
    file = tmp_path / "words.txt"
    file.write_text("\n".join(lines), "utf-8")
    loader = make_loader(str(file), held_out_share=0.0, epochs=1, **RUNNING)
    pieces = [
        TOKENIZER.decode(row["targets"][row["targets"] > 0]) for row in rows_of(loader)
    ]
    text = "\n".join(lines)
    assert sum(map(len, pieces)) >= len(text) - 10  # blanks between blocks
    assert all(piece in text for piece in pieces)
    words = set(" ".join(pieces).split())
    assert len(set(text.split()) - words) < len(pieces) / 10  # cut between two pieces
    blocks = -(-file.stat().st_size // 2100)
    ends = sum(
        int((row["targets"] == 2).sum())
        for row in rows_of(
            make_loader(str(file), held_out_share=0.0, epochs=1, **RUNNING)
        )
    )
    assert blocks - 1 <= ends <= blocks + 1


def test_long_texts_in_a_folder_are_as_in_a_file_of_text(tmp_path, make_loader):
    """A book among the files is not read as a whole for each of its pieces."""
    words = "".join(f"line {n} of a long text, {n * n}\n" for n in range(400))
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "book.txt").write_text(words)
    (tmp_path / "book.txt").write_text("\ufeff" + words)
    options = {"held_out_share": 0.0, **RUNNING}
    folder = make_loader(str(tmp_path / "books"), **options)
    file = make_loader(str(tmp_path / "book.txt"), **options)
    reader = folder._sources.parts[0].records._index.reader
    assert len(reader) == -(-len(words) // 2020)
    assert "book, byte 20" in reader.name(1)
    for one, other in zip(take(folder, 5), take(file, 5), strict=True):
        assert_same(one, other)


# Broken records --------------------------------------------------------------------

BROKEN = {
    '{"image": "000.png"}': "it has no text",
    '{"image": "nowhere.png", "en": "x"}': "nowhere.png cannot be read (No such file",
    '{"image": 3, "en": "x"}': "'image' is '3', not a path",
    '{"image": "000.png", "en": 7}': "'en' is 7, not text",
    '{"image": "000.png", "en": "  "}': "'en' is empty",
    '{"en": "x", "tasks": ["caption"]}': "task 'caption' needs an image",
    '{"en": "x", "tasks": "lm"}': "'tasks' is 'lm', not a list of tasks",
    '{"en": "x", "tasks": ["sing"]}': "task 'sing' is not one of",
    '{"text": "x", "language": "xx"}': "language 'xx' is not one of",
    '["en"]': "it is a list, not an object",
    '{"en": "x"': "it is not JSON (",
    "\udc80": "it is not JSON (",
    r'{"en": "\ud800"}': "'en' has half a character",
}


def test_broken_records_are_skipped_counted_and_named(tmp_path, capsys):
    """Each with its line and the reason; the others are all there."""
    own_files.write(tmp_path, "jsonl", own_files.records(12))
    file = tmp_path / "data.jsonl"
    good = file.read_bytes()
    bad = "\n".join(BROKEN).encode("utf-8", "surrogateescape")
    file.write_bytes(good + bad + b"\n\n" + good)
    data = dataclasses.replace(DATA, source=str(file), max_broken=0.4)
    loader = Loader(data, model=MODEL, microbatches=1)
    assert loader.figures() == {"broken_records": float(len(BROKEN))}
    found = loader._sources.broken
    for number, (line, reason) in enumerate(zip(found, BROKEN.values(), strict=True)):
        assert f"data.jsonl, line {13 + number}: " in line
        assert reason in line
    told = capsys.readouterr().out
    assert f"{len(BROKEN)} of 37 records are broken and left out:\n" in told
    assert told.count("data.jsonl, line") == 3 and told.endswith("...\n")
    with pytest.raises(ConfigError, match=r"13 of the 37 records .*max_broken=0.3 of"):
        sources.open_sources(dataclasses.replace(data, max_broken=0.3), MODEL)


def test_only_broken_records(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}\n")
    data = dataclasses.replace(DATA, source=str(tmp_path / "a.jsonl"), max_broken=1.0)
    with pytest.raises(ConfigError, match=r"1 of the 1 records .* it has no text"):
        sources.open_sources(data, MODEL)


def test_an_image_that_cannot_be_decoded_leaves_its_place_empty(tmp_path, make_loader):
    """Nothing else moves: the other rows are those of the data without the fault. It is
    named once and counted once however often it comes."""
    rows = own_files.records(12)
    for number, row in enumerate(rows):  # larger than the ends that are looked at
        row["image"] = own_files.encoded(own_files.picture(number, (80, 80)))
    whole = make_loader(own_files.write(tmp_path / "whole", "jsonl", rows), **CAPTIONS)
    number = int(whole._sources.parts[0].records._items["caption"].record[0])
    image = rows[number]["image"]
    rows[number]["image"] = image[:5000] + bytes(1000) + image[6000:]
    told = []
    source = own_files.write(tmp_path / "torn", "jsonl", rows)
    loader = make_loader(source, max_broken=0.5, told=told, **CAPTIONS)
    empty = 0
    for one, other in zip(take(loader, 9), take(whole, 9), strict=True):
        for row in range(4):
            gone = not one["modality"][0, row].any()
            empty += gone
            if not gone:
                for name in one:
                    np.testing.assert_array_equal(
                        one[name][0, row], other[name][0, row]
                    )
    assert empty >= 2
    assert (
        len(told) == 1 and "000.png" not in told[0] and "cannot be decoded" in told[0]
    )
    assert f"line {number + 1}: " in told[0]
    assert loader.figures() == {"broken_records": 1.0}


def test_too_many_undecodable_images_stop_the_run(tmp_path, make_loader):
    """Of 12 images 2 are torn: with 1 % allowed the run ends once 100 were tried."""
    rows = own_files.records(12)
    for number in range(0, 12, 5):
        rows[number]["image"] = rows[number]["image"][:50]
    loader = make_loader(own_files.write(tmp_path, "tar", rows), max_broken=0.01)
    with pytest.raises(DataError, match=r"of the 100 records read so far are broken"):
        take(loader, 100)
    assert loader.state()["step"] == 25
    # A share that is not reached stops nothing.
    take(make_loader(str(tmp_path / "data.tar"), max_broken=0.5), 40)


FILES = {
    "jsonl": (b"", "holds no records"),
    "txt": (b" \n\n", "holds no records"),
    "tar": (b"no tar file", "is no tar file"),
    "array_record": (b"no array record", "is an ArrayRecord file"),
    "parquet": (b"no table", "is a Parquet table"),
}


@pytest.mark.parametrize("kind", FILES)
def test_files_that_are_not_what_they_are_called(tmp_path, kind):
    content, message = FILES[kind]
    (tmp_path / f"x.{kind}").write_bytes(content)
    data = dataclasses.replace(DATA, source=str(tmp_path / f"x.{kind}"))
    with pytest.raises(ConfigError, match=message):
        sources.open_sources(data, MODEL)


def test_a_folder_with_a_file_that_lists_it(tmp_path):
    """Images without texts beside them, but named in a file there: that is told."""
    own_files.write(tmp_path, "jsonl", own_files.records(3))
    data = dataclasses.replace(DATA, source=str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"it has no text.* Or name .*/data\.jsonl, w"
    ):
        sources.open_sources(data, MODEL)
    for file in tmp_path.glob("*.png"):
        file.unlink()
    sources._cached_index.cache_clear()
    with pytest.raises(ConfigError, match=r"holds no records.* Name .*/data\.jsonl\."):
        sources.open_sources(data, MODEL)


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text("{}\n")
    data = dataclasses.replace(DATA, source=str(tmp_path / "a.jsonl"))

    def refuse(*_):
        raise PermissionError(13, "Permission denied", "a.jsonl")

    monkeypatch.setattr("jaxmoe.data.readers._lines", refuse)
    with pytest.raises(ConfigError, match=r"a\.jsonl cannot be read \(Permission"):
        sources.open_sources(data, MODEL)


def test_records_of_other_tasks_than_wanted(written):
    data = dataclasses.replace(DATA, source=written["jsonl"], **RUNNING)
    with pytest.raises(ConfigError, match="has no records to train on for the tasks"):
        sources.open_sources(data, MODEL)


# Mixtures and epochs ---------------------------------------------------------------


def test_mixture_by_weight(tmp_path, make_loader, written):
    """Three sources in shares of 0.5, 0.3 and 0.2, over the run and in each batch; the
    tasks share what is left to their source."""
    text = tmp_path / "some.txt"
    text.write_text("some words of running text\n" * 100)
    source = f"{written['tar']}*5, digits*3, {text}*2"
    model = dataclasses.replace(MODEL, patch_dim=16)
    options = {"image_mode": "gray", "batch_size": 100}
    loader = make_loader(source, model=model, **options)
    counts = np.zeros(3)
    shares = [0.5, 0.3 * 0.94, 0.2 + 0.3 * 0.06]  # digits have text of their own
    for batch in take(loader, 6):
        kinds = np.zeros(3)
        for row in rows_of([batch]):
            words = said(row)
            image = (row["modality"] == 1).any()
            kinds[2 if not image else int("digit" in words or "数字" in words)] += 1
        np.testing.assert_allclose(kinds / 100, shares, atol=0.025)
        counts += kinds
    np.testing.assert_allclose(counts / 600, shares, atol=0.005)
    weights = {task: loader._sources.weight(task) for task in TASKS}
    assert sum(weights.values()) == pytest.approx(1.0)
    # Digits have all four tasks, the images two, the text two with equal weights.
    assert weights["lm"] == pytest.approx(0.1 + 0.3 * 0.03)
    assert loader.state()["fingerprint"]["shares"] == [0.5, 0.3, 0.2]


def test_a_mixture_begins_with_the_stream_of_its_first_source(make_loader, written):
    """The records of a source come in an order that does not depend on the others."""
    alone = make_loader(written["jsonl"], **CAPTIONS)
    mixed = make_loader(f"{written['jsonl']}*3,{written['tar']}", **CAPTIONS)
    # Different sources of the same records: their own seed, their own order.
    one = [said(row) for row in rows_of(take(alone, 6))]
    other = [said(row) for row in rows_of(take(mixed, 8))]
    at = [other.index(words) for words in one[:5]]
    assert at == sorted(at)


@pytest.mark.parametrize("epochs", [1, 3])
def test_epochs(make_loader, written, epochs):
    """Every text of every record that is not held out, so often; then the end, and the
    last batch is filled with empty rows."""
    loader = make_loader(written["parquet"], epochs=epochs, **CAPTIONS)
    assert loader.ends
    batches = list(loader)
    words = [said(row) for row in rows_of(batches)]
    count = loader._sources.parts[0].records.count("caption")
    assert len(words) == epochs * count
    assert sorted(words) == sorted(epochs * list(set(words)))
    assert len(batches) == -(-len(words) // 4)
    with pytest.raises(StopIteration):
        next(loader)
    assert not make_loader(written["parquet"]).ends


@pytest.mark.parametrize("packing", [False, True])
def test_every_process_ends_at_the_same_step(make_loader, written, packing):
    options = {"epochs": 2, "packing": packing}
    parts = [[0, 1], [2], [3]]
    made = [list(make_loader(written["tar"], rows=p, **options)) for p in parts]
    assert len({len(batches) for batches in made}) == 1
    whole = list(make_loader(written["tar"], **options))
    assert len(whole) == len(made[0])
    for step, batch in enumerate(whole):
        for name, array in batch.items():
            together = np.concatenate([part[step][name] for part in made], axis=1)
            np.testing.assert_array_equal(together, array)


# Going on --------------------------------------------------------------------------


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("kind", ["jsonl", "array_record"])
def test_resume_is_bitwise(make_loader, written, kind, packing):
    """Stopped after 7 of 20 steps: the rest is as if never stopped, with other numbers
    of threads and of processes, too."""
    model = dataclasses.replace(MODEL, num_patches=8) if packing else MODEL
    options = {"packing": packing, "model": model}
    unbroken = take(make_loader(written[kind], **options), 20)
    stopped = make_loader(written[kind], num_threads=2, prefetch_batches=3, **options)
    take(stopped, 7)
    state = json.loads(json.dumps(stopped.state()))
    resumed = make_loader(written[kind], num_threads=1, **options)
    resumed.restore(state)
    halves = [
        make_loader(written[kind], rows=rows, **options) for rows in ([0, 3], [1, 2])
    ]
    for half in halves:
        half.restore(state)
    for step in range(7, 20):
        assert_same(next(resumed), unbroken[step])
        first, second = (next(half) for half in halves)
        for name, array in unbroken[step].items():
            np.testing.assert_array_equal(first[name], array[:, [0, 3]])
            np.testing.assert_array_equal(second[name], array[:, [1, 2]])
    assert resumed.state()["step"] == 20
    other = make_loader(written[kind], batch_size=8, **options)
    with pytest.raises(ConfigError, match=r"Data\.batch_size was 4 and is 8"):
        other.restore(state)


def test_content_is_what_counts(tmp_path, make_loader):
    """Moved files are the same data; another word or another pixel is not, whatever
    size and time say."""
    rows = own_files.records(6)
    source = own_files.write(tmp_path / "a", "jsonl", rows)
    state = make_loader(source).state()
    make_loader(own_files.write(tmp_path / "b" / "c", "jsonl", rows)).restore(state)
    content = (tmp_path / "a" / "data.jsonl").read_text()
    stat = os.stat(source)
    for file, change in (
        (tmp_path / "a" / "data.jsonl", lambda b: b.replace(b"red no 0", b"red no 9")),
        (tmp_path / "a" / "000.png", lambda b: b[:-20] + b"x" * 8 + b[-12:]),
    ):
        before = file.read_bytes()
        file.write_bytes(change(before))
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        sources._cached_index.cache_clear()
        with pytest.raises(ConfigError, match=r"content of source 1 \(jsonl\) was"):
            make_loader(source).restore(state)
        file.write_bytes(before)
    assert (tmp_path / "a" / "data.jsonl").read_text() == content
