# SPDX-License-Identifier: Apache-2.0
"""Writes docs/configuration.md from the dataclasses of `jaxmoe.config`.

    python docs/configuration.py

Run it after a change of a field or of a file in configs/; a test compares the page with
what this script would write.
"""

import dataclasses
import re
from pathlib import Path

from jaxmoe.config import SECTIONS
from jaxmoe.config_values import FIELDS, Field

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "configuration.md"

_HEAD = """\
# Configuration

This page is written by `python docs/configuration.py`. Do not edit it.

A configuration is a set of frozen dataclasses, one per part of the system. Their fields
are set in gin files and on the command line:

```bash
python train.py --gin_file=configs/m6_digits.gin --gin.MoE.num_experts=16
python train.py --gin.MoE.router=prototype --gin.MoE.top_k=4 --gin.Train.steps=200
jaxmoe train --gin_bindings=MoE.capacity_factor=1.25 --workdir=runs/capacity
```

- `--gin_file=FILE` and `--gin.SECTION.FIELD=VALUE` may be given any number of times.
  `--gin_bindings=SECTION.FIELD=VALUE` is another spelling of the latter.
- The last value wins: a later file over an earlier one, a line of a file over what was
  included above it, the command line over all files. One file, or the command line,
  sets a field once.
- Without a file, `configs/m6_digits.gin` is read. It agrees with the defaults below.
- In a file strings stand in quotes. On the command line they need none.
- An unknown name, a wrong type, a value out of range, or fields that do not fit
  together end the program with exit code 2 before anything is compiled. The message
  names the field, the rule, and a value that works.
- The whole configuration, with the place where each value comes from, is printed at the
  start of a run and written to `config.gin` in the run folder. `--gin_file` reads that
  file back to the same configuration.
- `None` means that there is no such limit. `'auto'` means that the value follows from
  others.
"""

_SHIPPED = """
## Shipped configurations

The head of each file says the command, the hardware and what to expect.

| file | what it is |
|---|---|
"""


def page() -> str:
    """The whole page."""
    sections = [_section(section) for section in SECTIONS]
    files = sorted((ROOT / "configs").glob("*.gin"))
    rows = [
        f"| [{f.name}](../configs/{f.name}) | {_first_sentence(f)} |" for f in files
    ]
    return _HEAD + "".join(sections) + _SHIPPED + "\n".join(rows) + "\n"


def _section(section: type) -> str:
    summary = (section.__doc__ or "").splitlines()[0]
    lines = [f"\n## {section.__name__}", "", summary, ""]
    lines += ["| field | takes | default | meaning |", "|---|---|---|---|"]
    for member in dataclasses.fields(section):
        name = f"{section.__name__}.{member.name}"
        cells = (
            f"`{name}`",
            _takes(FIELDS[name]),
            f"`{member.default!r}`",
            member.metadata["doc"],
        )
        lines.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _takes(field: Field) -> str:
    """The values of a field in words, such as 'whole number from 1, or `'auto'`'."""
    kinds = {int: "whole number", float: "number", bool: "`True` or `False`"}
    choices = [f"`{word!r}`" for word in field.choices]
    parts = []
    if field.kind in kinds:
        parts.append(f"{kinds[field.kind]}{_range(field.field.metadata)}")
    elif not choices:
        parts.append("text")
    parts += choices
    if field.optional:
        parts.append("`None`")
    return ", ".join(parts[:-1]) + f" or {parts[-1]}" if len(parts) > 1 else parts[0]


def _range(bounds) -> str:
    words = {"low": "from", "above": "above", "high": "to", "below": "below"}
    return "".join(
        f" {word} {bounds[name]:g}"
        for name, word in words.items()
        if bounds[name] is not None
    )


def _first_sentence(file: Path) -> str:
    """The first sentence of a configuration's head comment."""
    lines = file.read_text("utf-8").splitlines()
    head = " ".join(line[1:].strip() for line in lines if line.startswith("#"))
    return re.split(r"(?<=\.)\s", head)[0]


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
