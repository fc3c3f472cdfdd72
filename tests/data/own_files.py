# SPDX-License-Identifier: Apache-2.0
"""Small data sets of one's own, the same records in every kind of file."""

import io
import itertools
import json
import tarfile
from pathlib import Path

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter
from PIL import Image

from jaxmoe.config import Data, Model
from jaxmoe.data.columns import example_message
from jaxmoe.data.tasks import TASKS
from jaxmoe.data.tokenizer import make_tokenizer

KINDS = ("folder", "jsonl", "tar", "array_record", "parquet")
COLORS = {"red": (220, 30, 30), "green": (30, 180, 40), "blue": (30, 60, 210)}
CHINESE = {"red": "红", "green": "绿", "blue": "蓝"}

# Images of 8 x 8 pixels in 4 patches, captions of up to 15 bytes.
MODEL = Model(sequence_length=40, num_patches=4, patch_dim=48)
DATA = Data(
    source="",
    batch_size=4,
    image_size=8,
    image_mode="rgb",
    patch_size=4,
    shift_pixels=1,
    held_out_share=0.2,
    num_threads=0,
)
TOKENIZER = make_tokenizer("bytes")
CAPTIONS = dict.fromkeys((f"{t}_weight" for t in TASKS), 0.0) | {"caption_weight": 1.0}
RUNNING = dict.fromkeys((f"{t}_weight" for t in TASKS), 0.0) | {"lm_weight": 1.0}


def picture(number: int, size=(12, 10)) -> Image.Image:
    """A picture of one color and some noise; no two are the same."""
    color = np.array(list(COLORS.values())[number % 3])
    noise = np.random.default_rng(number).integers(-25, 25, (*size[::-1], 3))
    return Image.fromarray(np.clip(color + noise, 0, 255).astype(np.uint8))


def encoded(image: Image.Image, form: str = "PNG") -> bytes:
    content = io.BytesIO()
    image.save(content, form)
    return content.getvalue()


def records(count: int) -> list[dict]:
    """Records with their image as bytes, and a text in one language or in two."""
    found = []
    for number in range(count):
        color = list(COLORS)[number % 3]
        record = {"image": encoded(picture(number)), "en": f"{color} no {number}"}
        if number % 4 == 0:
            record["zh"] = f"{CHINESE[color]}{number}"
        found.append(record)
    return found


def write(folder: Path, kind: str, rows: list[dict]) -> str:
    """Writes records and returns their source."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "folder":
        for name, content in _members(rows):
            (folder / name).write_bytes(content)
        return str(folder)
    file = folder / f"data.{kind}"
    if kind == "jsonl":
        write_lines(file, rows)
    elif kind == "tar":
        with tarfile.open(file, "w") as archive:
            for name, content in _members(rows):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    elif kind == "array_record":
        write_array_record(file, rows)
    elif kind == "parquet":
        import pyarrow
        from pyarrow import parquet

        names = list(dict.fromkeys(name for row in rows for name in row))
        columns = {name: [row.get(name) for row in rows] for name in names}
        parquet.write_table(pyarrow.Table.from_pydict(columns), file)
    return str(file)


def write_lines(file: Path, rows: list[dict]) -> None:
    lines = []
    for number, row in enumerate(rows):
        image = row.get("image")
        if isinstance(image, bytes):
            (file.parent / f"{number:03}.png").write_bytes(image)
            row = {**row, "image": f"{number:03}.png"}
        lines.append(json.dumps(row))
    file.write_text("\n".join(lines) + "\n", "utf-8")


def write_array_record(file: Path, rows: list[dict]) -> None:
    writer = ArrayRecordWriter(str(file), "group_size:1")
    for row in rows:
        message = example_message()()
        for name, value in row.items():
            for one in value if isinstance(value, list) else [value]:
                content = one if isinstance(one, bytes) else one.encode()
                message.features.feature[name].bytes_list.value.append(content)
        writer.write(message.SerializeToString())
    writer.close()


def _members(rows: list[dict]):
    """Name and content of the files of each record, as in a WebDataset."""
    for number, row in enumerate(rows):
        rest = dict(row)
        if "image" in rest:
            yield f"{number:03}.png", rest.pop("image")
        if list(rest) == ["en"]:  # one text, in a file of its own
            yield f"{number:03}.en.txt", rest["en"].encode()
        else:
            yield f"{number:03}.json", json.dumps(rest).encode()


def take(loader, steps):
    return list(itertools.islice(loader, steps))


def rows_of(batches):
    """The rows of all batches, one by one, without those that are empty."""
    for batch in batches:
        flat = {name: a.reshape(-1, *a.shape[2:]) for name, a in batch.items()}
        for row in range(len(flat["tokens"])):
            if flat["modality"][row].any():
                yield {name: a[row] for name, a in flat.items()}


def said(row):
    return TOKENIZER.decode(row["targets"][row["targets"] > 0])


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)
