"""The parts of the microbenchmarks that need no MPI: flags, cases, data, figures, files, text."""

import csv
import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from mpizero.arrays import DTYPES, dtype_named
from mpizero.bench.cases import COPY, LIMIT_FROM, cases_of, shuffled
from mpizero.bench.data import PERIOD, Pattern, count_wrong, fill
from mpizero.bench.flags import first_rank, parse_plan, size_of, sizes_between
from mpizero.bench.report import report
from mpizero.bench.results import Row, read_results, row_of, write_csv, write_json
from mpizero.bench.summary import geometric_mean, percentile, summarise
from mpizero.bench.timing import Loop, Measured, measure
from mpizero.errors import ArgumentError, ArgumentTypeError

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce")


@pytest.mark.parametrize(
    ("text", "nbytes"), [("8", 8), ("1K", 1024), ("3k", 3072), ("256M", 256 << 20), ("2G", 2 << 30)]
)
def test_sizes(text, nbytes):
    assert size_of("-b", text) == nbytes


@pytest.mark.parametrize("text", ["", "0", "-8", "1.5M", "M", "8 K", "8T", "0x8", "\u0663"])
def test_sizes_that_are_none(text):
    with pytest.raises(ArgumentError, match="-b must be a number of bytes"):
        size_of("-b", text)


def test_factor_and_step():
    assert sizes_between("8", "1K", step=None, factor="4") == (8, 32, 128, 512)
    assert sizes_between("8", "20", step="4", factor=None) == (8, 12, 16, 20)
    assert sizes_between("1M", "3M", step=None, factor=None) == (1 << 20, 2 << 20, 3 << 20)
    assert sizes_between("32M", "32M", step=None, factor="2") == (32 << 20,)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-b", "8", "-e", "4"], "-e must be at least -b, 8 (got '4')"),
        (["-f", "1"], "-f must be a whole number, at least 2 (got '1')"),
        (["-f", "2", "-i", "8"], "-f and -i must be given one without the other"),
        (["-b", "1", "-e", "1G", "-i", "1"], "the number of sizes must be at most 10000"),
        (["-n", "0"], "-n must be a whole number, at least 1 (got '0')"),
        (["-w", "-1"], "-w must be a whole number, at least 0 (got '-1')"),
        (["-c", "2"], "-c must be one of 0, 1 (got '2')"),
        (["-d", "float33"], "-d must be a list, joined by commas, of "),
        (["-d", "float32,float"], "-d must be a list without repetitions"),
        (["-o", "sun"], "-o must be a list, joined by commas, of sum, mean, max, min, prod (got 'sun')"),
        (["-o", ""], "(got '')"),
        (["-r", "one"], "-r must be a whole number, at least 0 (got 'one')"),
        (["--algorithm", "rng"], "of auto, native, loads, "),
        (["--algorithm", "auto,all"], "(got 'all')"),
        (["--algorithm", "none"], "--algorithm none must be given with --versus"),
        (["--buffer", "shared"], "of private, symmetric (got 'shared')"),
        (["--order", "any,canonical"], "--order must be one of any, canonical"),
        (["--versus", "nccl"], "of gloo, mpi4py (got 'nccl')"),
        (["--versus", "gloo", "-o", "mean"], "-o must be one of sum, max, min, prod beside gloo (got 'mean')"),
        (["--versus", "mpi4py", "-d", "bfloat16"], "-d must be a type that MPI reduces, beside mpi4py"),
        (["--budget", "nan"], "--budget must be a number of seconds above 0 (got 'nan')"),
        (["--seed", "x"], "--seed must be a whole number"),
        (["--json", "no/such/folder/a.json"], "--json must be a file in a folder that exists"),
        (["-d", "bool"], "op must be one of max, min for bool (got 'sum')"),
        (["-d", "int8", "-o", "mean"], "for int8 (got 'mean')"),
        (["--fast"], "unrecognized arguments: --fast (see all_reduce_perf --help)"),
        (["-n"], "argument -n: expected one argument"),
        (["--algo", "ring"], "unrecognized arguments"),
    ],
)
def test_bad_flags_are_errors(words, said):
    with pytest.raises((ArgumentError, ArgumentTypeError)) as raised:
        parse_plan("all_reduce", words)
    assert said in str(raised.value)


def test_torch_is_named_where_it_is_needed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    for words in (["-d", "bfloat16"], ["--versus", "gloo"]):
        with pytest.raises(ArgumentError, match=r"mpizero\[torch\]"):
            parse_plan("all_reduce", words)


def test_a_plan():
    words = "-b 8 -e 128 -f 4 -n 7 -w 2 -c 0 -d float,half -o avg,max -r 1 --algorithm auto,ring --buffer symmetric"
    plan = parse_plan("all_reduce", [*words.split(), "--order", "canonical", "--prepared", "--budget", "0.5"])
    assert (plan.sizes, plan.iterations, plan.warm_up, plan.check) == ((8, 32, 128), 7, 2, False)
    assert (plan.dtypes, plan.ops, plan.root) == (("float32", "float16"), ("mean", "max"), 1)
    assert (plan.algorithms, plan.every, plan.buffers) == (("auto", "ring"), False, ("symmetric",))
    assert (plan.order, plan.prepared, plan.budget) == ("canonical", True, 0.5)
    assert parse_plan("broadcast", ["-o", "max"]).ops == ("none",)
    every = parse_plan("all_reduce", ["--algorithm", "all"])
    assert every.every
    assert {"auto", "native", "loads", "ring"} <= set(every.algorithms)
    assert parse_plan("all_reduce", ["--algorithm", "none", "--versus", "mpi4py"]).algorithms == ()


def test_one_rank_speaks(monkeypatch):
    monkeypatch.setattr("mpizero.bench.flags.launcher_rank", lambda: None)
    assert first_rank()
    monkeypatch.setattr("mpizero.bench.flags.launcher_rank", lambda: 1)
    assert not first_rank()


def test_cases_are_all_combinations_and_shuffled_alike():
    words = "-b 8 -e 2M -f 512 -o sum,max --algorithm auto,ring --buffer private,symmetric --prepared --versus mpi4py"
    plan = parse_plan("all_reduce", words.split())
    cases = cases_of(plan, 4, limit=True)
    copies = [case for case in cases if case.algorithm == COPY]
    assert len(cases) - len(copies) == 2 * 3 * (2 * 2 * 2 + 1)
    assert [case.nbytes for case in copies] == [2 << 20]
    assert copies[0].nbytes >= LIMIT_FROM
    assert all(case.buffer == "private" for case in cases if case.algorithm == "mpi4py")
    assert len(set(cases)) == len(cases)
    assert sorted(map(repr, shuffled(cases, 3))) == sorted(map(repr, cases))
    assert shuffled(cases, 3) == shuffled(cases, 3) != shuffled(cases, 4)
    assert shuffled(cases, 3) != cases


@pytest.mark.parametrize(("operation", "count"), [("all_reduce", 25), ("broadcast", 25), ("all_gather", 24)])
def test_sizes_divide_where_there_are_parts(operation, count):
    plan = parse_plan(operation, ["-b", "1", "-e", "101", "-i", "100"])
    found = [(case.count, case.nbytes) for case in cases_of(plan, 4, limit=False)]
    least = 4 if operation == "all_gather" else 1
    assert found == [(least, least * 4), (count, count * 4)]


def test_equal_sizes_after_rounding_are_one_case():
    plan = parse_plan("all_gather", ["-b", "1", "-e", "8", "-i", "1"])
    assert [case.count for case in cases_of(plan, 4, limit=False)] == [4]


def numbers(stored, dtype):
    """The values of elements as numpy stores them."""
    if dtype.name == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return stored.astype(np.complex128)


def simulated(operation, given, rank):
    """What the operation must give `rank`, from the whole arrays of all ranks, as numbers."""
    size, count = len(given), len(given[0])
    part = count // size
    mine = slice(rank * part, (rank + 1) * part)
    return {
        "all_reduce": lambda: sum(given),
        "reduce": lambda: sum(given),
        "reduce_scatter": lambda: sum(given)[mine],
        "broadcast": lambda: given[1],
        "all_gather": lambda: np.concatenate([each[:part] for each in given]),
        "all_to_all": lambda: np.concatenate([each[mine] for each in given]),
    }[operation]()


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8", "complex64"])
@pytest.mark.parametrize("part", [1, 5, PERIOD, 2 * PERIOD + 17])
def test_expectations_are_what_the_operation_gives(operation, name, part):
    dtype, ranks, iteration = dtype_named(name), 4, 3
    reduces = operation not in {"all_gather", "all_to_all", "broadcast"}
    pattern = Pattern(operation, dtype, "sum" if reduces else "none", ranks=ranks, seed=5)
    given = []
    for rank in range(ranks):
        data = np.empty(part * ranks, dtype.storage)
        fill(data, pattern.given(rank, iteration, 0, len(data)))
        given.append(numbers(data, dtype))
    for rank in range(ranks):
        wanted = simulated(operation, given, rank)
        found = pattern.expected(rank, iteration, part * ranks, 1)
        if operation == "reduce" and rank != 1:
            assert found == []
            continue
        made = np.empty(len(wanted), dtype.storage)
        for piece in found:
            fill(made[piece.start : piece.stop], piece.period)
        assert sum(piece.stop - piece.start for piece in found) == len(wanted)
        assert np.array_equal(numbers(made, dtype), wanted)


@pytest.mark.parametrize("name", sorted(set(DTYPES) - {"bool"}))
@pytest.mark.parametrize("op", ["sum", "mean", "prod", "max", "min"])
@pytest.mark.parametrize("ranks", [1, 2, 7, 33])
def test_results_are_exact_in_every_type(name, op, ranks):
    """Each result is a whole number that the type has, whatever order it is reduced in."""
    dtype = dtype_named(name)
    pattern = Pattern("all_reduce", dtype, op, ranks=ranks, seed=1)
    given = [numbers(pattern.given(rank, 2, 0, PERIOD), dtype).real for rank in range(ranks)]
    combine = {"sum": sum, "prod": np.prod, "max": np.max, "min": np.min, "mean": np.mean}[op]
    wanted = combine(given) if op == "sum" else combine(given, axis=0)
    (found,) = pattern.expected(0, 2, PERIOD, 0)
    assert np.array_equal(numbers(found.period, dtype), wanted)
    assert np.array_equal(wanted, np.round(wanted))
    assert len(set(wanted.tolist())) > 1 or ranks == 33


def test_data_depend_on_rank_index_and_iteration():
    pattern = Pattern("all_reduce", dtype_named("float32"), "sum", ranks=4, seed=1)
    first = pattern.given(0, 0, 0, PERIOD)
    for other in (pattern.given(1, 0, 0, PERIOD), pattern.given(0, 1, 0, PERIOD), pattern.given(0, 0, 64, PERIOD)):
        assert np.mean(first == other) < 0.1
    (now,), (before,) = pattern.expected(0, 1, PERIOD, 0), pattern.expected(0, 0, PERIOD, 0)
    assert np.mean(now.period == before.period) < 0.1


@pytest.mark.parametrize("length", [1, 100, PERIOD, 3 * PERIOD, 150 * PERIOD + 9])
def test_every_wrong_element_is_counted(length):
    period = np.arange(min(length, PERIOD), dtype=np.float32)
    data = np.empty(length, np.float32)
    fill(data, period)
    assert count_wrong(data, period) == 0
    for place in {0, length // 2, length - 1}:
        data[place] += 1
    assert count_wrong(data, period) == len({0, length // 2, length - 1})
    data[:] = np.nan
    assert count_wrong(data, period) == length


def test_a_chunk_in_another_place_is_noticed():
    pattern = Pattern("all_gather", dtype_named("float32"), "none", ranks=2, seed=1)
    data = np.empty(1 << 15, np.float32)
    fill(data, pattern.given(0, 0, 0, len(data)))
    moved = np.roll(data, 1 << 12)
    assert count_wrong(moved, pattern.given(0, 0, 0, len(data))) > 0.9 * len(data)


def test_figures():
    times = [3.0, 1.0, 2.0, 10.0]
    found = summarise(times)
    assert (found.median, found.least, found.p99) == (2.5, 1.0, 10.0)
    assert percentile(range(1, 201), 99) == 198
    assert percentile([7.0], 0) == 7.0
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert np.isnan(geometric_mean([]))


class FakeMpi:
    """One rank's instrument."""

    def Barrier(self):  # noqa: N802
        pass

    def Allreduce(self, _place, _times, _op):  # noqa: N802
        pass

    def allreduce(self, value, **_):
        return value


class FakeJob:
    def __init__(self):
        self.log = []

    def rewrite(self, iteration):
        self.log.append(("rewrite", iteration))

    def call(self):
        self.log.append("call")

    def wrong(self, iteration):
        self.log.append(("wrong", iteration))
        return 2


@pytest.fixture
def comm(monkeypatch):
    monkeypatch.setattr("mpizero.bench.timing.mpi", lambda: type("Module", (), {"IN_PLACE": None, "MAX": max}))
    return type("Comm", (), {"mpi": FakeMpi()})


def test_every_iteration_has_new_data_and_a_check(comm):
    job = FakeJob()
    found = measure(job, Loop(warm_up=2, iterations=3, check=True), comm)
    assert job.log == [entry for i in range(5) for entry in (("rewrite", i), "call", ("wrong", i))]
    assert (len(found.times), found.wrong) == (3, 10)


def test_without_a_check_nothing_is_said_of_errors(comm):
    job = FakeJob()
    found = measure(job, Loop(warm_up=0, iterations=3, check=False), comm)
    assert found.wrong is None
    assert not [entry for entry in job.log if entry[0] == "wrong"]


def test_a_budget_leaves_three_iterations(comm, monkeypatch):
    clock = iter(range(10_000))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    found = measure(FakeJob(), Loop(warm_up=5, iterations=50, check=True, budget=0.5), comm)
    assert len(found.times) == 3
    found = measure(FakeJob(), Loop(warm_up=5, iterations=50, check=True, budget=1e6), comm)
    assert len(found.times) == 50


def row(**changed):
    case = cases_of(parse_plan("all_reduce", ["-b", "1M", "-e", "1M", "--algorithm", "ring"]), 2, limit=False)[0]
    made = row_of(case, Measured(times=(2e-3, 1e-3, 3e-3), wrong=0), order="any", ranks=2)
    return replace(made, **changed)


def results(rows, **changed):
    made = {
        "schema_version": 1,
        "benchmark": "all_reduce_perf",
        "operation": "all_reduce",
        "date": "2026-01-02T03:04:05+00:00",
        "machine": {"cores": 2, "processor": "a processor", "system": "Linux"},
        "versions": {"mpizero": "0", "python": "3", "numpy": "2", "torch": "", "mpi": "an MPI 1"},
        "ranks": 2,
        "nodes": 1,
        "per_node": [2],
        "seed": 1,
        "warm_up": 5,
        "root": 0,
        "left_out": {"ring (private, float32, sum)": "no ring", "ring (private, float32, max)": "no ring either"},
        "rows": [asdict(each) for each in rows],
    }
    return made | changed


def test_a_row():
    made = row()
    assert (made.t_median_us, made.t_min_us, made.t_p99_us) == pytest.approx((2000, 1000, 3000))
    assert made.algbw_GBs == pytest.approx(0.524288)
    assert made.busbw_GBs == pytest.approx(0.524288)  # 2 (p-1)/p is 1 for 2 ranks
    assert (made.iterations, made.wrong, made.limit_GBs) == (3, 0, None)


def test_json_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "r.json"
    made = results([row(), row(wrong=None, limit_GBs=9.0)])
    write_json(made, str(path))
    assert read_results(path) == made
    assert [file.name for file in tmp_path.iterdir()] == ["r.json"]


def test_results_that_cannot_be_read(tmp_path):
    path = tmp_path / "r.json"
    with pytest.raises(ArgumentError, match="a JSON file of bin/"):
        read_results(path)
    for text in ("{", "[]", '{"rows": []}', json.dumps(results([], schema_version=2))):
        path.write_text(text)
        with pytest.raises(ArgumentError, match="must be"):
            read_results(path)
    made = results([row()])
    del made["rows"][0]["busbw_GBs"]
    path.write_text(json.dumps(made))
    with pytest.raises(ArgumentError, match=r"one without \['busbw_GBs'\]"):
        read_results(path)


def test_csv(tmp_path):
    path = tmp_path / "r.csv"
    write_csv([row(), row(algorithm="tree")], str(path))
    with path.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [each["algorithm"] for each in found] == ["ring", "tree"]
    assert set(found[0]) == set(Row.__dataclass_fields__)
    assert found[0]["limit_GBs"] == ""
    assert float(found[0]["busbw_GBs"]) == row().busbw_GBs


def test_text_has_the_columns_and_lines_of_nccl_tests():
    text = report(results([]), [row(), row(prepared=True, wrong=3, limit_GBs=9.0)])
    lines = text.splitlines()
    table = [line.split() for line in lines if not line.startswith("#")]
    head = next(line for line in lines if "algbw" in line)
    wanted = "# size count type redop algorithm buffer time min p99 algbw busbw #wrong"
    assert head.split() == wanted.split()
    first = ["1048576", "262144", "float32", "sum", "ring", "private", "2000.0", "1000.0", "3000.0", "0.524", "0.524"]
    assert table[0] == [*first, "0"]
    assert table[1][4] == "ring+prepared"
    assert table[1][-1] == "3"
    assert "# Out of bounds values : 3 FAILED" in lines
    assert "# Avg bus bandwidth : 0.5243" in lines
    assert "ranks 2  hosts 1  ranks per host 2" in text
    assert "left out: ring (private, float32, sum): no ring (and in 1 more cases)" in text
    assert "Memory limit at 1048576 B: busbw 9.000" in text
    assert "# Out of bounds values : 0 OK" in report(results([]), [row()])
    assert "N/A" in report(results([]), [row(wrong=None)])
