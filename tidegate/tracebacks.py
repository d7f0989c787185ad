"""What raised, told so that a person finds the line of their own code first."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

HERE = str(Path(__file__).parent)
PACKAGES = ("site-packages", "dist-packages")
_LIBRARIES = (HERE, *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})
MESSAGE = 300
"""Characters of a message before the frames; a longer one comes again in full behind them."""
OTHERS = 3


def describe_error(error: BaseException, most: int) -> str:
    """The error, the user's own frames from the innermost one out, then the last ones of all. At most `most`
    characters are of the message, and as many of frames."""
    message = "".join(traceback.format_exception_only(error)).strip()
    own = [_line(frame) for frame in reversed(own_frames(error))]
    if not own:
        return f"{message[:most]}\n{_last(error)[-most:].rstrip()}".strip()
    cut = len(message) > MESSAGE
    parts = [message[:MESSAGE] + "…" if cut else message, "\n".join(own)[: most // 2]]
    parts += [message[:most] if cut else "", _last(error)[-most // 2 :].rstrip()]
    return "\n".join(filter(None, parts))


def where(error: BaseException) -> str:
    """The innermost line of the user's own code, as ` (env.py:12, in correct)`; empty if there is none."""
    own = own_frames(error)
    return f" ({_place(own[-1])})" if own else ""


def own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames that are neither Tidegate's nor a library's; of an error that has none, those of the error
    that it came from."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        if isinstance(one, BaseExceptionGroup):
            inner = own_frames(one.exceptions[0])
            if inner:
                return inner
        own = [frame for frame in traceback.extract_tb(one.__traceback__) if not _is_library(frame.filename)]
        if own:
            return own
        one = one.__cause__ or one.__context__
    return []


def _is_library(file: str) -> bool:
    return (
        file.startswith("<")
        or any(f"/{name}/" in file for name in PACKAGES)
        or any(file.startswith(f"{path}/") for path in _LIBRARIES)
    )


def _line(frame: traceback.FrameSummary) -> str:
    return f"  {_place(frame)}: {frame.line}" if frame.line else f"  {_place(frame)}"


def _place(frame: traceback.FrameSummary) -> str:
    path = Path(frame.filename)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}:{frame.lineno}, in {frame.name}"


def _last(error: BaseException) -> str:
    return "".join(traceback.format_tb(error.__traceback__)[-OTHERS:])
