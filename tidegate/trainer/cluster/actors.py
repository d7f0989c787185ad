"""Actors on a cluster's nodes, each of which owns a process that a local run would own itself.

An actor restarted by Ray owns no process; the run detects the loss and starts the process again. A call that
fails raises a TidegateError (`wait_for_reply`).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayError, RayTaskError

from tidegate.errors import StartError, TidegateError
from tidegate.service.process_secrets import shield_process
from tidegate.service.service import Service
from tidegate.trainer.cluster.environment import ActorContext, ClusterNode, set_gloo_interface
from tidegate.trainer.cluster.file_transfer import FileBundle, FileCache
from tidegate.trainer.preflight import set_nccl_memory
from tidegate.trainer.processes.provider import CurrentWeights
from tidegate.trainer.processes.rank_process import LocalRankProcess

REPLY_TIMEOUT_S = 30.0
NOT_SET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
"""With this variable Ray leaves all GPUs of the node visible to each actor."""


class LostError(StartError):
    """An actor or its node exited or does not respond. `for_good`: Ray will not restart it."""

    def __init__(self, message: str, *, for_good: bool = False) -> None:
        super().__init__(message)
        self.for_good = for_good


async def wait_for_reply(call: Any, name: str, within_s: float | None = REPLY_TIMEOUT_S) -> Any:
    """Await an actor's reply to `call`; `within_s` None waits without a timeout.

    Raises LostError if the actor is lost or does not reply in time, the actor's own TidegateErrors, and
    StartError for its other errors.
    """
    try:
        async with asyncio.timeout(within_s):
            return await call
    except TimeoutError:
        raise LostError(f"{name} did not respond within {within_s:g} s") from None
    except RayError as error:
        raise translate(error, name) from error


def translate(error: RayError, name: str) -> TidegateError:
    if isinstance(error, RayTaskError):
        cause = getattr(error, "cause", None)
        if isinstance(cause, TidegateError):
            return cause
        return StartError(f"{name}: {type(cause).__name__}: {cause}")
    if isinstance(error, ActorUnavailableError):
        return LostError(f"{name} was lost: {_first_line(error)}")
    if isinstance(error, ActorDiedError) and "creation task" in str(error):
        return LostError(
            f"{name} could not be created on its node: {_last_line(error)}. "
            "Is this version of tidegate installed there?",
            for_good=True,
        )
    return LostError(f"{name} was lost: {_first_line(error)}", for_good=isinstance(error, RayActorError))


def _first_line(error: RayError) -> str:
    return str(error).strip().partition("\n")[0]


def _last_line(error: RayError) -> str:
    return str(error).strip().rpartition("\n")[2].strip()


_SWEEPER = 'exec 3<&0; (cat <&3 >/dev/null; rm -rf -- "$0") >/dev/null 2>&1 &'
"""Shell script that waits in the background for its standard input to close, then removes the directory."""


class TempDir:
    """A directory in TMPDIR that is removed when this process exits or is killed."""

    def __init__(self, name: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"{name}-"))
        theirs, self._ours = os.pipe()
        try:
            # In its own session: Ray kills the process group of an exited actor.
            command = ["sh", "-c", _SWEEPER, str(self.path)]
            subprocess.run(command, stdin=theirs, check=True, start_new_session=True)
        finally:
            os.close(theirs)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._ours >= 0:
            os.close(self._ours)
            self._ours = -1


def see_assigned_gpus() -> None:
    """Make this process and its children see only the GPUs that Ray assigned to the actor.

    Ranks and engines do not know which of several visible GPUs is theirs: rank 8 may be its node's first.
    """
    if NOT_SET in os.environ and (gpus := ray.get_gpu_ids()):
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))


class ProcessActor:
    """Base of the actors. The working directory is the run's, if it is visible here, else a temporary one."""

    def __init__(self, context: ActorContext) -> None:
        shield_process()
        context.apply()
        see_assigned_gpus()
        set_nccl_memory()
        self.node = ClusterNode(ray.util.get_node_ip_address())
        set_gloo_interface(self.node.address)
        self.shares_run_dir = context.probe.is_visible()
        self._temp_dir = None if self.shares_run_dir else TempDir(f"tidegate-{context.run}")
        self.directory = context.probe.directory if self._temp_dir is None else self._temp_dir.path

    async def about(self) -> tuple[ClusterNode, bool]:
        return self.node, self.shares_run_dir

    async def logs(self, offsets: Mapping[Path, int]) -> dict[Path, bytes]:
        """Return the content of local log files beyond the given offsets."""
        if self.shares_run_dir:
            return {}
        files = sorted((self.directory / "logs").glob("*.log"))
        return {file: _read_from(file, offsets.get(file, 0)) for file in files}

    async def stop(self) -> None:
        """Stop the owned process; may be called twice."""

    async def clean_up(self) -> None:
        """Stop the owned process and remove the temporary directory."""
        await self.stop()
        if self._temp_dir is not None:
            await asyncio.to_thread(self._temp_dir.remove)


class Build(Protocol):
    def __call__(self, directory: Path, host: str, port: int, live: CurrentWeights) -> Service: ...


class ServerActor(ProcessActor):
    def __init__(self, context: ActorContext, build: Build) -> None:
        super().__init__(context)
        self._build = build
        self._cache = FileCache(self.directory / "weights")
        self._current = (Path(), 0)
        self._service: Service | None = None

    async def start(self, port: int, weights: Path | FileBundle | None, version: int) -> str:
        """Start the server, again if it runs. Port 0 takes a free one, which is kept across restarts."""
        if weights is not None:
            self._current = (await self.fetch_weights(weights), version)
        if self._service is None:
            self._service = self._build(self.directory, self.node.address, port, lambda: self._current)
        else:
            await self._service.stop()
        return await self._service.start()

    async def fetch_weights(self, weights: Path | FileBundle) -> Path:
        """Return the path of weights on this node, unpacked from the object store if needed."""
        return weights if isinstance(weights, Path) else await self._cache.unpack(weights)

    async def wait_for_exit(self) -> tuple[str, str]:
        """Wait for the server to exit; returns a message on how it did, and its last log line."""
        assert self._service is not None
        how = await self._service.wait_for_exit()
        return how, self._service.last_log_line()

    async def stop(self) -> None:
        if self._service is not None:
            await self._service.stop()


class RankActor(ProcessActor):
    """Owns a trainer rank other than the first."""

    def __init__(self, context: ActorContext, rank: int) -> None:
        super().__init__(context)
        self._rank = LocalRankProcess(rank, self.directory / "logs")
        self._sending = asyncio.Lock()

    async def start(self) -> None:
        await self._rank.start()

    async def send(self, message: object) -> None:
        """Send a message, in the order of calls; raises BrokenPipeError if the rank has exited."""
        async with self._sending:
            await asyncio.to_thread(self._rank.send, message)

    async def wait_for_exit(self) -> str:
        return await self._rank.wait_for_exit()

    async def stop(self) -> None:
        await self._rank.stop()


def _read_from(file: Path, start: int) -> bytes:
    with file.open("rb") as log:
        log.seek(start)
        return log.read()
