"""Extends vLLM's worker. Its environment has no tidegate, so this module imports nothing of it."""

from __future__ import annotations

from typing import Any


class TiedWeightReload:
    """Mixin of vLLM's worker."""

    model_runner: Any
    reload_weights: Any

    def reload_published(self, weights_path: str) -> None:
        """Reload weights, then refresh packed weights on a CPU: vLLM's reload does not repack an output layer
        that is tied to the embedding."""
        self.reload_weights(weights_path=weights_path)
        for layer in self.model_runner.get_model().modules():
            # A layer without its weight has only the packed copy, which the reload made.
            if hasattr(layer, "cpu_linear") and layer.weight.numel() > 0:
                layer.quant_method.process_weights_after_loading(layer)
