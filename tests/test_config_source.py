# SPDX-License-Identifier: Apache-2.0
"""What Data.source names: kinds by their endings, weights, and mistakes in words."""

import pytest

from jaxmoe import gin_config
from jaxmoe.config import ConfigError
from jaxmoe.config_checks import check
from jaxmoe.config_source import Source, parse_sources, source_files

OWN = ["Model.sequence_length=96", "Model.num_patches=16", "Model.patch_dim=192"]
OWN += ["Data.image_size=32", "Data.image_mode='rgb'", "Data.patch_size=8"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder in which there is something of every kind, empty."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    names = ("a.jsonl", "b-0.tar", "b-1.tar", "c.array_record", "d.parquet", "e.txt")
    for name in (*names, "x.zip", "f.arrayrecord", "G.JSONL"):
        (tmp_path / name).touch()
    return tmp_path


def test_kinds(folder):
    kinds = {
        "digits": "digits",
        "text": "text",
        "photos": "folder",
        "photos/": "folder",
        "a.jsonl": "jsonl",
        "G.JSONL": "jsonl",
        "b-*.tar": "tar",
        "c.array_record": "array_record",
        "f.arrayrecord": "array_record",
        "d.parquet": "parquet",
        "e.txt": "txt",
        str(folder / "e.txt"): "txt",
    }
    for path, kind in kinds.items():
        assert parse_sources(path) == (Source(path, kind, 1.0),)
    shards = parse_sources("b-*.tar")[0]
    assert source_files(shards) == ["b-0.tar", "b-1.tar"]


def test_weights(folder):
    """They are divided by their sum; without one it is 1. A wild card is no weight."""
    text = "a.jsonl*6, b-*.tar * .5 ,photos*1.5, digits*2"
    found = {source.path: source.share for source in parse_sources(text)}
    assert found == {"a.jsonl": 0.6, "b-*.tar": 0.05, "photos": 0.15, "digits": 0.2}
    assert [s.share for s in parse_sources("a.jsonl,e.txt*3")] == [0.25, 0.75]


MISTAKES = {
    "digit": "there is no 'digit': a source is 'digits', 'text', a folder, or a file,"
    " with '*WEIGHT' behind it or not, and commas between several. Set"
    " Data.source='digits'.",
    "": "there is no ''",
    "a.jsonl,": "there is no ''",
    "nowhere/*.tar": "there is no 'nowhere/*.tar': a source is",
    "a.jsonl*0": "has a weight of 0: a source that is named takes part",
    "x.zip": "x.zip is of no known kind, or not of the kind of the others: the ending"
    " tells the kind: .jsonl, .tar, .array_record, .arrayrecord, .parquet or .txt; or"
    " it is a folder. Rename the file, or name files of one kind.",
    "[ae].*": "e.txt is of no known kind, or not of the kind of the others",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_mistakes(folder, text):
    with pytest.raises(ConfigError) as error:
        parse_sources(text)
    assert f"Data.source={text!r}" in str(error.value)
    assert MISTAKES[text] in str(error.value)


def told(*bindings):
    with pytest.raises(ConfigError) as error:
        check(gin_config.load((), bindings).config)
    return str(error.value)


def test_what_fits_together(folder):
    """Sources, images, held-out source and model."""
    check(gin_config.load((), [*OWN, "Data.source='photos,e.txt'"]).config)
    check(gin_config.load((), ["Data.source='e.txt'"]).config)
    packing = [*OWN[:1], "Model.num_patches=48", *OWN[2:], "Data.source='photos'"]
    check(gin_config.load((), [*packing, "Data.packing=True"]).config)
    message = told(*packing)
    assert "Set Model.num_patches=16 and Model.patch_dim=192, or" in message
    message = told("Data.packing=True", "Model.num_patches=6")
    assert "Set Model.num_patches=4 or a multiple of it and Model.patch_dim" in message
    message = told(*OWN)
    assert "Data.image_size=32 and Data.image_mode='rgb' do not fit" in message
    assert "Set Data.image_size=8 and Data.image_mode='gray', or Data.source" in message
    message = told(*OWN, "Data.source='photos'", "Data.shift_pixels=32")
    assert "Set Data.shift_pixels=31 or less" in message
    held_out = ["Data.source='photos'", "Data.held_out_source='text'"]
    assert "Data.held_out_source='text' is built in" in told(*OWN, *held_out)
    assert "has no effect" in told("Data.held_out_source='e.txt'")
    assert "Data.held_out_source='nowhere': there is no" in told(
        *OWN, "Data.source='photos'", "Data.held_out_source='nowhere'"
    )
    only = ["Data.source='e.txt'", "Data.lm_weight=0.0", "Data.text_denoise_weight=0.0"]
    assert "choose no task: with Data.source='e.txt' one of them" in told(*only)
