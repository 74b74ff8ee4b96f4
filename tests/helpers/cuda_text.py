"""The text of mpizero/arrays/kernels.cu, many kernels of it at once: for the CPU under a shim, for GPUs by nvcc."""

import ctypes
import fcntl
import hashlib
import shutil
import subprocess
from pathlib import Path

from mpizero.arrays import DTYPES
from mpizero.arrays.cuda_kernels import source_text

HERE = Path(__file__).parent
OPS = ("sum", "prod", "max", "min")
NUMBERS = (2, 3, 5, 8)
ARCHITECTURES = ("sm_75", "sm_80", "sm_90")

HOST = """
extern "C" void {name}(const Reduce* params, unsigned width, unsigned height, unsigned threads) {{
    launch(width, height, threads, [&] {{ Reduction<Held<{element}>::type, Op::{op}, {number}>(*params).run(); }});
}}
"""
HOST_MOVE = """
extern "C" void host_move(const Move* params, unsigned width, unsigned height, unsigned threads) {
    launch(width, height, threads, [&] { mpizero::move(*params); });
}
extern "C" unsigned long long size_of_reduce() { return sizeof(Reduce); }
extern "C" unsigned long long size_of_move() { return sizeof(Move); }
"""
DEVICE = """
extern "C" __global__ void __launch_bounds__(256) {name}(const __grid_constant__ Reduce params) {{
    Reduction<Held<{element}>::type, Op::{op}, {number}>(params).run();
}}
"""
NVCC = ("-std=c++17", "--fmad=false", "-ftz=true", "-Wno-deprecated-gpu-targets")
"""As CuPy compiles: it appends -ftz=true to the options of its callers."""


def takes(dtype, op):
    return dtype.kind != "c" or op not in {"max", "min"}


def everything():
    """All (element, op, number) that the tests on the CPU run."""
    yield from ((name, "copy", 1) for name in DTYPES)
    yield from (
        (name, op, number) for name, dtype in DTYPES.items() for op in OPS if takes(dtype, op) for number in NUMBERS
    )
    yield from (("float32", "sum", 32), ("bfloat16", "sum", 13))


def families():
    """The (element, op, number) that are compiled for GPUs: each element type and each operation on each kind."""
    yield from ((name, "copy", 1) for name in ("bfloat16", "float16", "float32", "int8", "complex128"))
    yield from ((name, "sum", 2) for name in DTYPES)
    for name in ("bfloat16", "float16", "float32", "float64", "int8", "uint64", "bool"):
        yield from ((name, op, 3) for op in ("max", "min", "prod"))
    yield from (("complex64", "prod", 3), ("bfloat16", "sum", 8), ("float32", "sum", 32))


def name_of(element, op, number):
    return f"kernel_{element}_{op}_{number}"


def text_of(chosen, template, head="", tail=""):
    """One text with a kernel for each of (element, op, number), and `move`."""
    kernels = [template.format(name=name_of(*one), element=one[0], op=one[1], number=one[2]) for one in chosen]
    return "\n".join([head, source_text(), "using namespace mpizero;", *kernels, tail])


def host_library(folder, text=None):
    """The kernels as a library for the CPU, built once however many processes ask."""
    head = f'#include "{HERE / "host_cuda.h"}"\n'
    text = text or text_of(everything(), HOST, head, HOST_MOVE)
    shim = (HERE / "host_cuda.h").read_text()
    built = folder / f"kernels-{hashlib.sha256((shim + text).encode()).hexdigest()[:16]}.so"
    with (folder / "kernels.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            _build(text, built)
    return ctypes.CDLL(str(built))


def _build(text, built):
    source = built.with_suffix(".cpp")
    source.write_text(text)
    unwanted = ("-Wno-unknown-pragmas", "-Wno-maybe-uninitialized", "-Wno-uninitialized")
    line = ["g++", "-std=c++17", "-O0", "-fPIC", "-shared", "-ffp-contract=off", "-fno-strict-aliasing"]
    # A GPU stops at an access that is not aligned to its size, where a CPU may go on: a trap (SIGILL) here.
    line += ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]
    line += ["-Wall", "-Werror", *unwanted, str(source), "-o", str(built)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr


def nvcc(folder, text, *words):
    """Run nvcc on a text; return what it wrote."""
    source, made = folder / "text.cu", folder / "made"
    source.write_text(text)
    line = [shutil.which("nvcc"), *NVCC, *words, str(source), "-o", str(made)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return made.read_bytes()
