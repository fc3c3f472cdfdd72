# SPDX-License-Identifier: Apache-2.0
"""The timeline as text and as figures."""

import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given

from jaxmoe.config_base import ConfigError
from jaxmoe.pipeline import draw
from jaxmoe.pipeline.simulate import Costs, simulate
from tests.pipeline.cases import UNIT, build, costs, schedules

SVG = "{http://www.w3.org/2000/svg}"


def timeline(name="dualpipe", ranks=4, microbatches=8, costs=UNIT):
    return simulate(build(name, ranks, microbatches), costs)


def test_text_in_full():
    """1F1B on 2 ranks with 3 microbatches."""
    expected = """\
        0         5         10
rank 0  F0F1....B0--F2B1--..B2--
rank 1  ..F0B0--F1B1--F2B2--....
F forward, B backward, I backward for inputs, W backward for weights
"""
    assert draw.text(timeline("1f1b", 2, 3)) == expected


def test_text_of_dualpipe():
    """The first half of the ranks: direction 1 in small letters, overlapped pairs."""
    rows = draw.text(timeline(), width=200).splitlines()
    assert rows[1].split()[2].startswith("F0F1F2f4i4w4f5F3b5--..f6B0--")
    assert rows[3].split()[2].startswith("..f4F0f5F1f6B0--F2b4--")


@given(schedules(largest=4), costs())
def test_text_shows_every_operation_once(schedule, costs):
    """Rows of blocks put together hold each operation's letters, in order, in lines no
    longer than asked for."""
    found = draw.text(simulate(schedule, costs), width=120)
    if found.startswith("The timeline is too long"):
        return
    assert max(map(len, found.splitlines())) <= 120
    for rank, line in enumerate(schedule.ranks):
        blocks = re.findall(rf"^rank {rank} +(.*)$", found, re.MULTILINE)
        labels = re.findall(r"[FBIWfbiw]\d+", "".join(blocks))
        expected = [
            (p.kind.replace("Bi", "I"), p.direction, p.microbatch)
            for operation in line
            for p in operation.parts
        ]
        shown = [(t[0].upper(), int(t[0].islower()), int(t[1:])) for t in labels]
        assert shown == expected


def test_long_text_goes_on_below():
    found = draw.text(timeline("dualpipe", 8, 20), width=80)
    rows = [line for line in found.splitlines() if line.startswith("rank 0")]
    assert len(rows) == 3
    heads = [line for line in found.splitlines() if line.startswith("   ")]
    assert [head.split()[0] for head in heads] == ["0", "25", "50"]


def test_text_that_is_too_long_is_left_to_a_figure():
    assert "a figure holds it" in draw.text(timeline("gpipe", 2, 300), width=40)


def test_colour_changes_no_character():
    plain = draw.text(timeline())
    coloured = draw.text(timeline(), colour=True)
    assert "\x1b[30;48;5;" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain


def test_long_costs_are_drawn_small():
    """Microseconds: one character stands for many units, and rows look the same."""
    micro = Costs(1000.0, 1000.0, 1000.0, 3000.0)
    rows = [draw.text(timeline(costs=c)).splitlines()[1:5] for c in (UNIT, micro)]
    assert rows[0] == rows[1]


def test_svg_has_a_box_per_operation():
    """Boxes lie in their row, at their times; an F&B is two; texts are microbatches."""
    simulated = timeline()
    root = ElementTree.fromstring(draw.svg(simulated))
    groups = root.findall(f"{SVG}g")
    schedule = simulated.schedule
    parts = [p for line in schedule.ranks for o in line for p in o.parts]
    texts = [group.find(f"{SVG}text").text for group in groups]
    assert texts == [str(part.microbatch) for part in parts]
    titles = [group.find(f"{SVG}title").text for group in groups]
    assert titles[0] == "0F0, 0 to 1"
    assert any("&" in title for title in titles)
    width, height = float(root.get("width")), float(root.get("height"))
    for group in groups:
        box = {k: float(group.find(f"{SVG}rect").get(k)) for k in ("x", "y", "width")}
        assert 0 < box["x"] < box["x"] + box["width"] < width
        assert 0 < box["y"] < height
    assert len({group.find(f"{SVG}rect").get("fill") for group in groups}) == 8


def test_the_words_of_the_legend_have_room():
    """Also where little happens: the last ones end inside of the figure. Their width is
    taken as half their size of 11 pixels for a letter."""
    root = ElementTree.fromstring(draw.svg(timeline("dualpipe", 2, 4)))
    words = [(float(t.get("x")), t.text) for t in root.findall(f"{SVG}text")]
    start, text = words[-2]
    assert (text, words[-1][1]) == ("backward for weights", "direction 1")
    assert start + 5.5 * len(text) < words[-1][0]
    assert words[-1][0] + 5.5 * len(words[-1][1]) < float(root.get("width"))


def test_figures_are_written(tmp_path):
    for name in ("figure.svg", "figure.png"):
        draw.write_figure(timeline("dualpipev", 2, 4), tmp_path / name)
    assert (tmp_path / "figure.svg").read_text("utf-8").startswith("<svg")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("figure.pdf", "figure.svg"),
        ("figure", "figure.svg"),
        ("nowhere/figure.svg", "cannot be written"),
        ("nowhere/figure.png", "cannot be written"),
    ],
)
def test_figures_that_cannot_be_written(tmp_path, name, part):
    with pytest.raises(ConfigError) as error:
        draw.write_figure(timeline("1f1b", 2, 2), tmp_path / name)
    assert part in str(error.value)
