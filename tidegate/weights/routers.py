"""Routers of a mixture-of-experts model, which choose the experts of each token."""

from __future__ import annotations

import re
from typing import Any

_LAYER = re.compile(r"\.layers\.(\d+)\.")


def routers(model: Any) -> dict[int, Any]:
    """Returns the routers of a Hugging Face model by the number of their layer; none if it is dense.

    A router returns the logits, the weights and the ids of the chosen experts, [tokens, k].
    """
    return {
        int(layer[1]): module
        for name, module in model.named_modules()
        if type(module).__name__.lower().endswith("topkrouter") and (layer := _LAYER.search(f".{name}"))
    }
