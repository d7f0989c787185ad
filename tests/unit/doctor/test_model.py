"""The checks of a model's directory find planted faults."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.tiny_tokenizer import make_model_dir, make_tokenizer
from tests.unit.doctor.common import codes, settings_of
from tidegate.config import Settings
from tidegate.doctor.findings import Finding
from tidegate.doctor.model import check_model
from tidegate.errors import StartError
from tidegate.launch import check
from tidegate.launch import check_model as check_run_model
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


def test_a_model_with_quantized_weights(tmp_path: Path) -> None:
    a_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (found,) = model_findings(tmp_path)
    assert found.code == "model_quantized"
    assert f"the weights of {tmp_path} are quantized (quantization_config in config.json: fp8)" in found.text
    assert "bfloat16" in str(found.fix)


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
    tokens = len(make_tokenizer("qwen2"))
    for rows, found in ((tokens - 1, True), (tokens, False), (tokens + 512, False), (tokens + 2000, True)):
        (a_model(tmp_path) / "config.json").write_text(json.dumps({"vocab_size": rows}))
        assert ("vocabulary" in codes(model_findings(tmp_path))) is found, rows


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            {"generation_config.json": {}, "tokenizer_config.json": {"eos_token": None}},
            "no token ends a reply",
        ),
        ({"config.json": {"vocab_size": 90}}, "its tokenizer has "),
        ({"config.json": {"vocab_size": 90000}}, "its tokenizer has "),
        ({"chat_template.jinja": None}, "no chat template"),
        ({"model.safetensors": None}, "has no weights"),
    ],
)
def test_a_run_refuses_an_unusable_model_before_anything_starts(
    tmp_path: Path, fault: dict[str, dict[str, object] | None], said: str
) -> None:
    model = shutil.copytree(TINY_BASE, tmp_path / "model")
    for name, changes in fault.items():
        if changes is None:
            (model / name).unlink()
        else:
            before = json.loads((model / name).read_text()) if changes else {}
            (model / name).write_text(json.dumps(before | changes))
    if "generation_config.json" in fault:  # nor does the template end a reply
        (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(StartError, match=said):
        check_all(settings_of(model))
    with pytest.raises(StartError, match="tidegate convert"):
        check(settings_of(tmp_path / "model" / "tokenizer.json"))


def check_all(settings: Settings) -> None:
    check(settings)
    check_run_model(settings, engines=True)


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
