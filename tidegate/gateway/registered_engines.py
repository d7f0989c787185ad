"""Registers a gateway's engines for clients and trainers, and keeps them across restarts."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from tidegate.errors import GatewayError
from tidegate.gateway.engines.engine import EngineEndpoint, EngineRecord
from tidegate.gateway.engines.pool import EnginePool
from tidegate.gateway.journal.base import Journal, Recovered
from tidegate.gateway.policies import ServedPolicies

log = logging.getLogger("tidegate.gateway")


class RegisteredEngines:
    """The engines of one gateway, as the journal has them.

    Args:
        pool: The engines in use.
        journal: The journal.
        policies: The policies that engines may serve.
    """

    def __init__(self, pool: EnginePool, journal: Journal, policies: ServedPolicies) -> None:
        self._pool = pool
        self._journal = journal
        self._policies = policies

    async def restore(self, recovered: Recovered, urls: Sequence[str]) -> None:
        """Adds engines of options and journal, except those of policies that are not served."""
        self._pool.trainer_managed = recovered.trainer_managed
        for record in (*map(EngineRecord, urls), *recovered.engines):
            if record.policy in self._policies.engine_sets:
                await self._pool.add(record)
            else:
                log.warning("engine %s is left out: policy %r is not served", record.url, record.policy)

    async def add(
        self, url: str, control: Sequence[str] = (), admitted: bool | None = None, policy: str = ""
    ) -> EngineEndpoint:
        """Adds an engine of a policy, which is kept across restarts. Idempotent. Raises GatewayError.

        `admitted` is set by trainers: whether the engine has the current version and receives calls. From
        then on the trainer manages the gateway, and engines that others add (None) wait until it admits them.
        """
        existing = self._pool.get(url)
        policy = policy or (existing.policy if existing is not None else "")
        self._check(url, existing, policy)
        joined = admitted is None if existing is None else existing.joined
        if admitted is not None:
            self._start_trainer_management(existing)
        else:
            admitted = not self._pool.trainer_managed if existing is None else existing.admitted
        engine = await self._pool.add(EngineRecord(url, tuple(control), joined, admitted, policy), wait_s=2.0)
        await self._record()
        return engine

    def _check(self, url: str, existing: EngineEndpoint | None, policy: str) -> None:
        """Raises GatewayError for an engine of an unknown policy, or of another one than before."""
        sets = self._policies.engine_sets
        if policy not in sets:
            names = (
                f"the policies are {', '.join(sorted(sets))}" if self._policies.named else "there is only one"
            )
            what = f"policy {policy!r} has no engines here" if policy else "it names no policy"
            raise GatewayError(f"engine {url}: {what}; {names}", status=400)
        if existing is not None and existing.policy != policy:
            raise GatewayError(
                f"engine {url} serves policy {existing.policy!r}: remove it, then add it for {policy!r}",
                status=409,
            )

    async def admit(self, url: str, admitted: bool) -> EngineEndpoint:
        """Sets, for a trainer, whether an engine receives calls. Raises GatewayError if it is unknown."""
        existing = self._pool.get(url)
        if existing is None:
            raise GatewayError(f"there is no engine {url}", status=404)
        self._start_trainer_management(existing)
        await self._pool.add(existing.record._replace(admitted=admitted))
        await self._record()
        return existing

    def set_candidate(self, urls: Collection[str], share: float) -> None:
        """Sets, for a trainer, the engines with a version that is not promoted yet; none: there is none.

        A restarted gateway has no candidate engines: the trainer repeats the call.
        """
        if unknown := [url for url in urls if self._pool.get(url) is None]:
            raise GatewayError(f"there is no engine {unknown[0]}", status=404)
        self._pool.set_candidate(urls, share)

    def _start_trainer_management(self, engine: EngineEndpoint | None) -> None:
        self._pool.trainer_managed = True
        if engine is not None:
            engine.weight_version = None  # set by the next probe, as the trainer may have loaded weights

    async def remove(self, url: str) -> None:
        await self._pool.remove(url)
        await self._record()

    async def _record(self) -> None:
        await self._journal.engines(
            [engine.record for engine in self._pool.engines()], self._pool.trainer_managed
        )
