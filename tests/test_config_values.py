# SPDX-License-Identifier: Apache-2.0
"""Single values, as overrides give them: what is taken, what is refused and how."""

import re

import pytest

from jaxmoe.config import Config, ConfigError
from jaxmoe.config_values import FIELDS
from jaxmoe.gin_config import load


def value(config: Config, name: str) -> object:
    section, field = name.split(".")
    return getattr(getattr(config, section.lower()), field)


@pytest.mark.parametrize(
    "override, expected",
    [
        ("MoE.top_k=4", 4),
        ("MoE.top_k = 4", 4),
        ("MoE.top_k=0x10", 16),
        ("Train.steps=1_000", 1000),
        ("MoE.balance_loss=1", 1.0),
        ("MoE.balance_loss=1e-3", 0.001),
        ("MoE.capacity_factor=2", 2.0),
        ("MoE.capacity_factor=None", None),
        ("Mesh.expert=auto", "auto"),
        ("Mesh.expert='auto'", "auto"),
        ("Mesh.expert=4", 4),
        ("Optimizer.name=sgd", "sgd"),
        ("Data.tokenizer=bytes", "bytes"),
        ("Data.tokenizer=sentencepiece:a b.model", "sentencepiece:a b.model"),
        ("Model.layer_pattern=dense,moe*3", "dense,moe*3"),
        ("Train.init_from=/tmp/x", "/tmp/x"),
        ("Train.init_from='/tmp/x'", "/tmp/x"),
        ('Train.init_from=""', ""),
        ("Train.init_from=foo", "foo"),
        ("Train.init_from=run#2", "run#2"),
        ("Train.init_from=a=b", "a=b"),
        ("Train.init_from=2024", "2024"),
        ("Train.init_from=2024-05-01", "2024-05-01"),
        ("Train.init_from=数字", "数字"),
        ("Model.use_bias=True", True),
        ("Model.use_bias=true", True),
        ("Model.use_bias=FALSE", False),
        ("\nMoE.top_k=3\nMoE.num_experts=9\n", 3),
    ],
)
def test_override(override, expected):
    name = override.partition("=")[0].strip()
    found = value(load([], [override]).config, name)
    assert found == expected and type(found) is type(expected)


GRAMMAR = "a value is a number, True, False, None, or a string in quotes"
EMPTY = "an empty value means neither '' nor None nor the default"
UNKNOWN = "does not exist: only fields of the configuration can be set"


def default(name: str) -> str:
    """How a message writes the default of a field, e.g. of 'Train.steps'."""
    return f"{name}={FIELDS[name].field.default!r}"


# An override, and the whole message. `{}` stands for "(command line)".
REFUSED = [
    (
        "Train.steps='10'",
        "Train.steps='10' {} is a string: it takes a whole number. Write"
        " Train.steps=10.",
    ),
    (
        "Train.steps=1e3",
        "Train.steps=1000.0 {} is a decimal number: it takes a whole number. Write"
        " Train.steps=1000.",
    ),
    (
        "MoE.top_k=2.5",
        "MoE.top_k=2.5 {} is a decimal number: it takes a whole number. Write"
        " MoE.top_k=2 or 3.",
    ),
    (
        "MoE.top_k=0.5",
        "MoE.top_k=0.5 {} is a decimal number: it takes a whole number. Write"
        " MoE.top_k=1.",
    ),
    (
        "Train.steps=ten",
        "Train.steps='ten' {} is a string: it takes a whole number. Write "
        + default("Train.steps")
        + ".",
    ),
    (
        "Train.steps=True",
        "Train.steps=True {} is True or False: it takes a whole number. Write "
        + default("Train.steps")
        + ".",
    ),
    (
        "Train.steps=10#5",
        "Train.steps='10#5' {} is a string: it takes a whole number. Write "
        + default("Train.steps")
        + ".",
    ),
    (
        "Train.steps=None",
        "Train.steps=None {} is no value: it takes a whole number. Write "
        + default("Train.steps")
        + ".",
    ),
    (
        "MoE.top_k=[1, 2]",
        "MoE.top_k=[1, 2] {} is a list: it takes a whole number. Write "
        + default("MoE.top_k")
        + ".",
    ),
    (
        "MoE.balance_loss='0.5'",
        "MoE.balance_loss='0.5' {} is a string: it takes a number. Write"
        " MoE.balance_loss=0.5.",
    ),
    (
        "MoE.balance_loss=nan",
        "MoE.balance_loss='nan' {} is a string: it takes a number. Write "
        + default("MoE.balance_loss")
        + ".",
    ),
    (
        "MoE.balance_loss=1e999",
        "MoE.balance_loss=inf {} is no value: NaN and infinity are refused. Set "
        + default("MoE.balance_loss")
        + " (the default).",
    ),
    (
        "MoE.capacity_factor=none",
        "MoE.capacity_factor='none' {} is a string: it takes a number or None. Write"
        " MoE.capacity_factor=None.",
    ),
    (
        "MoE.capacity_factor=0",
        "MoE.capacity_factor=0.0 {} is too small: it must be above 0. Set "
        + default("MoE.capacity_factor")
        + " (the default).",
    ),
    (
        "MoE.num_experts=0",
        "MoE.num_experts=0 {} is too small: it must be at least 1. Set "
        + default("MoE.num_experts")
        + " (the default).",
    ),
    (
        "Train.seed=2147483648",
        "Train.seed=2147483648 {} is too large: it must be at most 2147483647. Set "
        + default("Train.seed")
        + " (the default).",
    ),
    (
        "Model.use_bias=1",
        "Model.use_bias=1 {} is a whole number: it takes True or False. Write"
        " Model.use_bias=True.",
    ),
    (
        "Model.use_bias=off",
        "Model.use_bias='off' {} is a string: it takes True or False. Write"
        " Model.use_bias=False.",
    ),
    (
        "Mesh.expert=Auto",
        "Mesh.expert='Auto' {} is a string: it takes a whole number or 'auto'. Write"
        " Mesh.expert='auto'.",
    ),
    (
        "Optimizer.name=Adam",
        "Optimizer.name='Adam' {} is unknown: it takes 'adamw', 'adafactor' or 'sgd'."
        " Write Optimizer.name='adamw'.",
    ),
    (
        "Optimizer.name=3",
        "Optimizer.name=3 {} is a whole number: it takes 'adamw', 'adafactor' or"
        " 'sgd'. Write " + default("Optimizer.name") + ".",
    ),
    (
        "Train.init_from=None",
        "Train.init_from=None {} is no value: it takes a string in quotes. Write"
        " Train.init_from=''.",
    ),
    (
        "Train.init_from='a",
        'Train.init_from="\'a" {} cannot be read: ' + GRAMMAR + ". Write"
        " Train.init_from='a', for example.",
    ),
    (
        "Train.init_from='a\\nb'",
        "Train.init_from='a\\nb' {} has characters that cannot be printed: text and"
        " paths are printable. Write Train.init_from='ab'.",
    ),
    (
        "Train.init_from=",
        "Train.init_from {} has no value: " + EMPTY + ". Write"
        " \"--gin.Train.init_from=''\", or leave it out.",
    ),
    (
        "MoE.capacity_factor=",
        "MoE.capacity_factor {} has no value: " + EMPTY + ". Write"
        " MoE.capacity_factor=None, or leave it out.",
    ),
    (
        "Train.steps= ",
        "Train.steps {} has no value: "
        + EMPTY
        + ". Write "
        + default("Train.steps")
        + ", or leave it out.",
    ),
    (
        "MoE.num_expert=4",
        "MoE.num_expert {} " + UNKNOWN + ". Write MoE.num_experts.",
    ),
    (
        "moe.num_experts=4",
        "moe.num_experts {} " + UNKNOWN + ". Write MoE.num_experts.",
    ),
    (
        "Model.num_experts=4",
        "Model.num_experts {} " + UNKNOWN + ". Write MoE.num_experts.",
    ),
    (
        "Optimiser.learning_rate=1",
        "Optimiser.learning_rate {} " + UNKNOWN + ". Write Optimizer.learning_rate.",
    ),
    (
        "Train.learning_rte=1",
        "Train.learning_rte {} " + UNKNOWN + ". Write Optimizer.learning_rate.",
    ),
    (
        "Foo.bar=1",
        "Foo.bar {} " + UNKNOWN + ". Write a field of Mesh, Model, MoE, Pipeline,"
        " Balancer, Optimizer, Data, Checkpoint or Train.",
    ),
    (
        "Checkpoint.zzz=1",
        "Checkpoint.zzz {} " + UNKNOWN + ". Write Checkpoint.every_steps,"
        " Checkpoint.keep, Checkpoint.keep_every, Checkpoint.keep_best,"
        " Checkpoint.best_metric or Checkpoint.asynchronous.",
    ),
    (
        "evaluation/MoE.top_k=3",
        "evaluation/MoE.top_k {} has the scope 'evaluation': there is one value for"
        " all, so nothing would use it. Write MoE.top_k.",
    ),
    (
        "num_experts=8",
        "num_experts {} is a macro that nothing uses: a name without a section is a"
        " macro, and must be used. Write MoE.num_experts, or take it out.",
    ),
    (
        "wide=8",
        "wide {} is a macro that nothing uses: a name without a section is a macro,"
        " and must be used. Use it as %wide, or take it out.",
    ),
    (
        "Model.width=%wide",
        "Model.width=%wide {} uses an unknown macro: a macro is bound like a field,"
        " without a section. Bind wide too, or write a value.",
    ),
    (
        "Model.width=-%wide",
        "Model.width='-%wide' {} cannot be read: "
        + GRAMMAR
        + ". Write "
        + default("Model.width")
        + ", for example.",
    ),
    (
        "Model.width=@Mesh()",
        "Model.width=@Mesh() {} refers to an object: a configuration holds values."
        " Write " + default("Model.width") + ", for example.",
    ),
    (
        "MoE.top_k",
        "the override 'MoE.top_k' has no name and value: it has the form"
        " Section.field=value. Write for example MoE.top_k=2.",
    ),
    (
        "import os",
        "the override 'import os' has no name and value: it has the form"
        " Section.field=value. Write for example MoE.top_k=2.",
    ),
]


def error(override: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load([], [override])
    return str(caught.value)


@pytest.mark.parametrize("override, expected", REFUSED, ids=[o for o, _ in REFUSED])
def test_refused_override(override, expected):
    assert error(override) == expected.replace("{}", "(command line)")


def test_every_proposed_value_is_accepted():
    """What a message says to write can be written."""
    tried = 0
    for override, expected in REFUSED:
        better = re.search(r"Write (\w+\.\w+=[^ ,]+?)[,.]?( |$)", expected)
        if better is not None:
            load([], [better[1]])
            tried += 1
        else:
            assert re.search("Write|Set|Use|Bind", expected), override
    assert tried >= 20


def test_very_long_values_are_cut():
    for text in (
        "0x" + "f" * 5000,
        "9" * 5000,
        "(" * 5000,
        "'" + "a" * 5000,
        "x" * 5000,
    ):
        assert len(error(f"MoE.top_k={text}")) < 400
