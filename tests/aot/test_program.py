# SPDX-License-Identifier: Apache-2.0
"""Scheduled programs: read, their collectives found, their times added up."""

import pytest

from jaxmoe.aot import network
from jaxmoe.aot.chips import CHIPS, Chip
from jaxmoe.aot.collectives import collectives_of
from jaxmoe.aot.program import read_groups, read_program
from jaxmoe.aot.timing import Machine
from tests.helpers import ROOT

# Round numbers: 1 byte a second over a link, 1 cycle a second.
CHIP = Chip("test", 1.0, 100, 1e30, 1.0, 0.5, clock=1.0, wraps=4)
MESH = {"data": 1, "expert": 2, "pipe": 2}
SQUARE = network.grid(CHIP, [(0, 0), (0, 1), (1, 0), (1, 1)], [0] * 4)

TEXT = (ROOT / "tests" / "golden" / "small_step.hlo").read_text("utf-8")
PROGRAM = read_program(TEXT)


def test_instructions_are_read():
    """Names, types, operands and what stands in the attributes."""
    assert PROGRAM.entry == "main"
    by_name = {i.name: i for i in PROGRAM.computations["main"]}
    go, loop = by_name["go"], by_name["loop"]
    assert go.opcode == "all-to-all-start"
    assert [a.bytes for a in go.results] == [32, 32, 4]
    assert go.operands == ["q"]
    assert go.groups == [[0, 2], [1, 3]]
    assert go.scope == "jit(step)/F/all_to_all"
    assert by_name["one"].cycles == 10
    assert sorted(loop.called) == ["body", "cond"]
    assert PROGRAM.turns(loop) == 3


def test_groups_of_both_notations():
    assert read_groups("{{0,1},{2,3}}") == [[0, 1], [2, 3]]
    assert read_groups("[2,2]<=[4]") == [[0, 1], [2, 3]]
    assert read_groups("[2,2]<=[2,2]T(1,0)") == [[0, 2], [1, 3]]


@pytest.mark.parametrize("text", ["", "{}", "HloModule x\n"])
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match="no ENTRY"):
        read_program(text)


def test_collectives_of_the_entry():
    """A pair of start and done, and one carried by fusions; those of a loop are its."""
    found = collectives_of(PROGRAM, "main", SQUARE, MESH)
    assert [(c.kind, c.axis, c.bytes, c.is_async) for c in found] == [
        ("all-to-all", "expert", 32, True),
        ("all-gather", "expert", 64, True),
    ]
    (inside,) = collectives_of(PROGRAM, "body", SQUARE, MESH)
    assert (inside.kind, inside.axis, inside.is_async) == ("all-reduce", "pipe", False)


def test_times_by_hand():
    """The exchange takes 16 s: 10 are hidden, 6 waited for. The gather takes 32 s, all
    under 1000 s of work. Three turns of 5 s of work and an all-reduce of 2 x 16 s."""
    timed = Machine(PROGRAM, SQUARE, MESH, even_rows=1).time("main")
    seconds = {c.kind: (c.seconds, hidden, n) for c, hidden, n in timed.transfers}
    assert seconds == {
        "all-to-all": (16.0, 10.0, 1.0),
        "all-gather": (32.0, 32.0, 1.0),
        "all-reduce": (32.0, 0.0, 3.0),
    }
    assert timed.compute == 10 + 1000 + 3 * 5
    assert timed.seconds == 16 + 1000 + 3 * (5 + 32)


HOSTS = """
ENTRY %main (p: f32[8]) -> f32[16] {
  %p = f32[8]{0} parameter(0)
  %none = token[] after-all()
  %send = (f32[8]{0}, u32[], token[]) send(%p, %none), channel_id=1, MEETING
  %recv = (f32[16]{0}, u32[], token[]) recv(%none), channel_id=2, MEETING
  %one = f32[8]{0} add(%p, %p), backend_config={"estimated_cycles":"10"}
  %sent = token[] send-done(%send), channel_id=1
  %done = (f32[16]{0}, token[]) recv-done(%recv), channel_id=2
  ROOT %all = f32[16]{0} get-tuple-element(%done), index=0
}
""".replace(
    "MEETING",
    'frontend_attributes={_xla_host_transfer_rendezvous="all-gather.2_0",'
    '_xla_megascale_transfer_type="ALL_GATHER"}',
)


def test_what_hosts_carry_between_slices_is_a_collective():
    """A gather of 64 bytes over two slices: the half that comes from the other one
    takes 64 s at half a byte per second, of which 10 have work beside them."""
    two = network.grid(CHIP, [(0,), (1,), (0,), (1,)], [0, 0, 1, 1])
    mesh = {"data": 2, "expert": 2, "pipe": 1}
    timed = Machine(read_program(HOSTS), two, mesh, even_rows=1).time("main")
    ((found, hidden, times),) = timed.transfers
    assert (found.kind, found.axis, found.bytes) == ("all-gather", "data", 64)
    assert (found.seconds, hidden, times) == (64.0, 10.0, 1.0)
    assert timed.seconds == 64.0


def line(length, wraps=100):
    chip = Chip("test", 1.0, 1, 1.0, 1.0, 0.5, clock=1.0, wraps=wraps)
    return network.grid(chip, [(i,) for i in range(length)], [0] * length)


def test_exchange_takes_as_long_as_its_busiest_link():
    """On a line of 4 the middle link carries 2 x 2 of 16 parts each way; on a ring of 4
    every link carries one neighbour's part and half of the two ways round."""
    assert line(4).exchange([[0, 1, 2, 3]], 4) == 4.0
    assert line(4, wraps=4).exchange([[0, 1, 2, 3]], 4) == 2.0
    assert line(4).exchange([[0], [1], [2], [3]], 4) == 0.0


def test_permutes_share_links():
    """Neighbours have a link each; a mirror crosses the middle twice on a line of 4."""
    assert line(4).permute([(0, 1), (1, 2), (2, 3)], 4) == 4.0
    assert line(4).permute([(0, 3), (1, 2), (2, 1), (3, 0)], 4) == 8.0
    assert line(4).permute([(0, 0)], 4) == 0.0


def test_gathers_use_both_ways_of_a_ring():
    """3 of 4 parts arrive, over one link at the end of a line, or two of a ring."""
    assert line(4).gather([[0, 1, 2, 3]], 8) == 6.0
    assert line(4, wraps=4).gather([[0, 1, 2, 3]], 8) == 3.0


def test_between_slices():
    """Two slices of 2: half of what a device sends leaves it, at half the rate."""
    two = network.grid(CHIP, [(0, 0), (0, 1)] * 2, [0, 0, 1, 1])
    assert two.exchange([[0, 1, 2, 3]], 8) == 2 * 2 / 0.5
    assert two.permute([(0, 2)], 8) == 16.0
    assert two.gather([[0, 2]], 8) == 4 / 0.5


def test_gpus_of_a_host_are_on_a_switch():
    """8 of a host exchange at full rate, of two hosts over their network cards."""
    gpus = network.hosts(CHIPS["h200"], 16)
    host, both = [list(range(8))], [list(range(16))]
    assert gpus.exchange(host, 8_000_000) == pytest.approx(7e6 / 450e9)
    assert gpus.exchange(both, 16_000_000) == pytest.approx(8e6 / 50e9)


def test_axes_of_groups():
    assert network.axis_of([[0, 1], [2, 3]], MESH) == "pipe"
    assert network.axis_of([[0, 2]], MESH) == "expert"
    assert network.axis_of([], MESH) == "expert,pipe"
