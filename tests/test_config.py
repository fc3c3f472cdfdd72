# SPDX-License-Identifier: Apache-2.0
"""The fields, the cross-field checks and their messages, and the shipped configs."""

import dataclasses
import math
import pathlib
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe import config as config_lib
from jaxmoe import gin_config
from jaxmoe.config import Config, ConfigError, Model, MoE, check, check_mesh

CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs"
SHIPPED = sorted(path.stem for path in CONFIGS.glob("*.gin"))


def changed(**values: object) -> Config:
    """The default configuration with values changed, as `Model__width=32`."""
    config = Config()
    for name, value in values.items():
        section, field = name.split("__")
        part = dataclasses.replace(getattr(config, section.lower()), **{field: value})
        config = dataclasses.replace(config, **{section.lower(): part})
    return config


def message(config: Config) -> str:
    try:
        check(config)
    except ConfigError as error:
        return str(error)
    return ""


def test_every_field_says_what_it_means():
    for section in config_lib.SECTIONS:
        assert section.__doc__
        for field in dataclasses.fields(section):
            assert len(field.metadata["doc"]) > 8, field.name


def test_the_default_passes():
    check(Config())


# Values that are wrong together, and the whole message.
MISTAKES = [
    (
        {"Mesh__expert": 3},
        "MoE.num_experts=8 cannot be split evenly by Mesh.expert=3: it must be a"
        " multiple. Set MoE.num_experts=6 or 9, or Mesh.expert=1, 2, 4 or 8.",
    ),
    (
        {"MoE__num_experts": 60, "Mesh__expert": 8},
        "MoE.num_experts=60 cannot be split evenly by Mesh.expert=8: it must be a"
        " multiple. Set MoE.num_experts=56 or 64, or Mesh.expert=3, 4, 5, 6, 10 or 12.",
    ),
    (
        {"MoE__top_k": 9},
        "MoE.top_k=9 is more than MoE.num_experts=8: a token visits an expert once."
        " Set MoE.top_k=8 or less, or MoE.num_experts=9.",
    ),
    (
        {"MoE__top_k": 3, "MoE__router": "prototype"},
        "MoE.num_experts=8 cannot be split evenly by MoE.top_k=3: with"
        " MoE.router='prototype' it must be a multiple. Set MoE.num_experts=6 or 9, or"
        " MoE.top_k=1, 2, 4 or 8.",
    ),
    (
        {"MoE__num_groups": 3, "MoE__router": "grouped_sigmoid"},
        "MoE.num_experts=8 cannot be split evenly by MoE.num_groups=3: with"
        " MoE.router='grouped_sigmoid' it must be a multiple. Set MoE.num_experts=6 or"
        " 9, or MoE.num_groups=1, 2, 4 or 8.",
    ),
    (
        {"MoE__num_groups": 4, "MoE__top_groups": 5, "MoE__router": "grouped_sigmoid"},
        "MoE.top_groups=5 is more than MoE.num_groups=4: groups are kept out of those"
        " that there are. Set MoE.top_groups=4 or less.",
    ),
    (
        {"MoE__num_groups": 4, "MoE__top_k": 3, "MoE__router": "grouped_sigmoid"},
        "MoE.top_k=3 is more than the 2 experts in MoE.top_groups=1 of MoE.num_groups=4"
        " groups of MoE.num_experts=8: a token chooses inside the groups that it keeps."
        " Set MoE.top_k=2 or less, or MoE.top_groups=2.",
    ),
    (
        {"MoE__bias_update_rate": 0.001},
        "MoE.bias_update_rate=0.001 has no effect with MoE.router='top_k': only"
        " MoE.router='grouped_sigmoid' uses it. Set MoE.bias_update_rate=0.0, or"
        " MoE.router='grouped_sigmoid'.",
    ),
    (
        {"MoE__normalize_weights": True, "MoE__router": "prototype"},
        "MoE.normalize_weights=True has no effect with MoE.router='prototype': only"
        " MoE.router='top_k' uses it. Set MoE.normalize_weights=False, or"
        " MoE.router='top_k'.",
    ),
    (
        {"MoE__group_tokens": 100},
        "MoE.group_tokens=100 neither divides nor is a multiple of"
        " Model.sequence_length=48: routing groups are whole sequences or whole parts"
        " of one. Set MoE.group_tokens=96 or 144, or 'auto'.",
    ),
    (
        {"MoE__group_tokens": 480},
        "MoE.group_tokens=480 does not divide the tokens of a device, which are 3072 ="
        " Data.batch_size=64 / Train.accumulation=1 / (Mesh.data=1 x Mesh.expert=1)"
        " sequences of Model.sequence_length=48: a routing group lies inside one"
        " microbatch of one device. Set MoE.group_tokens=48, 96, 192, 384, 768 or 1536,"
        " or 'auto'.",
    ),
    (
        {"Model__num_layers": 6, "Mesh__pipe": 4},
        "Mesh.pipe=4 cannot split Model.num_layers=6 layers: this version has no"
        " pipeline, so every device holds all layers. Set Mesh.pipe=1.",
    ),
    (
        {"Data__batch_size": 10, "Mesh__data": 4},
        "Data.batch_size=10 / Train.accumulation=1 sequences cannot be split over"
        " (Mesh.data=4 x Mesh.expert=1) devices: the batch must be a multiple of"
        " 1 x 4 = 4. Set Data.batch_size=8 or 12, or Mesh.data x Mesh.expert = 1, 2, 5"
        " or 10.",
    ),
    (
        {"Data__batch_size": 8, "Train__accumulation": 3},
        "Data.batch_size=8 cannot be split evenly by Train.accumulation=3: it must be a"
        " multiple. Set Data.batch_size=6 or 9, or Train.accumulation=1, 2, 4 or 8.",
    ),
    (
        {"Model__width": 62},
        "Model.width=62 cannot be split evenly by Model.num_heads=4: with"
        " Model.head_dim='auto' it must be a multiple. Set Model.width=60 or 64, or"
        " Model.num_heads=1, 2, 31 or 62.",
    ),
    (
        {"Model__sequence_length": 17},
        "Model.sequence_length=17 has no room for text behind Model.num_patches=16: a"
        " sequence holds the patches and at least 2 tokens. Set"
        " Model.sequence_length=18 or more.",
    ),
    (
        {"Model__num_layers": 60, "Model__layer_pattern": "dense*3,moe*58"},
        "Model.layer_pattern='dense*3,moe*58' names 61 layers, which cannot fill"
        " Model.num_layers=60: the pattern is repeated a whole number of times. Set"
        " Model.num_layers=61, or Model.layer_pattern='dense*3,moe*57'.",
    ),
    (
        {"Model__layer_pattern": "dense,mo*3"},
        "Model.layer_pattern='dense,mo*3' has the part 'mo*3': its parts are 'dense' or"
        " 'moe', each optionally '*N' with N from 1 on. Set Model.layer_pattern='moe'"
        " or, for example, 'dense,moe*3'.",
    ),
    (
        {"Model__num_patches": 0},
        "Model.num_patches=0 and Model.patch_dim=4 do not fit the images of"
        " Data.source='digits' (Data.caption_weight=0.75,"
        " Data.image_denoise_weight=0.05): with Data.patch_size=2 an image has 16"
        " patches of 4 numbers. Set Model.num_patches=16 and Model.patch_dim=4, or"
        " Data.source='text' for no images.",
    ),
    (
        {"Data__patch_size": 3},
        "Data.patch_size=3 does not divide the images of 8 x 8 pixels: an image is cut"
        " into whole patches. Set Data.patch_size=1, 2, 4 or 8.",
    ),
    (
        {
            "Data__source": "text",
            "Data__lm_weight": 0.0,
            "Data__text_denoise_weight": 0.0,
        },
        "Data.text_denoise_weight=0.0, Data.lm_weight=0.0 choose no task: with"
        " Data.source='text' one of them must be above 0. Set Data.lm_weight=1.0.",
    ),
    (
        {"Data__held_out": 1797},
        "Data.held_out=1797 is too large: it must be at most 1796. Set"
        " Data.held_out=297 (the default).",
    ),
    (
        {"Mesh__data": 0},
        "Mesh.data=0 is too small: it must be at least 1. Set Mesh.data='auto' (the"
        " default).",
    ),
    (
        {"Optimizer__beta1": 1.0},
        "Optimizer.beta1=1.0 is too large: it must be below 1. Set Optimizer.beta1=0.9"
        " (the default).",
    ),
    (
        {"Optimizer__clip_norm": 0.0},
        "Optimizer.clip_norm=0.0 is too small: it must be above 0. Set"
        " Optimizer.clip_norm=1.0 (the default).",
    ),
    (
        {"Optimizer__learning_rate": math.nan},
        "Optimizer.learning_rate=nan is no value: NaN and infinity are refused. Set"
        " Optimizer.learning_rate=0.003 (the default).",
    ),
    (
        {"Data__seed": 2**31},
        "Data.seed=2147483648 is too large: it must be at most 2147483647. Set"
        " Data.seed=0 (the default).",
    ),
    (
        {"Data__tokenizer": "sentencepice:x"},
        "Data.tokenizer='sentencepice:x' is unknown: it must be 'bytes',"
        " 'sentencepiece:FILE' or 'tokenizers:FILE'. Set"
        " Data.tokenizer='sentencepiece:FILE'.",
    ),
    (
        {"Data__tokenizer": "tokenizers:no/file"},
        "Data.tokenizer='tokenizers:no/file' names no file: the part behind the colon"
        " is a file's path, and there is no 'no/file'. Give the right path, or set"
        " Data.tokenizer='bytes'.",
    ),
    (
        {"Train__init_from": "no/run"},
        "Train.init_from='no/run' is not a folder: it is the run folder (--workdir) of"
        " an earlier training. Give its path, or set Train.init_from='' to start from"
        " random weights.",
    ),
]


@pytest.mark.parametrize(
    "values, expected", MISTAKES, ids=["-".join(values) for values, _ in MISTAKES]
)
def test_message(values, expected):
    assert message(changed(**values)) == expected


def test_existing_files_pass(tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    check(changed(Data__tokenizer=f"tokenizers:{file}", Train__init_from=str(tmp_path)))


@pytest.mark.parametrize(
    "values",
    [
        {"Model__width": 62, "Model__head_dim": 16},
        {"Model__layer_pattern": "dense", "MoE__top_k": 9},  # no layer has experts
        {"MoE__group_tokens": 24},
        {"MoE__group_tokens": 96},
        {"Data__source": "text", "Model__num_patches": 0},
        {"Data__source": "text", "Model__patch_dim": 2048},
        {"Train__steps": 0, "Data__caption_weight": 0.0, "Model__patch_dim": 4},
        {"Data__patch_size": 4, "Model__num_patches": 4, "Model__patch_dim": 16},
    ],
    ids=str,
)
def test_unusual_but_right(values):
    check(changed(**values))


def test_check_mesh_sees_the_resolved_sizes():
    """What passes with sizes left open can fail on the devices that are there."""
    config = changed(MoE__group_tokens=1536)
    check(config)
    check_mesh(config, 1, 2, 1)
    with pytest.raises(ConfigError, match=r"1536 does not divide .* 768 = .*data=2 x"):
        check_mesh(config, 2, 2, 1)
    with pytest.raises(ConfigError, match=r"Mesh\.expert=3"):
        check_mesh(config, 1, 3, 1)
    with pytest.raises(ConfigError, match=r"Mesh\.pipe=2 .* Model\.num_layers=4"):
        check_mesh(config, 1, 2, 2)


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
    kinds = config_lib.layer_kinds(Model(layer_pattern=pattern, num_layers=layers))
    assert "".join(kind[0] for kind in kinds) == expected


@pytest.mark.parametrize("pattern", ["", ",", "moe,", "moe*0", "moe*-1", "moe*", "Moe"])
def test_layer_pattern_that_cannot_be_read(pattern):
    with pytest.raises(ConfigError, match=r"Set Model\.layer_pattern='moe'"):
        config_lib.layer_kinds(Model(layer_pattern=pattern))


@given(
    st.lists(st.sampled_from(["dense", "moe", "dense*2", "moe*3"]), min_size=1),
    st.integers(1, 100),
)
def test_layer_pattern_fills_all_layers_or_none(parts, layers):
    """Never fewer or more layers than asked for; the remedy fills them too."""
    model = Model(layer_pattern=",".join(parts), num_layers=layers)
    try:
        kinds = config_lib.layer_kinds(model)
    except ConfigError as error:
        better = re.search(r"Model\.layer_pattern='([^']*)'\.$", str(error))
        assert better is not None
        kinds = config_lib.layer_kinds(
            dataclasses.replace(model, layer_pattern=better[1])
        )
    assert len(kinds) == layers


def test_resolved_values():
    assert Model(width=64, num_heads=4).head_size == 16
    assert Model(head_dim=7).head_size == 7
    model = Model(ffn_width=100, sequence_length=30)
    assert config_lib.expert_width(model, MoE()) == 100
    assert config_lib.expert_width(model, MoE(expert_width=5)) == 5
    assert config_lib.group_tokens(model, MoE()) == 30
    assert config_lib.group_tokens(model, MoE(group_tokens=10)) == 10


@st.composite
def sizes(draw) -> Config:
    """Sizes that often do not fit together."""
    small = st.integers(1, 12)
    router = draw(st.sampled_from(["top_k", "prototype", "grouped_sigmoid"]))
    grouped = router == "grouped_sigmoid"
    return changed(
        MoE__router=router,
        MoE__num_experts=draw(st.integers(1, 64)),
        MoE__top_k=draw(small),
        MoE__num_groups=draw(small) if grouped else 1,
        MoE__top_groups=draw(small) if grouped else 1,
        MoE__group_tokens=draw(st.sampled_from(["auto", 12, 48, 96, 240])),
        Data__batch_size=draw(st.integers(1, 100)),
        Train__accumulation=draw(small),
        Mesh__data=draw(st.sampled_from(["auto", 1, 2, 3, 4])),
        Mesh__expert=draw(st.sampled_from(["auto", 1, 2, 3, 4, 8])),
        Model__num_heads=draw(small),
    )


@settings(max_examples=300)
@given(sizes())
def test_the_remedies_work(config):
    """Every single value that a message proposes ends that complaint."""
    text, name = message(config), ""
    remedy = (
        text.rpartition(". Set ")[2].removesuffix(".").replace(" (the default)", "")
    )
    for word in re.split(r",? or |, ", remedy):
        new_name, equals, value = word.rpartition("=")
        name = new_name if equals else name
        if not re.fullmatch(r"\w+\.\w+", name) or value in ("less", "more"):
            continue
        new = int(value) if value.isdigit() else value.strip("'")
        section, field = name.split(".")
        old_part = getattr(config, section.lower())
        part = dataclasses.replace(old_part, **{field: new})
        better = message(dataclasses.replace(config, **{section.lower(): part}))
        fact, new_fact = (
            re.sub(r"\d+", "N", m.partition(":")[0]) for m in (text, better)
        )
        assert fact != new_fact, f"{text}\n{name}={new}\n{better}"


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
    layers = config_lib.layer_kinds(model).count("moe")
    hidden = config_lib.expert_width(model, moe)
    matrices = 3 if model.activation == "swiglu" else 2
    parameters = layers * moe.num_experts * matrices * model.width * hidden
    *shape, billions = PUBLISHED[name]
    assert [layers, model.width, model.num_heads, hidden, moe.num_experts] == shape
    assert parameters / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    "name, data, expert",
    [
        ("m6_digits", 2, 4),
        ("digits_shared", 2, 4),
        ("peer_tiny", 2, 4),
        ("m6_t_base", 2, 4),
        ("m6_t_10b", 2, 32),
        ("m6_t_100b", 2, 32),
        ("m6_t_1t", 4, 192),
        ("m6_10t", 2, 2048),
        ("deepseek_v3", 2, 256),
    ],
)
def test_shipped_config_fits_its_hardware(name, data, expert):
    config = gin_config.load([str(CONFIGS / f"{name}.gin")]).config
    check(config)
    check_mesh(config, data, expert, 1)


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
