"""What goes with an optimizer: clipping and loss scaling before a step, a moving average after it."""

from mpizero.optim.clip import clip_grad_norm_, clip_grad_value_, grad_norm
from mpizero.optim.ema import EMA
from mpizero.optim.offloaded import offloaded
from mpizero.optim.scaler import GradScaler

__all__ = ["EMA", "GradScaler", "clip_grad_norm_", "clip_grad_value_", "grad_norm", "offloaded"]
