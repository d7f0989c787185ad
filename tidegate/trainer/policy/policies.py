"""Several trained policies as one: each gets its rows, and all step, are saved and restored together."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tidegate.config import Settings
from tidegate.errors import TrainingError
from tidegate.trainer.batch.rows import TrainingSequence
from tidegate.trainer.policy.policy import Policy
from tidegate.trainer.publish.layout import published, shares_engines


class Policies:
    """The trained policies of a run, a `TrainedPolicy`. Methods block: call them in a thread.

    A step is taken by all policies that have a row in the batch, or by none. A policy without a row keeps its
    weights.

    Args:
        settings: Settings of the run.
        trained: Trained policies by name.

    Attributes:
        non_finite: ids of the groups whose loss or gradient was not finite for a policy in the last batch.
        untrained: ids of the groups of the last batch on which no optimiser step was taken.
    """

    def __init__(self, settings: Settings, trained: Mapping[str, Policy]) -> None:
        self.settings = settings
        self.trained = dict(trained)
        self.non_finite: list[str] = []
        self.untrained: list[str] = []

    def backward(self, rows: Sequence[TrainingSequence], version: int) -> None:
        """Compute the gradients of each policy's rows. Raises TrainingError for a row of another policy."""
        by_policy: dict[str, list[TrainingSequence]] = {name: [] for name in self.trained}
        for row in rows:
            if row.policy not in by_policy:
                raise TrainingError(
                    f"session {row.session_id} has tokens of the policy {row.policy!r}, and the run trains "
                    f"{', '.join(by_policy)}; a replay needs the run's own policies"
                )
            by_policy[row.policy].append(row)
        for name, own in by_policy.items():
            self.trained[name].backward(own, version)

    def update(self, rows: Sequence[TrainingSequence], version: int) -> dict[str, float]:
        """Train on a batch in one step of each policy; see `Policy.update`."""
        self.backward(rows, version)
        return self.optimizer_step()

    def optimizer_step(self) -> dict[str, float]:
        """Take a step of every policy with rows if the losses and gradients of all are finite.

        Returns:
            The metrics of each policy as `policy/<name>/<metric>`, and of all: sums of tokens and times,
            means of the others.
        """
        stepping = {name: policy for name, policy in self.trained.items() if policy.has_batch}
        if not stepping:
            raise TrainingError("a batch has no trainable token")
        # All before any is taken: a step of one policy alone could not be taken back.
        finite = {name: policy.prepare_step() for name, policy in stepping.items()}
        skip = not all(finite.values())
        results = {name: policy.optimizer_step(skip=skip) for name, policy in stepping.items()}
        self.non_finite = sorted(
            {group for name, policy in stepping.items() if not finite[name] for group in policy.non_finite}
        )
        self.untrained = sorted({group for policy in stepping.values() for group in policy.untrained})
        merged = {
            key: sum(result[key] for result in results.values())
            / (1 if key.startswith(("tokens/", "time/")) else len(results))
            for key in next(iter(results.values()))
            if all(key in result for result in results.values())
        }
        own = {
            f"policy/{name}/{key}": value for name, result in results.items() for key, value in result.items()
        }
        return merged | own

    def save_adapter(self, directory: Path, *, dtype: str = "") -> Path:
        """Write what the engines of every policy load as one version, whose directory appears as a whole.

        `dtype` is not used: each policy has that of its engines. Raises OSError.
        """
        # An engine must not find a version that has the weights of some policies only.
        part = directory.with_name(f".{directory.name}.partial")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        for name, policy in self.trained.items():
            of_policy = self.settings.of_policy(name)
            adapter = of_policy.trainer.lora.publish == "adapter"
            save = policy.save_adapter if adapter else policy.save_weights
            place = published(self.settings, part, name)
            place.parent.mkdir(exist_ok=True)
            save(place, dtype=of_policy.engine.weights_dtype)
        # Links: no file of a version is changed, and that version is removed later.
        for name, own in self.settings.policies.items():
            if own.earlier is None:
                continue
            earlier = self._earlier(directory, name)
            if earlier is None and shares_engines(self.settings, name):  # they refuse a name without adapter
                earlier = published(self.settings, part, own.earlier)
            if earlier is not None:
                shutil.copytree(earlier, published(self.settings, part, name), copy_function=os.link)
        shutil.rmtree(directory, ignore_errors=True)
        part.replace(directory)
        return directory

    def _earlier(self, directory: Path, name: str) -> Path | None:
        """Return the weights of the earlier self `name` in the version of a directory; None: its base model.

        They are those of its policy `behind` versions ago. While there is no such version on disk, as after a
        resume, they stay what they were.
        """
        own, number = self.settings.policies[name], int(directory.name[1:])
        assert own.earlier is not None
        versions = {int(path.name[1:]): path for path in directory.parent.glob("v*")}
        newest_first = sorted((version for version in versions if version < number), reverse=True)
        before = [
            published(self.settings, versions[version], own.earlier)
            for version in newest_first
            if version <= number - own.behind
        ]
        stayed = [published(self.settings, versions[version], name) for version in newest_first]
        return next((path for path in (before or stayed) if path.is_dir()), None)

    def save_weights(self, directory: Path, *, dtype: str = "float32") -> Path:
        """Write the model of each trained policy in Hugging Face format, for checkpoints. Raises OSError."""
        for name, policy in self.trained.items():
            policy.save_weights(directory / name, dtype=dtype)
        return directory

    def weight_buckets(
        self, max_bytes: int, as_files: str | None = None, *, on_device: bool = False
    ) -> Generator[dict[str, Any], None, None]:
        """Yield nothing: versions of several policies are published as files."""
        yield from ()

    def staged(self, directory: Path) -> Policies:
        """Return this object: nothing else changes the policies before they are written."""
        return self

    def save_state(self, path: Path) -> None:
        """Write the state of each policy beside its weights; raises OSError."""
        for name, policy in self.trained.items():
            policy.save_state(path.with_name(name) / path.name)

    def load_state_from(self, path: Path) -> None:
        """Restore the states that `save_state` wrote; raises CheckpointError."""
        for name, policy in self.trained.items():
            policy.load_state_from(path.with_name(name) / path.name)

    def load_weights(self, directory: Path) -> None:
        """Restore the weights that `save_weights` wrote. Raises CheckpointError."""
        for name, policy in self.trained.items():
            policy.load_weights(directory / name)


def load_policies(settings: Settings, weights: Path) -> Policies:
    """Load the trained policies from a checkpoint's directory or their base models; raises StartError."""
    trained = {}
    for name in settings.trained_policies:
        of_policy = settings.of_policy(name)
        # An adapter cannot be separated from merged weights: its base is the run's original model.
        own = weights / name
        base = own if own.is_dir() and not of_policy.trainer.lora.rank else of_policy.model.path.absolute()
        trained[name] = Policy.load(base, of_policy.trainer, settings.run.seed)
    return Policies(settings, trained)
