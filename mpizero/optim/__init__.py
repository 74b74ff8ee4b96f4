"""What goes between backward and step: clipping by the global norm."""

from mpizero.optim.clip import clip_grad_norm_

__all__ = ["clip_grad_norm_"]
