"""The CUDA kernels: their bits on the CPU, what nvcc makes of their text, and how they are launched."""

import configparser
import ctypes
import re
import shutil
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.cuda_text import ARCHITECTURES, DEVICE, OPS, families, host_library, name_of, nvcc, takes, text_of
from helpers.reductions import Memory, accumulated, check_same, values_of

from mpizero.arrays import DTYPES, View
from mpizero.arrays import cuda_kernels as ours
from mpizero.errors import ArgumentError, ArgumentTypeError

HALVES = ("bfloat16", "float16")
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
slow = pytest.mark.slow
*OLDER, NEWEST = ARCHITECTURES
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    base = tmp_path_factory.getbasetemp()
    return host_library(base.parent if base.name.startswith("popen-") else base)


def run(library, op, targets, sources, *, divisor=1, grid=(2, 32)):
    params, dtype = ours.reduce_params(op, [t.device for t in targets], [s.device for s in sources], divisor)
    chosen = "copy" if len(sources) == 1 else "sum" if op == "mean" else op
    kernel = getattr(library, name_of(dtype.name, chosen, len(sources)))
    kernel(ctypes.byref(params), grid[0], 1, grid[1])
    for memory in (*targets, *sources):
        memory.check_guards()


def check(library, op, num, name, count, **how):
    """Run one reduction on the CPU and by numpy.

    `how` may say: wide, which sources are wide; targets, the targets' types; offsets, of sources and then targets;
    inside, the source that is the first target; divisor.
    """
    rng = np.random.default_rng(count * 100 + num)
    types = [DTYPES[name].accumulate if i in how.get("wide", ()) else name for i in range(num)]
    offsets = [*how.get("offsets", ())]
    made = [
        Memory(kind, values_of(DTYPES[kind], count, rng), offset or 0)
        for kind, offset in zip_longest(types, offsets[:num])
    ]
    into = [
        Memory(kind, np.zeros(count, DTYPES[kind].storage), offset or 0)
        for kind, offset in zip_longest(how.get("targets", (name,)), offsets[num:])
    ]
    sources = [View(memory.data.copy(), memory.dtype) for memory in made]
    if "inside" in how:
        into[0] = made[how["inside"]]
    divisor = how.get("divisor", 1)
    run(library, op, into, made, divisor=divisor)
    for target in into:
        check_same(target.host, accumulated(op, sources, target.dtype.name, divisor), op)


@needs_compiler
@pytest.mark.parametrize("name", DTYPES)
def test_bits_are_those_of_numpy(library, name):
    for op in (op for op in OPS if takes(DTYPES[name], op)):
        for num in (1, 2, 3, 5, 8):
            check(library, op, num, name, 1000)
    for count in (0, 1, 7, 64, 333):
        check(library, "sum", 3, name, count)
        check(library, "copy", 1, name, count)


@needs_compiler
@pytest.mark.parametrize("name", ["bfloat16", "float32", "int8", "complex64", "complex128"])
def test_pointers_need_not_be_aligned(library, name):
    for offsets in ([1, 1, 1, 1], [3, 3, 3, 3], [1, 0, 0, 0], [0, 0, 0, 1], [0, 1, 2, 3]):
        for count in (1, 2, 7, 1000):
            check(library, "sum", 3, name, count, offsets=offsets)
            check(library, "copy", 1, name, count, offsets=offsets[-2:])


@needs_compiler
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "uint8"])
def test_a_target_may_be_a_source_and_there_may_be_several(library, name):
    for num, inside in ((1, 0), (2, 0), (2, 1), (3, 2), (8, 5)):
        check(library, "sum", num, name, 1000, inside=inside)
        check(library, "sum", num, name, 1000, inside=inside, targets=(name, name, name))


@needs_compiler
@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("divisor", [1, 3, 8])
def test_halves_beside_their_accumulation_type(library, name, divisor):
    for num in (1, 2, 3, 5):
        for wide in ((), (0,), (num - 1,), tuple(range(num))):
            for targets in ((name,), ("float32",), ("float32", name, "float32")):
                if len(wide) < num or name in targets:
                    check(library, "sum", num, name, 1000, wide=wide, targets=targets, divisor=divisor)
    check(library, "prod", 3, name, 77, wide=(1,), targets=("float32", name), divisor=divisor)
    # Narrow pointers 3 elements after a line and wide ones 3 elements after one: 5 elements on, all are on lines.
    check(library, "sum", 3, name, 1000, wide=(1,), targets=("float32", name), offsets=[3, 3, 3, 3, 3])
    check(library, "sum", 3, name, 1000, wide=(1,), targets=("float32", name), offsets=[3, 1, 0, 2, 0])


@needs_compiler
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("divisor", [2, 3, 7, 64])
def test_a_mean_divides_before_the_rounding(library, name, divisor):
    for num in (1, 2, 5):
        check(library, "mean", num, name, 1000, divisor=divisor)


@needs_compiler
def test_a_mean_of_large_halves_does_not_overflow(library):
    sources = [Memory("float16", np.full(9, 65504, np.float16)) for _ in range(8)]
    target = Memory("float16", np.zeros(9, np.float16))
    run(library, "mean", [target], sources, divisor=8)
    assert (target.data == 65504).all()


@needs_compiler
@pytest.mark.parametrize(("name", "num"), [("float32", 32), ("bfloat16", 13)])
def test_many_sources(library, name, num):
    check(library, "sum", num, name, 1000, offsets=[0] * num)
    check(library, "sum", num, name, 1000, inside=num - 1, divisor=num, targets=(name, name))


@needs_compiler
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "float64"])
def test_the_lower_source_is_the_left_operand(library, name):
    """Of +0 and -0, which are equal, max and min give the left one: that of the first source."""
    rng = np.random.default_rng(4)
    for op in ("max", "min"):
        for num in (2, 3, 5, 8):
            top = rng.integers(0, 2, (num, 100)) << DTYPES[name].itemsize * 8 - 1
            zeros = [row.astype(f"u{DTYPES[name].itemsize}").view(DTYPES[name].storage) for row in top]
            sources, target = [Memory(name, row) for row in zeros], Memory(name, zeros[-1])
            run(library, op, [target], sources)
            assert target.data.tobytes() == zeros[0].tobytes()


@needs_compiler
def test_every_half_is_widened_and_rounded_as_by_numpy(library):
    for name in HALVES:
        every = Memory(name, np.arange(65536, dtype=np.uint16).view(DTYPES[name].storage))
        wide = Memory("float32", np.zeros(65536, np.float32))
        run(library, "copy", [wide], [every])
        check_same(wide.host, accumulated("copy", [every.host], "float32"), "copy")
        # The numbers half way between two neighbours, and those just beside.
        with np.errstate(all="ignore"):
            middle = (wide.data[:-1] + wide.data[1:]) / 2
        for value in (middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))):
            source, target = Memory("float32", value), Memory(name, np.zeros(65535, DTYPES[name].storage))
            run(library, "copy", [target], [source])
            check_same(target.host, accumulated("copy", [source.host], name), "copy")


@needs_compiler
@pytest.mark.parametrize("grid", [(1, 1), (1, 32), (3, 32), (7, 64)])
def test_any_grid_covers_all_elements_once(library, grid):
    for count in (1, 255, 256, 257, 5000):
        sources = [Memory("float32", np.arange(count, dtype=np.float32)) for _ in range(2)]
        run(library, "sum", [sources[1]], sources, grid=grid)
        assert (sources[1].data == 2 * np.arange(count)).all()


def host_move(library, runs, grid=(2, 32)):
    library.host_move(ctypes.byref(ours.move_params(runs)), grid[0], len(runs), grid[1])


@needs_compiler
@pytest.mark.parametrize("offsets", [(0, 0), (5, 5), (16, 48), (3, 11), (4, 0), (2, 0), (6, 8), (1, 0), (7, 4)])
@pytest.mark.parametrize("nbytes", [1, 3, 15, 16, 17, 1000, 10000])
def test_moved_bytes_arrive_and_no_others(library, offsets, nbytes):
    rng = np.random.default_rng(nbytes)
    source = Memory("uint8", rng.integers(0, 256, nbytes, dtype=np.uint8), offsets[0])
    target = Memory("uint8", np.zeros(nbytes, np.uint8), offsets[1])
    host_move(library, [(source.data.ctypes.data, target.data.ctypes.data, nbytes)])
    assert (source.data == target.data).all()
    source.check_guards()
    target.check_guards()


@needs_compiler
def test_the_structures_have_the_sizes_of_those_in_c(library):
    for structure, size in ((ours.ReduceParams, library.size_of_reduce), (ours.MoveParams, library.size_of_move)):
        size.restype = ctypes.c_uint64
        assert ctypes.sizeof(structure) == size()


class FakeCupy:
    """The names of CuPy that are used, launching on the CPU at once."""

    def __init__(self, library):
        self.library, self.compiled, self.launches, self.contexts = library, [], [], 0
        self.functions = []
        runtime = SimpleNamespace(
            getDevice=lambda: 0, deviceGetAttribute=self.attribute, cudaDevAttrMultiProcessorCount=16, free=self.free
        )
        self.cuda = SimpleNamespace(runtime=runtime, driver=SimpleNamespace(launchKernel=self.launch))

    def attribute(self, which, device):
        assert (which, device) == (16, 0)
        return 2

    def free(self, address):
        assert address == 0
        self.contexts += 1

    def RawModule(self, *, code, options):  # noqa: N802  (CuPy's name)
        assert code == ours.source_text()
        self.compiled.append(options)
        defined = dict(option[2:].split("=") for option in options if option.startswith("-D"))
        return SimpleNamespace(get_function=lambda name: self.function(name, defined))

    def function(self, name, defined):
        wanted = name_of(defined["ELEMENT"], defined["OP"], defined["SOURCES"]) if name == "reduce" else "host_move"
        self.functions.append(getattr(self.library, wanted))
        return SimpleNamespace(kernel=SimpleNamespace(ptr=len(self.functions) - 1))

    def launch(self, function, *rest):
        width, height, depth, threads, *ones, shared, stream, pointers, extra = rest
        assert (depth, *ones, shared, extra) == (1, 1, 1, 0, 0)
        params = ctypes.c_void_p.from_address(pointers)
        self.functions[function](params, width, height, threads)
        self.launches.append((width, height, threads, stream))


@pytest.fixture
def cupy(library, monkeypatch):
    fake = FakeCupy(library)
    monkeypatch.setattr(ours, "_cupy", lambda: fake)
    return fake


@needs_compiler
def test_reductions_are_compiled_once_and_launched_on_the_stream(cupy):
    kernels = ours.CudaKernels()
    sources = [Memory("float32", np.full(10000, value, np.float32)) for value in (1, 2, 3)]
    target = Memory("float32", np.zeros(10000, np.float32))
    devices = [source.device for source in sources]
    kernels.reduce("sum", [target.device], devices, 1, 77)
    assert (target.data == 6).all()
    kernels.reduce("mean", [target.device, sources[0].device], devices, 3, 78)
    assert (target.data == 2).all()
    assert (sources[0].data == 2).all()
    kernels.reduce("max", [target.device], devices, 1, 78)
    assert (target.data == 3).all()
    kernels.reduce("max", [target.device], devices[:1], 1, 78)
    assert (target.data == 2).all()
    assert [options[-3:] for options in cupy.compiled] == [
        ("-DELEMENT=float32", "-DOP=sum", "-DSOURCES=3"),
        ("-DELEMENT=float32", "-DOP=max", "-DSOURCES=3"),
        ("-DELEMENT=float32", "-DOP=copy", "-DSOURCES=1"),
    ]
    assert cupy.launches == [(10, 1, 256, stream) for stream in (77, 78, 78, 78)]
    assert cupy.contexts == 1


@needs_compiler
def test_an_empty_reduction_launches_nothing(cupy):
    empty = Memory("int32", np.zeros(0, np.int32)).device
    kernels = ours.CudaKernels()
    kernels.reduce("sum", [empty], [empty, empty], 1, 0)
    kernels.move([(16, 32, 0)], 0)
    kernels.move([], 0)
    assert cupy.launches == []


@needs_compiler
def test_more_runs_than_a_launch_takes_are_several_launches(cupy):
    source = Memory("int32", np.arange(7000, dtype=np.int32))
    target = Memory("int32", np.zeros(7000, np.int32))
    runs = [
        (source.data.ctypes.data + 400 * i, target.data.ctypes.data + 400 * (69 - i), 0 if i == 7 else 400)
        for i in range(70)
    ]
    ours.CudaKernels().move(runs, 5)
    want = np.arange(7000, dtype=np.int32).reshape(70, 100)[::-1].copy()
    want[62] = 0
    assert (target.data.reshape(70, 100) == want).all()
    assert cupy.launches == [(1, 32, 256, 5), (1, 32, 256, 5), (1, 5, 256, 5)]


def device(name, count=4, address=256):
    return SimpleNamespace(data=SimpleNamespace(address=address, size=count), dtype=DTYPES[name])


@pytest.mark.parametrize(
    ("op", "targets", "sources", "divisor", "error"),
    [
        ("sum", ["float32"], ["float32"] * 33, 1, ArgumentError("number of sources must be 1 to 32")),
        ("sum", [], ["float32"], 1, ArgumentError("number of targets must be 1 to 32")),
        ("sum", ["float32"], [], 1, ArgumentError("number of sources must be 1 to 32")),
        ("copy", ["float32"], ["float32"] * 2, 1, ArgumentError("number of sources of a copy must be 1")),
        ("xor", ["int8"], ["int8"], 1, ArgumentError("op must be one of")),
        ("sum", ["float16"], ["bfloat16", "float32"], 1, ArgumentTypeError("dtypes must be one")),
        ("sum", ["float64"], ["float32"], 1, ArgumentTypeError("dtypes must be one")),
        ("max", ["float32"], ["bfloat16"] * 2, 1, ArgumentTypeError("dtypes must be one")),
        ("max", ["complex64"], ["complex64"] * 2, 1, ArgumentTypeError("dtype must be one that max is defined for")),
        ("max", ["float32"], ["float32"] * 2, 2, ArgumentError("divisor of max must be 1")),
        ("mean", ["int32"], ["int32"] * 2, 2, ArgumentTypeError("dtype of a mean must be")),
        ("mean", ["float32"], ["float32"] * 2, 0, ArgumentError("divisor must be from 1")),
    ],
)
def test_what_the_kernels_cannot_do_is_refused(op, targets, sources, divisor, error):
    with pytest.raises(type(error), match=str(error)):
        ours.reduce_params(op, [device(name) for name in targets], [device(name) for name in sources], divisor)


def test_counts_must_be_equal():
    with pytest.raises(ArgumentError, match="counts of sources and targets must be equal"):
        ours.reduce_params("sum", [device("int8", 3)], [device("int8", 4)], 1)


def test_lines_begin_where_all_pointers_are_on_16_bytes():
    def head(*views):
        return ours.reduce_params("sum", views[:1], views[1:], 1)[0].head

    assert head(device("float32", 100, 256), device("float32", 100, 512)) == 0
    assert head(device("float32", 100, 260), device("float32", 100, 516)) == 3
    assert head(device("float32", 100, 260), device("float32", 100, 512)) == 100
    assert head(device("bfloat16", 100, 262), device("float32", 100, 268)) == 5
    assert head(device("bfloat16", 4, 262), device("float32", 4, 268)) == 4
    assert head(device("complex128", 9, 264), device("complex128", 9, 264)) == 9


def test_a_grid_has_a_line_per_thread_and_no_more_blocks_than_fit():
    assert [ours.grid_size(nbytes, 132) for nbytes in (1, 4096, 4097, 1 << 40)] == [1, 1, 2, 1056]


def test_the_text_includes_no_headers_and_is_installed():
    assert "#include" not in ours.source_text()
    config = configparser.ConfigParser()
    config.read(Path(__file__).parents[2] / "setup.cfg")
    assert config["options.package_data"]["mpizero.arrays"] == "kernels.cu"


@needs_nvcc
@pytest.mark.parametrize("architecture", [*(pytest.param(one, marks=slow) for one in OLDER), NEWEST])
def test_nvcc_compiles_the_text(tmp_path, architecture):
    cubin = nvcc(tmp_path, text_of(families(), DEVICE), "-cubin", f"-arch={architecture}")
    assert all(name_of(*one).encode() in cubin for one in families())


@needs_nvcc
@pytest.mark.parametrize(("name", "op", "num"), [("float32", "sum", 2), ("bfloat16", "sum", 8), (None, "copy", 1)])
def test_the_code_moves_16_bytes_at_a_time_and_keeps_denormals(tmp_path, name, op, num):
    """As CuPy compiles it: with the macros, and with -ftz=true after the options."""
    chosen = ours.options(name and DTYPES[name], op, num)
    ptx = nvcc(tmp_path, ours.source_text(), "-ptx", "-arch=sm_90", *(word for word in chosen if word[:2] == "-D"))
    text = re.sub(r"^\s*//.*", "", ptx.decode(), flags=re.MULTILINE)
    assert (".entry reduce(" if name else ".entry move(") in text
    assert len(re.findall(r"ld\.global\.v4", text)) >= 2 * num
    assert "st.global.v4" in text
    # No flush to zero, no fused operation, no read-only cache, no copy of the parameter on the stack.
    assert re.findall(r"\.ftz|\bfma\.|\.nc\b|\.approx|__local_depot", text) == []


NAMES = """
import cupy
from cupy.cuda.function import Function
cuda = cupy.cuda
assert all(map(callable, (cuda.runtime.getDevice, cuda.runtime.deviceGetAttribute, cuda.runtime.free)))
assert isinstance(cuda.runtime.cudaDevAttrMultiProcessorCount, int)
assert hasattr(cupy.RawModule, "get_function") and hasattr(cupy.RawKernel, "kernel") and hasattr(Function, "ptr")
cupy.RawModule(code="", options=("-std=c++17",))
try:
    cuda.driver.launchKernel(*range(10))
except TypeError as error:
    assert "exactly 11" in str(error) or "at least 11" in str(error), error
else:
    raise AssertionError
"""


def test_cupy_has_the_names_that_are_used():
    pytest.importorskip("cupy")
    done = subprocess.run([sys.executable, "-c", NAMES], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
