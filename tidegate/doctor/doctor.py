"""Runs all checks of `tidegate doctor`, in the order of their dependencies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean

from tidegate.config import Settings
from tidegate.doctor.engine import check_engine, check_fields
from tidegate.doctor.environment import check_environment, first_tasks
from tidegate.doctor.episode import judge_episode, run_episode
from tidegate.doctor.findings import Finding, Tell, error, failed, note, ok, warning
from tidegate.doctor.install import check_install, check_port, check_sandbox
from tidegate.doctor.model import check_model
from tidegate.doctor.rewards import check_judge, check_rewards
from tidegate.doctor.states import check_states
from tidegate.doctor.template import QUESTION
from tidegate.envs.base import Environment
from tidegate.errors import ConfigError, GatewayError, StartError
from tidegate.gateway.client import GatewayClient
from tidegate.gateway.rendering.renderer import Renderer
from tidegate.settings.judge import JudgeSettings
from tidegate.trainer.forecast import advice, episodes_at_a_time, forecast, measure_rate
from tidegate.trainer.processes.agents import AgentProcess, GatewayWorkers, supervise_agents
from tidegate.trainer.processes.launcher import admin_key
from tidegate.trainer.processes.provider import GatewayAccess
from tidegate.trainer.processes.servers import LocalProcesses
from tidegate.trainer.processes.supervisor import TaskSupervisor


@dataclass(slots=True)
class Examination:
    """Checks one configuration; `run` is called once.

    `tell` is called with each finding as soon as it exists. Started processes write their logs to
    `folder`/logs and are stopped before `run` returns.
    """

    settings: Settings
    folder: Path
    tell: Tell
    episodes: int = 1
    findings: list[Finding] = field(default_factory=list)

    async def run(self) -> list[Finding]:
        self._report(check_install(self.settings))
        if not self._report([check_port(self.settings)]):
            self._take_another_port()
        self._report(await check_sandbox(self.settings))
        found, renderer = await asyncio.to_thread(check_model, self.settings)
        self._report(found)
        found, environment = await asyncio.to_thread(check_environment, self.settings, renderer)
        if not self._report(found) or environment is None:
            self._skip("rewards", "the environment has an error")
            environment = None
        elif not self._report(await asyncio.to_thread(check_states, environment)):
            self._skip("rewards", "the environment's states have an error")
            environment = None
        else:
            self._report(await asyncio.to_thread(check_rewards, environment))
            if not self._report(await check_judge(self.settings.env.judge, environment)):
                self._remove_judge()
        async with contextlib.AsyncExitStack() as stack:
            await self._with_processes(stack, renderer, environment)
        return self.findings

    def _report(self, findings: Sequence[Finding]) -> bool:
        """Reports findings; returns whether none of them is an error."""
        for finding in findings:
            self.findings.append(finding)
            self.tell(finding)
        return not failed(list(findings))

    def _skip(self, check: str, why: str) -> None:
        self._report([note(check, "skipped", f"skipped: {why}")])

    def _remove_judge(self) -> None:
        """Lets the other checks run without the judge."""
        env = self.settings.env.model_copy(update={"judge": JudgeSettings()})
        self.settings = self.settings.model_copy(update={"env": env})

    def _take_another_port(self) -> None:
        """Provides a replacement so that the other checks can run."""
        gateway = self.settings.gateway.model_copy(update={"port": 0, "host": "127.0.0.1", "url": None})
        self.settings = self.settings.model_copy(update={"gateway": gateway})

    async def _with_processes(
        self, stack: contextlib.AsyncExitStack, renderer: Renderer | None, environment: Environment | None
    ) -> None:
        if renderer is None:
            self._skip("engine", "the model directory is incomplete")
            return
        urls = await self._engines(stack)
        prompt: list[int] = renderer.encode_prompt(QUESTION, None, {}).tolist()
        temperature = self.settings.sampling.temperature
        healthy = [self._report(await check_engine(url, prompt, temperature, renderer)) for url in urls]
        if all(healthy):
            self._report([ok("engine", self.settings.centering)])
            healthy = [self._report(await check_fields(url, self.settings)) for url in urls]
        if not urls or not all(healthy):
            self._skip("episode", "no engine works")
        elif any(len(policies) > 1 for policies in self.settings.engine_sets.values()):
            self._skip("episode", "the adapters of policies that share engines are made at a run's start")
        elif environment is None:
            self._skip("episode", "the environment has an error")
        else:
            await self._try_agent(stack, urls, environment, renderer)

    async def _engines(self, stack: contextlib.AsyncExitStack) -> dict[str, str]:
        """Returns the policies of the settings' engines, or of one for each, by URL; none if one fails."""
        settings, urls = self.settings, dict[str, str]()
        if settings.engine.urls:
            return dict.fromkeys((url.rstrip("/") for url in settings.engine.urls), "")
        for policy in settings.engine_sets:
            own = settings.of_engines(policy)
            current = partial(lambda path: (path, 0), own.model.path.absolute())
            try:
                engine = LocalProcesses().engines(settings, self.folder, current, policy)[0]
                stack.push_async_callback(engine.stop)
                urls[await engine.start()] = policy
            except (ConfigError, StartError) as failure:
                self._report([error("engine", "engine_does_not_start", str(failure))])
                return {}
        return urls

    async def _try_agent(
        self,
        stack: contextlib.AsyncExitStack,
        urls: dict[str, str],
        environment: Environment,
        renderer: Renderer,
    ) -> None:
        gateway = await self._gateway(stack, urls)
        if (source := self.settings.agent.source) != "local":
            self._skip("episode", f"agent.source is {source}; to check an agent, add --agent.source local")
            return
        if gateway is None:
            self._skip("episode", "the gateway could not start")
            return
        agents = await self._agents(stack, gateway)
        if agents is None:
            self._skip("episode", "the agent could not start")
            return
        lengths = []
        for number, task in enumerate(first_tasks(environment, self.episodes)):
            try:
                running = run_episode(self.settings, gateway, task, f"episode-{number}")
                episode = await agents.run(running)
            except (GatewayError, StartError) as failure:
                self._report([error("episode", "episode_failed", f"the episode could not be run: {failure}")])
                return
            self._report(judge_episode(episode, self.settings, renderer))
            lengths.append(episode.trajectory.sampled_tokens())
        rate = await measure_rate([*urls], episodes_at_a_time(self.settings))
        if rate and any(lengths):
            known = (self.settings, rate, fmean(lengths), environment.eval_sets())
            self._report([ok("speed", forecast(*known))])
            self._report([warning("speed", "slow", *told) for told in advice(*known)])

    async def _gateway(self, stack: contextlib.AsyncExitStack, urls: dict[str, str]) -> GatewayClient | None:
        key = admin_key(self.settings)
        service = LocalProcesses().gateway(self.settings, self.folder, {"admin_key": key}, None)
        stack.push_async_callback(service.stop)
        client = None
        try:
            client = GatewayClient(await service.start(), key)
            stack.push_async_callback(client.close)
            for url, policy in urls.items():
                await client.add_engine(url, policy=policy)
            await client.health()
        except (StartError, GatewayError) as failure:
            self._report([error("gateway", "gateway_does_not_start", str(failure))])
            return None
        self._report([ok("gateway", f"serves at {client.url}")])
        return client

    async def _agents(
        self, stack: contextlib.AsyncExitStack, gateway: GatewayClient
    ) -> TaskSupervisor | None:
        """Starts the agents' process and returns the supervisor that restarts it."""
        agent, access = self.settings.agent, GatewayAccess(gateway.url, gateway.agents_key)
        process = AgentProcess(agent, access, self.folder, "agent")
        stack.push_async_callback(process.stop)
        try:
            await process.start()
        except (ConfigError, StartError) as failure:
            self._report([error("agent", "agent_unloadable", f"your agent cannot be loaded: {failure}")])
            return None
        workers = GatewayWorkers(gateway, await stack.enter_async_context(GatewayClient(*access)))
        supervisor = TaskSupervisor()
        stack.push_async_callback(supervisor.close)
        supervisor.watch(supervise_agents(process, workers, lambda _: None), process.name)
        self._report([ok("agent", f"{agent.use} is loaded")])
        return supervisor
