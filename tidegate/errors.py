"""Error classes, and the three ways in which failures are handled.

**A failed episode is data, not a crash.** If an agent raises, a reward hangs or an engine drops a
connection, one attempt ends with an `Outcome` that names the cause and is recorded in the ledger; the run
continues. Only `completed` and `truncated` episodes are trained on; a failure never counts as reward 0. The
slot is attempted again until `max_attempts` failures are charged to the task; then the task is quarantined,
with the reason in `dead_letters.jsonl`. Infrastructure failures (`infra_error`) have a separate budget and
never quarantine a task; an outage (no engine, no worker, or a service that fails) pauses the run. If group
after group fails or has equal rewards, the run stops, because it cannot learn.

**A bad setting, a bad file or a failed component is an error.** It is raised as one of the classes below
and shown to the user as one message: what failed, where, and what to do. Committed checkpoints stay.

**A bad request gets a typed response** in the caller's dialect. Errors that must not be retried never have
the status 408, 409, 429 or 5xx.
"""

from __future__ import annotations

from collections.abc import Mapping

STOPPED = 130
"""Exit code after Ctrl-C or SIGTERM; not an error."""


class TidegateError(Exception):
    """Base class of Tidegate's errors. `str(error)` is a message for the user, `exit_code` the command's."""

    exit_code = 1


class ConfigError(TidegateError):
    """A setting is unknown, missing, of the wrong type, or contradicts another one."""

    exit_code = 2


class StartError(TidegateError):
    """A process could not start: a port in use, a missing model directory, a failed import."""

    exit_code = 3


class NothingToDoError(TidegateError):
    """A resumed run has already taken all its steps; not a failure."""

    exit_code = 0


class EngineError(TidegateError):
    """An engine refused a call, returned an invalid response, or did not respond in time.

    `retryable` is True if the same call may succeed later (connection lost, 5xx).
    """

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable


class IncompatibleEngineError(EngineError):
    """An engine's responses lack fields that training needs."""


RUN_ENDED = "the run has ended"
"""Begins the text with which a gateway tells its clients so."""


class GatewayError(TidegateError):
    """The gateway refused a control call; `status` is the HTTP status."""

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class GroupRefusedError(TidegateError):
    """The trainer did not train on a client's group; `state` is the state in which the group ended."""

    def __init__(self, message: str, *, state: str) -> None:
        super().__init__(message)
        self.state = state


class PublishError(TidegateError):
    """A policy version could not be made live on any engine."""


class LedgerError(TidegateError):
    """A ledger entry, or the event that it would record, is invalid: an unknown id, a second ending, a group
    that may not start, a corrupt file."""


class CheckpointError(TidegateError):
    """A checkpoint is missing, incomplete, or does not belong to this run."""


class StorageError(TidegateError):
    """The run's directory cannot be written: a full disk, missing permissions. Committed data stays."""


class TrainingError(TidegateError):
    """Training cannot continue: three non-finite steps in a row, or a batch that cannot be assembled."""


class NoProgressError(TidegateError):
    """The run made no progress within the watchdog's time; the message names what it waited for."""


class OutageError(TidegateError):
    """All engines, all workers, or a service that episodes need, were unavailable for `trainer.outage_s`."""


class NoUsableEpisodesError(TidegateError):
    """All recent groups failed or were filtered, so the run cannot learn; the message has the reasons."""


class RewardError(TidegateError):
    """A reward function raised, hung, or did not return a finite number, or a judge's reply was invalid:
    outcome `reward_error`.

    `metrics` are those of the failed episode.
    """

    def __init__(self, message: str, metrics: Mapping[str, float] | None = None) -> None:
        super().__init__(message)
        self.metrics = dict(metrics or {})


class RewardUnavailableError(RewardError):
    """A service that a reward calls, as a judge, failed: outcome `infra_error`, not `reward_error`."""


class UnrewardedError(RewardError):
    """The episode has no reward, and no error occurred: outcome `unrewarded`."""


class CorpusError(TidegateError):
    """A row of a corpus cannot be read, or an index does not match its manifest, encoder or files."""


class InfrastructureError(TidegateError):
    """A service that an episode needs failed. Raised by an agent, a tool or a reward, it ends the episode as
    `infra_error`."""


class SandboxError(InfrastructureError):
    """A sandbox could not start, was closed, or does not respond.

    Limits that a program in it exceeds are results of its commands instead, so that a policy cannot turn its
    failures into `infra_error`.
    """


class RetrievalError(TidegateError):
    """A search failed; see the two subclasses.

    `status` is the HTTP status, `code` a machine-readable reason.
    """

    def __init__(self, message: str, *, status: int, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class RetrievalUnavailable(RetrievalError, InfrastructureError):
    """No retrieval server responded in time; it ends an episode as `infra_error`, and may be retried."""

    def __init__(self, message: str, *, status: int = 503, code: str = "unavailable") -> None:
        super().__init__(message, status=status, code=code)


class RetrievalRefused(RetrievalError):
    """The request is invalid, and would be refused again."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message, status=status, code=code)


def unwrapped(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """Returns the first error of a group if all are Tidegate's, else the group.

    Before Python 3.11.4 errors raised in an `except*` are put into a group again, which hides their type.
    """
    expected, others = failures.split(TidegateError)
    if expected is None or others is not None:
        return failures
    first: BaseException = expected
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first
