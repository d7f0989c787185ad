"""Does a prompt start with the recorded ids of the turn that it follows?"""

from __future__ import annotations

from tidegate.types import Ids, Turn


def drifts(prompt: Ids, parent: Turn, added: int) -> bool:
    """Whether `prompt`, without the `added` ids at its end, does not end as turn `parent` did.

    `parent` was itself looked at when its prompt was made, so all of its history need not be: what it
    added and what was sampled is enough, and costs the same at turn 2 and at turn 1,000.
    """
    end = len(prompt) - added
    middle = end - len(parent.output_ids)
    start = middle - len(parent.delta_ids)
    if start < 0 or (parent.parent is None and start > 0):
        return True
    recorded = parent.delta_ids.tobytes() + parent.output_ids.tobytes()  # all are int32
    return prompt[start:end].tobytes() != recorded
