"""Process of the retrieval server."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tidegate.errors import ConfigError, StartError
from tidegate.rag.client import RAG_KEY
from tidegate.rag.index.searcher import Searcher
from tidegate.rag.server.app import create_app
from tidegate.rag.server.service import RagOptions, Retrieval
from tidegate.service.serve import Listen, bind, run_app


def serve(options: RagOptions, listen: Listen) -> None:
    """Serves until the process is stopped. Raises ConfigError or StartError if it cannot start."""
    if listen.host not in ("127.0.0.1", "localhost", "::1") and options.api_key is None:
        raise ConfigError(
            f"the retrieval server would be open to all on {listen.host}: set {RAG_KEY} or listen on loopback"
        )
    failed: list[str] = []

    def end(why: str) -> None:
        failed.append(why)
        os.kill(os.getpid(), signal.SIGINT)

    sock = bind(listen)
    run_app(create_app(Retrieval(options, open_searcher, end)), sock, listen)
    if failed:
        raise StartError(failed[0])


def open_searcher(directory: Path, options: RagOptions) -> Searcher:
    return Searcher.open(directory, threads=options.threads, device=options.device, encoder=options.encoder)
