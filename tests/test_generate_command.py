# SPDX-License-Identifier: Apache-2.0
"""`jaxmoe generate`: what is asked for, in every form, is what the model writes.

Legend: B sequences, S positions, P patches of D numbers.
"""

import io
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from jaxmoe import cli, generate_command, gin_config
from jaxmoe.checkpoint import Checkpointer
from jaxmoe.data import digits, images, picture
from jaxmoe.data.prompts import make_prompt
from jaxmoe.data.tasks import assemble
from jaxmoe.data.tokenizer import make_tokenizer
from tests import helpers
from tests.helpers import ROOT, assert_told, contents, tiny_config

# A run on 2 x 2 x 2 devices with a pipeline and a balancer; tight capacity in training.
CONFIG = tiny_config(
    mesh={"data": 2, "expert": 2, "pipe": 2},
    model={"init_std": 0.4},
    moe={"capacity_factor": 0.5},
    balancer={"interval": 5},
)
TOKENIZER = make_tokenizer("bytes")


def make_run(folder, config):
    """A run folder with the first weights of a run."""
    folder.mkdir(parents=True)
    text = gin_config.to_gin(config)
    (folder / "config.gin").write_text(text, "utf-8")
    plain = helpers.changed(config, balancer={"interval": 0})
    state = helpers.initial_state(plain, 1, 1)
    with Checkpointer(folder / "checkpoints", asynchronous=False) as checkpoints:
        checkpoints.save(3, state, {}, text)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("generate") / "run", CONFIG)


def held_out():
    return digits.load_digits(8, training=False).images


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Files of four digits, as they are and as one would photograph them."""
    folder = tmp_path_factory.mktemp("pictures")
    greys = np.rint(held_out()[:4] * 255).astype(np.uint8)
    Image.fromarray(greys[0]).save(folder / "0.png")
    large = Image.fromarray(greys[1]).resize((80, 80), Image.Resampling.NEAREST)
    large.convert("RGB").save(folder / "1.bmp")
    ink = Image.new("RGBA", (8, 8))  # black on transparent paper
    ink.putalpha(Image.fromarray(greys[2]))
    ink.save(folder / "2.png")
    Image.fromarray(255 - greys[3]).resize((32, 32), Image.Resampling.BOX).save(
        folder / "3.jpg", quality=100
    )
    return [str(path) for path in sorted(folder.iterdir())]


def results(capsys, *arguments):
    """What --json prints, and the lines before it."""
    assert cli.main(["generate", *arguments, "--json"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    return json.loads(last)["results"], lines


# What is asked for -------------------------------------------------------------------


def test_pictures_become_the_digits_that_they_show(pictures):
    """Bitwise the patches of the training data, from 8 x 8 grey pixels, from 100 times
    as many in colour, from black ink on transparent paper; nearly so from a negative
    as JPEG."""
    want = digits.to_patches(held_out()[:4], 4)
    for number, path in enumerate(pictures):
        got = picture.read_patches(path, CONFIG.data, digit=True)
        assert got.dtype == np.float32
        tolerance = 0.07 if path.endswith("jpg") else 0
        np.testing.assert_allclose(got, want[number], rtol=0, atol=tolerance)


def test_a_long_picture_gets_its_background_around_it():
    """A bright bar of 2 x 16 pixels on black becomes a bar in the middle."""
    bar = np.zeros((4, 16), np.uint8)
    bar[1:3, 1:15] = 255
    file = io.BytesIO()
    Image.fromarray(bar).save(file, "PNG")
    got = picture.digit_patches(file.getvalue(), 8).reshape(8, 8)
    assert not got[[0, 1, 2, 5, 6, 7]].any()
    np.testing.assert_array_equal(got[3:5, 1:7], 0.5)


@pytest.mark.parametrize(
    ("image", "text", "task", "encoder", "decoder"),
    [
        (True, None, "caption", [], ["zh"]),
        (True, "di", "caption", [], ["zh", *b"di"]),
        (True, "d[mask]g", "image_denoise", ["zh", *b"d", "m", *b"g"], ["bos"]),
        (False, "di", "lm", [], ["bos", *b"di"]),
        (False, "", "lm", [], ["bos"]),
        (False, "[mask:3]i[mask]", "text_denoise", [*"mmm", *b"i", "m"], ["bos"]),
        (False, "[mask:]", "lm", [], ["bos", *b"[mask:]"]),
    ],
)
def test_prompts_are_beginnings_of_the_tasks_examples(
    image, text, task, encoder, decoder
):
    special = {
        "zh": TOKENIZER.language_id("zh"),
        "bos": TOKENIZER.bos_id,
        "m": TOKENIZER.mask_id,
    }
    patches = np.ones((4, 16), np.float32) if image else None
    got = make_prompt(
        patches, text, language="zh", tokenizer=TOKENIZER, model=CONFIG.model
    )
    ids = [
        [special.get(x, x if isinstance(x, str) else x + 8) for x in part]
        for part in (encoder, decoder)
    ]
    assert (got.task, list(got.encoder), list(got.decoder)) == (task, *ids)
    assert got.patches is patches
    assert not len(got.targets)


@pytest.mark.parametrize(
    ("image", "masked", "most"), [(0, 0, 39), (0, 1, 19), (1, 0, 35), (1, 1, 17)]
)
def test_the_longest_prompt(image, masked, most):
    """As many tokens as told fit: S = 40 less 4 patches, and the first token; with
    masks the text twice. One more is refused, with this number."""
    patches = np.ones((4, 16), np.float32) if image else None
    given = {"language": "en", "tokenizer": TOKENIZER, "model": CONFIG.model}
    mask = "[mask]" * masked
    make_prompt(patches, mask + "x" * (most - masked), **given)
    for more in (1, 2, 3):
        with pytest.raises(
            ValueError, match=f"has {most + more} tokens.* room for {most}"
        ):
            make_prompt(patches, mask + "x" * (most - masked + more), **given)


MISTAKES = [
    ([], "neither --image nor --prompt"),
    (["--image=nowhere.png"], "nowhere.png cannot be read"),
    (["--image={run}/config.gin"], "config.gin cannot be read"),
    (["--prompt=a", "--prompt=b", *["--image={picture}"] * 3], "Give --prompt 1 or 3"),
    (["--prompt=a", "--language=zh"], "--language=zh without --image"),
    (["--prompt=a", "--language=fr"], "invalid choice: 'fr'"),
    (["--prompt=a", "--temperature=0"], "--temperature=0.0 is out of range"),
    (["--prompt=a", "--temperature=inf"], "--temperature=inf is out of range"),
    (["--prompt=a", "--top_p=1.5"], "it must be above 0 and at most 1"),
    (["--prompt=a", "--beam=0"], "--beam=0 is out of range"),
    (["--prompt=a", "--max_tokens=0"], "it must be at least 1"),
    (["--prompt=a", "--seed=3"], "only tokens that are drawn"),
    (["--prompt=a", "--seed=-1", "--top_p=1"], "--seed=-1 is out of range"),
    (["--prompt=a", "--beam=2", "--greedy"], "--greedy and --beam were given together"),
    (["--prompt=[mask:0]"], "[mask:0] in --prompt masks 0 tokens"),
    (["--prompt=" + "x" * 40], "there is room for 39"),
    (["--prompt=a", "--gin.Mesh.pipe=2"], "Set Mesh.pipe=1"),
    (["--prompt=a", "--gin.Mesh.distributed=True"], "Set Mesh.distributed=False"),
    (["--prompt=a", "--gin.Data.lm_weight=0"], "asks for the task 'lm'"),
    (["--image={picture}", "--gin.Data.source=text"], "it was trained on text alone"),
]


@pytest.mark.parametrize(("arguments", "part"), MISTAKES, ids=[p for _, p in MISTAKES])
def test_mistakes(arguments, part, run, pictures, capsys):
    """Exit code 2 and one message, before anything is compiled."""
    given = [a.format(run=run, picture=pictures[0]) for a in arguments]
    with helpers.compilations() as compiled:
        assert_told(["generate", f"--workdir={run}", *given], [part], capsys)
    assert not compiled


def test_a_folder_without_a_run_or_a_checkpoint(run, tmp_path, capsys):
    asked = ["generate", f"--workdir={tmp_path}", "--prompt=a"]
    assert_told(asked, [f"{tmp_path} is not a run folder", "`jaxmoe generate`"], capsys)
    (tmp_path / "config.gin").write_bytes((run / "config.gin").read_bytes())
    assert_told(asked, [f"'{tmp_path}' has no complete checkpoint"], capsys)


def test_the_data_of_the_run_may_be_gone(run, pictures, tmp_path, capsys):
    """A folder that is nowhere: its images are made as they were for training, and all
    that the run needs are its weights."""
    text = (run / "config.gin").read_text("utf-8")
    gone = text.replace(
        "Data.source = 'digits'", "Data.source = 'gone/*.tar*0.5,other'"
    )
    assert gone != text
    (tmp_path / "config.gin").write_text(gone, "utf-8")
    asked = ["generate", f"--workdir={tmp_path}", f"--image={pictures[2]}"]
    assert_told(asked, ["has no complete checkpoint"], capsys)
    data = gin_config.load([str(tmp_path / "config.gin")]).config.data
    request = generate_command.Request(pictures[2], "[mask:2]")
    (prompt,) = generate_command._prompts(
        [request], "zh", data, CONFIG.model, TOKENIZER
    )
    content = (Path(pictures[2])).read_bytes()
    want = digits.to_patches(images.decode(content, 8, "gray")[None], 4)[0]
    np.testing.assert_array_equal(prompt.patches, want)
    assert prompt.task == "image_denoise"
    texts = text.replace("Data.source = 'digits'", "Data.source = 'gone.txt'")
    (tmp_path / "config.gin").write_text(texts, "utf-8")
    assert_told(asked, ["it was trained on text alone"], capsys)


# What is written ---------------------------------------------------------------------


def greedy_by_hand(config, prompt, eos=-1):
    """The tokens after a prompt, by whole forward passes on one device."""
    config = helpers.changed(config, balancer={"interval": 0})
    setup = helpers.setup_of(config, 1, 1).for_inference()
    state = helpers.initial_state(config, 1, 1)
    module = nnx.merge(setup.graph, state.params, state.buffers)
    logits = jax.jit(lambda batch: module(batch)[0])
    model, ids = config.model, list(prompt.decoder)
    image = 0 if prompt.patches is None else model.num_patches
    sizes = {"num_patches": model.num_patches, "patch_dim": model.patch_dim}
    while True:
        last = image + len(prompt.encoder) + len(ids) - 1
        if last >= model.sequence_length or ids[-1] == eos:
            return ids[len(prompt.decoder) :]
        batch = assemble(
            [prompt._replace(decoder=ids)],
            sequence_length=model.sequence_length,
            **sizes,
        )
        ids.append(int(np.asarray(logits(batch))[0, last].argmax()))


@pytest.mark.slow
def test_every_task_is_written_as_by_hand(run, pictures, capsys):
    """Prompts of all four tasks and many lengths in one call: the tokens that whole
    forward passes on one device give; one program; the run is only read."""
    asked = [  # image, prompt
        (pictures[0], ""),
        (pictures[1], "digit "),
        (pictures[2], "di[mask:3] one"),
        (None, "ab[mask]d"),
        (None, "x" * 39),
    ]
    before = contents(run)
    texts = [f"--prompt={prompt}" for _, prompt in asked]
    with helpers.compilations() as compiled:
        got, _ = results(
            capsys,
            f"--workdir={run}",
            *(f"--image={image}" for image, _ in asked[:3]),
            *texts[:3],
        )
        alone, lines = results(capsys, f"--workdir={run}", *texts[3:])
    programs = [name for name in compiled if "run" in name]
    assert len(programs) == 2, "one for each call, whatever the lengths"
    assert contents(run) == before
    found = [*got, *alone]
    tasks = ["caption", "caption", "image_denoise", "text_denoise", "lm"]
    assert [result["task"] for result in found] == tasks
    assert lines[1].startswith("'ab[mask]d': ")
    for (image, text), result in zip(asked, found, strict=True):
        patches = image and picture.read_patches(image, CONFIG.data, digit=True)
        prompt = make_prompt(
            patches, text, language="en", tokenizer=TOKENIZER, model=CONFIG.model
        )
        want = greedy_by_hand(CONFIG, prompt, TOKENIZER.eos_id)
        assert result["tokens"] == np.trim_zeros(want, "b")
        begin = "" if "mask" in text else text
        assert result["text"] == begin + TOKENIZER.decode(want)
        assert result["ended"] == (want[-1] == TOKENIZER.eos_id)
        assert result["log_probability"] < 0


@pytest.mark.slow
def test_the_mesh_changes_nothing(run, pictures, capsys):
    """8 devices here, and one in a process of its own, draw the same."""
    arguments = [f"--workdir={run}", *(f"--image={p}" for p in pictures)]
    arguments += ["--temperature=1.5", "--top_p=0.9", "--seed=7", "--language=zh"]
    want, _ = results(capsys, *arguments)
    assert len({tuple(result["tokens"]) for result in want}) == 4
    process = helpers.start(["generate", *arguments, "--json"])
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    alone = json.loads(out.splitlines()[-1])["results"]
    assert [r["tokens"] for r in alone] == [r["tokens"] for r in want]


@pytest.mark.slow
def test_more_prompts_than_rows(run, capsys, monkeypatch):
    """9 prompts, 8 at a time: every text is that of its own prompt."""
    monkeypatch.setattr(generate_command, "_MOST_ROWS", 8)
    prompts = [f"--prompt={chr(97 + n % 7)}" for n in range(9)]
    got, _ = results(capsys, f"--workdir={run}", "--max_tokens=3", *prompts)
    assert [result["text"][0] for result in got] == list("abcdefgab")
    texts = [result["text"] for result in got]
    assert len(set(texts)) == 7
    assert texts[7:] == texts[:2]


def test_a_mistake_costs_no_start_of_jax(run):
    code = f"""
import sys
from jaxmoe import cli
assert cli.main(["generate", "--workdir={run}", "--prompt={"x" * 40}"]) == 2
loaded = {{"jax", "flax", "optax", "orbax", "grain", "matplotlib"}} & set(sys.modules)
assert not loaded, loaded
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
