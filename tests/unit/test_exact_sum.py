"""Exact sums of powers, against fractions, and sums in the order of a tree, against other code."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from mpizero.collectives import pairwise
from mpizero.optim.exact_sum import CHUNK, SCALE, ExactSum
from mpizero.optim.norm import power_sum
from mpizero.shard.exact_gradients import TreeSum


def exact(values):
    total = ExactSum()
    total.add(np.array(values, np.float64))
    return total


def test_numbers_of_any_size_are_added_exactly():
    generator = np.random.default_rng(0)
    values = generator.random(500) * 10.0 ** generator.integers(-320, 300, 500)
    values = [*values.tolist(), 0.0, 5e-324, 2.2250738585072014e-308, 1.7e308, 1.0, 1.0 - 2.0**-53]
    total = exact(values)
    assert Fraction(total.whole, 1 << SCALE) == sum(map(Fraction, values))
    assert total.rounded() == math.fsum(values)
    sent = ExactSum()
    for part in (values[:100], values[100:], []):
        sent.add_words(exact(part).words())
    assert sent.whole == total.whole
    assert exact([]).rounded() == exact([0.0, 0.0]).rounded() == 0


def test_what_is_not_finite():
    assert exact([1.7e308, 1.7e308]).rounded() == math.inf
    for values, expected in (
        ([1.0, math.inf], math.inf),
        ([math.inf, math.inf, 0.0], math.inf),
        ([math.inf, math.nan], math.nan),
    ):
        total = ExactSum()
        total.add_words(exact(values).words())
        total.add_words(exact([1.0]).words())
        assert np.array_equal(total.rounded(), expected, equal_nan=True)


@pytest.mark.parametrize("norm_type", [1, 2, 3, 0.5])
def test_a_sum_of_powers_does_not_depend_on_the_cuts(norm_type):
    """Pieces from multiples of 64 elements on, of a length that is none; a sum in fp64 does depend on them."""
    values = torch.randn(2 * CHUNK + 64 * 77 + 3, generator=torch.Generator().manual_seed(0)) * 1e-3
    found, plain = set(), set()
    for cut in (64, 64 * 200, CHUNK + 64, 2 * CHUNK + 64 * 77):
        left, right, whole = ExactSum(), ExactSum(), ExactSum()
        left.add_powers([values[:cut]], norm_type)
        right.add_powers([values[cut:], values[:0]], norm_type)
        for part in (right, left):
            whole.add_words(part.words())
        found.add(whole.whole)
        plain.add(power_sum([values[:cut]], norm_type) + power_sum([values[cut:]], norm_type))
    assert len(found) == 1
    assert len(plain) > 1
    expected = math.fsum((values.double().abs() ** norm_type).tolist())
    assert abs(whole.rounded() - expected) < 1e-13 * expected


@pytest.mark.parametrize("terms", range(1, 18))
def test_terms_that_come_one_by_one_are_added_as_a_tree(terms):
    """For any number of terms, with as few held as a binary counter has digits; no sign of a zero is lost."""
    values = torch.randn(terms, 5, generator=torch.Generator().manual_seed(terms))
    values[:, 4] = -0.0
    total, held = TreeSum(), 0
    for value in values[:-1]:
        total.add(value.clone())
        held = max(held, len(total.held))
    found = total.end_with(values[-1].clone())
    assert held <= math.log2(terms)
    assert not total.held
    expected = pairwise(list(values), torch.add)
    assert found.view(torch.int32).tolist() == expected.view(torch.int32).tolist()
