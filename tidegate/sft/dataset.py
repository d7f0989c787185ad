"""The training and validation sequences of a fine-tuning, and the batch of each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from tidegate.config import Settings
from tidegate.errors import ConfigError
from tidegate.gateway.rendering.renderer import Renderer, load_tokenizer
from tidegate.sft.chats import read_chats
from tidegate.sft.demonstration import Demonstration
from tidegate.sft.episodes import read_corrections, read_episodes
from tidegate.trainer.batch.rows import TrainingSequence
from tidegate.trainer.checkpoint.checkpoint import committed
from tidegate.trainer.preflight import saved_model_path


@dataclass(frozen=True, slots=True)
class TuningData:
    """Sequences, in the order of the files."""

    training: list[TrainingSequence]
    validation: list[TrainingSequence]
    batch_size: int
    seed: int

    @classmethod
    def load(cls, settings: Settings) -> TuningData:
        """Read the data that `[sft]` names.

        Raises:
            ConfigError: There is none, it cannot be read, or it is of another tokenizer than the model's.
            TidegateError: A run's files are damaged.
        """
        sft, seed = settings.sft, settings.run.seed
        if not sft.episodes and not sft.chats:
            raise ConfigError("there is nothing to train on: set sft.episodes or sft.chats")
        demonstrations = list(_demonstrations(settings))
        training, validation = split(demonstrations, sft.validation, seed)
        if not training:
            what = f"{len(demonstrations)} episodes and chats were selected"
            if sft.episodes and not sft.corrections:
                what += f", with sft.min_reward = {sft.min_reward:g}"
            raise ConfigError(f"no sequence is left to train on: {what}, sft.validation = {sft.validation:g}")
        _check_ids([*training, *validation], settings.model.path)
        return cls(training, validation, sft.batch_size, seed)

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.training) // self.batch_size)

    def batch(self, step: int) -> list[TrainingSequence]:
        """Return the sequences of a step, from 1; every epoch has an order of its own."""
        epoch, place = divmod(step - 1, self.steps_per_epoch)
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.training))
        chosen = order[place * self.batch_size : (place + 1) * self.batch_size]
        return [self.training[index] for index in chosen]

    @property
    def digest(self) -> str:
        """A digest of all ids and masks, by which a resumed fine-tuning recognises its data."""
        digest = blake2b(digest_size=16)
        for rows in (self.training, self.validation):
            digest.update(len(rows).to_bytes(8, "little"))
            for row in rows:
                digest.update(len(row.ids).to_bytes(8, "little") + row.ids.tobytes() + row.mask.tobytes())
        return digest.hexdigest()


def split(
    demonstrations: Sequence[Demonstration], share: float, seed: int
) -> tuple[list[TrainingSequence], list[TrainingSequence]]:
    """Split sequences into those for training and for validation, by task.

    A share of the tasks with a sequence, at least one if the share is above 0, is for validation.
    """
    tasks = sorted({each.task for each in demonstrations if each.rows})
    number = max(1, round(share * len(tasks))) if share else 0
    order = np.random.default_rng([seed, 2**32 - 1]).permutation(len(tasks))
    held = {tasks[index] for index in order[:number]}
    training = [row for each in demonstrations if each.task not in held for row in each.rows]
    validation = [row for each in demonstrations if each.task in held for row in each.rows]
    return training, validation


def _demonstrations(settings: Settings) -> Iterator[Demonstration]:
    sft, model = settings.sft, settings.model.path
    renderer = Renderer.load(model)
    for path in sft.episodes:
        _check_tokenizer(path, model)
        yield from read_corrections(path, renderer) if sft.corrections else read_episodes(path, sft)
    for path in sft.chats:
        yield from read_chats(path, renderer, sft.replies)


def _check_tokenizer(path: Path, model: Path) -> None:
    """Raises ConfigError if a run was sampled with another vocabulary than the model's.

    That of a run is known from its model, or from its checkpoints if the model was moved.
    """
    known = [saved_model_path(path), *committed(path).values()]
    other = next((each for each in known if each and (each / "tokenizer_config.json").is_file()), None)
    if other is not None and load_tokenizer(other).get_vocab() != load_tokenizer(model).get_vocab():
        raise ConfigError(
            f"sft.episodes: {path} was sampled with the tokenizer of {other}, whose token ids mean other "
            f"texts in model.path = {model}; to train on its texts, export them (tidegate export {path} "
            "--sft), and set sft.chats"
        )


def _check_ids(rows: Sequence[TrainingSequence], model: Path) -> None:
    """Raises ConfigError if an id is not of the model's vocabulary."""
    size = len(load_tokenizer(model))
    highest = max(rows, key=lambda row: int(row.ids.max()))
    if int(highest.ids.max()) >= size:
        raise ConfigError(
            f"{highest.session_id} has the token id {int(highest.ids.max())}, and the tokenizer of "
            f"model.path = {model} has {size} tokens: the data is of another model"
        )
