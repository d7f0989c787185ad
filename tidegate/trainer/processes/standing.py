"""Runs a standing service: engines, a gateway, and a trainer that uses them, each restarted when it exits.

The trainer is a process of its own (`tidegate train` with `gateway.url` and `engine.urls`), so that clients
are served by the newest published version while it is down.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tidegate.config import ENDLESS, SERVICE_SETTINGS, Settings
from tidegate.errors import ConfigError, StartError
from tidegate.gateway.client import ADMIN_KEY, GatewayClient
from tidegate.service.api_key import ENGINE_KEY, engine_key
from tidegate.service.backoff import back_off
from tidegate.service.directory_lock import INHERITED, DirectoryLock
from tidegate.service.process import OwnedProcess, run_together
from tidegate.service.serve import write_atomically
from tidegate.service.service import Service
from tidegate.settings import sections
from tidegate.trainer.ledger.ledger import Ledger
from tidegate.trainer.ledger.state import read_ledger_state
from tidegate.trainer.processes.launcher import admin_key
from tidegate.trainer.processes.servers import JUDGE_CACHE, LocalProcesses
from tidegate.trainer.processes.supervisor import TaskSupervisor
from tidegate.trainer.records.client_log import ClientLog
from tidegate.trainer.records.erasure import Erasure
from tidegate.trainer.records.trajectories import TrajectoryFiles
from tidegate.trainer.records.writer import FileWriter
from tidegate.trainer.start import set_first_version

STOP_S = 300.0
"""Time limit of the trainer's last step and checkpoint, in seconds."""


class TrainerProcess(OwnedProcess):
    """`tidegate train` with the settings of a file; its output is that of this process.

    Args:
        settings: Path of its settings.
        run_dir: Its run directory; a run in it is resumed.
        lock: Lock of the directory, which the trainer shares.
        key: Admin key of the gateway.
    """

    name = "trainer"

    def __init__(self, settings: Path, run_dir: Path, key: str, lock: DirectoryLock) -> None:
        super().__init__("the trainer", None)
        self._settings = settings
        self._run_dir = run_dir
        self._key = key
        self._lock = lock

    async def start(self) -> None:
        """Starts it; it exits when this process exits."""
        tie = [sys.executable, "-P", "-m", "tidegate.service.parent_death", str(os.getpid())]
        train = [sys.executable, "-P", "-m", "tidegate", "train", str(self._settings), "--resume", "auto"]
        fd = self._lock.fd
        variables = {**os.environ, ADMIN_KEY: self._key, ENGINE_KEY: engine_key(), INHERITED: str(fd)}
        await self._spawn([*tie, *train], env=variables, pass_fds=[fd])
        place = self._run_dir / "logs" / f"{self.name}.address"
        await asyncio.to_thread(write_atomically, place, json.dumps({"pid": self.pid}))

    async def restart(self) -> None:
        await self.start()

    async def wait_for_exit(self) -> str:
        """Waits for its exit; raises ConfigError if it refused its settings, as a restart would not help."""
        how = await super().wait_for_exit()
        if self._code == ConfigError.exit_code:
            raise ConfigError(f"{how}: its settings were refused, see above ({self._settings})")
        return how

    def finished(self) -> bool:
        """Whether it has taken all its steps."""
        return self._code == 0

    @property
    def _code(self) -> int | None:
        return self._process.returncode if self._process is not None else None

    async def stop(self) -> None:
        self.signal(signal.SIGTERM)
        await self._join(STOP_S)


STEADY_S = 60.0
"""A process that has run for this long before it exits is restarted at once."""
FIRST_S, LONGEST_S = 0.1, 60.0


class StandingService:
    """Engines, gateway and trainer of one run directory.

    Args:
        settings: Settings of the run, with `agent.source = "client"`.
        note: Receives messages on starts and restarts.

    Attributes:
        stop: Set it to end the service after the trainer's current step.

    Raises:
        ConfigError: The settings are not those of a standing service.
    """

    def __init__(self, settings: Settings, note: Callable[[str], None]) -> None:
        check(settings)
        self.settings = settings
        self.stop = asyncio.Event()
        self._note = note
        self._dir = settings.run_dir.absolute()
        self._key = admin_key(settings)
        processes = LocalProcesses()
        self.engines = processes.engines(settings, self._dir, self.newest_weights)
        self.gateway: Service = processes.gateway(
            settings, self._dir, {"admin_key": self._key}, self._dir / "gateway"
        )

    async def run(self, lock: DirectoryLock) -> None:
        """Serves and trains until `stop` is set. `lock` is that of the run's directory.

        Raises StartError if a process does not start the first time, and ConfigError if the trainer refuses
        its settings; a process that exits later is restarted without limit.
        """
        servers: list[Service] = [*self.engines, self.gateway]
        async with contextlib.AsyncExitStack() as stack:
            for server in servers:
                stack.push_async_callback(server.stop)
            await run_together([server.start() for server in servers])
            address = self.settings.gateway.public_url or self.gateway.url
            self._note(f"serving at {address}/v1, with the keys of {self.settings.gateway.keys}")
            self.write_service_settings()
            trainer = TrainerProcess(self.write_trainer_settings(), self._dir, self._key, lock)
            stack.push_async_callback(trainer.stop)
            await trainer.start()
            supervisor = TaskSupervisor()
            stack.push_async_callback(supervisor.close)  # before the processes stop: it would restart them
            processes: list[Service | TrainerProcess] = [*servers, trainer]
            for process in processes:
                supervisor.watch(self.keep(process), process.name)
            await supervisor.run(self.stop.wait())
            self._note("stopping: the trainer ends its step and writes a checkpoint")

    async def keep(self, process: Service | TrainerProcess) -> None:
        """Restarts a process whenever it exits, after a delay that grows while it exits at once."""
        failures = 0
        while True:
            began = time.monotonic()
            why: str | None = await process.wait_for_exit()
            if isinstance(process, TrainerProcess) and process.finished():
                self._note(f"{why}: training has ended, and clients are served by its last version")
                await self._keep_records()
                return
            failures = 0 if time.monotonic() - began > STEADY_S else failures
            while why is not None:
                self._note(f"{why}; starting it again")
                failures = await back_off(failures, FIRST_S, LONGEST_S)
                try:
                    await process.restart()
                    why = None
                except (StartError, OSError) as error:  # OSError: the trainer removed the weights meanwhile
                    why = str(error)
            self._note(f"the {process.name} is back")

    async def _keep_records(self) -> None:
        """Applies clients' erasures to the run's files and logs conversations, as the trainer did."""
        past = await asyncio.to_thread(read_ledger_state, self._dir / "ledger.jsonl")
        async with (
            GatewayClient(self.gateway.url, self._key) as client,
            FileWriter() as writer,
            asyncio.TaskGroup() as tasks,
        ):
            with await asyncio.to_thread(Ledger, self._dir / "ledger.jsonl") as ledger:
                files, clients = TrajectoryFiles(self._dir), ClientLog(self._dir)
                tasks.create_task(clients.watch(client, writer))
                await Erasure(
                    gateway=client, files=files, judge=self._dir / JUDGE_CACHE, writer=writer,
                    ledger=ledger, done=past.erased, note=self._note,
                ).watch()  # fmt: skip

    def newest_weights(self) -> tuple[Path, int]:
        """Returns the newest published weights, with which engines start, and their version."""
        published = [path for path in (self._dir / "weights").glob("v*") if path.name[1:].isdigit()]
        if not published:
            return self.settings.model.path.absolute(), set_first_version(self._dir)
        # By number: names of versions beyond 999,999 do not sort as text.
        newest = max(published, key=lambda path: int(path.name[1:]))
        return newest, int(newest.name[1:])

    def write_trainer_settings(self) -> Path:
        """Writes the trainer's settings: those of the service, with the addresses of gateway and engines."""
        settings = self.settings
        given = _with_absolute_paths(settings)
        given["gateway"] = {"url": self.gateway.url}
        del given["env"]["judge"]  # the gateway has it
        urls = [engine.url for engine in self.engines]
        given["engine"] = {
            "urls": urls, "kind": settings.engine.kind, "dtype": settings.engine.weights_dtype
        }  # fmt: skip
        given["run"] |= {"live_view": False, "dir": str(settings.run.dir.absolute())}
        if "steps" not in settings.trainer.model_fields_set:
            given["trainer"]["steps"] = ENDLESS
        file = self._dir / "trainer.toml"
        write_atomically(file, sections.dump(Settings.model_validate(given)))
        return file

    def write_service_settings(self) -> None:
        """Writes the service's settings, with which `tidegate serve` continues the run from anywhere."""
        settings = self.settings
        given = _with_absolute_paths(settings)
        given["run"]["dir"] = str(settings.run.dir.absolute())
        if settings.gateway.keys is not None:
            given["gateway"]["keys"] = str(settings.gateway.keys.absolute())
        if "steps" not in settings.trainer.model_fields_set:
            del given["trainer"]["steps"]
        self._dir.chmod(0o700)  # the settings may have keys
        write_atomically(self._dir / SERVICE_SETTINGS, sections.to_toml(given))


def _with_absolute_paths(settings: Settings) -> dict[str, Any]:
    """Returns the settings as plain values, in which files that exist have absolute paths."""

    def resolved(value: Any, plain: Any) -> Any:
        if isinstance(value, Path):
            return str(value.absolute()) if value.exists() else plain
        if isinstance(value, dict):
            return {name: resolved(value[name], plain[name]) for name in value}
        if isinstance(value, list):
            return [resolved(*pair) for pair in zip(value, plain, strict=True)]
        return plain

    values: dict[str, Any] = resolved(settings.model_dump(), settings.model_dump(mode="json"))
    return values


def check(settings: Settings) -> None:
    """Raises ConfigError if the settings are not those of a standing service."""
    if settings.agent.source != "client":
        raise ConfigError(
            f'agent.source = "{settings.agent.source}": a standing service learns from clients; set it to '
            '"client", or use tidegate train'
        )
    if settings.gateway.url is not None or settings.engine.urls:
        name = "engine.urls" if settings.gateway.url is None else "gateway.url"
        raise ConfigError(
            f"{name} has no effect with tidegate serve, which starts gateway and engines; to use running "
            "ones use tidegate train"
        )
    if settings.policies:
        raise ConfigError("policies is not supported with tidegate serve: use one policy, or tidegate train")
    if any(model.path is not None for model in settings.trainer.teacher.models.values()):
        raise ConfigError(
            "trainer.teacher.path does not go with tidegate serve, whose trainer starts no engine: start the "
            "teacher with tidegate engine, and set trainer.teacher.url"
        )
    if settings.trainer.schedule != "constant" and "steps" not in settings.trainer.model_fields_set:
        raise ConfigError(
            f'trainer.schedule = "{settings.trainer.schedule}" needs the number of steps: set trainer.steps, '
            'or use "constant"'
        )
