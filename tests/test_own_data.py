# SPDX-License-Identifier: Apache-2.0
"""docs/own_data.md keeps its word: a folder becomes a run by the commands it shows."""

import json
import re
import shlex

import pytest

from jaxmoe import cli
from jaxmoe.data import fields, readers
from jaxmoe.data.loader import Loader
from jaxmoe.data.tasks import TASKS
from tests import helpers
from tests.data import own_files
from tests.test_docs import blocks, commands, read

PAGE = read("docs/own_data.md")
# The model and the run of the page in seconds.
SHORT = ["--gin.Train.steps=8", "--gin.Train.log_every=4", "--gin.Data.batch_size=8"]
SHORT += ["--gin.Model.num_layers=1", "--gin.Model.layer_pattern=moe"]
SHORT += ["--gin.Model.width=16", "--gin.Model.ffn_width=32", "--gin.Mesh.pipe=1"]
SHORT += ["--gin.Train.eval_batches=1"]


def test_three_commands():
    first = blocks(PAGE, "bash")[0].splitlines()
    assert len(first) == 3
    assert first[0].startswith("pip install")


def test_records_that_are_shown_are_records():
    """Every line of the example, with an image where it names one."""
    lines = blocks(PAGE, "text")[0].splitlines()
    assert len(lines) == 3
    for line in lines:
        raw = readers.json_fields(line.encode())
        found = fields.parse_fields(raw, has_image="image" in raw)
        assert found.texts and set(found.tasks) <= set(TASKS)


def test_table_of_endings_is_that_of_the_code():
    from jaxmoe.config_source import KINDS

    table = PAGE.partition("| ending |")[2].partition("\n\n")[0]
    for ending in KINDS:
        assert f"`{ending}`" in table
    assert f"{readers.BLOCK_BYTES:,} bytes" in table


@pytest.mark.slow
def test_a_folder_becomes_a_run(tmp_path, monkeypatch, capsys):
    """The commands of the page on twelve images in four formats, one of them torn: they
    end well, the evaluation is found again, and the run would not go on with others."""
    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(12):
        form = ("PNG", "JPEG", "WEBP", "GIF")[number % 4]
        content = own_files.encoded(own_files.picture(number, (100, 80)), form)
        color = list(own_files.COLORS)[number % 3]
        (photos / f"{number}.{form.lower()}").write_bytes(content)
        (photos / f"{number}.txt").write_text(f"a {color} field")
    (photos / "torn.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (photos / "torn.txt").write_text("nothing to be seen")
    (tmp_path / "configs").symlink_to(helpers.ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    _, train, evaluate = commands(PAGE)[:3]
    arguments = ["train", *shlex.split(train)[2:], *SHORT, "--gin.Data.max_broken=0.5"]
    assert cli.main(arguments) == 0
    told = capsys.readouterr().out
    assert "captions of held-out images" in told
    summary = json.loads((tmp_path / "runs" / "photos" / "summary.json").read_text())
    rows = helpers.metrics_of(tmp_path / "runs" / "photos")
    assert [row["step"] for row in rows] == [1, 4, 8]
    assert all(0.0 < row["padding_fraction"] < 1.0 for row in rows)
    assert rows[-1]["broken_records"] == summary["broken_records"] == 1.0
    assert 0.0 <= summary["caption_exact_match_en"] <= 1.0
    assert "caption_exact_match_zh" not in summary
    assert cli.main(arguments) == 0
    assert "has all 8 steps already: nothing to do" in capsys.readouterr().out
    assert cli.main(shlex.split(evaluate)[1:]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures == {name: summary[name] for name in figures}
    # A run does not go on with other images.
    (photos / "0.png").write_bytes((photos / "4.png").read_bytes())
    more = [a.replace("steps=8", "steps=14") for a in arguments]
    assert cli.main(more) == cli.EXIT_MISTAKE
    assert "content of source 1 (folder) was" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_ends_with_its_data(tmp_path, capsys):
    """Two epochs of a packed text are fewer steps than Train.steps: exit code 0, the
    last step is saved and evaluated, and started again there is nothing to read."""
    text = tmp_path / "words.txt"
    text.write_text("".join(f"line {n} of a text, {n * n}\n" for n in range(160)))
    config = helpers.run_config()
    data = {"source": str(text), "epochs": 2, "packing": True}
    config = helpers.changed(config, data=data)
    arguments = ["train", *helpers.arguments(config), f"--workdir={tmp_path}/run"]
    assert cli.main(arguments) == 0
    told = "".join(capsys.readouterr())
    step = int(re.search(r"the data ended after step (\d+) of 21", told)[1])
    assert 5 < step < 21
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["step"] == step
    assert summary["eval_loss_lm"] > 0.0
    assert (tmp_path / "run" / "checkpoints" / str(step) / "complete.json").is_file()
    loader = Loader(config.data, model=config.model, microbatches=1)
    assert len(list(loader)) == step
    assert cli.main(arguments) == 0
    assert f"the data ended after step {step} of 21" in "".join(capsys.readouterr())


@pytest.mark.slow
def test_a_run_stops_when_too_much_is_broken(tmp_path, capsys):
    """Exit code 1 and one message, which names a record; what was saved stays."""
    rows = own_files.records(24)
    for row in rows[::2]:
        row["image"] = row["image"][:60]
    source = own_files.write(tmp_path, "jsonl", rows)
    weights = {"caption_weight": 1.0, "text_denoise_weight": 0.0, "lm_weight": 0.0}
    config = helpers.changed(
        helpers.run_config(),
        data={"source": source, **weights},
        checkpoint={"every_steps": 1},
    )
    arguments = ["train", *helpers.arguments(config), f"--workdir={tmp_path}/run"]
    assert cli.main(arguments) == cli.EXIT_FAILED == 1
    told = capsys.readouterr()
    lines = r"skipped: .*data\.jsonl, line \d+: its image cannot"
    found = re.findall(lines, told.out + told.err)
    assert len(found) == len(set(found)) > 1
    assert "of the 128 records read so far are broken, the last" in told.err
    assert "At most Data.max_broken=0.01 of them may be." in told.err
    assert "Traceback" not in told.err
    rows = helpers.metrics_of(tmp_path / "run")
    assert rows[0]["broken_records"] > 1
    assert (tmp_path / "run" / "checkpoints" / "1" / "complete.json").is_file()
