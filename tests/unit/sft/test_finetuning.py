"""The steps of a fine-tuning, its directory, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.unit.trainer.learning_fixtures import VOCABULARY, make_model
from tidegate.cli import main
from tidegate.config import Settings, TrainerSettings, load_settings
from tidegate.errors import ConfigError, TrainingError
from tidegate.observer import Silent
from tidegate.settings.losses import NLLLoss
from tidegate.sft.demonstration import demonstration
from tidegate.sft.finetuning import FineTuning, model_of, trainer_settings
from tidegate.trainer.batch.rows import TrainingSequence
from tidegate.trainer.policy.optimizer import learning_rate
from tidegate.trainer.policy.policy import Policy
from tidegate.trainer.records.metrics import MetricsLog, read_metrics

RATE = 1e-2


def rows(number: int, seed: int = 0) -> list[TrainingSequence]:
    """Random sequences, some of which begin alike, so that prefixes are shared."""
    rng = np.random.default_rng(seed)
    beginning = rng.integers(0, VOCABULARY, 40)
    made = []
    for index in range(number):
        ids = rng.integers(0, VOCABULARY, int(rng.integers(45, 70))).astype(np.int32)
        if index % 2:
            ids[:40] = beginning
        mask = rng.random(len(ids)) < 0.5
        mask[:41] = False
        mask[-1] = True
        made += demonstration("t", f"row {index}", [(ids, mask)]).rows
    return made


def likelihood(model: Any, batch: list[TrainingSequence]) -> torch.Tensor:
    """The mean negative log likelihood, by transformers' own loss."""
    longest = max(len(row.ids) for row in batch)
    ids_bt = torch.zeros(len(batch), longest, dtype=torch.int64)
    labels_bt = torch.full((len(batch), longest), -100)
    for at, row in enumerate(batch):
        ids = torch.tensor(row.ids, dtype=torch.int64)
        ids_bt[at, : len(ids)] = ids
        labels_bt[at, : len(ids)] = torch.where(torch.tensor(row.mask), ids, -100)
    loss: torch.Tensor = model(input_ids=ids_bt, labels=labels_bt).loss
    return loss


@pytest.mark.parametrize(("microbatch_tokens", "beta1"), [(64, 0.9), (8192, 0.5)])
def test_a_step_is_one_of_adamw_on_the_mean_likelihood_of_the_tokens(
    tmp_path: Path, microbatch_tokens: int, beta1: float
) -> None:
    base, batch = make_model(tmp_path / "base"), rows(9)
    settings = TrainerSettings(learning_rate=RATE, microbatch_tokens=microbatch_tokens, beta1=beta1)
    policy = Policy.load(base, settings.model_copy(update={"loss": NLLLoss()}))
    model = AutoModelForCausalLM.from_pretrained(base).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(beta1, 0.999), weight_decay=0.0)
    for step in range(2):
        expected = likelihood(model, batch)
        assert policy.validation_loss(batch) == pytest.approx(expected.item(), rel=1e-5)
        metrics = policy.update(batch, 0)
        assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-5), step
        optimizer.zero_grad()
        expected.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
    other = dict(model.named_parameters())
    for name, value in policy.weights().items():
        torch.testing.assert_close(value, other[name].detach(), atol=2e-4, rtol=1e-3)


def test_a_cosine_falls_to_a_tenth_at_the_last_step() -> None:
    settings = TrainerSettings(steps=11, learning_rate=1.0, schedule="cosine", warmup_steps=1)
    rates = [learning_rate(settings, done) for done in range(13)]
    assert rates[0] == pytest.approx(0.5)
    for done in range(1, 11):
        assert rates[done] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * done / 10)) / 2)
    assert rates[10] == rates[11] == rates[12] == pytest.approx(0.1)


def chats(path: Path, number: int = 12) -> Path:
    """A file of chats in the words of `make_model`."""
    rng = np.random.default_rng(5)
    lines = []
    for _ in range(number):
        said = [" ".join(f"w{word}" for word in rng.integers(1, VOCABULARY - 1, 6)) for _ in range(2)]
        messages = [{"role": "user", "content": said[0]}, {"role": "assistant", "content": said[1]}]
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A model whose template ends each message with the token w47."""
    path = make_model(tmp_path / "base")
    template = "{% for message in messages %} {{ message.content }} w47{% endfor %}"
    (path / "chat_template.jinja").write_text(template)
    config = json.loads((path / "tokenizer_config.json").read_text()) | {"eos_token": "w47"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def settings_of(base: Path, *overrides: str) -> Settings:
    place = [
        f"--model.path={base}",
        f"--run.dir={base.parent}",
        f"--sft.chats={chats(base.parent / 'c.jsonl')}",
    ]
    return load_settings(
        None, [*place, "--sft.batch_size=4", "--sft.learning_rate=1e-2", "--eval.every=2", *overrides]
    )


def tune(settings: Settings, **how: Any) -> FineTuning:
    tuning = FineTuning(settings, Silent(), **how)
    tuning.prepare()
    assert asyncio.run(tuning.run())
    return tuning


def test_losses_fall_and_the_result_is_a_model(base: Path) -> None:
    settings = settings_of(base, "--sft.epochs=12", "--sft.validation=0.1", "--sft.schedule=constant")
    tuning = tune(settings)
    lines = read_metrics(tuning.dir)
    assert [line["step"] for line in lines] == list(range(37))
    assert lines[-1]["loss"] < lines[1]["loss"] / 2
    assert [line["step"] for line in lines if "validation/loss" in line] == list(range(0, 37, 2))
    assert lines[-1]["sft/epoch"] == 12.0
    assert FineTuning(settings, Silent(), resume=True).is_complete
    model = Policy.load(model_of(settings), trainer_settings(settings, 36))
    assert model.validation_loss(tuning.dataset.training) < 0.7 * lines[1]["loss"]
    with pytest.raises(ConfigError, match=r"holds a fine-tuning already: continue it \(--resume\)"):
        FineTuning(settings, Silent())
    assert FineTuning(settings, Silent(), fresh=True).step == 0


def test_a_stopped_fine_tuning_goes_on_to_the_same_weights(base: Path) -> None:
    whole = tune(settings_of(base, "--run.name=whole"))
    settings = settings_of(base, "--run.name=parts")

    class StopsAt(Silent):
        def step(self, metrics: Any) -> None:
            if metrics["step"] == 2:
                tuning.stop.set()

    tuning = FineTuning(settings, StopsAt())
    tuning.prepare()
    assert not asyncio.run(tuning.run())
    assert not (tuning.dir / "model").exists()
    with MetricsLog(tuning.dir) as log:
        log.append({"step": 3, "version": 0})  # as if it had been killed before the next checkpoint
    assert tune(settings, resume=True).step == 2
    losses = [[line.get("loss") for line in read_metrics(each.dir)] for each in (whole, tuning)]
    assert losses[0] == losses[1]
    result = "model/model.safetensors"
    assert (whole.dir / result).read_bytes() == (tuning.dir / result).read_bytes()


def test_more_steps_replace_the_result_and_fewer_are_refused(base: Path) -> None:
    tuning = tune(settings_of(base))
    more = settings_of(base, "--sft.epochs=2")
    longer = FineTuning(more, Silent(), resume=True)
    assert not longer.is_complete
    longer.prepare()
    assert not (tuning.dir / "model").exists()
    assert asyncio.run(longer.run())
    assert [line["step"] for line in read_metrics(tuning.dir)] == list(range(7))
    with pytest.raises(ConfigError, match=r"has taken 6 steps already, more than the 2 that are set"):
        FineTuning(settings_of(base, "--sft.steps=2"), Silent(), resume=True)


def test_other_data_another_model_and_a_foreign_directory_are_refused(base: Path) -> None:
    tuning = tune(settings_of(base))
    with pytest.raises(ConfigError, match="or its selection, differs from that of"):
        FineTuning(settings_of(base, "--sft.validation=0.5"), Silent(), resume=True)
    with pytest.raises(ConfigError, match=r"but the run in .* began with"):
        FineTuning(settings_of(base, f"--model.path={model_of(tuning.settings)}"), Silent(), resume=True)
    with pytest.raises(ConfigError, match="holds no fine-tuning to resume"):
        FineTuning(settings_of(base, "--run.name=new"), Silent(), resume=True)
    (tuning.dir / "ledger.jsonl").touch()
    with pytest.raises(ConfigError, match="holds a run of tidegate train"):
        FineTuning(tuning.settings, Silent(), resume=True)


def test_a_step_that_is_not_finite_names_its_data(base: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    model.base_model.norm.weight.data.fill_(float("nan"))
    model.save_pretrained(base)
    tuning = FineTuning(settings_of(base), Silent())
    tuning.prepare()
    with pytest.raises(TrainingError, match=r"step 1 has no finite loss .*c\.jsonl, line \d+.*lower sft"):
        asyncio.run(tuning.run())


def test_settings_of_rewards_do_not_change_the_steps(base: Path) -> None:
    changed = [
        "--trainer.loss.name=decoupled_ppo", "--trainer.minibatches=2", "--trainer.steps=3",
        "--trainer.learning_rate=7", "--run.name=changed",
    ]  # fmt: skip
    result = "model/model.safetensors"
    plain, other = tune(settings_of(base)), tune(settings_of(base, *changed))
    assert (plain.dir / result).read_bytes() == (other.dir / result).read_bytes()


def test_a_run_that_exists_is_refused_before_the_fine_tuning(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "sft", f"--model.path={base}", f"--run.dir={base.parent}", "--run.name=mine",
        f"--sft.chats={chats(base.parent / 'c.jsonl')}",
    ]  # fmt: skip
    for name, file, more in (("mine", "ledger.jsonl", ["--then", "train"]), ("mine-sft", "config.toml", [])):
        (base.parent / name).mkdir()
        (base.parent / name / file).touch()
        assert main([*command, *more]) == 2
        assert f"{name} holds a " in capsys.readouterr().err
    assert not (base.parent / "mine-sft" / "metrics.jsonl").exists()
    assert main(["sft"]) == 2
    assert "name a file, for example tidegate sft" in capsys.readouterr().err
