"""Bodies of the control plane."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from yarl import URL

from tidegate.gateway.groups.store import GroupStore
from tidegate.gateway.sessions.limits import SessionLimits
from tidegate.gateway.sessions.session import GatewaySession
from tidegate.gateway.sessions.store import SessionStore
from tidegate.types import Outcome, Sampling, Split, Task

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Epoch = Annotated[int, Field(ge=0)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TaskBody(Body):
    id: str
    env: str
    messages: list[dict[str, Any]]
    answer: Any = None
    info: dict[str, Any] = {}


class SamplingBody(Body):
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: int = -1
    max_tokens: Annotated[int, Field(ge=1)] = 256


class LimitsBody(Body):
    turns: Annotated[int, Field(ge=1)] | None = None
    tokens: Annotated[int, Field(ge=1)] | None = None
    seconds: Seconds | None = None
    calls: Annotated[int, Field(ge=1)] | None = None


class OpenSession(Body):
    task: TaskBody | None = None
    env: str | None = None
    group_id: str | None = None
    slot: int | None = None
    split: Split = "train"
    sampling: SamplingBody = SamplingBody()
    deadline_s: Seconds | None = None
    metadata: dict[str, Any] = {}
    seed: int | None = None
    limits: LimitsBody = LimitsBody()
    untrained_models: list[str] = []
    """Model names whose calls are recorded and not trained on."""
    trainer_epoch: Epoch | None = None
    """Of a session that ends `cancelled` when a newer trainer comes."""

    def arguments(self) -> dict[str, Any]:
        told = dict(self)
        epoch = told.pop("trainer_epoch")
        return {
            **told,
            "epoch": epoch,
            "task": None if self.task is None else Task(**dict(self.task)),
            "sampling": Sampling(**dict(self.sampling)),
            "limits": SessionLimits(**dict(self.limits)),
        }


class PostReward(Body):
    value: Annotated[float, Field(allow_inf_nan=False)]
    name: str = "reward"
    turn: Annotated[int, Field(ge=0)] | None = None


class Finish(Body):
    output: str | None = None
    outcome: Outcome | None = None
    reward: Any = None
    """Checked later: what is no finite number ends the session as `reward_error`."""
    metrics: dict[str, Any] = {}
    error: str | None = None
    trainer_epoch: Epoch | None = None
    """Of a trainer that may have been replaced."""
    wait_s: Annotated[float, Field(ge=0, le=600)] | None = None
    """The answer comes after so long, rewarded or not (202: ask again). None: once it is rewarded."""

    def arguments(self) -> dict[str, Any]:
        told = dict(self)
        epoch = told.pop("trainer_epoch")
        metrics = {
            storable(name): float(value)
            for name, value in self.metrics.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        return {
            **told,
            "epoch": epoch,
            "metrics": metrics,
            "output": None if self.output is None else storable(self.output),
            "error": None if self.error is None else storable(self.error),
        }


class Seal(Body):
    task_id: str
    sessions: list[str]
    trainer_epoch: Epoch | None = None


class Drop(Body):
    trainer_epoch: Epoch | None = None


class Lease(Body):
    trainer_epoch: Epoch
    max: Annotated[int, Field(ge=0)] = 1
    wait_s: Annotated[float, Field(ge=0, le=600)] = 0.0
    key: str = ""
    """The same in a request that is sent again: it gets the groups that the first one was given."""


class WaitReady(Body):
    trainer_epoch: Epoch
    wait_s: Annotated[float, Field(ge=0, le=60)] = 0.0


class GiveBack(Body):
    lease_ids: list[str]


class Ack(Body):
    trainer_epoch: Epoch
    lease_id: str
    outcome: str


def engine_address(text: str) -> str:
    """An engine's URL; one that no call can be sent to is found out here, and not by a probe."""
    try:
        url = URL(text)
        able = (
            url.scheme in ("http", "https") and bool((url.raw_host or "").encode("idna")) and bool(url.port)
        )
    except ValueError as error:
        raise ValueError(f"no URL: {error}") from None
    if not able or url.raw_user is not None or url.raw_query_string or url.raw_fragment:
        raise ValueError("an engine's URL is http(s)://host:port, without a user, a query or a fragment")
    return text


Url = Annotated[str, AfterValidator(engine_address)]


class EngineUrl(Body):
    url: Url


class AddEngine(EngineUrl):
    control: list[Url] = []
    """The engines behind a router, which take the control calls that it does not pass on."""
    admitted: bool | None = None
    """A trainer's word: whether it is at the live version and serves. None: it waits for that, where a
    trainer leads the gateway."""


class AdmitEngine(EngineUrl):
    admitted: bool


def storable(text: str) -> str:
    """Text with question marks for lone surrogates: JSON can carry them, no encoding can."""
    return text.encode("utf-8", "replace").decode()


def session_row(session: GatewaySession) -> dict[str, Any]:
    """A session as the control plane shows it: no key, no answer."""
    return {
        "session_id": session.id,
        "state": session.state,
        "task_id": session.task.id if session.task is not None else None,
        "env": session.env,
        "split": session.split,
        "group_id": session.group_id,
        "slot": session.slot,
        "turns": len(session.tree.nodes),
        "calls": len(session.calls.live),
        "limits": session.limits.to_wire(),
        "oldest_version": session.oldest_version(),
        "metadata": session.metadata,
    }


def group_rows(sessions: SessionStore, groups: GroupStore) -> list[dict[str, Any]]:
    """All groups: those that are not sealed yet, then the others in the order of sealing."""
    rows = []
    for group_id, members in sessions.groups().items():
        if groups.get(group_id) is None:
            known = [version for one in members if (version := one.oldest_version()) is not None]
            rows.append(_group_row(group_id, "live", min(known, default=None), [m.id for m in members]))
    for entry in groups.entries():
        ids = [trajectory.session_id for trajectory in entry.group.trajectories]
        rows.append(_group_row(entry.group.id, entry.state, entry.group.oldest_version(), ids))
    return rows


def _group_row(group_id: str, state: str, oldest: int | None, sessions: list[str]) -> dict[str, Any]:
    return {"id": group_id, "state": state, "oldest_version": oldest, "sessions": sessions}


def explain(errors: list[Any]) -> str:
    """Pydantic's findings as one sentence each."""
    return "; ".join(
        f"{'.'.join(str(part) for part in one['loc']) or 'body'}: {one['msg']}" for one in errors
    )
