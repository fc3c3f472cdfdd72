# SPDX-License-Identifier: Apache-2.0
"""Carries out a table of ticks with names for values: the oracle of the lowering.

A buffer's slot holds the name of a value, such as ("stash", stage, microbatch), or
nothing. The rules of a tick, from the docstring of `lower`, are written here a second
time, without a look at how it makes a table.
"""

from jaxmoe.pipeline.lower import COLUMNS, TickTable

BUFFERS = ("activations", "gradients", "stash", "deferred")


class Rank:
    """The buffers of one rank; a value must be taken out before its slot is reused."""

    def __init__(self, sizes):
        self.slots = {name: [None] * getattr(sizes, name) for name in BUFFERS}

    def take(self, buffer, slot, value):
        """Reads a slot that must hold this value; nothing reads it again."""
        assert slot >= 0, f"{value} is read from nowhere"
        assert self.slots[buffer][slot] == value, (buffer, slot, value)
        self.slots[buffer][slot] = None

    def put(self, buffer, slot, value):
        """Writes a slot that must be free."""
        assert slot >= 0, f"{value} is written nowhere"
        assert self.slots[buffer][slot] is None, (buffer, slot, value)
        self.slots[buffer][slot] = value


def replay(table: TickTable) -> dict[tuple[str, int, int], int]:
    """Carries out a table, and checks it on the way.

    Returns:
      How often F, Bi and W were done, by (kind, stage, microbatch).
    """
    schedule, columns = table.schedule, table.columns
    assert tuple(columns) == COLUMNS
    R = schedule.num_ranks
    ranks = [Rank(table.slots) for _ in range(R)]
    counts: dict[tuple[str, int, int], int] = {}
    for tick in range(table.ticks):
        rows = [{n: int(columns[n][tick, rank]) for n in COLUMNS} for rank in range(R)]
        sent = [{} for _ in range(R)]  # per receiving rank: column -> value
        writes = []
        for rank, row in enumerate(rows):
            kinds = table.branches[row["branch"]]
            spent = sum(table.costs.of(kind) for kind in kinds)
            if set(kinds) >= {"F", "B"}:
                rest = table.costs.of("W") if "W" in kinds else 0
                spent = min(spent, table.costs.of("F&B") + rest)
            assert spent <= table.lengths[tick] + 1e-6
            writes += _run(schedule, ranks[rank], rank, kinds, row, sent, counts)
        for rank, row in enumerate(rows):
            for column in ("a_right", "a_left", "g_right", "g_left"):
                value = sent[rank].get(column)
                assert (row[column] >= 0) == (value is not None), (tick, rank, column)
                if value:
                    buffer = "activations" if column[0] == "a" else "gradients"
                    writes.append((ranks[rank], buffer, row[column], value))
        for place, buffer, slot, value in writes:  # all reads of a tick are over
            place.put(buffer, slot, value)
    left = [slots for rank in ranks for slots in rank.slots.values()]
    assert all(slot is None for slots in left for slot in slots), "values left over"
    return counts


def _run(schedule, place, rank, kinds, row, sent, counts):
    """One rank in one tick: takes what it reads, returns what it writes."""
    last = schedule.num_stages - 1
    writes, unused = [], {"f": "F", "b": "B", "w": "W"}
    for kind in kinds:
        letter = {"F": "f", "B": "b", "Bi": "b", "W": "w"}[kind]
        unused.pop(letter)  # at most one of each
        direction, stage, microbatch = (
            row[f"{letter}_{name}"] for name in ("direction", "stage", "microbatch")
        )
        assert schedule.stage_of(rank, direction) == stage
        for name in ("Bi", "W") if kind == "B" else (kind,):
            key = (name, stage, microbatch)
            counts[key] = counts.get(key, 0) + 1
        if kind == "W":
            place.take("deferred", row["w_deferred"], ("deferred", stage, microbatch))
            continue
        forward = kind == "F"
        buffer = "activations" if forward else "gradients"
        if stage != (0 if forward else last):
            place.take(buffer, row[f"{letter}_inbox"], (buffer, stage, microbatch))
        else:
            assert row[f"{letter}_inbox"] == -1
        if forward:
            value = ("stash", stage, microbatch)
            writes.append((place, "stash", row["f_stash"], value))
        else:
            place.take("stash", row["b_stash"], ("stash", stage, microbatch))
            assert (row["b_deferred"] >= 0) == (kind == "Bi")
        if kind == "Bi":
            value = ("deferred", stage, microbatch)
            writes.append((place, "deferred", row["b_deferred"], value))
        target = stage + 1 if forward else stage - 1
        to = schedule.rank_of(target, schedule.direction_of(target, microbatch))
        value = (buffer, target, microbatch)
        local = row[f"{letter}_local"]
        if not 0 <= target <= last:
            assert local == -1
        elif to == rank:
            writes.append((place, buffer, local, value))
        else:
            assert local == -1
            right = (direction == 0) == forward
            assert to == rank + (1 if right else -1)
            column = f"{buffer[0]}_{'right' if right else 'left'}"
            assert column not in sent[to]
            sent[to][column] = value
    if {"F", "B"} <= set(kinds) and schedule.num_directions == 2:
        assert row["f_direction"] != row["b_direction"]
    for letter in unused:
        assert all(v == -1 for n, v in row.items() if n.startswith(f"{letter}_"))
    return writes
