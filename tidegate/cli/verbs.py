"""What the verbs share."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Verbs = object


def add_address(verb: argparse.ArgumentParser, port: int) -> None:
    verb.add_argument("--host", default="127.0.0.1")
    verb.add_argument("--port", type=int, default=port, help="0 takes a free one")
    verb.add_argument("--announce", type=Path, help="write {url, pid} to this file once it serves")
    verb.add_argument("--owned", action="store_true", help="end when stdin closes")


def log_to_stderr() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
