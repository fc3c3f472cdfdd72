# SPDX-License-Identifier: Apache-2.0
"""The running text, whatever this Python's version of it says."""

import sys
import types

import pytest

from jaxmoe.config import ConfigError
from jaxmoe.data import text


def test_no_paragraph_is_in_both_parts():
    train = {p for block in text.load_text(training=True) for p in block.split("\n")}
    held_out = {
        p for block in text.load_text(training=False) for p in block.split("\n")
    }
    assert not train & held_out
    assert len(held_out) > 20


def test_sizes():
    train, held_out = text.load_text(training=True), text.load_text(training=False)
    assert all(len(block) >= text.BLOCK_CHARACTERS for block in train + held_out)
    assert 0.05 < len(held_out) / len(train) < 0.15
    assert sum(map(len, train)) > 100_000


def test_markup_is_gone():
    everything = "\n".join(text.load_text(training=True))
    for markup in ("`", "::=", ">>>", "****", "====", "\n\n", "  "):
        assert markup not in everything


def test_python_without_its_documentation(monkeypatch):
    """The remedy is named where the help topics are missing or almost empty."""
    for topics in ({}, {"a": "Only one short paragraph of some forty letters."}):
        package = types.ModuleType("pydoc_data")
        package.topics = types.SimpleNamespace(topics=topics)
        monkeypatch.setitem(sys.modules, "pydoc_data", package)
        with pytest.raises(ConfigError, match="blocks of text: at least 10 are needed"):
            text.load_text.__wrapped__(training=True)
    monkeypatch.setitem(sys.modules, "pydoc_data", None)
    with pytest.raises(ConfigError, match=r"or set Data\.lm_weight and"):
        text.load_text.__wrapped__(training=True)
