"""Parts of Hugging Face models that differ between architectures or versions of transformers."""

from __future__ import annotations

import inspect
import re
from typing import Any

_LAYER = re.compile(r"\.layers\.(\d+)\.")


def routers(model: Any) -> dict[int, Any]:
    """Returns the routers of a model by the number of their layer; none if it is dense.

    A router chooses the experts of each token. It returns the logits, the weights and the ids of the chosen
    experts, [tokens, k].
    """
    return {
        int(layer[1]): module
        for name, module in model.named_modules()
        if type(module).__name__.lower().endswith("topkrouter") and (layer := _LAYER.search(f".{name}"))
    }


def cache_argument(model: Any) -> str:
    """Returns the name of the argument by which a model takes its key-value cache.

    It is `cache`, or `past_key_values` where transformers is older than 5.24.
    """
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
