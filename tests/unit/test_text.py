"""Text to train on: what counts, how it is split, and what is refused."""

import pytest

from mpizero.bench import Text
from mpizero.errors import ArgumentError

pytest.importorskip("torch")
LENGTH = 16


@pytest.fixture
def folder(tmp_path):
    """Forty files of distinct letters, one that is no text and one that is too short."""
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_bytes(bytes([65 + number]) * 100)
    (tmp_path / "picture.png").write_bytes(b"\x00" * 100)
    (tmp_path / "short.txt").write_bytes(b"\x01" * LENGTH)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "x.py").write_bytes(b"\x02" * 100)
    return tmp_path


def letters(text, batches=50):
    return {int(value) for number in range(batches) for value in text.batch(8, seed=(number,))[0].unique()}


def test_a_folder_is_split_by_files(folder):
    train, valid = Text.split(folder, LENGTH)

    assert letters(valid) == {65, 85}
    assert letters(train) == set(range(65, 105)) - {65, 85}


def test_a_file_is_split_by_position(tmp_path):
    path = tmp_path / "anything.bin"
    path.write_bytes(bytes(range(200)))
    train, valid = Text.split(path, LENGTH)

    assert max(letters(train)) < min(letters(valid))
    assert letters(train) | letters(valid) <= set(range(200))


def test_targets_are_the_bytes_that_follow(tmp_path):
    path = tmp_path / "count.txt"
    path.write_bytes(bytes(range(256)))
    x, y = Text.split(path, LENGTH)[0].batch(5, seed=(1, 2))

    assert x.shape == y.shape == (5, LENGTH)
    assert (y == x + 1).all()


def test_a_seed_gives_the_same_batch_and_another_one_another(folder):
    text = Text.split(folder, LENGTH)[0]

    assert (text.batch(8, seed=(0, 7))[0] == text.batch(8, seed=(0, 7))[0]).all()
    assert (text.batch(8, seed=(0, 7))[0] != text.batch(8, seed=(1, 7))[0]).any()


@pytest.mark.parametrize("content", [None, b"", b"x" * (LENGTH + 1)])
def test_missing_empty_and_short_data_are_refused(tmp_path, content):
    path = tmp_path / "data.txt"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(ArgumentError, match="data must be"):
        Text.split(path, LENGTH)


def test_a_folder_without_text_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="0 bytes in 0 files"):
        Text.split(tmp_path, LENGTH)
