"""The policy at a Tinker service: gradients, optimiser steps, snapshots and saved states.

The service saves its state after each step. A call that fails may have had its effect: so the step is taken
again as a whole, in a new session that begins with the last saved state. No step is taken twice on one state.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tidegate import failpoints
from tidegate.config import TrainerSettings
from tidegate.errors import CheckpointError, ConfigError, StartError, TrainingError
from tidegate.service.backoff import backoff_s
from tidegate.service.threads import within
from tidegate.tinker.service import SNAPSHOT, connect, read_snapshot, sdk, status_of, unique_name
from tidegate.trainer.batch.rows import TrainingSequence
from tidegate.trainer.checkpoint.checkpoint import TRAINER_STATE, sync_tree
from tidegate.trainer.checkpoint.huggingface import tokenizer_files
from tidegate.trainer.policy.diagnostics import distance_metrics
from tidegate.trainer.policy.optimizer import BETA2, learning_rate
from tidegate.trainer.records.formats import datum_fields

CLIP = (0.8, 1.2)
"""Bounds of the ratio in `ppo` and `cispo` at a service, unless `trainer.tinker.loss_config` has others."""
EPS = 1e-8
"""AdamW's constant, that of this trainer's own."""
REFUSED = (400, 401, 403, 404, 405, 422)
"""Statuses that a second try does not change; some services have no call that deletes, and answer 405."""
DELETE_S = 60.0

T = TypeVar("T")
Floats = npt.NDArray[np.float64]
log = logging.getLogger("tidegate.tinker")


class TinkerPolicy:
    """A LoRA policy that a Tinker service holds. Its methods block: call them in a thread.

    Args:
        settings: the `[trainer]` settings.
        base: directory with the base model's configuration and tokenizer.
        seed: seed of the LoRA matrices.
        key: key of the service.
        open_service: opens a session at the service; by default with the SDK.

    Attributes:
        steps: number of batches trained on.
        non_finite: ids of the groups whose loss was not finite in the last batch.
        untrained: ids of the groups of the last batch on which no step was taken.

    Raises:
        ConfigError: `base` is a version of another run.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        base: Path,
        seed: int,
        key: str,
        open_service: Callable[[], Any] | None = None,
    ) -> None:
        if (base / SNAPSHOT).exists():  # engines would sample from it, but training begins with `base_model`
            raise ConfigError(
                f"model.path = {base}: a version of a run at a Tinker service, from which no other run "
                "begins: name the base model's directory"
            )
        self.settings = settings
        self.steps = 0
        self.non_finite: list[str] = []
        self.untrained: list[str] = []
        self._open_service = open_service or (lambda: connect(settings.tinker, key, once_s=settings.outage_s))
        self._seed = seed
        self._files = {**tokenizer_files(base), "config.json": (base / "config.json").read_bytes()}
        if (generation := base / "generation_config.json").is_file():
            self._files[generation.name] = generation.read_bytes()
        self._service: Any = None
        self._session: Any = None
        """The SDK's TrainingClient; None after a failure."""
        self._state: str | None = None
        """Path of the state that was saved after the last step."""
        self._sampler: str | None = None
        """Path of the snapshot of that state, if there is one."""
        self._saved: set[str] = set()
        """States and snapshots that this process or its checkpoints name, and that may have to be deleted."""
        self._rows: list[TrainingSequence] = []
        self._version = -1

    # -- training

    def backward(self, rows: Sequence[TrainingSequence], version: int) -> None:
        """Take the rows of a batch; `optimizer_step` sends them, so that a step is one unit there."""
        self._rows, self._version = [row for row in rows if row.trained], version

    def optimizer_step(self) -> dict[str, float]:
        """Take an optimiser step on the batch, save the state, and return the batch's metrics.

        Raises:
            TrainingError: a batch has no trained token, or the service refuses the step or is away for
                longer than `trainer.outage_s`.
            StartError: the SDK cannot be used.
        """
        began, rows = time.perf_counter(), self._rows
        self._rows = []
        if not rows:
            raise TrainingError("a batch has no trainable token")
        rate = learning_rate(self.settings, self.steps)
        scales = self._scales(rows)
        policy, state = self._attempt(lambda session: self._step(session, rows, scales, rate))
        groups = sorted({row.group_id for row in rows})
        taken = state is not None
        self.non_finite = sorted(
            {row.group_id for row, values in zip(rows, policy, strict=True) if not np.isfinite(values).all()}
        )
        self.untrained = [] if taken else groups
        if state is not None:
            self._state, self._sampler = state, None
            self._saved.add(state)
            self.steps += 1
        else:
            self._session = None  # with it go the gradients
        tokens = float(sum(row.trained for row in rows))
        return {
            **self._distance(rows, policy),
            "grad_norm": math.nan,  # no service tells it
            "learning_rate": rate,
            "optimizer_steps": float(taken),
            "skipped": float(not taken),
            "tokens/trained": tokens if taken else 0.0,
            "tokens/computed": float(sum(row.inputs for row in rows)),
            "padding_ratio": 0.0,
            "time/update": time.perf_counter() - began,
        }

    def _step(
        self, session: Any, rows: Sequence[TrainingSequence], scales: Sequence[float], rate: float
    ) -> tuple[list[Floats], str | None]:
        """Take a step and save the state after it.

        Returns:
            log π of each row's trained tokens before the step, and the path of the state; None if a value is
            not finite, and no step was taken.
        """
        tinker, timeout_s, own = sdk(), self.settings.outage_s, self.settings.tinker
        data = [datum(tinker, row, scale) for row, scale in zip(rows, scales, strict=True)]
        output = session.forward_backward(data, own.loss, dict(own.loss_config) or None).result(timeout_s)
        policy = [
            np.asarray(one["logprobs"].data, np.float64)[row.mask[1 : row.inputs + 1]]
            for row, one in zip(rows, output.loss_fn_outputs, strict=True)
        ]
        if not all(np.isfinite(values).all() for values in policy):
            return policy, None
        adam = tinker.AdamParams(
            learning_rate=rate, beta1=self.settings.beta1, beta2=BETA2, eps=EPS,
            weight_decay=self.settings.weight_decay, grad_clip_norm=self.settings.max_grad_norm,
        )  # fmt: skip
        failpoints.reach("tinker.backward")
        session.optim_step(adam).result(timeout_s)
        failpoints.reach("tinker.step")
        state = session.save_state(unique_name("state")).result(timeout_s).path
        failpoints.reach("tinker.state")
        return policy, state

    def _scales(self, rows: Sequence[TrainingSequence]) -> list[float]:
        """Factor of each row's advantages, with which the service's sum or mean is the mean over trained
        tokens."""
        tokens = sum(row.trained for row in rows)
        if self.settings.tinker.reduction == "sum":
            return [1 / tokens for _ in rows]
        return [len(rows) * row.inputs / tokens for row in rows]

    def _distance(self, rows: Sequence[TrainingSequence], policy: Sequence[Floats]) -> dict[str, float]:
        """Loss, and the metrics of `Diagnostics`; the service does not tell entropies."""
        own, config = self.settings.tinker, self.settings.tinker.loss_config
        low, high = config.get("clip_low_threshold", CLIP[0]), config.get("clip_high_threshold", CLIP[1])
        sums: dict[str, float] = dict.fromkeys(
            ("tokens", "own", "own_k3", "k3", "drift", "clipped", "ratio", "ratio_squared", "row_ratio"), 0.0
        )
        sums |= {"row_ratio_squared": 0.0, "rows": float(len(rows)), "max_error": 0.0, "entropy": math.nan}
        objective = 0.0
        for row, values in zip(rows, policy, strict=True):
            gap, advantages = values - row.logprobs[row.mask], row.advantages[row.mask].astype(np.float64)
            log_ratio = np.nan_to_num(gap).clip(-20.0, 20.0)
            ratio, k3 = np.exp(log_ratio), np.expm1(log_ratio) - log_ratio
            bounded, mine = ratio.clip(low, high), row.versions[row.mask] == self._version
            clipped = np.zeros_like(ratio)
            if own.loss == "importance_sampling":
                terms = ratio * advantages
            elif own.loss == "ppo":
                terms = np.minimum(ratio * advantages, bounded * advantages)
                clipped = (terms < ratio * advantages).astype(np.float64)
            else:
                terms, clipped = bounded * advantages * values, (bounded != ratio).astype(np.float64)
            objective += float(terms.sum())
            row_ratio = math.exp(float(np.clip(log_ratio.sum(), -20.0, 20.0)))
            for name, value in {
                "tokens": len(ratio), "own": mine.sum(), "own_k3": k3[mine].sum(), "k3": k3.sum(),
                "drift": np.abs(log_ratio).sum(), "clipped": clipped.sum(), "ratio": ratio.sum(),
                "ratio_squared": np.square(ratio).sum(), "row_ratio": row_ratio,
                "row_ratio_squared": row_ratio**2,
            }.items():  # fmt: skip
                sums[name] += float(value)
            sums["max_error"] = max(sums["max_error"], float(np.abs(gap[mine]).max(initial=0.0)))
        return {"loss": -objective / sums["tokens"], **distance_metrics([sums])}

    # -- session

    def _attempt(self, work: Callable[[Any], T]) -> T:
        """Do work in the session; after a failure again, in a new session with the last saved state."""
        deadline = time.monotonic() + self.settings.outage_s
        for failures in itertools.count():
            try:
                if self._session is None:
                    self._session = self._open()
                return work(self._session)
            except StartError:
                raise
            except Exception as error:  # the SDK has no common class of its errors
                self._session = None
                status = status_of(error)
                what = f"the Tinker service: {type(error).__name__}: {error}"
                if (failures and status in REFUSED) or time.monotonic() > deadline:
                    raise TrainingError(
                        f"{what}; the step was not taken. Go on from the last checkpoint with --resume"
                    ) from error
                log.warning("%s; again from the state after step %d", what, self.steps)
            time.sleep(backoff_s(failures, 0.5, 15.0))
        raise AssertionError

    def _open(self) -> Any:
        """Open a session with the last saved state; the first one saves its first."""
        if self._service is not None and hasattr(self._service, "close"):
            self._service.close()
        timeout_s = self.settings.outage_s
        service = self._service = within(timeout_s, self._open_service)
        if (state := self._state) is not None:
            return within(timeout_s, lambda: service.create_training_client_from_state_with_optimizer(state))
        session = within(
            timeout_s,
            lambda: service.create_lora_training_client(
                base_model=self.settings.tinker.base_model, rank=self.settings.lora.rank, seed=self._seed
            ),
        )
        self._state = session.save_state(unique_name("state")).result(timeout_s).path
        self._saved.add(self._state)
        failpoints.reach("tinker.opened")
        return session

    # -- weights and checkpoints (`Restorable`)

    def save_weights(self, directory: Path, *, dtype: str = "float32") -> Path:
        """Write a directory that names a snapshot of the weights, with the tokenizer's files.

        The directory is replaced atomically. Snapshots and states that no directory of the run names are
        deleted at the service.

        Raises:
            OSError: a file cannot be written.
            TrainingError: the service takes no snapshot.
        """
        if self._sampler is None:
            self._sampler = self._attempt(
                lambda session: (
                    session.save_weights_for_sampler(unique_name("sampler"))
                    .result(self.settings.outage_s)
                    .path
                )
            )
            self._saved.add(self._sampler)
            failpoints.reach("tinker.sampler")
        snapshot = {
            "base_model": self.settings.tinker.base_model,
            "sampler": self._sampler,
            "state": self._state,
        }
        partial = directory.with_name(f".{directory.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name, content in self._files.items():
            (partial / name).parent.mkdir(exist_ok=True)
            (partial / name).write_bytes(content)
        (partial / SNAPSHOT).write_text(json.dumps(snapshot), encoding="utf-8")
        sync_tree(partial)
        shutil.rmtree(directory, ignore_errors=True)
        partial.rename(directory)
        self._delete_unused(directory.parents[1])
        return directory

    def save_adapter(self, directory: Path, *, dtype: str = "float32") -> Path:
        """Write the same: a snapshot is an adapter at the service."""
        return self.save_weights(directory, dtype=dtype)

    def weight_buckets(
        self, max_bytes: int, as_files: str | None = None, *, on_device: bool = False
    ) -> Generator[dict[str, Any], None, None]:
        yield from ()

    def staged(self, directory: Path) -> TinkerPolicy:
        return self

    def save_state(self, path: Path) -> None:
        """Write the path of the state at the service, and the number of steps. Raises OSError."""
        if self._state is None:
            self._attempt(lambda session: None)
        path.write_text(json.dumps({"state": self._state, "steps": self.steps}), encoding="utf-8")

    def load_state_from(self, path: Path) -> None:
        """Go on from a saved state, in a new session. Raises CheckpointError."""
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            self._state, self.steps = str(saved["state"]), int(saved["steps"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} names no state of a Tinker service: {error!r}") from error
        self._session = self._sampler = None
        self._saved |= _named(path.parents[2])

    def load_weights(self, directory: Path) -> None:
        """Take the snapshot that a directory names; the state has the weights. Raises CheckpointError."""
        try:
            self._sampler, _ = read_snapshot(directory)
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{directory} names no snapshot of a Tinker service: {error}") from error

    def _delete_unused(self, run_dir: Path) -> None:
        if self._service is None:
            return  # after a resume: with the next version
        unused = self._saved - _named(run_dir) - {self._sampler or "", self._state or ""}
        for path in unused:
            try:
                self._service.create_rest_client().delete_checkpoint_from_tinker_path(path).result(DELETE_S)
            except Exception as error:  # noqa: BLE001 - no step fails for it
                log.info("the Tinker service did not delete %s: %s: %s", path, type(error).__name__, error)
                # ValueError: the SDK has no call for such a path, as for those of skyrl-tx.
                if status_of(error) not in REFUSED and not isinstance(error, ValueError):
                    return  # the service is away: again with the next version
            self._saved.discard(path)
            failpoints.reach("tinker.deleted")


def datum(tinker: Any, row: TrainingSequence, scale: float) -> Any:
    """Convert a row to the SDK's Datum, whose inputs end before the last trained token."""
    ids, inputs = datum_fields(row, row.inputs, scale)
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(ids),
        loss_fn_inputs={name: tinker.TensorData(**fields) for name, fields in inputs.items()},
    )


def _named(run_dir: Path) -> set[str]:
    """Return the states and snapshots that the directories of a run name."""
    named = set()
    for name in (SNAPSHOT, TRAINER_STATE):
        for path in run_dir.glob(f"*/*/{name}"):
            with contextlib.suppress(ValueError):  # a killed process left an incomplete file
                whole = json.loads(path.read_text(encoding="utf-8"))
                named |= {whole[key] for key in ("sampler", "state") if key in whole}
    return named
