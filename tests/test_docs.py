# SPDX-License-Identifier: Apache-2.0
"""The documentation is true where a program can tell: links, commands, tables."""

import ast
import fnmatch
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from PIL import Image

from jaxmoe import config as config_lib
from jaxmoe import config_derived, gin_config
from jaxmoe.config_values import FIELDS
from tests import helpers
from tests.data import own_files
from tests.test_floors import FLOORS

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
BAD_DASHES = re.compile("[\u2010-\u2015\u2212\u2018\u2019\u201c\u201d]")
SECTION = "|".join(section.__name__ for section in config_lib.SECTIONS)

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


# Reading pages ---------------------------------------------------------------------


def blocks(text: str, language: str) -> list[str]:
    """The contents of the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def inline_code(text: str) -> list[str]:
    """What stands between backticks outside of fenced blocks."""
    return re.findall(r"`([^`\n]+)`", prose(text))


def commands(text: str) -> list[str]:
    """The commands of the bash blocks, those joined by && one by one."""
    lines = [line for block in blocks(text, "bash") for line in block.splitlines()]
    return [part.strip() for line in lines for part in line.split("&&")]


def anchors(text: str) -> set[str]:
    """The names by which headings can be linked to."""
    headings = re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def table(text: str, heading: str) -> list[list[str]]:
    """The rows, without the head, of the first table below a heading."""
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    assert len(rows) > 2, f"no table below {heading!r}"
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def read(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


# Links, names and commands ---------------------------------------------------------


@pages
def test_links_resolve(page):
    text = page.read_text("utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        if re.match(r"\w+:", target):
            assert target.startswith("https://"), target
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name) if name else page
        assert file.is_file(), f"{page.name}: {target}"
        assert file.resolve().is_relative_to(ROOT), target
        if anchor:
            assert anchor in anchors(file.read_text("utf-8")), f"{page.name}: {target}"


@pages
def test_commands_have_ascii_dashes_and_quotes(page):
    """What is pasted into a shell must be what was meant: no en dash for a hyphen."""
    text = page.read_text("utf-8")
    lines = [line for block in blocks(text, "text") for line in block.splitlines()]
    shell = [line for line in lines if line.startswith("$ ")]
    for command in [*commands(text), *inline_code(text), *shell]:
        assert not BAD_DASHES.search(command), command
    assert all(block.isascii() for block in blocks(text, "bash"))


@pages
def test_files_named_in_commands_and_code_exist(page):
    text = page.read_text("utf-8")
    words = [word for code in inline_code(text) for word in code.split()]
    words += [word for command in commands(text) for word in command.split()]
    pattern = r"(?:--gin_file=)?((?:tests|docs|configs|jaxmoe|benchmarks)/[a-z_/\d.]+)"
    for word in words:
        if match := re.fullmatch(pattern, word):
            assert (ROOT / match[1]).exists(), f"{page.name}: {match[1]}"


@pages
def test_configuration_names_exist_and_values_fit(page):
    text = page.read_text("utf-8")
    for code in [*inline_code(text), *commands(text)]:
        for name in re.findall(rf"(?<![\w.])(?:{SECTION})\.[a-z_]\w*", code):
            assert name in FIELDS, f"{page.name}: {name}"
        binding = re.fullmatch(rf"(?:--gin\.)?((?:{SECTION})\.\w+=.+)", code)
        if binding:
            gin_config.load((), [binding[1]])


class CheckedTrainer:
    """In place of the trainer: checks as it does before it compiles, then ends."""

    def __init__(self, config, workdir, config_text):
        from jaxmoe.data import records, sources
        from jaxmoe.mesh import resolve_sizes

        sizes = [config.mesh.data, config.mesh.expert, config.mesh.pipe]
        devices = 8 if "auto" in sizes else int(np.prod(sizes))
        self.platform, self.sizes = "cpu", resolve_sizes(config, devices)
        records.vocab_size(config.data, config.model)
        sources.open_sources(config.data, config.model)
        workdir.mkdir(parents=True, exist_ok=True)
        (workdir / "config.gin").write_text(config_text, "utf-8")

    def run(self):
        return {}


@pages
def test_commands_parse(page, tmp_path, monkeypatch, capsys):
    """Each goes through the real command line, up to where JAX would compile."""
    from jaxmoe import cli

    monkeypatch.setattr("jaxmoe.trainer.Trainer", CheckedTrainer)
    monkeypatch.setattr("jaxmoe.trainer.evaluate_run", lambda *_: {})
    written = lambda *given: [{"text": ""}] * len(given[2])  # noqa: E731
    monkeypatch.setattr("jaxmoe.generate_command._write", written)
    monkeypatch.setattr("jaxmoe.aot_command.run", lambda *_: 0)
    monkeypatch.setattr("jaxmoe.inspect_command.run", lambda *_: 0)
    monkeypatch.setattr("jaxmoe.doctor_command.run", lambda *_: 0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    own_files.write(tmp_path / "photos", "folder", own_files.records(3))
    Image.new("L", (8, 8)).save(tmp_path / "digit.png")
    for command in commands(page.read_text("utf-8")):
        words = shlex.split(command, comments=True)
        if words[:2] == ["python", "train.py"]:
            arguments = ["train", *words[2:]]
        elif words[:1] == ["jaxmoe"]:
            arguments = words[1:]
        else:
            continue
        code = cli.main(arguments)
        assert code == 0, f"{page.name}: {command}\n{capsys.readouterr().err}"


def test_every_command_is_documented():
    from jaxmoe import cli

    usage = re.findall(r"^  (\w+)  ", cli._USAGE, re.MULTILINE)
    assert {"train", "eval"} <= set(usage)
    text = "\n".join(page.read_text("utf-8") for page in PAGES)
    for name in usage:
        assert f"jaxmoe {name}" in text, name


# Tables and drawings ---------------------------------------------------------------


def test_configuration_page_is_current():
    script = helpers.script(ROOT / "docs" / "configuration.py")
    text = script.PAGE.read_text("utf-8")
    assert text == script.page(), "out of date: run python docs/configuration.py"
    for name in FIELDS:
        assert f"| `{name}` |" in text


def test_design_shows_the_floors_that_are_enforced():
    rows = table(read("docs/design.md"), "The house")
    assert [row[0] for row in rows] == [str(n) for n in range(len(FLOORS))]
    shown = tuple(tuple(re.findall(r"`([^`]+)`", row[2])) for row in rows)
    assert shown == FLOORS


def test_every_router_and_task_has_a_row():
    from jaxmoe.data.tasks import TASKS

    routers = [row[0].strip("`") for row in table(read("docs/routing.md"), "Routers")]
    assert tuple(routers) == FIELDS["MoE.router"].choices
    tasks = [row[0].strip("`") for row in table(read("docs/data.md"), "Tasks")]
    assert tuple(tasks) == TASKS


def test_drawn_mask_is_the_attention_mask():
    from jaxmoe.layers.attention import attention_mask

    drawing = blocks(
        read("docs/model.md").partition("## The attention mask")[2], "text"
    )
    head, *rows = [line.split() for line in drawing[0].splitlines()]
    assert [row[0] for row in rows] == head
    decoder = np.asarray([[letter == "d" for letter in head]])
    seen = attention_mask(np.ones(decoder.shape, np.int32), decoder)[0, 0]
    drawn = [[mark == "x" for mark in row[1:]] for row in rows]
    np.testing.assert_array_equal(np.asarray(seen), drawn)


def test_table_of_models_agrees_with_the_configurations():
    for row in table(read("docs/model.md"), "Sizes of the shipped models"):
        file, layers, width, hidden, experts, _, billions = row
        name = re.search(r"configs/(\w+\.gin)", file)[1]
        config = gin_config.load([str(ROOT / "configs" / name)]).config
        model, moe = config.model, config.moe
        found = (
            config_derived.layer_kinds(model).count("moe"),
            model.width,
            config_derived.expert_width(model, moe),
            moe.num_experts,
        )
        assert found == tuple(int(n) for n in (layers, width, hidden, experts)), name
        matrices = 3 if model.activation == "swiglu" else 2
        number = np.prod([*found, matrices], dtype=float)
        assert number / 1e9 == pytest.approx(float(billions), rel=1e-3), name


def test_table_of_parameters_names_those_there_are():
    from jaxmoe import model, tree_names

    bindings = ["Model.layer_pattern='dense,moe'", "Model.activation='swiglu'"]
    bindings += ["Model.tie_embeddings=False", "MoE.num_shared_experts=1"]
    config = gin_config.load((), bindings).config
    module = nnx.eval_shape(
        lambda: model.M6(config.model, config.moe, 264, rngs=nnx.Rngs(0))
    )
    params = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    names = set(tree_names.named_leaves(params))
    rows = table(read("docs/model.md"), "Parameters")
    shown = [name for row in rows for name in re.findall(r"`([^`]+)`", row[0])]
    for pattern in shown:
        found = fnmatch.filter(names, pattern)
        assert found, pattern
    missing = {n for n in names if not any(fnmatch.fnmatch(n, p) for p in shown)}
    assert not missing


# Metrics ---------------------------------------------------------------------------

# The functions that write keys of the files.
LINE_KEYS = {
    "StepLog._spike",
    *("StepLog._values", "StepLog.rebalanced", "Loader.figures"),
    *("load_statistics", "load_statistics_by_layer"),
}
EVALUATION_KEYS = {"Evaluator.__call__", "Evaluator._task_figures"}
SUMMARY_KEYS = {"Trainer._finish", "Clock.summary"}


def functions() -> dict[str, ast.FunctionDef]:
    """The package's functions, and its methods as Class.method."""
    found = {}
    for path in (ROOT / "jaxmoe").rglob("*.py"):
        for node in ast.parse(path.read_text("utf-8")).body:
            inside = node.body if isinstance(node, ast.ClassDef) else [node]
            prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
            for function in inside:
                if isinstance(function, ast.FunctionDef):
                    found[prefix + function.name] = function
    return found


def written_keys(names: set[str]) -> set[str]:
    """Keys of dicts and of assignments in functions; f"loss_{task}" is loss_<task>."""
    known, keys = functions(), set()
    for name in names:
        for node in ast.walk(known[name]):
            found = []
            if isinstance(node, ast.Dict):
                found = node.keys
            elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                found = [node.slice]
            keys |= {key for node in found if (key := _key(node))}
    return keys


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value)
            if isinstance(part, ast.Constant)
            else f"<{ast.unparse(part.value)}>"
            for part in node.values
        )
    return ""


def documented_keys(heading: str) -> list[str]:
    """The first column of a table of docs/metrics.md."""
    return [row[0].strip("`") for row in table(read("docs/metrics.md"), heading)]


def is_documented(key: str, heading: str) -> bool:
    """Whether a key, such as loss_caption, has a row, such as loss_<task>."""
    from jaxmoe.data.tasks import TASKS
    from jaxmoe.data.tokenizer import LANGUAGES

    names = {"<task>": "|".join(TASKS), "<language>": "|".join(LANGUAGES)}
    for pattern in documented_keys(heading):
        for name, choices in names.items():
            pattern = pattern.replace(name, f"(?:{choices})")
        if re.fullmatch(pattern, key):
            return True
    return False


@pytest.mark.parametrize(
    ("heading", "names", "extra"),
    [
        ("metrics.jsonl", LINE_KEYS | EVALUATION_KEYS, {"step"}),
        ("summary.json", SUMMARY_KEYS | EVALUATION_KEYS, set()),
    ],
)
def test_metrics_page_has_every_key_and_no_other(heading, names, extra):
    documented = documented_keys(heading)
    assert len(documented) == len(set(documented))
    assert set(documented) == written_keys(names) | extra
