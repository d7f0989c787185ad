"""A person's decision about a run's versions, written by `tidegate versions` for the trainer."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from tidegate.errors import TidegateError
from tidegate.service.serve import write_atomically

FILE = "versions.request"


@dataclass(frozen=True, slots=True)
class VersionRequest:
    """A decision of a person.

    Attributes:
        action: promote: the version in test goes live; rollback: it is rolled back, or without one the policy
            returns to an earlier checkpoint.
        step: Step of this checkpoint; None to roll back only the version in test.
    """

    action: Literal["promote", "rollback"]
    step: int | None = None


def write_request(run_dir: Path, request: VersionRequest) -> None:
    """Leave a request for the run's trainer; it replaces one that was not carried out."""
    write_atomically(run_dir / FILE, json.dumps(asdict(request)))


def read_request(run_dir: Path) -> VersionRequest | None:
    """Return the request that was not carried out yet, None without one. Raises TidegateError if damaged."""
    try:
        return VersionRequest(**json.loads((run_dir / FILE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise TidegateError(f"{run_dir / FILE} cannot be read ({error}); remove it") from error


def clear_request(run_dir: Path) -> None:
    (run_dir / FILE).unlink(missing_ok=True)
