"""A loss of the user's own: `trainer.loss.use = "file.py:function"`, called with `trainer.loss.options`.

The function returns a `Loss`, of parts of its own or of those in `parts`.
"""

from __future__ import annotations

from tidegate.errors import ConfigError
from tidegate.loading import construct, load_object
from tidegate.settings.losses import CustomLoss
from tidegate.trainer.losses.loss import Loss


def make(settings: CustomLoss) -> Loss:
    """Returns the loss with these settings."""
    loss = construct(load_object(settings.use, {}, "loss"), settings.options, "loss")
    if not isinstance(loss, Loss):
        raise ConfigError(
            f"trainer.loss.use = {settings.use!r} returned {type(loss).__name__}, not a "
            "tidegate.trainer.losses.loss.Loss"
        )
    return loss
