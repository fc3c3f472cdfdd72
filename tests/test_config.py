# SPDX-License-Identifier: Apache-2.0
"""The fields, what follows from them, and the shipped configurations."""

import dataclasses
import pathlib
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe import config as config_lib
from jaxmoe import config_derived, gin_config
from jaxmoe.config import Config, ConfigError, Model, MoE
from jaxmoe.config_checks import check, check_mesh

CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs"
SHIPPED = sorted(path.stem for path in CONFIGS.glob("*.gin"))


def test_every_field_says_what_it_means():
    for section in config_lib.SECTIONS:
        assert section.__doc__
        for field in dataclasses.fields(section):
            assert len(field.metadata["doc"]) > 8, field.name


@pytest.mark.parametrize(
    "pattern, layers, expected",
    [
        ("moe", 3, "mmm"),
        ("dense,moe", 6, "dmdmdm"),
        (" dense * 2 , moe*3", 5, "ddmmm"),
        ("dense*3,moe*58", 61, "ddd" + "m" * 58),
        ("dense,moe*2", 6, "dmmdmm"),
    ],
)
def test_layer_kinds(pattern, layers, expected):
    kinds = config_derived.layer_kinds(Model(layer_pattern=pattern, num_layers=layers))
    assert "".join(kind[0] for kind in kinds) == expected


@pytest.mark.parametrize("pattern", ["", ",", "moe,", "moe*0", "moe*-1", "moe*", "Moe"])
def test_layer_pattern_that_cannot_be_read(pattern):
    with pytest.raises(ConfigError, match=r"Set Model\.layer_pattern='moe'"):
        config_derived.layer_kinds(Model(layer_pattern=pattern))


@given(
    st.lists(st.sampled_from(["dense", "moe", "dense*2", "moe*3"]), min_size=1),
    st.integers(1, 100),
)
def test_layer_pattern_fills_all_layers_or_none(parts, layers):
    """Never fewer or more layers than asked for; the remedy fills them too."""
    model = Model(layer_pattern=",".join(parts), num_layers=layers)
    try:
        kinds = config_derived.layer_kinds(model)
    except ConfigError as error:
        better = re.search(r"Model\.layer_pattern='([^']*)'\.$", str(error))
        assert better is not None
        kinds = config_derived.layer_kinds(
            dataclasses.replace(model, layer_pattern=better[1])
        )
    assert len(kinds) == layers


def test_resolved_values():
    assert Model(width=64, num_heads=4).head_size == 16
    assert Model(head_dim=7).head_size == 7
    model = Model(ffn_width=100, sequence_length=30)
    assert config_derived.expert_width(model, MoE()) == 100
    assert config_derived.expert_width(model, MoE(expert_width=5)) == 5
    assert config_derived.group_tokens(model, MoE()) == 30
    assert config_derived.group_tokens(model, MoE(group_tokens=10)) == 10


# Layers, hidden, heads, ffn, experts, expert parameters in billions: the table of M6-T
# (arXiv 2105.15082) and M6-10T (arXiv 2110.03888); DeepSeek-V3 (arXiv 2412.19437).
PUBLISHED = {
    "m6_t_base": (5, 1024, 16, 4096, 32, 1.342),
    "m6_t_10b": (10, 1024, 16, 4096, 128, 10.74),
    "m6_t_100b": (24, 1024, 16, 4096, 512, 103.1),
    "m6_t_1t": (24, 1024, 16, 21248, 960, 1002.6),
    "m6_10t": (48, 1024, 16, 9984, 10240, 10050.0),
    "deepseek_v3": (58, 7168, 128, 2048, 256, 653.9),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name):
    config = gin_config.load([str(CONFIGS / f"{name}.gin")]).config
    model, moe = config.model, config.moe
    layers = config_derived.layer_kinds(model).count("moe")
    hidden = config_derived.expert_width(model, moe)
    matrices = 3 if model.activation == "swiglu" else 2
    parameters = layers * moe.num_experts * matrices * model.width * hidden
    *shape, billions = PUBLISHED[name]
    assert [layers, model.width, model.num_heads, hidden, moe.num_experts] == shape
    assert parameters / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    "name, data, expert, pipe",
    [
        ("m6_digits", 2, 4, 1),
        ("digits_shared", 2, 4, 1),
        ("peer_tiny", 2, 4, 1),
        ("peer_mid", 4, 4, 1),
        ("m6_t_base", 1, 16, 1),
        ("m6_t_10b", 1, 64, 1),
        ("m6_t_100b", 1, 64, 1),
        ("m6_t_1t", 1, 64, 8),
        ("m6_10t", 1, 256, 16),
        ("deepseek_v3", 1, 32, 32),
    ],
)
def test_shipped_config_fits_its_hardware(name, data, expert, pipe):
    config = gin_config.load([str(CONFIGS / f"{name}.gin")]).config
    check(config)
    check_mesh(config, data, expert, pipe)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_config_says_what_it_is(name):
    head = (CONFIGS / f"{name}.gin").read_text().partition("\n\n")[0]
    for part in ("Command:", "Hardware:", "Time:", "Expected:"):
        assert f"# {part}" in head


def test_the_default_file_is_the_defaults():
    assert gin_config.load([str(CONFIGS / "m6_digits.gin")]).config == Config()


def test_configuration_needs_no_jax():
    code = "import sys, jaxmoe.gin_config; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
