"""What a session's metadata keeps of its feedback: comments, corrections, values and times."""

from __future__ import annotations

import time
from typing import Any

from tidegate.errors import GatewayError
from tidegate.gateway.sessions.session import GatewaySession

MAX_NOTES = 16
"""Limit of a conversation's comments and corrections."""
NOTES = "feedback"
"""Field of a session's metadata with its comments and corrections."""
RECEIVED = "received"
"""Field of a session's metadata with the values of its feedback, and how long after the reply each came."""


def notes_of(
    session: GatewaySession, name: str, turn: int | None, comment: str | None, correction: str | None
) -> dict[str, Any]:
    """Return the session's metadata with a comment and a correction, by the turn and the feedback's name.

    Args:
        session: The session.
        name: Name of the feedback.
        turn: Turn of the reply that it is about; None: the newest one.
        comment: The comment.
        correction: The correction.

    Raises:
        GatewayError: 400 if the session has too many of them, or no reply to correct.
    """
    if comment is None and correction is None:
        return {}
    newest = session.tree.newest()
    if turn is None and newest is not None:
        turn = newest.turn.index
    if turn is None:
        raise GatewayError("the conversation has no reply to comment on or to correct", status=400)
    notes: dict[str, dict[str, Any]] = {**session.metadata.get(NOTES, {})}
    note: dict[str, Any] = {"comment": comment}
    if correction is not None:
        reply = {"role": "assistant", "content": correction}
        note["correction"] = [*session.tree.history(turn)[:-1], reply]
    notes[f"{turn}.{name}"] = {key: value for key, value in note.items() if value is not None}
    if len(notes) > MAX_NOTES:
        raise GatewayError(
            f"a conversation keeps comments and corrections from {MAX_NOTES} feedbacks at most", status=400
        )
    return {NOTES: notes}


def received(
    session: GatewaySession, name: str, value: float, turn: int | None, *, reply_only: bool
) -> dict[str, Any]:
    """Return the session's metadata with one more value of feedback; a repeated name replaces the earlier.

    Args:
        session: The session.
        name: Name of the feedback.
        value: Its value.
        turn: Turn of the reply that it is about; None: the newest one.
        reply_only: Whether it rewards this reply alone.
    """
    newest = session.tree.newest() if turn is None else session.tree.nodes[turn]
    ended = None if newest is None else newest.turn.started + newest.turn.seconds
    entry = {
        "name": name,
        "value": value,
        "reply": turn if reply_only else None,
        "after_s": None if ended is None else round(max(0.0, time.time() - ended), 3),
    }
    place = (name, entry["reply"])
    kept = [one for one in session.metadata.get(RECEIVED, []) if (one["name"], one["reply"]) != place]
    return {RECEIVED: [*kept, entry]}
