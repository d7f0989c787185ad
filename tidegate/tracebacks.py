"""Formats errors so that the user's own code comes first."""

from __future__ import annotations

import re
import sysconfig
import tempfile
import traceback
from collections import Counter
from pathlib import Path

HERE = str(Path(__file__).parent)
PACKAGES = ("site-packages", "dist-packages")
_LIBRARIES = (HERE, *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})
MESSAGE = 300
"""Characters of a message before the frames; a longer message is repeated in full after them."""
LAST_FRAMES = 3
"""Number of the innermost frames that are shown last."""

_OWN_FRAME = re.compile(
    rf'\n  File "(?:{re.escape(HERE)}|[^"\n]*/(?:site|dist)-packages)/[^"\n]*", line [^\n]*(?:\n    [^\n]*)*'
)
_PASSING = re.compile(rf"(?:/tmp|{re.escape(tempfile.gettempdir())})/[^\s'\":]+|[0-9a-f]{{8,}}|\d+")


class FailureReasons(Counter[str]):
    """Numbers of failures by reason.

    Texts that differ only in temporary paths and numbers are one reason, which has the first of the texts,
    without the frames of this package and of libraries.
    """

    def count(self, text: str, number: int = 1) -> None:
        text = _OWN_FRAME.sub("", text)
        kind = _PASSING.sub("#", text)
        self[next((known for known in self if _PASSING.sub("#", known) == kind), text)] += number


def describe_error(error: BaseException, limit: int) -> str:
    """Returns the message, the user's own frames from the innermost outwards, and the innermost frames.

    An error that Tidegate raised itself, such as that of a program's exit status, has only its message.

    `limit` is the limit of the characters of the message, and of those of the frames.
    """
    message = "".join(traceback.format_exception_only(error)).strip()
    own = [_line(frame) for frame in reversed(own_frames(error))]
    if not own:
        return f"{message[:limit]}\n{_last(error)[-limit:].rstrip()}".strip()
    cut = len(message) > MESSAGE
    parts = [message[:MESSAGE] + "…" if cut else message, "\n".join(own)[: limit // 2]]
    parts += [message[:limit] if cut else "", _last(error)[-limit // 2 :].rstrip()]
    return "\n".join(filter(None, parts))


def where(error: BaseException) -> str:
    """Returns the innermost line of the user's own code, as ` (env.py:12, in correct)`, or an empty text."""
    own = own_frames(error)
    return f" ({_location(own[-1])})" if own else ""


def own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Returns the frames outside Tidegate and libraries; if there are none, those of the error's cause."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, BaseExceptionGroup):
            inner = own_frames(current.exceptions[0])
            if inner:
                return inner
        frames = traceback.extract_tb(current.__traceback__)
        if own := [frame for frame in frames if not _is_library(frame.filename)]:
            return own
        current = current.__cause__ or current.__context__
    return []


def _is_library(file: str) -> bool:
    return (
        file.startswith("<")
        or any(f"/{name}/" in file for name in PACKAGES)
        or any(file.startswith(f"{path}/") for path in _LIBRARIES)
    )


def _line(frame: traceback.FrameSummary) -> str:
    return f"  {_location(frame)}: {frame.line}" if frame.line else f"  {_location(frame)}"


def _location(frame: traceback.FrameSummary) -> str:
    path = Path(frame.filename)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}:{frame.lineno}, in {frame.name}"


def _last(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-LAST_FRAMES:]
    ours = bool(frames) and frames[-1].filename.startswith(f"{HERE}/")
    return "" if ours else "".join(traceback.format_list(frames))
