"""Handles raw prompts: text or ids that are sent to the engine without a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from tidegate.gateway.errors import ApiError
from tidegate.gateway.rendering.messages import root_key
from tidegate.gateway.sessions.tree import Attachment, TurnTree
from tidegate.turn import CLIENT_CLOSED, Ids

_ROOT = root_key(None, {"raw": True})


def raw_ids(ids: Sequence[int], vocabulary: int) -> Ids:
    """Returns a prompt's ids; shape [prompt]. Raises ApiError for an empty prompt or an id out of range."""
    if not ids:
        raise ApiError("prompt: it has no tokens; send at least one", param="prompt")
    if min(ids) < 0 or max(ids) >= vocabulary:
        invalid = next(token_id for token_id in ids if not 0 <= token_id < vocabulary)
        raise ApiError(
            f"prompt: token id {invalid} is not in the vocabulary (size {vocabulary})", param="prompt"
        )
    return np.asarray(ids, dtype=np.int32)


def attach_raw(tree: TurnTree, prompt: Ids, policy: str = "") -> tuple[Attachment, Ids]:
    """Returns a prompt's position in the tree and the ids that it adds. A prompt extends the longest recorded
    sequence of its policy that it starts with, compared by ids. Text whose encoding differs from the sampled
    ids becomes a new root."""
    children: dict[int | None, list[int]] = {}
    for index, node in enumerate(tree.nodes):
        if node.turn.policy != policy:
            continue
        children.setdefault(node.turn.parent, []).append(index)
    parent, start, quoted_ids = None, 0, None
    # A stack and not recursion: a session's turns may be more than Python's recursion limit.
    pending: list[tuple[int | None, int]] = [(None, 0)]
    while pending:
        above, begin = pending.pop()
        for index in children.get(above, ()):
            turn = tree.nodes[index].turn
            prompt_end = begin + len(turn.delta_ids)
            end = prompt_end + len(turn.output_ids)
            if not np.array_equal(prompt[begin:prompt_end], turn.delta_ids):
                continue
            if np.array_equal(prompt[prompt_end:end], turn.output_ids):
                pending.append((index, end))
                # Of two turns with equal ids, the newer one is continued.
                if (end, index) > (start, -1 if parent is None else parent):
                    parent, start, quoted_ids = index, end, None
            elif turn.finish_reason == CLIENT_CLOSED and not tree.nodes[index].quoted:
                count = _shared(prompt[prompt_end:], turn.output_ids)
                if prompt_end + count > start and 0 < count < len(prompt) - prompt_end:
                    parent, start, quoted_ids = index, prompt_end + count, count
    history_hash = blake2b(prompt.tobytes(), digest_size=16, key=_ROOT).digest()
    newest = tree.newest_of(policy)
    if parent == newest:
        branch_reason = tree.changes_policy(policy)
    elif parent is None:
        branch_reason = "prompt: it does not start with a recorded sequence"
    else:
        branch_reason = f"older: turn {parent} is continued, the newest is turn {newest}"
    return Attachment(parent, 0, history_hash, branch_reason, _ROOT, quoted_ids), prompt[start:]


def _shared(ids: Ids, others: Ids) -> int:
    size = min(len(ids), len(others))
    different = np.flatnonzero(ids[:size] != others[:size])
    return int(different[0]) if len(different) else size
