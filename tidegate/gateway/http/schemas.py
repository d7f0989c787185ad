"""Defines the control plane's request bodies and the rows of its responses."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator
from yarl import URL

from tidegate.errors import GatewayError
from tidegate.gateway.groups.store import GroupStore
from tidegate.gateway.sessions.session import FinishReport, GatewaySession
from tidegate.gateway.sessions.store import SessionStore
from tidegate.loading import did_you_mean
from tidegate.types import ENGINE_WAIT_S, MAX_ERROR, MAX_METRICS, MAX_OUTPUT, Outcome, Trajectory, fields_of

Epoch = Annotated[int, Field(ge=0)]


REPORTABLE = (Outcome.AGENT_ERROR, Outcome.INFRA_ERROR, Outcome.TIMEOUT, Outcome.CANCELLED)


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class PostReward(Body):
    value: Annotated[float, Field(allow_inf_nan=False)]
    name: str = "reward"
    turn: Annotated[int, Field(ge=0)] | None = None


class WorkerName(Body):
    worker: Annotated[str, Field(min_length=1, max_length=200)]
    secret: Annotated[str, Field(max_length=200)] = ""
    """A secret of the worker's choice: calls in its name without it are refused."""


class NextAttempts(WorkerName):
    capacity: Annotated[int, Field(ge=1, le=1024)] = 1
    wait_s: Annotated[float, Field(ge=0, le=60, allow_inf_nan=False)] = 30.0


def _short(reward: Any) -> Any:
    """Returns a reward, or the rewards of policies; of other values at most the beginning of their text, for
    the error."""
    if isinstance(reward, dict) and max(len(reward), *map(len, reward), 0) <= MAX_METRICS:
        return {storable(name): _number_or_text(value) for name, value in reward.items()}
    return _number_or_text(reward)


def _number_or_text(reward: Any) -> Any:
    return reward if reward is None or _number(reward) is not None else repr(reward)[:200]


# pydantic's own limits of length refuse texts with lone surrogates, which `storable` replaces.
def _bounded_output(output: str | None) -> str | None:
    if output is not None and len(output) > MAX_OUTPUT:
        raise ValueError(f"it has {len(output)} characters, and at most {MAX_OUTPUT} are allowed")
    return output


def _bounded_metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    longest = max(map(len, metrics), default=0)
    if max(len(metrics), longest) > MAX_METRICS:
        raise ValueError(
            f"it has {len(metrics)} entries and names of up to {longest} characters, and at most "
            f"{MAX_METRICS} of both are allowed"
        )
    return metrics


def _number(value: Any) -> float | None:
    """Returns a number of JSON; None for another value, and for an integer beyond a float."""
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:
        return None


class AgentReport(Body):
    """How an agent's run ended; by default the gateway decides on the outcome."""

    output: Annotated[str | None, AfterValidator(_bounded_output)] = None
    outcome: Outcome | None = None
    reward: Annotated[Any, AfterValidator(_short)] = None
    """A finite number, or one for each policy by its name; any other value ends the session as
    `reward_error`."""
    metrics: Annotated[dict[str, Any], AfterValidator(_bounded_metrics)] = {}
    error: str | None = None
    """Its end is cut off, if it is long."""

    def report(self) -> FinishReport:
        metrics = {
            storable(name): number
            for name, value in self.metrics.items()
            if (number := _number(value)) is not None and math.isfinite(number)
        }
        error = None if self.error is None else storable(self.error[:MAX_ERROR])
        output = None if self.output is None else storable(self.output)
        return FinishReport(self.outcome, error, output, self.reward, metrics)


class Finish(AgentReport):
    trainer_epoch: Epoch | None = None
    """Epoch of the calling trainer."""
    wait_s: Annotated[float, Field(ge=0, le=600)] | None = None
    """Seconds after which the response is 202, if the reward is not ready yet; None: no limit."""


class WorkerFinish(AgentReport):
    @field_validator("outcome")
    @classmethod
    def _reportable(cls, outcome: Outcome | None) -> Outcome | None:
        if outcome is not None and outcome not in REPORTABLE:
            raise ValueError(f"a worker may report null, {', '.join(REPORTABLE)}; not {outcome}")
        return outcome


class ToolArguments(Body):
    """Arguments of a tool, by name."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)


class AgentReply(Body):
    """A reply that the environment's counterpart responds to."""

    message: Annotated[
        dict[str, Any],
        Field(json_schema_extra={"properties": {"role": {"type": "string"}}, "required": ["role"]}),
    ]
    """A chat message with a `role`."""

    @field_validator("message")
    @classmethod
    def _has_role(cls, message: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(message.get("role"), str):
            raise ValueError("a chat message has a role and a content")
        return message


class ClientEpisodeRequest(Body):
    task_id: Annotated[str, Field(min_length=1, max_length=200)]
    metadata: dict[str, Any] = {}
    key: Annotated[str, Field(pattern="^[A-Za-z0-9_-]{32,64}$")] | None = None
    """Secret part of the episode's key. A repeated request with the same key opens no other episode."""


class Feedback(Body):
    id: Annotated[str, Field(min_length=1, max_length=300)]
    """Id of a reply, or name of a conversation."""
    value: Annotated[float, Field(allow_inf_nan=False, strict=True)] | Literal["up", "down"]
    """A reward; `up` is 1, `down` is 0."""
    name: Annotated[str, Field(min_length=1, max_length=200)] = "feedback"
    """A repeated name replaces the earlier value."""
    reply_only: bool = False
    """Rewards the reply alone instead of the conversation."""
    comment: Annotated[str, Field(max_length=10_000)] | None = None
    correction: Annotated[str, Field(min_length=1, max_length=100_000)] | None = None
    """What the reply should have been; kept as a demonstration (`tidegate export --corrections`)."""

    def reward(self) -> float:
        return {"up": 1.0, "down": 0.0}[self.value] if isinstance(self.value, str) else self.value


class SealClientGroup(Body):
    sessions: Annotated[list[str], Field(min_length=1)]


class Seal(Body):
    task_id: str
    sessions: list[str]
    trainer_epoch: Epoch | None = None
    wait_s: Annotated[float, Field(ge=0, le=600)] | None = None


class Drop(Body):
    trainer_epoch: Epoch | None = None
    why: str | None = None


class Lease(Body):
    trainer_epoch: Epoch
    max: Annotated[int, Field(ge=0)] = 1
    wait_s: Annotated[float, Field(ge=0, le=600)] = 0.0
    key: str = ""
    """A repeated request with the same key gets the groups of the first one."""
    protocol: Literal[1] = 1
    """Version of the lease protocol (docs/own_loop.md) that the caller speaks."""


class AcknowledgeErasures(Body):
    groups: list[str]


class EndRun(Body):
    trainer_epoch: Epoch
    why: str


class WaitReady(Body):
    trainer_epoch: Epoch
    wait_s: Annotated[float, Field(ge=0, le=60)] = 0.0


class GiveBack(Body):
    lease_ids: list[str]


class Ack(Body):
    trainer_epoch: Epoch
    lease_id: str
    outcome: str
    why: str | None = None
    """Further details for the group's client."""


def engine_address(text: str) -> str:
    """Validates an engine's URL, so that a wrong one is refused before a probe fails."""
    try:
        url = URL(text)
        valid = (
            url.scheme in ("http", "https") and bool((url.raw_host or "").encode("idna")) and bool(url.port)
        )
    except ValueError as error:
        raise ValueError(f"invalid URL: {error}") from None
    if not valid or url.raw_user is not None or url.raw_query_string or url.raw_fragment:
        raise ValueError("an engine's URL must be http(s)://host:port, without a user, a query or a fragment")
    return text


Url = Annotated[str, AfterValidator(engine_address)]


class EngineUrl(Body):
    url: Url


class AddEngine(EngineUrl):
    control: list[Url] = []
    """Addresses of the engines behind a router, for control calls that it does not forward."""
    admitted: bool | None = None
    """Set by a trainer: whether the engine has the current version and receives calls. None: the engine waits
    for the trainer, if one manages the gateway."""
    policy: str = ""
    """Name of the policy that it serves, of several that share it the first one. Empty: there is one only, or
    the engine was added before."""


class AdmitEngine(EngineUrl):
    admitted: bool


class SetCandidate(Body):
    engines: list[Url] = []
    """The engines with the candidate version; none: there is no candidate."""
    share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the new conversations that they serve."""


def storable(text: str) -> str:
    """Replaces lone surrogates, which JSON permits but UTF-8 cannot encode, by question marks."""
    return text.encode("utf-8", "replace").decode()


def session_row(session: GatewaySession) -> dict[str, Any]:
    """Returns a session's public fields, without its key and its task's answer."""
    return {
        "session_id": session.id,
        "state": session.state,
        "task_id": session.task.id if session.task is not None else None,
        "env": session.env,
        "split": session.split,
        "group_id": session.group_id,
        "slot": session.slot,
        "turns": len(session.tree.nodes),
        "calls": len(session.calls.running),
        "limits": fields_of(session.limits),
        "oldest_version": session.oldest_version(),
        "metadata": session.metadata,
        "reported": session.ending and session.ending.reported,
    }


def access_row(session_id: str, key: str, root: str) -> dict[str, str]:
    """Returns the response body of the call that opens a session; `root` is the gateway's URL."""
    return {"session_id": session_id, "base_url": f"{root}/s/{session_id}/v1", "api_key": key}


def summary_row(trajectory: Trajectory) -> dict[str, Any]:
    """Returns the response body of `finish`."""
    return {
        "session_id": trajectory.session_id,
        "outcome": trajectory.outcome.value,
        "reward": trajectory.reward,
        "reward_parts": trajectory.reward_parts,
        "agent_reward": trajectory.agent_reward,
        "policy_rewards": trajectory.policy_rewards,
        "turns": len(trajectory.turns),
        "sampled_tokens": trajectory.sampled_tokens(),
        "oldest_version": trajectory.oldest_version(),
        "error": trajectory.error,
        "seconds": trajectory.seconds,
        "engine_wait_s": trajectory.metrics.get(ENGINE_WAIT_S, 0.0),
    }


def group_rows(sessions: SessionStore, groups: GroupStore) -> list[dict[str, Any]]:
    """Returns all groups: unsealed ones, then sealed ones in the order of sealing."""
    rows = []
    for group_id, members in sessions.groups().items():
        if groups.get(group_id) is None:
            versions = [version for session in members if (version := session.oldest_version()) is not None]
            unended = sum(member.ending is None for member in members)
            oldest = min(versions, default=None)
            row = _group_row(group_id, "live", oldest, [m.id for m in members], unended)
            rows.append(row | {"client": members[0].client, "outcome": _unrewarded_end(members[0])})
    for entry in groups.entries():
        summary = entry.summary
        row = _group_row(entry.id, entry.state, summary.oldest_version, entry.sessions)
        rows.append(row | {"newest_version": summary.newest_version, "reward": summary.reward})
    return rows


def _group_row(
    group_id: str, state: str, oldest: int | None, sessions: list[str], unended: int = 0
) -> dict[str, Any]:
    return {
        "id": group_id,
        "state": state,
        "oldest_version": oldest,
        "sessions": sessions,
        "unended": unended,
    }


def _unrewarded_end(session: GatewaySession) -> str | None:
    """Returns the outcome of a client's conversation that has ended without a reward; else None."""
    trajectory = None if session.conversation is None else session.trajectory
    return None if trajectory is None or trajectory.reward is not None else trajectory.outcome.value


B = TypeVar("B", bound=Body)


def read(kind: type[B], body: bytes | bytearray) -> B:
    """Parses a request body. Raises GatewayError."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise GatewayError(explain(error.errors(), kind.model_fields), status=400) from None


def explain(errors: Sequence[Any], fields: Collection[str] = ()) -> str:
    """Formats Pydantic's errors as one line.

    Args:
        errors: The errors; those of a union's branches become one.
        fields: Names of the body's fields, for an unknown one.
    """
    reasons: dict[str, list[str]] = {}
    for error in errors:
        name = ".".join(str(part) for part in error["loc"] if not _is_branch(part)) or "body"
        reason, value = error["msg"].removeprefix("Value error, "), error.get("input")
        if error["type"] == "extra_forbidden":
            reason += f"{did_you_mean(name, fields)}; the fields are {', '.join(fields)}" if fields else ""
        elif error["type"] not in ("missing", "json_invalid") and not name.endswith("key"):
            name += f" = {value!r:.60}" if value is None or isinstance(value, str | float | int) else ""
        reasons.setdefault(name, []).append(reason)
    return "; ".join(f"{name}: {', or '.join(dict.fromkeys(found))}" for name, found in reasons.items())


def _is_branch(part: str | int) -> bool:
    """Returns whether a part of a location is a union's branch, which Pydantic adds."""
    return isinstance(part, str) and (part in ("int", "float", "str", "none") or "[" in part)
