"""The engines' sources have the routes and fields that Tidegate uses."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests import engine_wheels


def test_routes_and_fields_that_are_missing_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = {"/a": ("Body", "one two"), "/b": ("Gone", ""), "/c": ("", ""), "/d": ("", "")}
    monkeypatch.setitem(engine_wheels.USED, "sglang", used)
    with zipfile.ZipFile(tmp_path / "sglang-1-py3-none-any.whl", "w") as archive:
        archive.writestr(
            "sglang/io.py",
            "class Base:\n    one: int\nclass Body(Base):\n    three: int\n    four = 4\n    five: int = 5\n",
        )
        archive.writestr(
            "sglang/http.py", '@app.post("/a")\n@app.api_route("/b", methods=[])\n@app.get(\n    "/c",\n)\n'
        )
    found = engine_wheels.missing(tmp_path / "sglang-1-py3-none-any.whl")
    assert found == ["/d", "/a: two", "/a: three, which is required", "/b: class Gone"]


@pytest.mark.slow
def test_the_pinned_engines_have_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert engine_wheels.main([]) == 0, capsys.readouterr().out
