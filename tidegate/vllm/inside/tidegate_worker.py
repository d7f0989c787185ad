"""What vLLM's worker can do besides. Its environment has no tidegate: nothing of it is imported here."""

from __future__ import annotations

from typing import Any


class ReloadsTied:
    """Mixed into vLLM's worker."""

    model_runner: Any
    reload_weights: Any

    def reload_published(self, weights_path: str) -> None:
        """vLLM's own reload, and what it leaves behind on a CPU: matrix products go through packed copies
        there, and the copy of an output layer that is tied to the embedding is not made anew."""
        self.reload_weights(weights_path=weights_path)
        for layer in self.model_runner.get_model().modules():
            # Where the weight is gone, the copy is all there is: the reload made it.
            if hasattr(layer, "cpu_linear") and layer.weight.numel() > 0:
                layer.quant_method.process_weights_after_loading(layer)
