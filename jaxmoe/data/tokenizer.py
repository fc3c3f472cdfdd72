# SPDX-License-Identifier: Apache-2.0
"""Floor 5. Text to token ids and back.

Every tokenizer has the same eight special ids in front, then its own ids, shifted by
eight. So id 0 is padding for all of them, and a language is asked for by its own token.
Bytes need no file and no training; SentencePiece and Hugging Face files are options.
"""

from __future__ import annotations

import hashlib
import importlib
import pathlib
from collections.abc import Iterable
from typing import Any, Literal, Protocol

from jaxmoe.config import ConfigError

Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = ("en", "zh")

PAD, BOS, EOS, MASK, ENGLISH, CHINESE = range(6)
NUM_SPECIAL = 8  # two are reserved

_LANGUAGE_IDS = {"en": ENGLISH, "zh": CHINESE}


class Tokenizer(Protocol):
    """What the data needs of a tokenizer."""

    pad_id: int
    bos_id: int
    eos_id: int
    mask_id: int
    vocab_size: int
    fingerprint: str

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special ids."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids up to the first end; other specials are left out."""
        ...

    def language_id(self, language: Language) -> int:
        """The id that asks for a language."""
        ...


class _Specials:
    """The special ids, and the part of encoding and decoding that they need."""

    pad_id, bos_id, eos_id, mask_id = PAD, BOS, EOS, MASK

    def __init__(self, own_ids: int, fingerprint: str):
        self.vocab_size = NUM_SPECIAL + own_ids
        self.fingerprint = fingerprint

    def language_id(self, language: Language) -> int:
        if language not in _LANGUAGE_IDS:
            raise ValueError(f"language={language!r} is not one of {LANGUAGES}.")
        return _LANGUAGE_IDS[language]

    def _own(self, ids: Iterable[int]) -> list[int]:
        """The tokenizer's own ids up to the end; what no text has is left out."""
        own = []
        for i in ids:
            if i == EOS:
                break
            if NUM_SPECIAL <= i < self.vocab_size:
                own.append(int(i) - NUM_SPECIAL)
        return own


class ByteTokenizer(_Specials):
    """One id per UTF-8 byte: 264 ids, any language, no file."""

    def __init__(self):
        super().__init__(256, "bytes")

    def encode(self, text: str) -> list[int]:
        return [byte + NUM_SPECIAL for byte in text.encode("utf-8", errors="replace")]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(self._own(ids)).decode("utf-8", errors="replace")


class SentencePieceTokenizer(_Specials):
    """A SentencePiece model file."""

    def __init__(self, file: pathlib.Path):
        package = _package("sentencepiece", file)
        content = _content("sentencepiece", file)
        try:
            self._processor = package.SentencePieceProcessor(model_proto=content)
        except RuntimeError as error:
            raise _unreadable("sentencepiece", file, error) from error
        super().__init__(
            self._processor.get_piece_size(), _hashed("sentencepiece", content)
        )

    def encode(self, text: str) -> list[int]:
        return [i + NUM_SPECIAL for i in self._processor.encode(text)]

    def decode(self, ids: Iterable[int]) -> str:
        return self._processor.decode(self._own(ids))


class HuggingFaceTokenizer(_Specials):
    """A `tokenizer.json` of the Hugging Face package `tokenizers`."""

    def __init__(self, file: pathlib.Path):
        package = _package("tokenizers", file)
        content = _content("tokenizers", file)
        try:
            self._tokenizer = package.Tokenizer.from_buffer(content)
        except Exception as error:  # the package raises nothing narrower
            raise _unreadable("tokenizers", file, error) from error
        super().__init__(
            self._tokenizer.get_vocab_size(), _hashed("tokenizers", content)
        )

    def encode(self, text: str) -> list[int]:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return [i + NUM_SPECIAL for i in encoding.ids]

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode(self._own(ids))


def make_tokenizer(spec: str) -> Tokenizer:
    """Makes the tokenizer that `Data.tokenizer` names.

    Args:
      spec: 'bytes', 'sentencepiece:FILE' or 'tokenizers:FILE'.

    Raises:
      ConfigError: if the kind is unknown, its package is not installed, or the file is
        missing or not such a file.
    """
    kind, _, file = spec.partition(":")
    if spec == "bytes":
        return ByteTokenizer()
    if kind == "sentencepiece" and file:
        return SentencePieceTokenizer(pathlib.Path(file))
    if kind == "tokenizers" and file:
        return HuggingFaceTokenizer(pathlib.Path(file))
    raise ConfigError(
        f"Data.tokenizer={spec!r} is unknown: it must be 'bytes',"
        " 'sentencepiece:FILE' or 'tokenizers:FILE'. Set Data.tokenizer to one of them."
    )


def _package(name: str, file: pathlib.Path) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"Data.tokenizer='{name}:{file}' needs the package {name!r}, which is not"
            " installed. Run: pip install 'jaxmoe[tokenizers]', or set"
            " Data.tokenizer='bytes'."
        ) from error


def _content(kind: str, file: pathlib.Path) -> bytes:
    try:
        return file.expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(
            f"Data.tokenizer='{kind}:{file}' cannot be read ({error.strerror}): the"
            " part behind the colon must be a readable file. Give its path, or set"
            " Data.tokenizer='bytes'."
        ) from error


def _unreadable(kind: str, file: pathlib.Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"Data.tokenizer='{kind}:{file}' is not a file of {kind}: {error}. Give a file"
        " that this package wrote, or set Data.tokenizer='bytes'."
    )


def _hashed(kind: str, content: bytes) -> str:
    """What identifies a tokenizer wherever its file lies."""
    return f"{kind}:{hashlib.sha256(content).hexdigest()[:16]}"
