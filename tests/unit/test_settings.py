"""What users tell mpizero by environment variables."""

import pytest

from mpizero.errors import ArgumentError
from mpizero.settings import settings


def test_without_variables_the_defaults_hold(monkeypatch):
    for name in ("MPIZERO_TIMEOUT", "MPIZERO_ABORT", "MPIZERO_TTY", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    found = settings()

    assert (found.timeout, found.abort, found.threads, found.terminal) == (600, True, None, False)


def test_variables_are_read_at_each_call(monkeypatch):
    monkeypatch.setenv("MPIZERO_TIMEOUT", "2.5")
    monkeypatch.setenv("MPIZERO_ABORT", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    found = settings()

    assert (found.timeout, found.abort, found.threads) == (2.5, False, 3)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "soon", ""])
def test_a_time_out_must_be_a_positive_number(monkeypatch, text):
    monkeypatch.setenv("MPIZERO_TIMEOUT", text)

    with pytest.raises(ArgumentError, match=f"MPIZERO_TIMEOUT must be a positive number of seconds .got '{text}'."):
        settings()


@pytest.mark.parametrize(("text", "aware", "canary"), [("", None, False), ("0", False, False), ("1", True, True)])
def test_switches_of_messages_of_gpu_memory(monkeypatch, text, aware, canary):
    monkeypatch.setenv("MPIZERO_CUDA_AWARE", text)
    monkeypatch.setenv("MPIZERO_CANARY", text)
    found = settings()

    assert (found.cuda_aware, found.canary) == (aware, canary)


@pytest.mark.parametrize("name", ["MPIZERO_CUDA_AWARE", "MPIZERO_CANARY"])
@pytest.mark.parametrize("text", ["yes", "true", "2", " 1"])
def test_a_switch_must_be_0_or_1(monkeypatch, name, text):
    monkeypatch.setenv(name, text)

    with pytest.raises(ArgumentError, match=f"{name} must be 0 or 1 .got '{text}'."):
        settings()


@pytest.mark.parametrize(("text", "count"), [("", 0), ("0", 0), ("3", 3)])
def test_the_number_of_a_restart(monkeypatch, text, count):
    monkeypatch.setenv("MPIZERO_RESTART", text)

    assert settings().restart == count


@pytest.mark.parametrize("text", ["-1", "once", "1.5"])
def test_the_number_of_a_restart_must_be_one(monkeypatch, text):
    monkeypatch.setenv("MPIZERO_RESTART", text)

    with pytest.raises(ArgumentError, match=f"MPIZERO_RESTART must be a whole number, 0 or more .got '{text}'."):
        settings()
