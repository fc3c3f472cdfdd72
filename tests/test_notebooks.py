# SPDX-License-Identifier: Apache-2.0
"""The notebooks of colab/ run top to bottom, and print the figures that stand in them.

Figures are the numbers printed by the cells that are tagged 'figures'.
"""

import json
import math
import re
import sys

import pytest

from tests import helpers
from tests.helpers import ROOT

nbformat = pytest.importorskip("nbformat")

RELATIVE = 0.15  # losses of short runs, on another machine or version
ABSOLUTE = 0.15  # shares, and what is near 0
PLACE = re.compile(r"(?<![\w.:/~<-])/\w[\w.-]*/")  # the beginning of an absolute path
NAMES = ("dualpipe", "eplb", "quickstart")


execute = helpers.script(ROOT / "colab" / "execute.py")


def text(cell):
    """What a cell printed."""
    outputs = (output.get("text", "") for output in cell.get("outputs", ()))
    return "".join(outputs)


def figures(notebook):
    """The numbers of every tagged cell, in order, and the words between them."""
    tagged = [c for c in notebook.cells if "figures" in c.metadata.get("tags", ())]
    printed = "".join(text(cell) for cell in tagged)
    number = r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[-+]?\d+)?"
    words = re.sub(r"\s+", " ", re.sub(number, "#", printed))
    return [float(found) for found in re.findall(number, printed)], words


def test_these_are_all():
    assert execute.names() == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_kept_and_name_no_place(name):
    notebook = execute.read(name)
    assert len(figures(notebook)[0]) >= 4
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    written = json.dumps(notebook.cells)
    for place in (str(ROOT), sys.prefix):
        assert place not in written
    words = [cell.source for cell in notebook.cells] + [text(cell) for cell in code]
    for output in (output for cell in code for output in cell.outputs):
        of_kind = output.get("data", {})  # base64 has slashes of its own
        words += [str(of_kind[kind]) for kind in of_kind if kind != "image/png"]
    assert set(PLACE.findall("\n".join(words))) <= {"/content/"}
    dashes = set("\u2010\u2011\u2012\u2013\u2014\u2212") & set(written)
    assert not dashes
    errors = [o for c in code for o in c.outputs if o.output_type == "error"]
    assert not errors


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_runs_and_prints_the_same_figures(name, tmp_path):
    want, words = figures(execute.read(name))
    got, got_words = figures(execute.executed(name, tmp_path))
    assert got_words == words
    for a, b in zip(got, want, strict=True):
        assert math.isclose(a, b, rel_tol=RELATIVE, abs_tol=ABSOLUTE), (got, want)
