"""The bundled base models are small, and equal what their recipes make."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.duo_base import make as duo_base
from examples.search_base import make as search_base
from examples.selfplay_base import make as selfplay_base
from examples.service_base import make as service_base
from examples.shell_base import make as shell_base
from examples.tiny_base import make as tiny_base

RECIPES = [
    pytest.param(tiny_base, id="tiny_base"),
    pytest.param(duo_base, id="duo_base"),
    pytest.param(search_base, id="search_base"),
    pytest.param(selfplay_base, id="selfplay_base"),
    pytest.param(service_base, id="service_base"),
    pytest.param(shell_base, id="shell_base"),
]
STEPS = {
    tiny_base: (60, 4),
    duo_base: (0.08, 2),
    search_base: (0.1, 3),
    selfplay_base: (0.1, 3),
    service_base: (0.1, 3),
    shell_base: (0.1, 2),
}
"""Recipe → its steps, or their scale, for a short training, and the factor by which the loss falls."""
pytestmark = pytest.mark.parametrize("recipe", RECIPES)


def model_of(recipe: ModuleType) -> Path:
    assert recipe.__file__ is not None
    return Path(recipe.__file__).parent / "model"


def skip_without_games(recipe: ModuleType) -> None:
    if recipe is selfplay_base:
        pytest.importorskip("textarena")


def test_it_is_small_enough_for_a_repository(recipe: ModuleType) -> None:
    assert sum(file.stat().st_size for file in model_of(recipe).iterdir()) <= 4_000_000


@pytest.mark.slow
def test_the_recipe_gives_the_committed_tokenizer(recipe: Any, tmp_path: Path) -> None:
    skip_without_games(recipe)
    recipe.make_tokenizer().save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / name).read_text() == (model_of(recipe) / name).read_text(), (
            f"{name}: run make.py again"
        )


def test_it_loads_as_any_other_model(recipe: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_of(recipe))
    model = AutoModelForCausalLM.from_pretrained(model_of(recipe))
    assert model.config.model_type == "qwen3"
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.eos_token == "<|im_end|>"
    assert {one.dtype for one in model.parameters()} == {torch.float32}
    assert model.num_parameters() == recipe.make_model(tokenizer).num_parameters() < 1_000_000


@pytest.mark.slow
def test_some_steps_of_the_recipe_bring_the_loss_down(
    recipe: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without_games(recipe)
    monkeypatch.setattr(recipe, "BATCH", recipe.BATCH // 4)
    steps, factor = STEPS[recipe]
    tokenizer = AutoTokenizer.from_pretrained(model_of(recipe))
    recipe.train(recipe.make_model(tokenizer), tokenizer, steps)
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert losses[-1] < losses[0] / factor
