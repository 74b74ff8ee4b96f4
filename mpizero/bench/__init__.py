"""Measuring and showing: progress of a training job, text to train on."""

from mpizero.bench.progress import Progress
from mpizero.bench.text import Text

__all__ = ["Progress", "Text"]
