"""The losses, one module for each, by its name in `trainer.loss.name`."""
