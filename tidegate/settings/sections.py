"""Sections of settings: read from TOML, dotted overrides laid over them, checked, and written again.

Unknown keys are refused by name, with the nearest known one.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin
from urllib.parse import urlsplit

import tomli_w
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from tidegate.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)


def _directory_name(name: str) -> str:
    if name in ("", ".", "..") or any(mark in name for mark in "/\\\0"):
        raise ValueError("it names one directory in run.dir; to write elsewhere, set run.dir")
    return name


def _http_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise ValueError(f"this is no URL: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("this is no URL; write scheme and host, such as http://127.0.0.1:30000")
    return url.rstrip("/")


DirectoryName = Annotated[str, AfterValidator(_directory_name)]
HttpUrl = Annotated[str, AfterValidator(_http_url)]


class SettingsSection(BaseModel):
    """A group of settings; unknown keys are an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def load(model: type[Model], path: Path | None, overrides: Sequence[str] = ()) -> Model:
    """Read a TOML file, lay dotted overrides over it, and check everything.

    `overrides` are `--section.key value` or `--section.key=value`; values are read as TOML where they
    can be and as text otherwise; that of a setting which is text is text, whatever else it could be.

    Raises ConfigError, which names the key, the file and the nearest known key.
    """
    raw = _read_toml(path) if path is not None else {}
    for key, value in _pairs(overrides):
        _lay(raw, key, _value(model, key, value))
    return _check(model, raw, str(path) if path is not None else "the command line")


def overlay(model: Model, overrides: Sequence[str]) -> Model:
    """A copy of settings with dotted overrides laid over them; raises ConfigError."""
    raw = model.model_dump()
    for key, value in _pairs(overrides):
        _lay(raw, key, _value(type(model), key, value))
    return _check(type(model), raw, "the command line")


def _check(model: type[Model], raw: dict[str, Any], where: str) -> Model:
    """Check settings that were read already, at `where`; raises ConfigError."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        lines = dict.fromkeys(_explain(one, where, model) for one in error.errors())
        raise ConfigError("\n".join(lines)) from None


def dump(settings: BaseModel) -> str:
    """Settings as TOML, loadable again."""
    return tomli_w.dumps(_without_none(settings.model_dump(mode="json")))


def differences(before: BaseModel, after: BaseModel) -> list[str]:
    """What differs, by dotted key; with the values where they are numbers, as no secret is one."""
    old, new = (dict(_flat(one.model_dump(mode="json"))) for one in (before, after))
    return [
        f"{key} {old[key]} → {new[key]}" if _is_number(old.get(key)) and _is_number(new.get(key)) else key
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def known_keys(model: type[BaseModel], prefix: str = "") -> list[tuple[str, str, str]]:
    """Every setting as (dotted key, default, description)."""
    found = []
    for name, field in model.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, SettingsSection):
            found += known_keys(section, f"{prefix}{name}.")
        else:
            default = "required" if field.is_required() else _shown(field.default)
            found.append((prefix + name, default, field.description or ""))
    return found


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Plain words of a command line, and settings: `--section.key value` or `--section.key=value`."""
    plain, overrides, waiting = [], [], False
    for word in words:
        if waiting or word.startswith("--"):
            overrides.append(word)
            waiting = not waiting and "=" not in word
        else:
            plain.append(word)
    return plain, overrides


def split_file(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The settings file that a command line names, if it does, and settings. Raises ConfigError on two."""
    files, overrides = split_words(words)
    if len(files) > 1:
        raise ConfigError(f"one settings file is read, not {' and '.join(files)}")
    return Path(files[0]) if files else None, overrides


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such settings file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a directory; name the settings file in it") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def _pairs(overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    rest = list(overrides)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or len(word) == 2:
            raise ConfigError(f"{word!r} is not a setting; settings are given as --section.key value")
        key, equals, value = word[2:].partition("=")
        if not equals:
            if not rest:
                raise ConfigError(f"--{key} needs a value")
            value = rest.pop(0)
        yield key, value


def _lay(raw: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    table = raw
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--{key}: {section} is a value, not a section")
    table[last] = value


def _value(model: type[BaseModel], key: str, text: str) -> Any:
    """The value that a command line's text is, for the setting `key`."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return value if isinstance(value, str) or not _takes_text(model, key.split(".")) else text


def _takes_text(model: Any, path: Sequence[str]) -> bool:
    """Whether a setting is a text, or nothing."""
    for name in path:
        if not _is_section(model) or name not in model.model_fields:
            return False
        model = model.model_fields[name].annotation
    kinds = get_args(model) if get_origin(model) in (Union, UnionType) else (model,)
    plain = {get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in kinds} - {NoneType}
    return plain <= {str, Path}


def _shown(default: Any) -> str:
    """A default as one would write it in TOML; nothing where there is none."""
    if default is None:
        return ""
    return tomli_w.dumps({"a": str(default) if isinstance(default, Path) else default})[4:].strip()


def _without_none(value: Any) -> Any:
    """TOML has no null: what is None is left out, which reads back as the default."""
    if isinstance(value, dict):
        return {key: _without_none(one) for key, one in value.items() if one is not None}
    return value


def _explain(error: Any, where: str, model: type[BaseModel]) -> str:
    key = ".".join(str(part) for part in error["loc"] if not _is_type_tag(part))
    if error["type"] == "extra_forbidden":
        return f"{where}: there is no setting {key!r}{_nearest(key, model)}"
    if error["type"] == "missing":
        return f"{where}: the setting {key!r} is required"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] in ("string_type", "path_type"):
        message = "it is a text; write it in quotes"
    if not key or (key in model.model_fields and _is_section(model.model_fields[key].annotation)):
        return f"{where}: {message}"  # of the whole section: it names the keys itself
    return f"{where}: {key} = {error['input']!r}: {message[:1].lower()}{message[1:]}"


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, SettingsSection)


def _is_type_tag(part: str | int) -> bool:
    """Pydantic adds the tried branch of a union to the location; it means nothing to a reader."""
    return isinstance(part, str) and (part in ("int", "str", "none") or "[" in part)


def _nearest(key: str, model: type[BaseModel]) -> str:
    known = [*(name for name, _, _ in known_keys(model)), *model.model_fields]
    tail = {name.rpartition(".")[2]: name for name in known}
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    close = close or [tail[one] for one in difflib.get_close_matches(key.rpartition(".")[2], tail, n=1)]
    return f"; did you mean {close[0]!r}?" if close else ""
