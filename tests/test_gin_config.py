# SPDX-License-Identifier: Apache-2.0
"""Gin files and overrides: what they mean, what is refused, and with which words."""

import dataclasses
import sys

import gin
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe.config import SECTIONS, Config, ConfigError
from jaxmoe.config_values import FIELDS
from jaxmoe.gin_config import load, split_arguments, to_gin


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Runs every test in an empty folder, so that messages have short paths."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(text: str, name: str = "a.gin") -> str:
    with open(name, "w", encoding="utf-8", newline="") as file:
        file.write(text)
    return name


def error(gin_files=(), bindings=()) -> str:
    with pytest.raises(ConfigError) as caught:
        load(gin_files, bindings)
    return str(caught.value)


def test_nothing_given_is_the_default():
    assert load().config == Config()


GRAMMAR = "a value is a number, True, False, None, or a string in quotes"
EMPTY = "an empty value means neither '' nor None nor the default"
UNKNOWN = "does not exist: only fields of the configuration can be set"
# The text of a.gin, and the whole message.
REFUSED_FILES = [
    (
        "\nData.tokenizer = bytes",
        "a.gin:2 cannot be read: `Data.tokenizer = bytes`: " + GRAMMAR + ". Write"
        " Data.tokenizer = 'bytes'.",
    ),
    (
        "Train.init_from = /tmp/x  # there",
        "a.gin:1 cannot be read: `Train.init_from = /tmp/x  # there`: " + GRAMMAR + "."
        " Write Train.init_from = '/tmp/x'.",
    ),
    (
        "Model.use_bias = true",
        "Model.use_bias='true' (a.gin:1) is a string: it takes True or False. Write"
        " Model.use_bias=True.",
    ),
    (
        "Train.steps = 1e3",
        "Train.steps=1000.0 (a.gin:1) is a decimal number: it takes a whole number."
        " Write Train.steps=1000.",
    ),
    (
        "# none\nMoE.capacity_factor =",
        "MoE.capacity_factor (a.gin:2) has no value: " + EMPTY + ". Write"
        " MoE.capacity_factor=None, or leave it out.",
    ),
    (
        "Train.init_from =  # nothing",
        "Train.init_from (a.gin:1) has no value: " + EMPTY + ". Write"
        " Train.init_from='', or leave it out.",
    ),
    (
        "MoE.top_k = 1\nMoE.num_experts = 4\nMoE.top_k = 2",
        "MoE.top_k is bound twice (a.gin:1 and a.gin:3): one file, or the command line,"
        " binds a name once. Keep one of the two, such as MoE.top_k=2.",
    ),
    (
        "MoE:\n  top_k = 1\n  topk = 2",
        "MoE.topk (a.gin:3) " + UNKNOWN + ". Write MoE.top_k.",
    ),
    (
        "Model.width = (64",
        # Python's tokenizer tells the line of an open bracket from 3.12 on.
        f"a.gin:{1 if sys.version_info >= (3, 12) else 2} cannot be read:"
        " `Model.width = (64`: " + GRAMMAR + ". Write one"
        " `Section.field = value` per line, with all quotes closed.",
    ),
    (
        "Model.width = 64 128",
        "Model.width='64 128' (a.gin:1) is a string: it takes a whole number. Write"
        f" Model.width={Config().model.width}.",
    ),
    (
        "import os",
        "a.gin:1 imports os: a configuration holds values, no code. Take the line out.",
    ),
    (
        "from __gin__ import dynamic_registration",
        "a.gin:1 imports __gin__.dynamic_registration: a configuration holds values, no"
        " code. Take the line out.",
    ),
    (
        "include 'b.gin'",
        "a.gin:1 includes 'b.gin', which is not there: includes are looked for beside"
        " the file that includes, and in the current folder. Correct the path, or take"
        " the line out.",
    ),
    (
        "include 'a.gin'",
        "a.gin includes itself, over 1 file(s): what a file includes must stand on its"
        " own. Take one of the include lines out.",
    ),
    (
        "wide = 64\nModel.width = %wise",
        "Model.width=%wise (a.gin:2) uses an unknown macro: a macro is bound like a"
        " field, without a section. Write %wide.",
    ),
    (
        "a = %b\nb = %a\nModel.width = %a",
        "Model.width (a.gin:3) goes in a circle: Model.width = %a = %b: a macro must"
        " end in a value. Write a value for a.",
    ),
]


@pytest.mark.parametrize(
    "text, expected", REFUSED_FILES, ids=[t for t, _ in REFUSED_FILES]
)
def test_refused_file(text, expected):
    assert error([write(text)]) == expected


@pytest.mark.parametrize(
    "content, expected",
    [
        (b"\x7fELF\0\0", "a.gin is not a text: it has NUL bytes"),
        (b"# \xff", "a.gin is not a text: 'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_file_that_is_no_text(folder, content, expected):
    (folder / "a.gin").write_bytes(content)
    text = error(["a.gin"])
    assert text.startswith(f"--gin_file={expected}")
    assert text.endswith("Give the path of a .gin file, such as configs/m6_digits.gin.")


@pytest.mark.parametrize(
    "path, fact",
    [
        ("b.gin", "b.gin is not there"),
        ("", " is not there"),
        ("sub", "sub is a folder"),
        ("a\0b", "a\\x00b is not there"),
    ],
)
def test_file_that_is_not_there(folder, path, fact):
    (folder / "sub").mkdir()
    text = error([path])
    rule = "it must be the path of a file, as seen from the current folder"
    assert text.startswith(f"--gin_file={fact}: {rule}. Write --gin_file=")
    assert text.endswith("m6_digits.gin.")


def test_file_with_a_similar_name_is_proposed():
    write("", "m6_small.gin")
    assert error(["m6_smal.gin"]).endswith("Write --gin_file=m6_small.gin.")


@pytest.mark.parametrize(
    "text", ["Train.steps = 5\r\nTrain.seed = 6\r\n", "\ufeff", "#"]
)
def test_texts_of_other_editors(text):
    assert load([write(text)]).config.train.steps in (5, Config().train.steps)


def test_blocks_and_macros():
    file = write(
        "wide = 32\nModel:\n  width = %wide\n  ffn_width = %double\ndouble = 64"
    )
    model = load([file], ["wide=16"]).config.model
    assert (model.width, model.ffn_width) == (
        16,
        64,
    )  # the last value of a macro counts


def test_include_is_relative_to_the_file(folder):
    (folder / "sub").mkdir()
    write("include 'b.gin'\ninclude 'c.gin'\nTrain.seed = 1", "sub/a.gin")
    write("Train.steps = 7\nTrain.seed = 5", "sub/b.gin")
    write("Train.steps = 8", "b.gin")
    write("Train.keep = 1".replace("Train", "Checkpoint"), "c.gin")  # current folder
    config = load(["sub/a.gin"]).config
    assert (config.train.steps, config.train.seed, config.checkpoint.keep) == (7, 1, 1)


def test_the_last_source_wins_and_is_recorded():
    files = [
        write("MoE.num_experts = 16\nMoE.top_k = 4"),
        write(
            "MoE.num_experts = 32\nMoE.top_k = 4\nwide = 8\nModel.width = %wide", "b"
        ),
    ]
    loaded = load(files, ["MoE.num_experts=64", "Model.num_heads=2"])
    assert loaded.config.moe.num_experts == 64
    found = {k: v for k, v in loaded.provenance.items() if v != "default"}
    assert found == {
        "MoE.num_experts": "command line, instead of 32 (b:1)",
        "MoE.top_k": "b:2",
        "Model.width": "b:4, %wide of b:3",
        "Model.num_heads": "command line",
    }
    assert set(loaded.provenance) == set(FIELDS)


def test_identical_override_is_fine():
    loaded = load([write("MoE.num_experts = 8")], ["MoE.num_experts=8"])
    assert loaded.provenance["MoE.num_experts"] == "command line"


def test_twice_on_the_command_line():
    assert error([], ["MoE.top_k=1", "MoE.top_k=2"]) == (
        "MoE.top_k is bound twice (command line): one file, or the command line, binds"
        " a name once. Keep one of the two, such as MoE.top_k=2."
    )


def test_an_overridden_value_is_checked_too():
    assert "takes a whole number" in error(
        [write("Train.steps = '1'")], ["Train.steps=1"]
    )


def test_loads_leave_nothing_behind():
    assert load([], ["MoE.top_k=3"]).config.moe.top_k == 3
    assert load().config == Config()


def test_a_failed_load_leaves_gin_as_it_was():
    load([], ["MoE.top_k=3"])
    before = gin.config_str()
    assert "top_k = 3" in before
    for bad in ("MoE.top_k=x", "MoE.top=1", "x=1", "MoE.top_k=%x"):
        error([], ["Model.width=8", bad])
        assert gin.config_str() == before


@gin.configurable(module="elsewhere")
def other(value=0):
    return value


def test_other_configurables_are_left_alone():
    gin.bind_parameter("elsewhere.other.value", 5)
    gin.finalize()  # a locked configuration is no hindrance
    try:
        load([], ["MoE.top_k=3"])
        assert other() == 5 and gin.config_is_locked()
    finally:
        gin.clear_config()


def test_active_scopes_are_ignored():
    with gin.config_scope("evaluation"):
        gin.bind_parameter("evaluation/jaxmoe.MoE.top_k", 7)
        assert load().config == Config()
    gin.clear_config()


def test_split_arguments():
    argv = [
        "train",
        "--gin_file=a.gin",
        "--gin.X.y=1",
        "--workdir=w",
        "--gin_file",
        "b",
    ]
    argv += ["--gin.X.z", "-1", "--gin_bindings=Q.r = 's'", "--gin.E.f=", "--json"]
    argv += ["--", "--gin.not=1"]
    files, bindings, rest = split_arguments(argv)
    assert files == ["a.gin", "b"]
    assert bindings == ["X.y=1", "X.z=-1", "Q.r = 's'", "E.f="]
    assert rest == ["train", "--workdir=w", "--json", "--", "--gin.not=1"]


@pytest.mark.parametrize(
    "argv, expected",
    [
        (
            ["--gin.X.y"],
            "--gin.X.y has no value: the value stands behind '=' or a space. Write"
            " --gin.X.y=VALUE.",
        ),
        (
            ["--gin_file", "--workdir=w"],
            "--gin_file has no value: the value stands behind '=' or a space. Write"
            " --gin_file=VALUE.",
        ),
        (
            ["--gin_binding=X.y=1"],
            "--gin_binding is no argument: a configuration is given by --gin_file,"
            " --gin.X.y and --gin_bindings. Write --gin_bindings=VALUE.",
        ),
        (
            ["--gin-file=a"],
            "--gin-file is no argument: a configuration is given by --gin_file,"
            " --gin.X.y and --gin_bindings. Write --gin_file=VALUE.",
        ),
    ],
)
def test_refused_arguments(argv, expected):
    with pytest.raises(ConfigError) as caught:
        split_arguments(argv)
    assert str(caught.value) == expected


def values_of(name: str) -> st.SearchStrategy:
    """Every kind of value that a field takes."""
    field = FIELDS[name]
    bounds = field.field.metadata
    low = max(b for b in (bounds["low"], bounds["above"], 0) if b is not None)
    high = bounds["high"] or bounds["below"]
    if field.kind is bool:
        kinds = [st.booleans()]
    elif field.kind is int:
        kinds = [st.integers(int(low), high or 2**31 - 1)]
    elif field.kind is float:
        ends = {
            "exclude_min": bounds["above"] == 0,
            "exclude_max": bool(bounds["below"]),
        }
        ends["exclude_max"] &= high is not None
        kinds = [st.floats(low, high, allow_nan=False, allow_infinity=False, **ends)]
    elif field.choices:
        kinds = []
    else:
        letters = st.characters(exclude_categories=["Cc", "Cs"])
        kinds = [st.text(letters).filter(str.isprintable)]
    kinds += [st.sampled_from(field.choices)] if field.choices else []
    kinds += [st.none()] if field.optional else []
    return st.one_of(kinds)


@st.composite
def configs(draw) -> Config:
    """A configuration of which some fields have any value that their types take."""
    parts = {}
    for section in SECTIONS:
        names = [field.name for field in dataclasses.fields(section)]
        chosen = draw(st.lists(st.sampled_from(names), unique=True, max_size=4))
        values = {n: draw(values_of(f"{section.__name__}.{n}")) for n in chosen}
        parts[section.__name__.lower()] = section(**values)
    return Config(**parts)


@settings(max_examples=200)
@given(configs())
def test_round_trip(config):
    """The written configuration reads back to an equal object, types included."""
    loaded = load([write(to_gin(config))])
    assert loaded.config == config
    again = to_gin(loaded.config, loaded.provenance)
    assert repr(load([write(again)]).config) == repr(loaded.config)


def test_to_gin_tells_where_values_come_from():
    loaded = load([write("MoE.top_k = 4")], ["MoE.num_experts=16"])
    lines = to_gin(loaded.config, loaded.provenance).splitlines()
    assert "MoE.num_experts = 16                      # command line" in lines
    assert "MoE.top_k = 4                             # a.gin:1" in lines
    router = f"MoE.router = {Config().moe.router!r}"
    assert f"{router:41} # default" in lines
    assert len([line for line in lines if " = " in line]) == len(FIELDS)


NAMES = st.sampled_from(
    [*FIELDS, "x", "MoE.nothing", "s/MoE.top_k", "", "MoE", "%x", "é.é"]
)
WORDS = [
    "1",
    "2",
    "-1",
    "1e3",
    "0.5",
    "'a'",
    "auto",
    "bytes",
    "True",
    "None",
    "%x",
    "@x()",
]
TEXTS = st.one_of(st.sampled_from(WORDS), st.text(max_size=8))
wrong = st.builds(
    "{}{}{}".format, NAMES, st.sampled_from(["=", " = ", ":", " "]), TEXTS
)


@st.composite
def right(draw) -> str:
    name = draw(st.sampled_from(list(FIELDS)))
    return f"{name} = {draw(values_of(name))!r}"


def loads(*arguments) -> bool:
    """Whether it loads; anything but `ConfigError` fails the test."""
    try:
        load(*arguments)
    except ConfigError as caught:
        assert len(str(caught)) < 3000
        str(caught).encode()  # can be printed anywhere
        return False
    return True


def mostly_right(other: st.SearchStrategy) -> st.SearchStrategy:
    """Lines that are right, or right ones and others."""
    mixed = st.lists(st.one_of(right(), wrong, other), min_size=1, max_size=3)
    return st.one_of(st.lists(right(), max_size=2), mixed)


def test_fuzzed_overrides():
    outcomes = []

    @settings(max_examples=400)
    @given(mostly_right(st.text()))
    def fuzz(bindings):
        outcomes.append(loads([], bindings))

    fuzz()
    assert 0.3 < sum(outcomes) / len(outcomes) < 0.9


def test_fuzzed_files():
    outcomes = []
    pieces = ["", "# x", "include 'a.gin'", "import x", "  ", "(", "\\", "'''"]

    @settings(max_examples=400)
    @given(mostly_right(st.one_of(st.sampled_from(pieces), st.text())))
    def fuzz(lines):
        with open("a.gin", "wb") as file:
            file.write("\n".join(lines).encode("utf-8", "surrogatepass"))
        outcomes.append(loads(["a.gin"]))

    fuzz()
    assert 0.3 < sum(outcomes) / len(outcomes) < 0.9


@settings(max_examples=100)
@given(st.binary(max_size=40))
def test_fuzzed_bytes(content):
    with open("a.gin", "wb") as file:
        file.write(content)
    loads(["a.gin"])
