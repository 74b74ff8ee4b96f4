"""mpizero plot: what it draws, where it puts it, and what it says of bad input."""

import argparse
import copy
import json
import sys
import xml.etree.ElementTree as ET

import pytest

from mpizero.bench.plots import draw, pictures_of
from mpizero.bench.results import read_results
from mpizero.cli import plot
from mpizero.errors import ArgumentError, MpiZeroError

ROW = {
    "operation": "all_reduce",
    "algorithm": "ring",
    "buffer": "private",
    "prepared": False,
    "dtype": "float32",
    "op": "sum",
    "order": "any",
    "nbytes": 1024,
    "count": 256,
    "iterations": 20,
    "t_median_us": 10.0,
    "t_min_us": 9.0,
    "t_p99_us": 12.0,
    "algbw_GBs": 0.1,
    "busbw_GBs": 0.1,
    "wrong": 0,
    "limit_GBs": None,
}
RESULTS = {
    "schema_version": 1,
    "operation": "all_reduce",
    "date": "2026-01-02T03:04:05+00:00",
    "machine": {"cores": 2, "processor": "a processor"},
    "versions": {"mpi": "an MPI 1"},
    "ranks": 4,
    "nodes": 2,
    "per_node": [3, 1],
}


def results(*changes):
    sizes = (1024, 65536, 4 << 20)
    rows = []
    for change in changes or ({}, {"algorithm": "native", "t_median_us": 30.0}, {"buffer": "symmetric"}):
        rows += [{**ROW, "nbytes": size, **change} for size in sizes]
    rows[-1]["limit_GBs"] = 3.0
    return {**copy.deepcopy(RESULTS), "rows": rows}


def run(*words):
    parser = argparse.ArgumentParser()
    plot.configure(parser)
    return plot.run(parser.parse_args([str(word) for word in words]))


@pytest.fixture
def written(tmp_path):
    def write(name="r.json", *changes):
        path = tmp_path / name
        path.write_text(json.dumps(results(*changes)))
        return path

    return write


def texts(path):
    """The words of an SVG file, which keeps them as comments beside the outlines of their letters."""
    parser = ET.XMLParser(target=ET.TreeBuilder(insert_comments=True))  # noqa: S314
    return [(each.text or "").strip() for each in ET.parse(path, parser).iter() if each.tag is ET.Comment]  # noqa: S314


def test_draws_both_formats_into_a_folder(written, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert run(written(), "--out", tmp_path) == 0
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    words = "\n".join(texts(tmp_path / "r.svg"))
    assert "all_reduce of float32, sum: 4 ranks on 2 hosts (3, 1 per host), an MPI 1" in words
    assert "median of the slowest rank, us" in words
    assert "bus bandwidth, GB/s" in words
    assert "speed-up over the MPI library" in words
    assert "memory limit:" in words
    assert {"ring, private", "ring, symmetric", "native, private", "4 MiB", "64 KiB"} <= set(texts(tmp_path / "r.svg"))
    assert capsys.readouterr().out.split() == [str(tmp_path / "r.png"), str(tmp_path / "r.svg")]


def test_what_was_not_measured_is_not_drawn(written, tmp_path):
    pytest.importorskip("matplotlib")
    path = written("r.json", {"busbw_GBs": 0.0})
    found = json.loads(path.read_text())
    found["rows"][-1]["limit_GBs"] = None
    path.write_text(json.dumps(found))
    assert run(path, "--out", tmp_path / "one.svg") == 0
    words = "\n".join(texts(tmp_path / "one.svg"))
    assert "memory limit" not in words
    assert "speed-up" not in words


def test_the_same_results_give_the_same_file(written, tmp_path):
    pytest.importorskip("matplotlib")
    (picture,) = pictures_of(read_results(written()))
    for name in ("a.svg", "b.svg"):
        draw(picture, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_types_are_pictures_of_their_own(written, tmp_path):
    pytest.importorskip("matplotlib")
    path = written("r.json", {}, {"dtype": "bfloat16"})
    assert run(path, written("s.json"), "--out", tmp_path) == 0
    names = {file.name for file in tmp_path.glob("*.png")}
    assert names == {"r-float32-sum.png", "r-bfloat16-sum.png", "s.png"}
    with pytest.raises(ArgumentError, match="--out must be a folder where there are several pictures"):
        run(path, "--out", tmp_path / "one.png")


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("nowhere", "--out must be a folder that exists, or a file with the ending .png or .svg"),
        ("a.pdf", "--out must be a folder that exists, or a file with the ending .png or .svg"),
        ("no/such/a.png", "--out must be a file in a folder that exists"),
    ],
)
def test_bad_out(written, tmp_path, out, said):
    with pytest.raises(ArgumentError) as raised:
        run(written(), "--out", tmp_path / out)
    assert said in str(raised.value)


def test_bad_results(written, tmp_path):
    with pytest.raises(ArgumentError, match="results must be a JSON file of bin/"):
        run(tmp_path / "none.json")
    empty = written()
    empty.write_text(json.dumps({**RESULTS, "rows": []}))
    with pytest.raises(ArgumentError, match="results must be files with rows in them"):
        run(empty)
    with pytest.raises(ArgumentError, match="results must be files with names that differ"):
        run(written(), written(), "--out", tmp_path)


def test_without_matplotlib_says_how_to_get_it(written, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MpiZeroError, match=r"needs matplotlib .*pip install 'mpizero\[plot\]'"):
        run(written(), "--out", tmp_path)
