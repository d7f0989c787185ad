"""Shared code of the examples' launch scripts, and the preparation of deep research's data."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import REPO
from tidegate.envs.search.search_qa import SearchQA

EXAMPLES = REPO / "examples"
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def bash(script: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-euc", f"source {EXAMPLES}/services.sh\n{script}"],
        cwd=cwd, capture_output=True, text=True, timeout=60, env={**os.environ, "PATH": PATH},
    )  # fmt: skip


def test_a_started_server_is_waited_for_and_ends_with_the_script(tmp_path: Path) -> None:
    (tmp_path / "serve.py").write_text(
        "import http.server, os, sys\n"
        "server = http.server.HTTPServer(('127.0.0.1', 0), http.server.SimpleHTTPRequestHandler)\n"
        "open('part', 'w').write(f'http://127.0.0.1:{server.server_port}/ {os.getpid()}\\n')\n"
        "os.replace('part', 'address')\n"
        "server.serve_forever()\n"
    )
    # The address is known only when it serves, so the script reads it anew.
    done = bash(
        "start one file://$PWD/address python serve.py\n"
        "read -r url pid <address\n"
        'python -c "import sys, urllib.request as r; print(r.urlopen(sys.argv[1]).status)" "$url"',
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["one: starting (log: runs/logs/one.log)", "200"]
    pid = int((tmp_path / "address").read_text().split()[1])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_server_that_does_not_start_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    done = bash("start rag http://127.0.0.1:9/ sh -c 'echo no such index; exit 1'\necho on", tmp_path)
    assert done.returncode == 3
    assert done.stderr == "rag did not start; the end of its log:\nno such index\n"
    assert "on" not in done.stdout.splitlines()


def test_lists_are_written_as_settings_have_them(tmp_path: Path) -> None:
    assert bash("as_list a; echo; as_list a b c", tmp_path).stdout == '["a"]\n["a", "b", "c"]'


@pytest.mark.parametrize("example", ["search", "deepresearch"])
def test_launch_scripts_say_how_they_are_used(tmp_path: Path, example: str) -> None:
    script = EXAMPLES / example / "launch.sh"
    done = subprocess.run([str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "usage: launch.sh DATA INDEX" in done.stderr


def test_browsecomp_plus_is_prepared_without_being_deciphered(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    from tests.unit.envs.test_search_qa import CANARY, enciphered

    rows = [
        {
            "query_id": str(n),
            "query": enciphered(f"Question {n}?"),
            "answer": enciphered(f"answer {n}"),
            "gold_docs": [{"docid": enciphered(f"d{n}"), "text": enciphered("long")}],
            "negative_docs": [{"docid": "x"}],
        }
        for n in range(40)
    ]
    texts = ["---\nurl: u\ntitle: A title\ndate: x\n---\nBody.", "No front matter.\ntitle: none"]
    documents = [{"docid": f"d{n}", "text": text, "url": "u"} for n, text in enumerate(texts)]
    for name, table in (("questions", rows), ("corpus", documents)):
        (tmp_path / name).mkdir()
        parquet.write_table(pa.Table.from_pylist(table), tmp_path / name / "test-0.parquet")
    command = [sys.executable, str(EXAMPLES / "deepresearch/prepare.py"), "questions", "corpus", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.endswith("corpus: 2\n")
    corpus = [json.loads(line) for line in (tmp_path / "out/corpus.jsonl").read_text().splitlines()]
    assert [one["title"] for one in corpus] == ["A title", ""]
    assert corpus[0] == {"id": "d0", "title": "A title", "text": texts[0]}
    written = (tmp_path / "out/train.jsonl").read_text() + (tmp_path / "out/test.jsonl").read_text()
    assert "Question" not in written
    assert base64.b64encode(b"long").decode() not in written
    paths = {"path": str(tmp_path / "out/train.jsonl"), "eval_path": str(tmp_path / "out/test.jsonl")}
    environment = SearchQA(**paths, canary=CANARY)
    tasks = [*environment.eval_sets()[""], *map(environment.train_task, range(environment.train_size() or 0))]
    assert sorted(int(task.answer[0].split()[1]) for task in tasks) == list(range(40))
    assert 2 <= len(environment.eval_sets()[""]) <= 14
    assert all(list(task.info["gold"]) == [f"d{task.answer[0].split()[1]}"] for task in tasks)
