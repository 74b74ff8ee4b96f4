"""How an algorithm is chosen: by the caller, by a measured table, by the cost model, by rule."""

import json

import pytest

from mpizero.arrays import DTYPES
from mpizero.collectives import algorithms_of, build
from mpizero.collectives.select import Case, choose, decide, pieces_of, segment_of
from mpizero.collectives.tuned import Choice, Row, Table, layout_of
from mpizero.errors import ArgumentError

MACHINE = {"processor": "P", "mpi": "M"}
FAST = [(8, 1e-6), (1 << 20, 1e-4)]
SLOW = [(8, 5e-5), (1 << 20, 8.4e-3)]


def case(**words):
    given = {"size": 4, "nbytes": 1 << 20, "dtype": DTYPES["float32"], "native": True, "nodes": (0,) * 4, **words}
    return Case(**given)


def table(*choices, operation="all_reduce", layout=(4,), dtype="float32", order="any", machine=MACHINE):
    row = Row(operation=operation, layout=layout, dtype=dtype, order=order, choices=tuple(choices))
    return {"tuning": Table(machine=machine, rows=(row,)).dumps(), "machine": MACHINE}


def pick(nbytes, algorithm, pieces=1):
    return Choice(nbytes=nbytes, algorithm=algorithm, pieces=pieces, us=1.0, others={algorithm: 1.0})


def test_on_one_host_loads():
    assert choose("all_reduce", "auto", case(board=True)) == "loads"
    assert choose("broadcast", "auto", case(board=True, nbytes=4)) == "loads"
    assert choose("all_reduce", "auto", case(board=True, strict=True)) == "loads"


def test_the_table_comes_first():
    notes = table(pick(1 << 10, "native"), pick(1 << 20, "ring"))
    assert choose("all_reduce", "auto", case(board=True, notes=notes)) == "ring"
    assert choose("all_reduce", "auto", case(board=True, notes=notes, nbytes=5000)) == "native"
    assert "mpizero tune" in decide("all_reduce", "auto", case(board=True, notes=notes)).why
    # what it does not know, it does not decide
    assert choose("all_gather", "auto", case(board=True, notes=notes)) == "loads"
    other = case(board=True, notes=notes, size=2, nodes=(0, 0))
    assert choose("all_reduce", "auto", other) == "loads"


def test_a_table_never_breaks_the_order():
    notes = table(pick(1 << 20, "ring"))
    assert choose("all_reduce", "auto", case(board=True, notes=notes, strict=True)) == "loads"
    notes = table(pick(1 << 20, "tree"), order="canonical")
    assert choose("all_reduce", "auto", case(board=True, notes=notes, strict=True)) == "tree"


def test_a_choice_that_cannot_be_is_left():
    notes = table(pick(1 << 20, "native"))
    assert choose("all_reduce", "auto", case(board=True, notes=notes, dtype=DTYPES["bfloat16"])) == "loads"
    notes = table(pick(1 << 20, "bruck"), operation="all_to_all")
    assert choose("all_to_all", "auto", case(board=True, notes=notes)) == "bruck"
    assert choose("all_to_all", "auto", case(board=True, notes=notes, even=False)) == "loads"


def test_a_table_of_another_machine_is_left():
    notes = table(pick(1 << 20, "ring"), machine={"processor": "Q", "mpi": "M"})
    assert choose("all_reduce", "auto", case(board=True, notes=notes)) == "loads"


def test_a_row_of_another_dtype_serves():
    notes = table(pick(1 << 20, "ring"))
    assert choose("all_reduce", "auto", case(board=True, notes=notes, dtype=DTYPES["float64"])) == "ring"


def test_pieces_of_the_table():
    notes = table(pick(1 << 20, "segmented_ring", pieces=4))
    assert pieces_of("all_reduce", "segmented_ring", case(notes=notes)) == 4
    assert pieces_of("all_reduce", "double_tree", case(notes=notes)) == 2
    assert pieces_of("all_reduce", "ring", case(notes=notes)) == 1


def test_a_table_survives_its_file():
    made = Table.loads(table(pick(4, "native"), pick(1 << 20, "segmented_ring", 8))["tuning"])
    assert Table.loads(made.dumps()) == made
    assert json.loads(made.dumps())["schema_version"] == 1
    for text in ("", "{}", "[1]", '{"schema_version": 1, "machine": {}, "rows": [{}]}'):
        with pytest.raises(ArgumentError, match="the tuning table must be"):
            Table.loads(text)
    with pytest.raises(ArgumentError, match="schema_version of the tuning table must be 1"):
        Table.loads('{"schema_version": 9}')


def test_by_cost_between_hosts():
    """With measured links `auto` takes what the model finds cheapest."""
    links = {"links": {"local": FAST, "remote": SLOW}}
    spread = case(nodes=(0, 0, 1, 1), nbytes=16 << 20, notes=links)
    found = decide("all_reduce", "auto", spread)
    assert found.name == "hierarchical"
    assert "cost model" in found.why
    assert any(key[:2] == ("cost", "all_reduce") for key in links if isinstance(key, tuple))  # reckoned once
    assert choose("all_reduce", "auto", case(nodes=(0, 0, 1, 1), nbytes=64, notes=links)) == "native"
    strict = case(nodes=(0, 1, 0, 1), nbytes=16 << 20, notes=links, strict=True)  # placed in turn: not canonical
    assert choose("all_reduce", "auto", strict) in {"direct", "tree", "halving_doubling"}


def test_by_rule_without_links():
    assert choose("all_reduce", "auto", case(nodes=(0, 0, 1, 1))) == "hierarchical"
    assert choose("all_reduce", "auto", case(nodes=(0, 1, 2, 3))) == "direct"
    assert choose("reduce_scatter", "auto", case(size=32, nodes=tuple(range(32)))) == "ring"
    assert choose("all_reduce", "auto", case(nodes=(0, 1, 2, 3), nbytes=64)) == "native"


def test_gathers_of_many_ranks_cross_the_network_once_per_node():
    """A ring would have a round for each rank; with a rank on each host there is nothing to compose."""
    many = tuple(rank // 8 for rank in range(128))
    assert choose("all_gather", "auto", case(size=128, nodes=many)) == "hierarchical"
    assert choose("all_gather", "auto", case(size=128, nodes=many, even=False)) == "hierarchical"
    assert choose("all_gather", "auto", case(size=128, nodes=tuple(range(128)))) == "ring"
    assert choose("all_gather", "auto", case(size=32, nodes=many[:32])) == "ring"


def test_what_cannot_be_is_refused():
    with pytest.raises(ArgumentError, match="loads for ranks that share no memory, on 2 hosts"):
        choose("all_reduce", "loads", case(nodes=(0, 0, 1, 1)))
    with pytest.raises(ArgumentError, match="takes uneven counts"):
        choose("all_to_all", "bruck", case(even=False))
    with pytest.raises(ArgumentError, match="canonical order"):
        choose("all_reduce", "ring", case(strict=True))
    with pytest.raises(ArgumentError, match="one of auto"):
        choose("all_reduce", "rng", case())
    for entry in algorithms_of("all_reduce"):
        assert choose("all_reduce", entry.name, case()) == entry.name


def test_segments():
    schedule = build("all_reduce", "direct", 4, 0)
    slots = 4 * (schedule.raw_slots + schedule.acc_slots)
    whole = segment_of(schedule, (4, 4), 1 << 24, hosts=1)
    assert whole * slots * 3 <= 8 << 20  # three are in flight
    assert segment_of(schedule, (4, 4), 1 << 18, hosts=2) == 1 << 15
    assert segment_of(schedule, (4, 4), 100, hosts=2) == 1 << 15
    moving = build("all_gather", "ring", 4, 0)
    assert segment_of(moving, (4, 4), 1 << 20, hosts=1) > 1 << 20


def test_layout():
    assert layout_of((0, 1, 0, 2, 1, 0)) == (3, 2, 1)
