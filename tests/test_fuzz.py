# SPDX-License-Identifier: Apache-2.0
"""Thousands of configurations, as text and as commands: right, or the user's mistake.

Whatever is given ends with exit code 0, or with 2 and one message; never with a stack
trace. Three in ten at least are right, so that all checks are reached.
"""

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe import cluster, config_checks, gin_config
from jaxmoe.config import ConfigError
from jaxmoe.config_values import FIELDS
from jaxmoe.mesh import resolve_sizes
from tests.helpers import ROOT

# Trains nothing: ends where JAX would be imported.
COMMAND = """
import sys
from jaxmoe import cli
cli._run = lambda config, workdir, config_text: 0
sys.exit(cli.main(sys.argv[1:]))
"""


def plausible(name):
    """Values of the right kind, most of them in range and many that fit the others."""
    field = FIELDS[name]
    default, meta = field.field.default, field.field.metadata
    values = [st.just(default), *map(st.just, field.choices)]
    if field.optional:
        values.append(st.none())
    if field.kind is bool:
        values.append(st.booleans())
    elif field.kind is int:
        low = int(meta["low"] if meta["low"] is not None else 0)
        values += [st.sampled_from([low, 1, 2, 4, 8, 64]), st.integers(low, low + 99)]
        if isinstance(default, int):
            values.append(st.sampled_from([default, 2 * default]))
    elif field.kind is float:
        values.append(st.floats(0, 2, allow_subnormal=False))
    elif not field.choices:
        values.append(st.sampled_from(["", "dense", "dense,moe", "text", "1-3"]))
    return st.tuples(st.just(name), st.one_of(values).map(repr))


WORDS = st.one_of(
    st.sampled_from(["", "'", "None", "1e3", "-1", "nan", "[1", "true", "%x", "@f()"]),
    st.integers().map(str),
    st.floats().map(str),
    st.text(max_size=8),
)
RIGHT = st.sampled_from(sorted(FIELDS)).flatmap(plausible)
WRONG = st.tuples(
    st.one_of(st.sampled_from(sorted(FIELDS)), st.text(max_size=12)), WORDS
)
BINDINGS = st.one_of(
    st.lists(RIGHT, max_size=2, unique_by=lambda pair: pair[0]),
    st.lists(RIGHT, max_size=2, unique_by=lambda pair: pair[0]),
    st.lists(st.one_of(RIGHT, RIGHT, WRONG), max_size=4),
)


def is_right(files, bindings, devices=8):
    """Whether it is a configuration for so many devices; else a ConfigError tells."""
    try:
        loaded = gin_config.load(files, bindings)
        config_checks.check(loaded.config)
        cluster.find(loaded.config.mesh)
        if devices:
            resolve_sizes(loaded.config, devices)
    except ConfigError as error:
        assert str(error).strip()
        return False
    return True


def as_text(bindings):
    return [f"{name}={value}" for name, value in bindings]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["overrides", "file"])
def test_fuzzed_configurations(form, tmp_path):
    outcomes = []
    file = tmp_path / "fuzz.gin"

    @settings(max_examples=1000)
    @given(BINDINGS)
    def fuzz(bindings):
        texts = as_text(bindings)
        if form == "file":
            file.write_bytes("\n".join(texts).encode("utf-8", "surrogatepass"))
            outcomes.append(is_right([str(file)], ()))
        else:
            outcomes.append(is_right((), texts))

    fuzz()
    assert len(outcomes) >= 1000
    assert 0.3 <= sum(outcomes) / len(outcomes) <= 0.9


@pytest.mark.slow
def test_fuzzed_commands(tmp_path):
    """50 of them as processes: the same verdict as here, one message, no trace."""
    found = []

    @settings(max_examples=50)
    @given(BINDINGS)
    def collect(bindings):
        texts = as_text(bindings)
        if len(found) < 50 and not any("\0" in text for text in texts):
            encoded = [text.encode("utf-8", "replace").decode() for text in texts]
            found.append(encoded)

    while len(found) < 50:
        collect()
    codes = [outcome(texts, tmp_path) for texts in found]
    assert sum(codes) / 2 <= 0.7 * len(codes), "at least 30 % are right"
    for texts, code in zip(found, codes, strict=True):
        assert (code == 0) == is_right((), texts, devices=0), texts


def outcome(texts, folder):
    """The exit code of a command, of which nothing but the checks is carried out."""
    options = [f"--gin.{text}" for text in texts]
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "train", f"--workdir={folder}/run", *options],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "Traceback" not in done.stderr, (texts, done.stderr)
    assert done.returncode in (0, 2), (texts, done.stderr)
    if done.returncode == 2:
        assert done.stderr.startswith("jaxmoe: "), texts
    return done.returncode
