# SPDX-License-Identifier: Apache-2.0
"""Floor 5. What a record of a source of one's own may hold, whatever it is kept in.

  image      a picture
  en, zh     text in that language: one, or a list of several
  text       the same in the language that `language` names, English if it is not there
  tasks      the tasks it is for; if it is not there: captioning and image denoising
             with an image, text denoising and language modelling without

What does not fit is a `BrokenRecord`: it is skipped, counted and named.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jaxmoe.data.tasks import IMAGE_TASKS, TASKS
from jaxmoe.data.tokenizer import LANGUAGES, Language

_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can spell them, UTF-8 cannot


class BrokenRecord(Exception):
    """Why a record cannot be used, in a few words."""


class DataError(RuntimeError):
    """Too many records are broken to go on: exit code 1."""


class Fields(NamedTuple):
    """The texts of a record with their languages, and the tasks it is for."""

    texts: tuple[tuple[Language, str], ...]
    tasks: tuple[str, ...]


def parse_fields(raw: Mapping[str, Any], *, has_image: bool) -> Fields:
    """Checks the fields of a record. What is None counts as absent; others are ignored.

    Args:
      raw: The fields by name, but for the image.
      has_image: Whether there is one.

    Raises:
      BrokenRecord: if there is no text, or something has the wrong type.
    """
    language = raw.get("language")
    if language is None:
        language = "en"
    if language not in LANGUAGES:
        raise BrokenRecord(f"language {_shown(language)} is not one of {LANGUAGES}")
    named: tuple[tuple[str, Language], ...] = (
        *((name, name) for name in LANGUAGES),
        ("text", language),
    )
    texts: list[tuple[Language, str]] = [
        (of, text) for name, of in named for text in _texts(name, raw.get(name))
    ]
    if not texts:
        raise BrokenRecord("it has no text")
    tasks = raw.get("tasks")
    if tasks is None:
        return Fields(
            tuple(texts),
            tuple(name for name in TASKS if (name in IMAGE_TASKS) == has_image),
        )
    if not isinstance(tasks, list) or not tasks:
        raise BrokenRecord(f"'tasks' is {_shown(tasks)}, not a list of tasks")
    for name in tasks:
        if name not in TASKS:
            raise BrokenRecord(f"task {_shown(name)} is not one of {TASKS}")
        if name in IMAGE_TASKS and not has_image:
            raise BrokenRecord(f"task {name!r} needs an image, and there is none")
    return Fields(tuple(texts), tuple(name for name in TASKS if name in tasks))


def _texts(name: str, value: Any) -> Iterator[str]:
    if value is None:
        return
    for text in value if isinstance(value, list) else [value]:
        if not isinstance(text, str):
            raise BrokenRecord(f"{name!r} is {_shown(text)}, not text")
        if not text.strip():
            raise BrokenRecord(f"{name!r} is empty")
        if not text.isascii() and _SURROGATE.search(text):
            raise BrokenRecord(f"{name!r} has half a character (a surrogate)")
        yield text.strip()


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
