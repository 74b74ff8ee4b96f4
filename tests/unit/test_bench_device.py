"""The parts of the benchmarks on device memory that need no ranks: flags, wires, data, waiting, bars, parts."""

import numpy as np
import pytest

from mpizero.arrays import DTYPES, dtype_named
from mpizero.bench.cases import COPIES, cases_of
from mpizero.bench.data import PERIOD, Pattern
from mpizero.bench.flags import parse_plan
from mpizero.bench.gpu_bars import BARS, verdict
from mpizero.bench.gpu_parts import Outcome, Part
from mpizero.bench.gpucheck import share, table
from mpizero.bench.place import HostPlace, place_of
from mpizero.bench.wires import Wires, forced_wire
from mpizero.comm import Communicator
from mpizero.errors import ArgumentError
from mpizero.settings import settings


def ways(words):
    plan = parse_plan("all_reduce", ["-b", "8", "-e", "8", *words.split()])
    return [(case.algorithm, case.wire) for case in cases_of(plan, 2, limit=False)]


def test_algorithms_meet_the_wires_that_they_can_take():
    pytest.importorskip("torch")
    assert ways("") == [("auto", "")]
    assert ways("-D cuda") == [("auto", "auto")]
    assert ways("-D cuda --wire all") == [("auto", "loads"), ("auto", "messages"), ("auto", "staged")]
    assert ways("-D cuda --wire loads,staged --algorithm native,auto,ring,loads --versus mpi4py") == [
        ("native", "staged"),
        ("auto", "loads"),
        ("auto", "staged"),
        ("ring", "staged"),
        ("loads", "loads"),
        ("mpi4py", COPIES),
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("-D gpu", "-D must be one of cpu, cuda, stand-in (got 'gpu')"),
        ("--wire loads", "--wire must be given with -D cuda"),
        ("-D cuda --wire ring", "--wire must be a list, joined by commas, of auto, loads, messages, staged"),
        ("-D cuda --wire auto,all", "(got 'all')"),
        ("-D cuda --wire loads --algorithm ring", "--algorithm must be one that takes --wire loads (got 'ring')"),
        ("-D cuda --versus gloo", "--versus must be mpi4py with -D cuda (got 'gloo')"),
    ],
)
def test_flags_that_do_not_go_together(words, said):
    pytest.importorskip("torch")
    with pytest.raises(ArgumentError) as raised:
        parse_plan("all_reduce", words.split())
    assert said in str(raised.value)


def test_torch_is_needed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ArgumentError, match="-D cuda must be used where torch is"):
        parse_plan("all_reduce", ["-D", "cuda"])


def test_a_gpu_is_needed():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ArgumentError, match="used where torch finds a GPU"), place_of("cuda"):
        pass


@pytest.fixture
def place():
    pytest.importorskip("torch")
    with place_of("stand-in") as found:
        yield found


@pytest.mark.parametrize("name", DTYPES)
def test_data_on_a_device_are_those_on_the_host(place, name):
    """Filled and compared there, with one wrong element anywhere found, as on the host."""
    op = "max" if name == "bool" else "sum"
    op = op if DTYPES[name].kind != "c" else "sum"
    pattern = Pattern("all_reduce", dtype_named(name), op, ranks=3, seed=1)
    for count in (1, 100, PERIOD, 3 * PERIOD + 5):
        period = pattern.given(1, 2, 0, count)
        array = place.new(name, count, None, symmetric=False)
        data = place.elements(array)
        place.fill(data, period)
        plain = np.empty(count, DTYPES[name].storage)
        HostPlace().fill(plain, period)
        assert array.view(-1).untyped_storage().tolist()[: plain.nbytes] == plain.view(np.uint8).tolist()
        assert place.count_wrong(data, period) == 0
        for wrong in {0, count // 2, count - 1}:
            kept = data[wrong].clone()
            data[wrong] = kept ^ 1
            assert place.count_wrong(data, period) == 1
            data[wrong] = kept


def test_a_call_is_over_when_the_device_is(place):
    """What is queued on the caller's stream has run when a settled call returns, and not before that."""
    runtime = place.device.runtime
    runtime.restless = 0.0
    done = []
    call = place.settled(lambda: runtime.enqueue(runtime.users[0], lambda: done.append(1)))
    call()
    assert done == [1]
    runtime.enqueue(runtime.users[0], lambda: done.append(2))
    assert done == [1]


def test_a_wire_is_forced_for_the_communicators_that_are_made_meanwhile(monkeypatch):
    monkeypatch.setenv("MPIZERO_DEVICE_WIRE", "messages")
    with forced_wire("staged"):
        assert settings().device_wire == "staged"
    assert settings().device_wire == "messages"
    monkeypatch.delenv("MPIZERO_DEVICE_WIRE")
    with pytest.raises(KeyError), forced_wire("loads"):
        raise KeyError
    assert settings().device_wire == "auto"


def test_wires_are_communicators_that_keep_their_wire(place):
    comm = Communicator()
    wires = Wires(comm, place.device, ("loads", "staged"))
    assert [wires.comm(wire).side(place.device).forced for wire in ("loads", "staged")] == ["loads", "staged"]
    assert wires.comm("copies") is comm
    assert wires.refused == {}
    wires.close()
    comm.close()


def test_copies_to_the_host_and_back(place):
    x, out = (place.new("float32", 1000, None, symmetric=False) for _ in range(2))
    x[:], out[:] = 3, 0
    given, taken, before, after = place.on_host(x, out)
    before()
    taken[:] = given + 1
    after()
    assert (out == 4).all()
    given, none, before, after = place.on_host(x, None)
    before()
    given += 5
    after()
    assert none is None
    assert (x == 8).all()


def test_verdicts():
    assert verdict("staged", 1.2, 0) == "reached"
    assert verdict("staged", 1.21, 0) == "missed"
    assert verdict("loads-2", 0.6, 0) == "reached"
    assert verdict("loads-2", 0.59, None) == "missed"
    assert verdict("loads-2", None, None) == "not measured"
    assert verdict("loads-2", 0.9, 3) == "wrong results"
    assert verdict("stages-fp32", 0, 0) == "reached"
    assert [BARS[name].text() for name in ("loads-4", "staged", "against-64M")] == [
        "0.6, aim 0.8",
        "at most 1.2",
        "30 x",
    ]


def test_a_part_may_use_what_those_before_it_left():
    first, second, third = (Part(name="p", ranks=1, program=(), seconds=each) for each in (60.0, 30.0, 30.0))
    assert share(120, first, [second, third]) == 60
    assert share(110, second, [third]) == 80
    assert share(10, third, []) == 10
    assert share(60, first, [second, third]) == 30
    assert share(-1, third, []) == 0


def test_the_table_judges_figures_but_not_those_of_a_stand_in():
    def outcome(value, wrong=0):
        figure = {"name": "loads-2", "value": value, "wrong": wrong}
        return Outcome(
            name="figures", ranks=2, state="passed", seconds=1, limit=2, said="", found={"figures": [figure]}
        )

    def row(outcomes, *, stand_in):
        return next(line for line in table(outcomes, stand_in=stand_in).splitlines() if line.startswith("loads, 2"))

    assert row([outcome(0.7)], stand_in=False).split()[-5:] == ["0.7", "0.6,", "aim", "0.8", "reached"]
    assert row([outcome(0.1)], stand_in=False).endswith("missed")
    assert row([outcome(0.7)], stand_in=True).endswith("stand-in")
    assert row([outcome(0.7, wrong=2)], stand_in=True).endswith("wrong results")
    assert row([], stand_in=False).endswith("not measured")


def test_a_plan_keeps_its_device():
    pytest.importorskip("torch")
    plan = parse_plan("all_reduce", ["-D", "stand-in", "--wire", "all"])
    assert (plan.device, plan.every_wire, plan.wires) == ("stand-in", True, ("loads", "messages", "staged"))
