"""Index builds: a killed build resumes, and an existing index stays until the new one is complete."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests import REPO
from tests.rag_corpus import build_quietly, passages, write_jsonl
from tidegate.errors import ConfigError, CorpusError, StartError, StorageError
from tidegate.failpoints import VARIABLE
from tidegate.rag import build as build_module
from tidegate.rag.build import Plan
from tidegate.rag.corpus.corpus import FILES
from tidegate.rag.encoders import HashEncoder
from tidegate.rag.index.manifest import NAME, Manifest
from tidegate.rag.index.searcher import Searcher
from tidegate.service.directory_lock import FILE, DirectoryLock

COUNT, SHARD = 100, 16


def plan_of(directory: Path, **changes: object) -> Plan:
    source = directory / "c.jsonl"
    if not source.exists():
        write_jsonl(source, passages(COUNT))
    given = {"encoder": "hash", "bm25": True, "shard": SHARD} | changes
    return Plan([source], directory / "index", **given)  # type: ignore[arg-type]


def killed_at(place: str, directory: Path, **changes: object) -> None:
    """Run the build, with these changes to its plan, in a process that is killed at a place."""
    code = (
        "import io, sys; from pathlib import Path\n"
        "from tests.unit.rag.test_build import plan_of\n"
        "from tests.rag_corpus import build_quietly\n"
        f"build_quietly(plan_of(Path(sys.argv[1]), **{changes!r}))"
    )
    plan_of(directory)
    root = REPO
    done = subprocess.run(
        [sys.executable, "-c", code, str(directory)],
        env=os.environ | {VARIABLE: place},
        cwd=root,
        timeout=60,
        check=False,
    )
    assert done.returncode == -9


def contents(directory: Path) -> dict[str, str]:
    """Every file's digest, by name."""
    return {file.name: file.blake2b for file in Manifest.read(directory).files}


@pytest.mark.parametrize(
    "place",
    [
        "rag.documents:3",
        pytest.param("rag.offsets:4", marks=pytest.mark.slow),
        "rag.vectors:5",
        pytest.param("rag.bm25", marks=pytest.mark.slow),
        pytest.param("rag.index", marks=pytest.mark.slow),
    ],
)
def test_a_killed_build_resumes_with_the_same_result(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed, calm = tmp_path / "killed", tmp_path / "calm"
    killed.mkdir()
    calm.mkdir()
    killed_at(place, killed)
    with pytest.raises(CorpusError, match="holds no index"):
        Searcher(killed / "index", threads=1)
    encoded = counted(monkeypatch)
    build_quietly(plan_of(killed))
    shards = sum(1 for texts in encoded if len(texts) > 1)
    assert shards == {"rag.vectors:5": 2, "rag.index": 0}.get(place, 7)
    build_quietly(plan_of(calm))
    assert contents(killed / "index") == contents(calm / "index")
    searcher = Searcher(killed / "index", threads=1)
    assert [document.id for document in searcher.corpus] == [f"p{number}" for number in range(COUNT)]
    for mode in searcher.modes:
        assert searcher.search(["Person77"], [1], mode)[0][0].id == "p77"


def test_a_build_killed_while_it_merges_lists_resumes(tmp_path: Path) -> None:
    killed_at("rag.lists", tmp_path, kind="ivf-flat", bm25=False)
    manifest, _ = build_quietly(plan_of(tmp_path, kind="ivf-flat", bm25=False))
    names = {path.name for path in (tmp_path / "index" / manifest.generation).iterdir()}
    assert names == {*FILES, "vectors.faiss", "vectors.lists", "probe.npy"}
    assert Searcher(tmp_path / "index", threads=1).search(["Person77"], [1])[0][0].id == "p77"


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """The texts of each call for passages from now on."""
    calls: list[Sequence[str]] = []

    class Counted(HashEncoder):
        def passages(self, texts):  # type: ignore[no-untyped-def]
            calls.append(texts)
            return super().passages(texts)

    monkeypatch.setattr(build_module, "load_encoder", lambda *_, **__: Counted())
    return calls


def test_what_was_half_written_is_cut_off(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    directory = plan.out / plan.generation(plan.sources)
    directory.mkdir(parents=True)
    (directory / "documents.jsonl").write_bytes(b'{"id":"half')
    (directory / "documents.offsets").write_bytes(b"\0\0\0\0\0\0\0\0\x07\0\0")
    build_quietly(plan)
    assert len(Searcher(plan.out, threads=1)) == COUNT


def test_the_same_build_again_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, said = build_quietly(plan_of(tmp_path))
    assert "index flat: exact" in said
    assert "against exact search: flat, recall@10 1.000" in said
    calls = counted(monkeypatch)
    again, said = build_quietly(plan_of(tmp_path))
    assert again == first
    assert "already built" in said
    assert not calls


def test_a_damaged_index_is_built_again_by_the_same_command(tmp_path: Path) -> None:
    manifest, _ = build_quietly(plan_of(tmp_path))
    (tmp_path / "index" / manifest.generation / "vectors.faiss").write_bytes(b"gone")
    again, said = build_quietly(plan_of(tmp_path))
    assert "vectors.faiss is 4 bytes long" in said
    assert again.files == manifest.files
    assert Searcher(tmp_path / "index", threads=1).search(["Person7"], [1])[0][0].id == "p7"


def test_another_index_is_replaced_only_where_that_is_asked_for(tmp_path: Path) -> None:
    build_quietly(plan_of(tmp_path))
    before = Searcher(tmp_path / "index", threads=1)
    write_jsonl(tmp_path / "c.jsonl", passages(30))
    with pytest.raises(ConfigError, match=r"already holds another index \(100 documents.*--replace"):
        build_quietly(plan_of(tmp_path))
    assert len(Searcher(tmp_path / "index", threads=1)) == 100
    build_quietly(plan_of(tmp_path, replace=True))
    assert len(Searcher(tmp_path / "index", threads=1)) == 30
    # Whoever has the old one open keeps it.
    assert before.search(["Person77"], [1])[0][0].id == "p77"
    assert before.find("p99") is not None
    left = sorted(path.name for path in (tmp_path / "index").iterdir())
    assert left == [FILE, Manifest.read(tmp_path / "index").generation, NAME]


def test_an_encoder_that_was_trained_on_at_its_place_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vectors of both must not come together in one index, nor a finished one be taken for the new one."""
    monkeypatch.setattr(build_module, "load_encoder", lambda *_, **__: HashEncoder())
    weights = tmp_path / "model" / "1_Pooling" / "config.json"
    weights.parent.mkdir(parents=True)
    weights.write_text("one")
    plan = plan_of(tmp_path, encoder=str(tmp_path / "model"), bm25=False)
    first, _ = build_quietly(plan)
    assert "already built" in build_quietly(plan)[1]
    weights.write_text("another")
    with pytest.raises(ConfigError, match="--replace"):
        build_quietly(plan)
    again, _ = build_quietly(plan_of(tmp_path, encoder=str(tmp_path / "model"), bm25=False, replace=True))
    assert again.generation != first.generation


def test_the_directory_holds_the_index_and_nothing_else(tmp_path: Path) -> None:
    manifest, _ = build_quietly(plan_of(tmp_path, bm25=False))
    inside = {path.name for path in (tmp_path / "index" / manifest.generation).iterdir()}
    assert inside == {*FILES, "vectors.faiss", "probe.npy"}
    assert manifest.documents == COUNT
    assert manifest.corpus == manifest.files[0].blake2b
    assert manifest.modes == ("dense",)
    assert "faiss-cpu" in manifest.versions


def test_the_corpus_hash_is_of_the_documents_not_of_their_form(tmp_path: Path) -> None:
    hashes = set()
    for name, rows in (
        ("text", passages(5)),
        ("contents", [{"id": r["id"], "contents": f'"{r["title"]}"\n{r["text"]}'} for r in passages(5)]),
        ("fewer", passages(4)),
    ):
        source = write_jsonl(tmp_path / f"{name}.jsonl", rows)
        hashes.add(build_quietly(Plan([source], tmp_path / name, bm25=True))[0].corpus)
    assert len(hashes) == 2


def test_an_invalid_directory_or_number_of_threads_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--threads 0"):
        build_quietly(plan_of(tmp_path, threads=0))
    (tmp_path / "index").write_text("a file")
    with pytest.raises(StorageError, match=r"--out .*index: cannot create the directory"):
        build_quietly(plan_of(tmp_path))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"recall": 1.5}, r"--recall 1\.5: it must be more than 0 and at most 1"),
        ({"recall": 0.0}, "--recall 0: it must be more than 0"),
        ({"encoder": None, "recall": 0.9}, "--index and --recall apply to vectors: give --encoder"),
        ({"encoder": None, "kind": "sq8"}, "--index and --recall apply to vectors: give --encoder"),
    ],
)
def test_settings_that_do_not_apply_are_refused(tmp_path: Path, changes: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        plan_of(tmp_path, **changes)


def test_another_target_of_recall_is_another_index(tmp_path: Path) -> None:
    names = {plan_of(tmp_path, recall=recall).generation([]) for recall in (None, 0.9, 0.99)}
    assert len(names) == 3


def test_a_disk_that_is_full_ends_the_build_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(build_module, "ingest", fail)
    with pytest.raises(
        StorageError, match=r"No space left on device; make room or make it writable, .* resumes the build"
    ):
        build_quietly(plan_of(tmp_path))


def test_two_builds_of_one_directory_exclude_each_other(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    with (
        DirectoryLock(plan.out, "tidegate rag build"),
        pytest.raises(StartError, match=f"in use by tidegate rag build .process {os.getpid()} on"),
    ):
        build_quietly(plan)
    build_quietly(plan)


def test_an_encoder_that_gives_no_numbers_is_refused_by_the_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(HashEncoder):
        def passages(self, texts):  # type: ignore[no-untyped-def]
            vectors = super().passages(texts)
            vectors[["Person40" in text for text in texts]] = np.nan
            return vectors

    monkeypatch.setattr(build_module, "load_encoder", lambda *_, **__: Broken())
    with pytest.raises(
        CorpusError, match=r"returned no finite vector for 1 documents, the first of them 'p40'"
    ):
        build_quietly(plan_of(tmp_path))


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tidegate.cli import main

    source = write_jsonl(tmp_path / "c.jsonl", passages(20))
    out = tmp_path / "index"
    build = ["rag", "build", str(source), "--out", str(out), "--encoder", "hash", "--bm25", "--threads", "1"]
    assert main(build) == 0
    assert capsys.readouterr().out == f"{out}: 20 documents, dense, bm25, hybrid\n"
    assert main(["rag", "verify", str(out)]) == 0
    assert "is intact: 10 files, 20 documents" in capsys.readouterr().out
    assert main(["rag", "build", str(tmp_path / "no.jsonl"), "--out", str(out), "--bm25"]) == 2
    assert "no such file" in capsys.readouterr().err


def test_a_device_that_is_not_there_is_named_before_the_corpus_is_read(tmp_path: Path) -> None:
    plan = Plan(sources=[tmp_path / "none.jsonl"], out=tmp_path / "index", encoder="hash", device="cuda:7")
    with pytest.raises(StartError, match=r"--device = 'cuda:7': .*; this machine has cpu"):
        build_quietly(plan)
    assert not (tmp_path / "index").exists()
