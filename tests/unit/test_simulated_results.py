"""What benchmarks/simulated has measured is simulated again: a change of the model that breaks it is found here."""

import json
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"
RESULTS = sorted(path for path in (BENCHMARKS / "results").glob("simulated-*.json") if "quick" not in path.name)


@pytest.fixture(scope="module")
def script():
    """The benchmark, which has no ending."""
    loader = SourceFileLoader("simulated", str(BENCHMARKS / "simulated"))
    module = module_from_spec(spec_from_loader("simulated", loader))
    loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", RESULTS[-1:], ids=lambda path: path.name)
def test_measured_steps_are_still_met(script, path):
    found = json.loads(path.read_text(encoding="utf-8"))
    assert len(found["rows"]) == 18
    middle = sorted({row["rate_mbit"] for row in found["rows"]})[1]  # the others cost time, and say the same
    for row in found["rows"]:
        case = row["hosts"], row["rate_mbit"], row["stage"]
        if row["rate_mbit"] == middle and abs(row["error_percent"]) <= script.BAR:
            step = script.simulated(case, found["work"], row["inputs"])
            bar = script.BAR + 5  # one draw in place of the median of several
            assert step.seconds * 1e3 == pytest.approx(row["measured_ms"], rel=bar / 100), case


def test_the_spread_is_that_of_units(script):
    times = {"forward": [1.0, 2.0, 4.0], "backward": [2.0, 4.0, 8.0]}
    ranks = [{"compute": times, "units": [None] * 4}] * 2
    assert script.spread_of(ranks) == pytest.approx(2 * 0.6931, rel=1e-3)


def test_links_are_fitted_to_gathers_alone(script):
    where = script.cluster_of(4, 1e-8)
    price = script.Prices(cluster=script.cluster_of(4, 3e-8)).of("all_gather", 1 << 20, 4)
    alone = {"nbytes": 1 << 20, "count": 4, "seconds": 4 * price.seconds}
    fitted, sent = script.fitted(where, alone)
    assert fitted.remote.beta == pytest.approx(3e-8, rel=1e-6)
    assert sent == pytest.approx(4 * price.sent)
