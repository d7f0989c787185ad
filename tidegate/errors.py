"""What may go wrong, and who is told.

**A bad episode is data, not a crash.** An agent that raises, a reward that hangs, an engine that
drops a connection: each ends one slot attempt with an `Outcome` of its own, is entered in the
ledger, and the run goes on. Only `completed` and `truncated` episodes are trained on; a failure is
never reward 0. A failed slot is attempted again, `max_attempts` times; then its task is quarantined
and `dead_letters.jsonl` says why. What infrastructure did (`infra_error`) is no task's fault: it has a
budget of its own, and an outage of everything pauses the run. Where group after group fails, or has
rewards that are all alike, nothing can be learned: the run stops and says so.

**A bad setting, a bad file, a dead component is an error.** It is raised as one of the classes
below, reaches the person who runs the command as one sentence that says what was wrong, where, and
what to do next, and loses nothing: what was checkpointed stays.

**A bad request gets a typed answer.** The gateway answers in the dialect of the caller. What must not
be retried is never 408, 409, 429 or 5xx.
"""

from __future__ import annotations

STOPPED = 130
"""The exit code of what a person stopped, by Ctrl-C or SIGTERM; no error."""


class TidegateError(Exception):
    """Base of every error that Tidegate raises on purpose. `str(error)` is fit to be shown."""

    exit_code = 1


class ConfigError(TidegateError):
    """A setting is unknown, missing, of the wrong type, or contradicts another one."""

    exit_code = 2


class StartError(TidegateError):
    """A process of the run could not start: a port in use, a missing model directory, a bad import."""

    exit_code = 3


class FinishedError(TidegateError):
    """There is nothing left to do: a run that is resumed has taken all its steps. No failure."""

    exit_code = 0


class EngineError(TidegateError):
    """An engine refused a call, answered nonsense, or could not be reached in time.

    `retryable` says whether the same call may succeed later (connection lost, 5xx).
    """

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable


class UnfitEngineError(EngineError):
    """What an engine samples comes without what training needs of it."""


class GatewayError(TidegateError):
    """The gateway answered a control call with an error; `status` is the HTTP status."""

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class PublishError(TidegateError):
    """A policy version could not be made live on any engine."""


class LedgerError(TidegateError):
    """An entry that the book cannot hold: an unknown id, a second ending, a broken file."""


class CheckpointError(TidegateError):
    """A checkpoint is missing, incomplete, or does not belong to this run."""


class StorageError(TidegateError):
    """The run's directory cannot be written: a full disk, missing rights. What was committed stays."""


class TrainingError(TidegateError):
    """Training cannot go on: three non-finite steps in a row, or a batch that cannot be formed."""


class StalledError(TidegateError):
    """Nothing moved for the watchdog's time; the message names what was waited for."""


class OutageError(TidegateError):
    """No engine, or nothing else that episodes need, was there for longer than a run waits."""


class HopelessError(TidegateError):
    """Nothing can be learned: group after group failed, or was filtered. The message carries the reasons."""


class RewardError(TidegateError):
    """A reward function raised, hung, or gave no finite number; ends the session as `reward_error`."""


class CorpusError(TidegateError):
    """A row of a corpus cannot be read, or an index does not fit its manifest, its encoder or its files."""


class InfrastructureError(TidegateError):
    """A service that an agent works with failed, not the agent: a run that this ends is `infra_error`."""


class RetrievalError(TidegateError):
    """A search that has no answer, and why: one of the two below, never to be taken for each other.

    `status` is the HTTP status, `code` a word for programs.
    """

    def __init__(self, message: str, *, status: int, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class RetrievalUnavailable(RetrievalError, InfrastructureError):
    """No retrieval server answered in time: an infrastructure failure, not an empty result.

    It ends a session as `infra_error`; another try may succeed.
    """

    def __init__(self, message: str, *, status: int = 503, code: str = "unavailable") -> None:
        super().__init__(message, status=status, code=code)


class RetrievalRefused(RetrievalError):
    """The request is wrong, and would be refused again."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message, status=status, code=code)


def unwrapped(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """What tasks that ran together failed of: the first error where all are Tidegate's, else all.

    Before Python 3.11.4 what an `except*` raises comes in a group again, so that its type was lost.
    """
    known, others = failures.split(TidegateError)
    if known is None or others is not None:
        return failures
    first: BaseException = known
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first
