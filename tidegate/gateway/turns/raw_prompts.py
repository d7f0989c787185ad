"""Prompts that are given as text or ids and go to the engine as they are, without a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from tidegate.gateway.errors import ApiError
from tidegate.gateway.rendering.messages import root_key
from tidegate.gateway.sessions.tree import Attachment, TurnTree
from tidegate.types import CLIENT_CLOSED, Ids

_ROOT = root_key(None, {"raw": True})


def raw_ids(ids: Sequence[int], vocabulary: int) -> Ids:
    """A prompt's ids; shape [prompt]. Raises Refusal for a prompt that no engine can take."""
    if not ids:
        raise ApiError("prompt: it has no tokens", param="prompt")
    if min(ids) < 0 or max(ids) >= vocabulary:
        wrong = next(one for one in ids if not 0 <= one < vocabulary)
        raise ApiError(f"prompt: {wrong} is not in the vocabulary of {vocabulary}", param="prompt")
    return np.asarray(ids, dtype=np.int32)


def place_raw(tree: TurnTree, prompt: Ids) -> tuple[Attachment, Ids]:
    """Where a prompt belongs and what it adds: it extends the longest recorded sequence that it starts
    with, by its ids. Text that is encoded otherwise than it was sampled begins a tree of its own."""
    children: dict[int | None, list[int]] = {}
    for index, node in enumerate(tree.nodes):
        children.setdefault(node.turn.parent, []).append(index)
    parent, start, cut = None, 0, None
    found: list[tuple[int | None, int]] = [(None, 0)]
    while found:
        above, begin = found.pop()
        for index in children.get(above, ()):
            turn = tree.nodes[index].turn
            said = begin + len(turn.delta_ids)
            end = said + len(turn.output_ids)
            if not np.array_equal(prompt[begin:said], turn.delta_ids):
                continue
            if np.array_equal(prompt[said:end], turn.output_ids):
                found.append((index, end))
                # Of two turns that are alike the newer one is continued.
                if (end, index) > (start, -1 if parent is None else parent):
                    parent, start, cut = index, end, None
            elif turn.finish_reason == CLIENT_CLOSED and not tree.nodes[index].quoted:
                count = _shared(prompt[said:], turn.output_ids)
                if said + count > start and 0 < count < len(prompt) - said:
                    parent, start, cut = index, said + count, count
    asked = blake2b(prompt.tobytes(), digest_size=16, key=_ROOT).digest()
    newest = len(tree.nodes) - 1
    why = None
    if newest >= 0 and parent is None:
        why = "prompt: it starts with no sequence that was recorded"
    elif parent is not None and parent != newest:
        why = f"older: turn {parent} is continued, the newest is turn {newest}"
    return Attachment(parent, 0, asked, why, _ROOT, cut), prompt[start:]


def _shared(ids: Ids, others: Ids) -> int:
    """How many ids two sequences have in common at their beginnings."""
    size = min(len(ids), len(others))
    different = np.flatnonzero(ids[:size] != others[:size])
    return int(different[0]) if len(different) else size
