"""Views and kernels: what a collective sees of an array, and the arithmetic on it."""

import subprocess
import sys

import numpy as np
import pytest

from mpizero.arrays import (
    DTYPES,
    View,
    borrow,
    check_no_partial_overlap,
    combine,
    copy,
    dtype_named,
    kind_of,
    new_like,
    scratch_view,
)
from mpizero.errors import ArgumentError, ArgumentTypeError


def view_of(values, name=None):
    data = np.asarray(values)
    return View(data, DTYPES[name or data.dtype.name])


def bits(*values):
    """fp32 numbers as bfloat16 bits, cut off."""
    return (np.array(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


class Rows(np.ndarray):
    """A subclass that never gets fewer than two axes, as numpy.matrix."""

    def reshape(self, *shape):
        return self.view(np.ndarray).reshape(*shape).reshape(1, -1).view(Rows)


# Views


def test_contiguous_arrays_are_not_copied():
    x = np.arange(6.0).reshape(2, 3)
    borrowed = borrow(x, writable=True)
    assert not borrowed.packed
    assert np.shares_memory(borrowed.view.data, x)
    assert borrowed.view.count == 6


STRIDED = {
    "fortran": lambda: np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "step": lambda: np.arange(24.0)[::2],
    "backwards": lambda: np.arange(7.0)[::-1],
    "both": lambda: np.arange(60.0).reshape(3, 4, 5)[::-1, 1:3, ::2],
    "transposed": lambda: np.arange(60.0).reshape(3, 4, 5).transpose(2, 0, 1),
}


@pytest.mark.parametrize("name", STRIDED)
def test_strided_arrays_are_packed_by_index_and_written_back(name):
    """K3, K4."""
    x = STRIDED[name]()
    base = x if x.base is None else x.base
    untouched = base.copy()
    borrowed = borrow(x, writable=True)
    assert borrowed.packed
    assert borrowed.view.data.tolist() == list(x.flat)
    borrowed.view.data[:] += 100
    wanted = x + 100
    borrowed.give_back()
    assert np.array_equal(x, wanted)
    assert np.count_nonzero(base != untouched) == x.size


def test_packed_input_that_is_only_read_is_not_written_back():
    x = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    borrowed = borrow(x, writable=False)
    borrowed.view.data[:] = -1
    borrowed.give_back()
    assert x.min() == 0


def test_torch_views():
    torch = pytest.importorskip("torch")
    x = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    plain = borrow(x, writable=True)
    assert (plain.packed, plain.view.dtype.name, plain.view.data.dtype) == (False, "bfloat16", np.uint16)
    plain.view.data[0] = bits(7.0)[0]
    assert x[0, 0] == 7
    for y in (x.T, x[:, ::2], x[1:, 1:]):
        packed = borrow(y, writable=True)
        assert packed.packed
        assert (packed.view.data == borrow(y.contiguous(), writable=False).view.data).all()
        packed.view.data[:] = bits(*range(packed.view.count))
        packed.give_back()
        assert y.flatten().tolist() == list(range(y.numel()))


def test_borrowed_storage_can_still_be_emptied():
    """Units of shard empty and refill their storage; Tensor.numpy() would forbid it for ever."""
    torch = pytest.importorskip("torch")
    for dtype in (torch.float32, torch.bfloat16, torch.bool):
        x = torch.zeros(8, dtype=dtype)
        view = borrow(x, writable=True).view
        combine("max", view, view, view)
        x.untyped_storage().resize_(0)
        assert x.untyped_storage().nbytes() == 0


def test_torch_parameters_conjugates_and_negatives():
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.ones(3))
    borrow(weight, writable=True).view.data[:] = 5
    assert weight.tolist() == [5, 5, 5]
    z = torch.tensor([1 + 2j, 3 - 4j])
    for y in (z.conj(), z.conj().imag):
        packed = borrow(y, writable=True)
        assert packed.packed
        assert packed.view.data.tolist() == y.tolist()
        packed.view.data[:] = packed.view.data * 2
        wanted = (y * 2).tolist()
        packed.give_back()
        assert y.tolist() == wanted
    assert z.tolist() == [2 + 8j, 6 - 16j]


def test_shapes_without_elements_or_axes():
    assert borrow(np.empty((3, 0)), writable=True).view.count == 0
    scalar = np.array(2.0)
    borrow(scalar, writable=True).view.data[0] = 3
    assert scalar == 3
    assert borrow(np.zeros((1, 2)).view(Rows), writable=True).view.count == 2


def test_read_only():
    """K12."""
    x = np.zeros(3)
    x.flags.writeable = False
    assert borrow(x, writable=False).view.count == 3
    with pytest.raises(ArgumentError, match="out must be writable"):
        borrow(x, "out", writable=True)


def test_big_endian():
    """K12."""
    with pytest.raises(ArgumentTypeError, match="x must be in native byte order"):
        borrow(np.zeros(3, np.dtype("f4").newbyteorder()), writable=False)
    assert borrow(np.zeros(3, ">i1"), writable=True).view.count == 3


@pytest.mark.parametrize("x", ["text", [1.0], 1.0, None, np.float32(1)])
def test_what_is_no_array(x):
    with pytest.raises(ArgumentTypeError, match="x must be a numpy array, a torch tensor or a CuPy array"):
        kind_of(x)


@pytest.mark.parametrize("dtype", ["U3", "O", "M8[s]", "f4,i4", "g"])
def test_dtypes_that_nobody_carries(dtype):
    with pytest.raises(ArgumentTypeError, match=r"dtype of x must be one of .*float32"):
        borrow(np.zeros(2, dtype), writable=False)


def test_torch_tensors_that_are_not_in_host_memory():
    torch = pytest.importorskip("torch")
    with pytest.raises(ArgumentTypeError, match="dense tensor in host memory"):
        kind_of(torch.empty(2, device="meta"))
    with pytest.raises(ArgumentTypeError, match="dense tensor in host memory"):
        kind_of(torch.eye(2).to_sparse())
    with pytest.raises(ArgumentTypeError, match="dtype of x"):
        borrow(torch.zeros(2, dtype=torch.float8_e4m3fn), writable=False)


def test_elements_that_share_memory_are_not_written():
    windows = np.lib.stride_tricks.as_strided(np.zeros(6), (4, 3), (8, 8))
    for x in (np.lib.stride_tricks.as_strided(np.zeros(1), (4,), (0,)), windows):
        assert borrow(x, writable=False).view.count == x.size
        with pytest.raises(ArgumentError, match="free of elements that share memory"):
            borrow(x, writable=True)
    torch = pytest.importorskip("torch")
    for x in (torch.zeros(1).expand(4), torch.zeros(6).unfold(0, 3, 1)):
        with pytest.raises(ArgumentError, match="free of elements that share memory"):
            borrow(x, writable=True)


def test_overlap():
    """K5: exact alias is in place, memory apart is apart, anything between is an error."""
    base = np.arange(16.0)
    square = base.reshape(4, 4)
    in_place = [(base, base[:]), (square, base.reshape(4, 4)), (square.T, base.reshape(4, 4).T), (base[::2], base[::2])]
    apart = [
        (base, base.copy()),
        (base[:8], base[8:]),
        (base[::2], base[1::2]),
        (base[:0], base),
        (square[:, :2], square[:, 2:]),
    ]
    partly = [
        (base[:9], base[8:]),
        (base[1:], base[:-1]),
        (square, square.T),
        (base, base[::-1]),
        (square[:2], square[1:3]),
    ]
    assert [check_no_partial_overlap(x, out) for x, out in in_place] == [True] * len(in_place)
    assert [check_no_partial_overlap(x, out) for x, out in apart] == [False] * len(apart)
    for x, out in partly:
        with pytest.raises(ArgumentError, match="out must be x itself or memory apart from x"):
            check_no_partial_overlap(x, out)


def test_overlap_of_tensors():
    torch = pytest.importorskip("torch")
    base = torch.arange(16, dtype=torch.bfloat16)
    square = base.view(4, 4)
    assert check_no_partial_overlap(base, base[:])
    assert check_no_partial_overlap(square.T, base.view(4, 4).T)
    assert not check_no_partial_overlap(base[:8], base[8:])
    assert not check_no_partial_overlap(base[::2], base[1::2])
    assert not check_no_partial_overlap(base[:0], base)
    z = torch.zeros(3, dtype=torch.complex64)
    for x, out in ((base[:9], base[8:]), (square, square.T), (z, z.conj())):
        with pytest.raises(ArgumentError, match="memory apart"):
            check_no_partial_overlap(x, out)


def test_new_like():
    assert new_like(np.zeros(3, np.int8), (2, 5)).dtype == np.int8
    torch = pytest.importorskip("torch")
    x = new_like(torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)), (4,))
    assert (x.dtype, tuple(x.shape), x.requires_grad) == (torch.bfloat16, (4,), False)


def test_scratch_view_and_parts():
    view = scratch_view(np.zeros(70, np.uint8), DTYPES["float64"])
    assert view.count == 8
    view.part(2, 5).data[:] = 1
    assert view.data.tolist() == [0, 0, 1, 1, 1, 0, 0, 0]


def test_dtypes():
    assert {name: dtype.itemsize for name, dtype in DTYPES.items() if dtype.is_half} == {"bfloat16": 2, "float16": 2}
    assert dtype_named("bfloat16").accumulator("sum") is DTYPES["float32"]
    assert dtype_named("bfloat16").accumulator("max") is DTYPES["bfloat16"]
    assert dtype_named("float64").accumulator("mean") is DTYPES["float64"]
    assert dtype_named("int8").accumulator("prod") is DTYPES["int8"]
    with pytest.raises(ArgumentTypeError, match=r"dtype of weights must be one of .*bfloat16.*got 'float8'"):
        dtype_named("float8", "weights")


# Kernels


def test_combine_in_place_and_apart():
    left, right = view_of([1.0, 2.0, 3.0]), view_of([10.0, 20.0, 30.0])
    dst = view_of(np.zeros(3))
    for op, wanted in {"sum": [11, 22, 33], "prod": [10, 40, 90], "max": [10, 20, 30], "min": [1, 2, 3]}.items():
        combine(op, dst, left, right)
        assert dst.data.tolist() == wanted
    combine("mean", left, left, right, 2)
    assert left.data.tolist() == [5.5, 11, 16.5]


def test_order_of_operands_reaches_the_result():
    """A NaN's payload tells left from right where nothing else does; here the blocks' order of elements is checked."""
    count = 3 * 32768 + 5
    left = np.arange(count, dtype=np.float16)
    right = np.ones(count, np.float16)
    dst = view_of(np.zeros(count, np.float32))
    combine("sum", dst, view_of(left), view_of(right))
    assert np.array_equal(dst.data, left.astype(np.float32) + 1)


def test_partial_results_of_16_bit_floats_stay_wide():
    partial = view_of(np.zeros(2, np.float32))
    combine("sum", partial, view_of(np.array([2048, 60000], np.float16)), view_of(np.array([1, 60000], np.float16)))
    assert partial.data.tolist() == [2049, 120000]
    combine("sum", partial, partial, view_of(np.array([1, 1], np.float16)))
    final = view_of(np.zeros(2, np.float16))
    copy(final, partial, 2)
    assert final.data.tolist() == [1025, 60000]


@pytest.fixture(params=["numpy", "torch"])
def engine(request, monkeypatch):
    """Take the numpy path (as where torch was never imported) or the torch path."""
    if request.param == "numpy":
        monkeypatch.setitem(sys.modules, "torch", None)
    else:
        pytest.importorskip("torch")
    return request.param


NAN = np.array([0x7FC00001, 0xFFC12345, 0x7F800001], np.uint32).view(np.float32)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (1.0, 0x3F80),
        (1.0 + 2**-8, 0x3F80),  # a tie goes to the even neighbour: down
        (1.0 + 3 * 2**-8, 0x3F82),  # and up
        (1.0 + 2**-8 + 2**-20, 0x3F81),  # just above a tie
        (1.0 + 3 * 2**-8 - 2**-20, 0x3F81),  # just below
        (-1.0 - 2**-8, 0xBF80),
        (3.4e38, 0x7F80),  # rounds up to infinity
        (np.inf, 0x7F80),
        (-np.inf, 0xFF80),
        (-0.0, 0x8000),
        (1e-45, 0x0000),
        (NAN[0], 0x7FC0),
        (NAN[1], 0x7FC0),
        (NAN[2], 0x7FC0),
    ],
)
def test_rounding_to_bfloat16(engine, value, wanted):
    for count in (1, 7, 16, 33):
        dst = view_of(np.zeros(count, np.uint16), "bfloat16")
        copy(dst, view_of(np.full(count, value, np.float32)))
        assert set(dst.data.tolist()) == {wanted}


def test_rounding_to_float16(engine):
    dst = view_of(np.zeros(4, np.float16))
    copy(dst, view_of(np.array([2051, 2049, 65520, np.nan], np.float32)))
    assert dst.data.tolist()[:3] == [2052, 2048, np.inf]
    assert np.isnan(dst.data[3])


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
@pytest.mark.parametrize("op", ["sum", "mean", "prod", "max", "min"])
def test_numpy_and_torch_give_the_same_bits(name, op, monkeypatch):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    count = 32768 + 1000
    left, right = (rng.integers(0, 1 << 16, count, dtype=np.uint16) for _ in range(2))  # every pattern, NaN included
    found = []
    for module in (torch, None):
        monkeypatch.setitem(sys.modules, "torch", module)
        dst = view_of(np.zeros(count, DTYPES[name].storage), name)
        operands = [view_of(part.view(DTYPES[name].storage), name) for part in (left, right)]
        combine(op, dst, *operands, 3 if op == "mean" else 1)
        found.append(dst.data.view(np.uint16))
    is_nan = np.isnan(found[0].view(np.float16)) if name == "float16" else (found[0] & 0x7FFF) > 0x7F80
    assert np.array_equal(found[0], found[1])
    assert is_nan.any()
    assert not is_nan.all()


@pytest.mark.parametrize("name", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("op", ["max", "min"])
def test_nan_wins_on_either_side(engine, name, op):
    values = np.array([1.0, np.nan, np.nan, -2.0], np.float32)
    storage = DTYPES[name].storage

    def make(data):
        return view_of(bits(*data) if name == "bfloat16" else data.astype(storage), name)

    dst = make(np.zeros(4, np.float32))
    combine(op, dst, make(values), make(values[::-1].copy()))
    wide = View(np.zeros(4, np.float64), DTYPES["float64"])
    copy(wide, dst) if name != "float64" else np.copyto(wide.data, dst.data)
    assert np.isnan(wide.data).tolist() == [False, True, True, False]
    assert wide.data[0] == (1.0 if op == "max" else -2.0)


def test_integers_wrap():
    dst = view_of(np.zeros(2, np.int8))
    combine("sum", dst, view_of(np.array([127, -128], np.int8)), view_of(np.array([1, -1], np.int8)))
    assert dst.data.tolist() == [-128, 127]


def test_complex_mean_divides_by_parts(engine):
    dst = view_of(np.zeros(2, np.complex64))
    copy(dst, view_of(np.array([complex(1, 2), complex(np.inf, 1)], np.complex64)), 3)
    third = np.float32(1) / np.float32(3)
    assert dst.data.tolist() == [complex(third, np.float32(2) / np.float32(3)), complex(np.inf, third)]


def test_read_only_halves_are_widened_without_torch_warning():
    pytest.importorskip("torch")
    data = np.ones(4, np.float16)
    data.flags.writeable = False
    dst = view_of(np.zeros(4, np.float32))
    combine("sum", dst, view_of(data), view_of(data))
    assert dst.data.tolist() == [2] * 4


def test_kernels_do_not_import_torch():
    code = (
        "import sys, numpy as np\n"
        "from mpizero.arrays import DTYPES, View, combine\n"
        "v = [View(np.zeros(3, np.uint16), DTYPES['bfloat16']) for _ in range(3)]\n"
        "combine('sum', *v)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
@pytest.mark.parametrize("widths", ["nnn", "wnn", "wwn", "wnw", "www", "nww", "nwn"])
def test_torch_adds_halves_with_the_same_bits(name, widths):
    """Of 16-bit (n) and fp32 (w) views, for result, left and right; NaN aside, whose bits are the processor's."""
    pytest.importorskip("torch")
    rng = np.random.default_rng(2)
    count = 5003
    found = []
    left, right = (rng.standard_normal(count).astype(np.float32) * 100 for _ in range(2))
    for once in (False, True):
        views = [view_of(np.zeros(count, np.float32)), view_of(left.copy()), view_of(right.copy())]
        for index, width in enumerate(widths):
            if width == "n":
                narrow = view_of(np.zeros(count, DTYPES[name].storage), name)
                copy(narrow, views[index])
                views[index] = narrow
        combine("sum", *views, once=once)
        found.append(views[0].data.tobytes())
    assert found[0] == found[1]
    assert any(found[0])
