"""Access log: one JSON line per turn on the logger `tidegate.gateway.access` at level INFO.

Lines contain session and token counts, but no text, token ids or keys.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import orjson

if TYPE_CHECKING:
    from tidegate.gateway.sessions.session import GatewaySession
    from tidegate.types import Turn

access = logging.getLogger("tidegate.gateway.access")


def log_turn(session: GatewaySession, turn: Turn, prompt_tokens: int) -> None:
    if not access.isEnabledFor(logging.INFO):
        return
    row = {
        "session": session.id,
        "turn": turn.index,
        "parent": turn.parent,
        "group": session.group_id,
        "prompt_tokens": prompt_tokens,
        "output_tokens": len(turn.output_ids),
        "cached_tokens": turn.cached_tokens,
        "finish": turn.finish_reason,
        "versions": [span.version for span in turn.version_spans],
        "branch": turn.branch,
        "seconds": round(turn.seconds, 4),
    }
    access.info("%s", orjson.dumps(row).decode())
