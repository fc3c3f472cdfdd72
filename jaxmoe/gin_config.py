# SPDX-License-Identifier: Apache-2.0
"""Floor 0. The configuration's text: gin files and overrides to `Config`, and back.

The gin library reads the text, and its configurables make the dataclasses. Between the
two stands what gin would let pass: every value must have its field's type and range,
every name must be used, and every error is a `ConfigError` of fact, rule and remedy.

One source (a file, or the command line as a whole) binds a name once. Between sources
the last one wins: an included file, its file, a later file, the command line. Where a
value comes from is kept as its provenance.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pathlib
import re
import threading
import tokenize
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import gin
from gin import config_parser

from jaxmoe.config import SECTIONS, Config
from jaxmoe.config_base import (
    ConfigError,
    choice,
    mistake,
    nearest,
    printable,
    shown,
    shown_path,
)
from jaxmoe.config_values import FIELDS, check_name, typed

# Gin has no types:
# pyright: reportMissingTypeStubs=false, reportIncompatibleMethodOverride=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

COMMAND_LINE = "command line"
DEFAULT = "default"

_MODULE = "jaxmoe"  # stands before our names in gin's registry
_CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs"
_LOCK = threading.Lock()  # gin's state is global
_ATTRIBUTES = [field.name for field in dataclasses.fields(Config)]
_SECTIONS = dict(zip(SECTIONS, _ATTRIBUTES, strict=True))

with gin.unlock_config():
    for _section in SECTIONS:
        gin.register(_section, module=_MODULE)


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A configuration, and where its values come from.

    Attributes:
      config: The configuration.
      provenance: For every field, as 'MoE.top_k': 'default', 'FILE:LINE' or 'command
        line', and the other value that it replaced, if any.
    """

    config: Config
    provenance: Mapping[str, str]


class _Binding(NamedTuple):
    name: str  # 'MoE.top_k', or without a dot a macro
    value: Any
    place: str  # 'FILE:LINE' or 'command line'


class _Reference(NamedTuple):
    """What gin has in place of a value: `%name`, a macro, or `@name` and `@name()`."""

    name: str
    text: str

    def __repr__(self) -> str:
        return self.text


class _Values(config_parser.ParserDelegate):
    """Keeps references as they are: reading does not touch gin's state."""

    def configurable_reference(
        self, scoped_configurable_name: str, evaluate: bool
    ) -> _Reference:
        return _Reference("", f"@{scoped_configurable_name}{'()' if evaluate else ''}")

    def macro(self, macro_name: str) -> _Reference:
        return _Reference(macro_name, f"%{macro_name}")


class _UnreadableError(Exception):
    """Gin cannot read a text; the argument is the line, or None."""


def load(gin_files: Sequence[str] = (), bindings: Sequence[str] = ()) -> Loaded:
    """Reads a configuration. What nothing sets has its default.

    Args:
      gin_files: Paths; a later file wins over an earlier one. Without any,
        `configs/m6_digits.gin` is read if it is there; it agrees with the defaults.
      bindings: Overrides as on the command line, 'MoE.top_k=2'. A text that is no
        Python value counts as a string. Several lines in one string are read like a
        file.

    Raises:
      ConfigError: for a mistake in text, names, types or ranges. Gin's own state is
        then what it was before.
    """
    assert not isinstance(gin_files, str) and not isinstance(bindings, str)
    default = _CONFIGS / "m6_digits.gin"
    files = [os.fspath(file) for file in gin_files]
    if not files and default.is_file():
        files = [str(default)]
    with _LOCK:
        found = [binding for file in files for binding in _file(file, ())]
        found += _command_line(bindings)
        values, provenance = _settle(found)
        return Loaded(_construct(values), provenance)


def to_gin(config: Config, provenance: Mapping[str, str] | None = None) -> str:
    """Writes every field as text, which `load` reads back to an equal object.

    Args:
      config: The configuration.
      provenance: Where the values come from, as `load` tells; becomes comments.
    """
    lines = ["# The whole configuration. Read it back with --gin_file=FILE"]
    for section, attribute in _SECTIONS.items():
        lines += ["", f"# {(section.__doc__ or '').splitlines()[0]}"]
        for field in dataclasses.fields(section):
            name = f"{section.__name__}.{field.name}"
            line = f"{name} = {getattr(getattr(config, attribute), field.name)!r}"
            if provenance is not None:
                line = f"{line:<40}  # {provenance.get(name, DEFAULT)}"
            lines.append(line)
    return "\n".join(lines) + "\n"


def split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Takes the arguments of the configuration out of a command line.

    They are `--gin_file=FILE`, `--gin.X.y=VALUE` and `--gin_bindings=X.y=VALUE`, each
    any number of times, with '=' or a space before what follows.

    Returns:
      The files, the bindings, and the other arguments in their order.

    Raises:
      ConfigError: if a value is missing, or another argument begins with `--gin`.
    """
    files: list[str] = []
    bindings: list[str] = []
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        if word == "--":
            rest += [word, *words]
        elif not word.startswith("--gin"):
            rest.append(word)
        elif not re.fullmatch(r"--gin_file|--gin_bindings|--gin\..+", flag):
            raise mistake(
                f"{printable(flag)} is no argument",
                "a configuration is given by --gin_file, --gin.X.y and --gin_bindings",
                f"Write {nearest(flag, ['--gin_bindings']) or '--gin_file'}=VALUE",
            )
        else:
            if not equals and (value := next(words, "--")).startswith("--"):
                raise mistake(
                    f"{printable(flag)} has no value",
                    "the value stands behind '=' or a space",
                    f"Write {printable(flag)}=VALUE",
                )
            if flag == "--gin_file":
                files.append(value)
            elif flag == "--gin_bindings":
                bindings.append(value)
            else:
                bindings.append(f"{flag.removeprefix('--gin.')}={value}")
    return files, bindings, rest


# From text to bindings.


def _file(path: str, including: tuple[str, ...]) -> list[_Binding]:
    """The bindings of a file and of those it includes, in their order."""
    name = shown_path(path)
    if not os.path.isfile(path):
        raise _no_file(path, name)
    identity = os.path.realpath(path)
    if identity in including:
        raise mistake(
            f"{name} includes itself, over {len(including)} file(s)",
            "what a file includes must stand on its own",
            "Take one of the include lines out",
        )
    try:
        content = pathlib.Path(path).read_bytes()
    except OSError as error:
        raise mistake(
            f"--gin_file={name} cannot be read ({error.strerror})",
            "it must be readable for this user",
            "Check its permissions, or name another file",
        ) from error
    try:
        text = content.decode("utf-8-sig")
        if "\0" in text:
            raise ValueError("it has NUL bytes")
    except ValueError as error:
        raise mistake(
            f"--gin_file={name} is not a text: {error}",
            "a gin file is UTF-8 text",
            "Give the path of a .gin file, such as configs/m6_digits.gin",
        ) from error
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return list(_text(text, name, os.path.dirname(path), (*including, identity), {}))


def _no_file(path: str, name: str) -> ConfigError:
    folder = os.path.dirname(path) or os.curdir
    names = {file.stem: str(file) for file in _CONFIGS.glob("*.gin")}
    if os.path.isdir(folder):
        names |= {file.stem: str(file) for file in pathlib.Path(folder).glob("*.gin")}
    best = nearest(os.path.basename(path).removesuffix(".gin"), names)
    meant = names.get(best or "m6_digits", "FILE")
    return mistake(
        f"--gin_file={name} is {'a folder' if os.path.isdir(path) else 'not there'}",
        "it must be the path of a file, as seen from the current folder",
        f"Write --gin_file={shown_path(meant)}",
    )


def _text(
    text: str,
    source: str,
    folder: str,
    including: tuple[str, ...],
    bound: dict[str, str],
) -> Iterator[_Binding]:
    """The bindings of a text.

    Args:
      text: Lines of gin.
      source: What messages call it.
      folder: Includes are looked for there, then in the current folder.
      including: The files that are being read, outermost first.
      bound: The names that this source has bound so far, and where; is added to.
    """
    try:
        statements = _parse(text)
    except _UnreadableError as error:
        raise _unreadable(text, source, error.args[0]) from error
    for statement in statements:
        place = source
        if source != COMMAND_LINE:
            place = f"{source}:{statement.location.line_num}"
        if isinstance(statement, config_parser.BindingStatement):
            scope, selector, field, value, _ = statement
            name = check_name(scope, selector, field, place)
            yield _once(_Binding(name, value, place), bound)
        elif isinstance(statement, config_parser.IncludeStatement):
            wanted = statement.filename
            places = [os.path.join(folder, wanted), wanted]
            path = next(filter(os.path.isfile, places), None)
            if path is None:
                raise mistake(
                    f"{place} includes {shown(wanted)}, which is not there",
                    "includes are looked for beside the file that includes, and in"
                    " the current folder",
                    "Correct the path, or take the line out",
                )
            yield from _file(path, including)
        elif isinstance(statement, config_parser.ImportStatement):
            raise mistake(
                f"{place} imports {statement.module}",
                "a configuration holds values, no code",
                "Take the line out",
            )


def _parse(text: str) -> list[Any]:
    """Has gin read a text.

    Raises:
      _UnreadableError: for whatever gin or Python's tokenizer raise.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*escape sequence")
            before = ""
            for token in tokenize.generate_tokens(io.StringIO(text).readline):
                if before == "-" and token.string in ("%", "@"):
                    # Gin would read `-%x` as `%x`.
                    raise _UnreadableError(token.start[0])
                if token.type not in (tokenize.NL, tokenize.COMMENT):
                    before = token.string
            return list(config_parser.ConfigParser(text, _Values()))
    except _UnreadableError:
        raise
    except tokenize.TokenError as error:
        raise _UnreadableError(error.args[1][0]) from error
    except Exception as error:  # gin's parser promises no narrower kinds
        raise _UnreadableError(getattr(error, "lineno", None)) from error


def _command_line(texts: Sequence[str]) -> Iterator[_Binding]:
    """The bindings of overrides; strings need no quotes there."""
    bound: dict[str, str] = {}
    for text in texts:
        if "\n" in text.strip():
            yield from _text(text, COMMAND_LINE, "", (), bound)
            continue
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not re.fullmatch(r"(\w+/)*(\w+\.)*\w+", key):
            raise mistake(
                f"the override {shown(text)} has no name and value",
                "it has the form Section.field=value",
                "Write for example MoE.top_k=2",
            )
        scope, _, key = key.rpartition("/")
        selector, _, field = key.rpartition(".")
        parts = (selector, field) if selector else (field, "")
        name = check_name(scope, *parts, COMMAND_LINE)
        yield _once(_Binding(name, _override(name, value), COMMAND_LINE), bound)


def _override(name: str, text: str) -> Any:
    """The value of an override: as gin reads it, or else the text itself."""
    if not text:
        raise _empty(name, COMMAND_LINE)
    field = FIELDS.get(name)
    try:
        if "#" in text and text[0] not in "'\"":
            raise _UnreadableError(None)  # gin would take it for a comment
        value = _parse(f"_ = {text}")[0].value
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and field and field.kind is str and not field.choices:
            return text  # a folder may be called 2024
        return value
    except _UnreadableError as error:
        if field is None or re.search(r"^[%@(\[{-]|['\"]", text):
            meant = repr(text.strip(_MARKS))
            if field and (field.kind is not str or field.choices):
                meant = repr(field.field.default)
            raise mistake(
                f"{name}={shown(text)} ({COMMAND_LINE}) cannot be read",
                _GRAMMAR,
                f"Write {name}={meant}, for example",
            ) from error
    if field.kind is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    return text


def _once(binding: _Binding, bound: dict[str, str]) -> _Binding:
    name, value, place = binding
    if name in bound:
        places = " and ".join(dict.fromkeys((bound[name], place)))
        raise mistake(
            f"{name} is bound twice ({places})",
            "one file, or the command line, binds a name once",
            f"Keep one of the two, such as {name}={shown(value)}",
        )
    bound[name] = place
    return binding


_GRAMMAR = "a value is a number, True, False, None, or a string in quotes"
_MARKS = " '\"()[]{}"  # what an unreadable string may have at its ends


def _unreadable(text: str, source: str, line: int | None) -> ConfigError:
    """The error for a text that gin cannot read, with what its line looks like."""
    lines = text.split("\n")
    content = lines[min(line, len(lines)) - 1].strip()[:200] if line else ""
    place = f"{source}:{line}" if line and source != COMMAND_LINE else source
    binding = re.fullmatch(r"([\w./]+)\s*=\s*(.*?)(\s*#.*)?", content)
    remedy = "Write one `Section.field = value` per line, with all quotes closed"
    if binding:
        name, value = binding[1], binding[2]
        if not value:
            return _empty(name, place)
        if not re.search(r"['\"%@(\[{\\]", value):
            if name in FIELDS:
                typed(FIELDS[name], value, place)
            word = value.capitalize()
            word = word if word in ("True", "False", "None") else repr(value)
            remedy = f"Write {name} = {word}"
    return mistake(f"{place} cannot be read: `{printable(content)}`", _GRAMMAR, remedy)


def _empty(name: str, place: str) -> ConfigError:
    field = FIELDS.get(name)
    value = None if field is None or field.optional else field.field.default
    written = f"{name}={value!r}"
    if value == "" and place == COMMAND_LINE:  # the shell takes one pair of quotes off
        written = f'"--gin.{written}"'
    return mistake(
        f"{name} ({place}) has no value",
        "an empty value means neither '' nor None nor the default",
        f"Write {written}, or leave it out",
    )


# From bindings to values.


def _settle(found: Sequence[_Binding]) -> tuple[dict[str, Any], dict[str, str]]:
    """The last value of every name that is bound, and where all values come from."""
    macros = {binding.name: binding for binding in found if "." not in binding.name}
    used: set[str] = set()
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    provenance = dict.fromkeys(FIELDS, DEFAULT)
    for binding in found:
        name, place = binding.name, binding.place
        if "." not in name:
            continue
        value, origin = _follow(binding, macros, used)
        if isinstance(value, _Reference):
            raise mistake(
                f"{name}={value} ({place}) refers to an object",
                "a configuration holds values",
                f"Write {name}={FIELDS[name].field.default!r}, for example",
            )
        value = typed(FIELDS[name], value, place)
        note = place
        if origin is not binding:
            note += f", %{origin.name} of {origin.place}"
        if name in values and values[name] != value:
            note += f", instead of {values[name]!r} ({places[name]})"
        values[name], places[name], provenance[name] = value, place, note
    for name, binding in macros.items():
        if name not in used:
            same = [known for known in FIELDS if known.endswith(f".{name}")]
            remedy = f"Write {choice(same)}" if same else f"Use it as %{name}"
            raise mistake(
                f"{name} ({binding.place}) is a macro that nothing uses",
                "a name without a section is a macro, and must be used",
                f"{remedy}, or take it out",
            )
    return values, provenance


def _follow(
    binding: _Binding, macros: Mapping[str, _Binding], used: set[str]
) -> tuple[Any, _Binding]:
    """The value behind macros, and the binding that holds it; adds to `used`."""
    start, passed = binding, [binding.name]
    while isinstance(binding.value, _Reference) and binding.value.name:
        name = binding.value.name
        if name in passed:
            raise mistake(
                f"{start.name} ({start.place}) goes in a circle: {' = %'.join(passed)}",
                "a macro must end in a value",
                f"Write a value for {name}",
            )
        if name not in macros:
            best = nearest(name, macros)
            raise mistake(
                f"{binding.name}=%{name} ({binding.place}) uses an unknown macro",
                "a macro is bound like a field, without a section",
                f"Write %{best}" if best else f"Bind {name} too, or write a value",
            )
        used.add(name)
        passed.append(name)
        binding = macros[name]
    return binding.value, binding


def _construct(values: Mapping[str, Any]) -> Config:
    """Has gin make the dataclasses.

    Every field is bound, so that nothing of an earlier load is left, and nothing of
    other configurables is touched.
    """
    parts: dict[str, Any] = {}
    with gin.unlock_config(), gin.config_scope(None):
        for section, attribute in _SECTIONS.items():
            selector = f"{_MODULE}.{section.__name__}"
            for field in dataclasses.fields(section):
                value = values.get(f"{section.__name__}.{field.name}", field.default)
                gin.bind_parameter(("", selector, field.name), value)
            parts[attribute] = gin.get_configurable(selector)()
    return Config(**parts)
