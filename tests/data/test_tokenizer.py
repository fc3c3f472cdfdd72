# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: what goes in comes out, and the special ids are the same for all."""

import io
import sys

import hypothesis
import pytest
from hypothesis import strategies as st

from jaxmoe.config import ConfigError
from jaxmoe.data import digits
from jaxmoe.data.tokenizer import LANGUAGES, NUM_SPECIAL, make_tokenizer

TEXT = [digits.caption(i, language) for i in range(10) for language in LANGUAGES]


@pytest.fixture(scope="module")
def sentencepiece_file(tmp_path_factory):
    package = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    package.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT * 4),
        model_writer=model,
        vocab_size=80,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    file = tmp_path_factory.mktemp("sentencepiece") / "tiny.model"
    file.write_bytes(model.getvalue())
    return file


@pytest.fixture(scope="module")
def tokenizers_file(tmp_path_factory):
    package = pytest.importorskip("tokenizers")
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    alphabet = package.pre_tokenizers.ByteLevel.alphabet()
    trainer = package.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    file = tmp_path_factory.mktemp("tokenizers") / "tokenizer.json"
    tokenizer.save(str(file))
    return file


def check_contract(tokenizer):
    """Specials lie below the tokenizer's own ids, and decoding ends at the end."""
    special = [tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.mask_id]
    special += [tokenizer.language_id(language) for language in LANGUAGES]
    assert sorted(special) == list(range(6))
    assert tokenizer.pad_id == 0
    for text in TEXT:
        ids = tokenizer.encode(text)
        assert all(NUM_SPECIAL <= i < tokenizer.vocab_size for i in ids)
        assert tokenizer.decode(ids) == text
        begun = [tokenizer.language_id("zh"), *ids, tokenizer.eos_id, *ids, 0]
        assert tokenizer.decode(begun) == text
    assert tokenizer.decode([tokenizer.vocab_size, -1, tokenizer.mask_id]) == ""


def test_bytes_contract():
    tokenizer = make_tokenizer("bytes")
    assert tokenizer.vocab_size == 264
    assert tokenizer.fingerprint == "bytes"
    check_contract(tokenizer)


@hypothesis.given(st.text())
def test_bytes_round_trip(text):
    tokenizer = make_tokenizer("bytes")
    # Only surrogates have no bytes.
    expected = text.encode(errors="replace").decode()
    assert tokenizer.decode(tokenizer.encode(text)) == expected


@hypothesis.given(st.lists(st.integers(-5, 400)))
def test_bytes_decode_anything(ids):
    """Whatever a model generates can be shown."""
    assert isinstance(make_tokenizer("bytes").decode(ids), str)


def test_invalid_utf8_is_replaced():
    tokenizer = make_tokenizer("bytes")
    assert tokenizer.decode(tokenizer.encode("数字")[:4]) == "数\ufffd"


def test_unknown_language():
    with pytest.raises(ValueError, match="'fr' is not one of"):
        make_tokenizer("bytes").language_id("fr")


# The binding of sentencepiece warns at its first import on newer Pythons.
@pytest.mark.filterwarnings("ignore:builtin type:DeprecationWarning")
def test_sentencepiece(sentencepiece_file):
    tokenizer = make_tokenizer(f"sentencepiece:{sentencepiece_file}")
    assert tokenizer.fingerprint.startswith("sentencepiece:")
    check_contract(tokenizer)


def test_tokenizers(tokenizers_file):
    tokenizer = make_tokenizer(f"tokenizers:{tokenizers_file}")
    assert tokenizer.fingerprint.startswith("tokenizers:")
    assert tokenizer.vocab_size == NUM_SPECIAL + 300
    check_contract(tokenizer)


@pytest.mark.filterwarnings("ignore:builtin type:DeprecationWarning")
@pytest.mark.parametrize("kind", ["sentencepiece", "tokenizers"])
def test_bad_files(kind, tmp_path):
    pytest.importorskip(kind)
    with pytest.raises(ConfigError, match=r"cannot be read .*No such file"):
        make_tokenizer(f"{kind}:{tmp_path / 'none'}")
    other = tmp_path / "other"
    other.write_bytes(b"something else")
    with pytest.raises(ConfigError, match=f"is not a file of {kind}"):
        make_tokenizer(f"{kind}:{other}")


@pytest.mark.parametrize("kind", ["sentencepiece", "tokenizers"])
def test_package_missing(kind, monkeypatch):
    monkeypatch.setitem(sys.modules, kind, None)
    with pytest.raises(ConfigError, match=r"pip install 'jaxmoe\[tokenizers\]'"):
        make_tokenizer(f"{kind}:file")


@pytest.mark.parametrize("spec", ["", "byte", "bytes:x", "tokenizers:", "spm:file"])
def test_unknown_kind(spec):
    with pytest.raises(ConfigError, match="must be 'bytes', 'sentencepiece:FILE'"):
        make_tokenizer(spec)
