"""The file of project keys: what it holds, who follows its changes, and how it is refused."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tidegate.cli import main
from tidegate.errors import ConfigError
from tidegate.gateway.project_keys import KeyFile, create_key, read_keys


def test_keys_are_created_listed_and_revoked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.json"
    made = {}
    for name in ("me", "you"):
        assert main(["keys", "create", name, "--file", str(file)]) == 0
        made[name] = capsys.readouterr().out.strip()
    text = file.read_text()
    assert not any(key in text for key in made.values()), "only hashes"
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
    accepted = KeyFile(file)
    assert {accepted.name_of(key) for key in made.values()} == {"me", "you"}
    assert accepted.name_of(made["me"] + "x") is None
    assert main(["keys", "list", "--file", str(file)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["me", "you"]
    assert main(["keys", "revoke", "me", "--file", str(file)]) == 0
    accepted.reload()
    assert (accepted.name_of(made["me"]), accepted.name_of(made["you"])) == (None, "you")
    assert list(tmp_path.iterdir()) == [file], "no partial file is left"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["create", "me"], "has a key 'me' already"),
        (["create", "a b"], "1 to 64 letters, digits, - or _; not 'a b'"),
        (["create", "me.you"], "not 'me.you'"),
        (["revoke", "you"], "has no key 'you'; it has me"),
    ],
)
def test_what_is_wrong_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], why: str
) -> None:
    file = tmp_path / "keys.json"
    create_key(file, "me")
    before = file.read_bytes()
    assert main(["keys", *arguments, "--file", str(file)]) == ConfigError.exit_code
    assert why in capsys.readouterr().err
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "there is no such file; tidegate keys create NAME"),
        ("no JSON", "holds no project keys"),
        ("[]", "holds no"),
        ('{"keys": [{}]}', "holds no"),
    ],
)
def test_a_file_without_keys_is_named(tmp_path: Path, text: str | None, why: str) -> None:
    file = tmp_path / "keys.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=r"keys\.json") as raised:
        KeyFile(file)
    assert why in str(raised.value)


def test_while_the_file_is_damaged_no_key_is_accepted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys.json"
    key = create_key(file, "me")
    accepted, whole = KeyFile(file), file.read_bytes()
    file.write_text("{")
    accepted.reload()
    assert accepted.name_of(key) is None
    assert "no project key is accepted" in caplog.text
    file.write_bytes(whole)
    accepted.reload()
    assert accepted.name_of(key) == "me"
    file.unlink()
    accepted.reload()
    assert accepted.name_of(key) is None
    assert KeyFile(None).name_of(key) is None
    assert list(read_keys(_restored(file, whole))) == ["me"]


def _restored(file: Path, content: bytes) -> Path:
    file.write_bytes(content)
    return file
