# SPDX-License-Identifier: Apache-2.0
"""The shipped models compiled for the slices that they are meant for: docs/scale.md.

    python benchmarks/scale.py [--only NAME[,NAME...]] [--page]

Every row is one `jaxmoe aot` in a process of its own; it needs libtpu and no TPU, and
up to 20 GB of memory. What was found is kept in benchmarks/scale.json, so that rows can
be made one at a time with `--only`; `--page` compiles nothing. Either way the table in
docs/scale.md is written anew. The last line is JSON: name -> what is kept of a row.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "scale.json"
PAGE = ROOT / "docs" / "scale.md"
BEGIN, END = "<!-- begin: benchmarks/scale.py -->\n", "<!-- end -->"
KEPT = (
    *("topology", "chips", "mesh", "microbatches", "compile_s", "bytes_per_chip"),
    *("memory_per_chip", "fits", "recomputed", "step_s", "exposed_s", "tokens_per_s"),
    *("mfu", "hidden_fraction"),
)


class Row(NamedTuple):
    """One case: a shipped configuration, a slice, and what differs from the file."""

    config: str
    topology: str
    changes: tuple[str, ...] = ()

    def command(self) -> list[str]:
        """The arguments of `jaxmoe`."""
        first = ("aot", f"--topology={self.topology}")
        changes = (f"--gin.{change}" for change in self.changes)
        return [*first, f"--gin_file=configs/{self.config}.gin", *changes]


ROWS = {
    "m6_t_base": Row("m6_t_base", "v5e:4x4"),
    "m6_t_100b": Row("m6_t_100b", "v5p:4x4x4"),
    "m6_t_100b_v6e": Row("m6_t_100b", "v6e:16x16", ("Mesh.data=4",)),
    "m6_t_1t": Row("m6_t_1t", "v5p:8x8x8"),
    "m6_10t": Row("m6_10t", "v5p:16x16x16"),
    "deepseek_v3": Row("deepseek_v3", "v5p:8x8x16"),
    "deepseek_v3_2k": Row("deepseek_v3", "v5p:8x8x16", ("Model.sequence_length=2048",)),
    "two_slices": Row(
        "m6_t_base", "v5e:4x4*2", ("Mesh.data=2", "Data.batch_size=2048")
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(ROWS))
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in () if options.page else options.only.split(","):
        found[name] = measure(ROWS[name])
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
        print(table({name: found[name]}), flush=True)
    found = {name: found[name] for name in ROWS if name in found}
    write(PAGE, found)
    print(json.dumps(found))


def measure(row: Row) -> dict[str, Any]:
    """Compiles one case, and keeps what the page tells of it."""
    command = [sys.executable, "-m", "jaxmoe", *row.command(), "--json"]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if run.returncode:
        sys.exit(f"{shlex.join(command)} ended with code {run.returncode}")
    report = json.loads(run.stdout.splitlines()[-1])
    return {key: report[key] for key in KEPT if key in report}


def write(page: Path, found: dict[str, dict]) -> None:
    """Puts the table and the commands between the marks of the page."""
    before, _, rest = page.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    commands = [shlex.join(["jaxmoe", *ROWS[name].command()]) for name in found]
    block = "\n".join(["", table(found), "", "```bash", *commands, "```", "", ""])
    page.write_text(f"{before}{BEGIN}{block}{END}{after}")


def table(found: dict[str, dict]) -> str:
    """The rows as Markdown."""
    head = (
        *("case", "slice", "chips", "data x expert x pipe", "microbatches"),
        *("GiB per chip", "step, s", "MFU", "tokens/s", "exchange hidden", "in F&B"),
        "compile, s",
    )
    rows = [head, ["---"] * len(head), *(cells(*row) for row in found.items())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def cells(name: str, row: dict[str, Any]) -> list[str]:
    """One row of the table; a case that does not fit has no times."""
    gib = f"{row['bytes_per_chip'] / 2**30:.1f} of {row['memory_per_chip'] / 2**30:.0f}"
    known = "step_s" in row
    hidden = row.get("hidden_fraction", {})
    pairs = hidden.get("F&B", hidden.get("F&Bi"))
    return [
        f"`{name}`",
        row["topology"],
        str(row["chips"]),
        " x ".join(str(n) for n in row["mesh"].values()),
        str(row["microbatches"]),
        gib if row["fits"] else f"{gib}: does not fit",
        f"{row['step_s']:.3g}" if known else "",
        f"{row['mfu']:.1%}" if known else "",
        f"{row['tokens_per_s']:,.0f}" if known else "",
        f"{hidden['step']:.1%}" if "step" in hidden else "",
        f"{pairs:.1%}" if pairs is not None else "",
        f"{row['compile_s']:.0f}",
    ]


if __name__ == "__main__":
    main()
