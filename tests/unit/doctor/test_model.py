"""The checks of a model's directory find planted faults."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.tiny_tokenizer import make_model_dir
from tests.unit.doctor.common import codes, settings_of
from tidegate.doctor.findings import Finding
from tidegate.doctor.model import check_model
from tidegate.scaffold.init import TINY_BASE


def model_findings(model: Path) -> list[Finding]:
    return check_model(settings_of(model))[0]


def a_model(folder: Path, template: str = "qwen2") -> Path:
    make_model_dir(folder, template)
    (folder / "model.safetensors").touch()  # looked for, not into
    return folder


def test_a_complete_model_has_no_finding() -> None:
    found, renderer = check_model(settings_of())
    assert codes(found) == []
    assert renderer is not None


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    assert codes(model_findings(tmp_path / "nowhere")) == ["no_model"]


@pytest.mark.parametrize("missing", ["config.json", "tokenizer_config.json", "model.safetensors"])
def test_a_directory_that_is_incomplete(tmp_path: Path, missing: str) -> None:
    (a_model(tmp_path) / missing).unlink()
    (found,) = model_findings(tmp_path)
    assert found.code == "model_incomplete"


def test_a_model_without_a_chat_template(tmp_path: Path) -> None:
    model = shutil.copytree(TINY_BASE, tmp_path / "model")
    (model / "chat_template.jinja").unlink()
    (found,) = model_findings(model)
    assert found.code == "no_chat_template"
    assert "has no chat template" in found.text


def test_a_tokenizer_that_is_broken(tmp_path: Path) -> None:
    model = shutil.copytree(TINY_BASE, tmp_path / "model")
    (model / "tokenizer.json").write_text("{}")
    assert codes(model_findings(model)) == ["tokenizer_unreadable"]


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    (a_model(tmp_path) / "config.json").write_text(json.dumps({"vocab_size": 3}))
    assert "vocabulary" in codes(model_findings(tmp_path))


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("qwen2", ["template_rewrites"]),
        ("qwen3", ["template_rewrites"]),
        ("shouting", ["template_branches", "template_without_tools"]),
        ("mistral", ["template_rewrites", "template_refuses", "template_without_tools"]),
        ("counting", ["template_without_tools"]),
    ],
)
def test_what_a_template_does_to_a_history(tmp_path: Path, template: str, expected: list[str]) -> None:
    assert codes(model_findings(a_model(tmp_path, template))) == expected


def test_exact_and_inexact_parts_are_named_with_the_reason(tmp_path: Path) -> None:
    told = {
        one.code: one.text for one in model_findings(a_model(tmp_path, "qwen3")) if one.check == "template"
    }
    assert "a tool's result; results of parallel calls" in told["ok"]
    assert "after reasoning (the template renders the past reply differently" in told["template_rewrites"]
