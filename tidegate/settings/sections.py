"""Settings sections: reads TOML, applies dotted overrides, validates, and writes TOML again.

Errors about unknown keys name the nearest known one.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin
from urllib.parse import urlsplit

import tomli_w
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from tidegate.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)


def _directory_name(name: str) -> str:
    if name in ("", ".", "..") or any(mark in name for mark in "/\\\0"):
        raise ValueError("must be the name of a directory in run.dir; to write elsewhere, set run.dir")
    return name


def _http_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise ValueError(f"not a URL: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("not a URL with scheme and host, such as http://127.0.0.1:30000")
    return url.rstrip("/")


DirectoryName = Annotated[str, AfterValidator(_directory_name)]
HttpUrl = Annotated[str, AfterValidator(_http_url)]


class SettingsSection(BaseModel):
    """A group of settings; unknown keys are an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    of_kind: ClassVar[Mapping[str, str]] = {}
    """Settings that apply to one `kind` of the section. Another kind on the command line leaves them out."""
    renamed: ClassVar[Mapping[str, str]] = {}
    """Former names of settings, as dotted keys, with their present names."""

    def other_than_default(self, *names: str) -> list[str]:
        """Returns those of the settings that differ from their defaults."""
        return [name for name in names if getattr(self, name) != type(self).model_fields[name].default]


def load(model: type[Model], path: Path | None, overrides: Sequence[str] = ()) -> Model:
    """Reads settings from a TOML file and dotted overrides.

    Args:
        model: Class of the settings.
        path: The TOML file; None: defaults only.
        overrides: `--section.key value` or `--section.key=value`. Values of text settings are text; others
            are read as TOML if that is possible, else as text.

    Raises:
        ConfigError: A setting is invalid; the message names the key, the file and the nearest known key.
    """
    raw = _read_toml(path) if path is not None else {}
    for key, value in _pairs(overrides):
        _set(model, raw, key, _value(model, key, value))
    return _check(model, raw, str(path) if path is not None else "the command line")


def overlay(model: Model, overrides: Sequence[str]) -> Model:
    """Returns a copy of settings with dotted overrides; raises ConfigError."""
    raw = model.model_dump()
    for key, value in _pairs(overrides):
        _set(type(model), raw, key, _value(type(model), key, value))
    return _check(type(model), raw, "the command line")


def _check(model: type[Model], raw: dict[str, Any], where: str) -> Model:
    """Validates settings that were read from `where`; raises ConfigError."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        lines = dict.fromkeys(_explain(detail, where, model) for detail in error.errors())
        raise ConfigError("\n".join(lines)) from None


def dump(settings: BaseModel) -> str:
    """Returns settings as TOML, which `load` reads again."""
    return tomli_w.dumps(_without_none(settings.model_dump(mode="json")))


def differences(before: BaseModel, after: BaseModel) -> list[str]:
    """Returns the dotted keys that differ; with their values if they are numbers, which are not secret."""
    old, new = (dict(_flat(settings.model_dump(mode="json"))) for settings in (before, after))
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
    """Returns all settings as (dotted key, default, description).

    The description of a setting that only some kinds of a section have names these kinds.
    """
    keys = []
    for name, field in model.model_fields.items():
        kinds = _sections(field.annotation)
        if len(kinds) == 1:
            keys += known_keys(kinds[0], f"{prefix}{name}.")
        elif kinds:
            keys += _keys_of_kinds(kinds, type(field.default), f"{prefix}{name}.")
        else:
            default = "required" if field.is_required() else _format(field.default)
            keys.append((prefix + name, default, field.description or ""))
    return keys


def _keys_of_kinds(
    kinds: Sequence[type[SettingsSection]], default: type[SettingsSection], prefix: str
) -> list[tuple[str, str, str]]:
    """Returns the settings of a section that is one of several kinds, selected by its `name`."""
    names = [str(kind.model_fields["name"].default) for kind in kinds]
    rows = []
    for setting in dict.fromkeys(field for kind in (default, *kinds) for field in kind.model_fields):
        have = {
            name: kind.model_fields[setting]
            for name, kind in zip(names, kinds, strict=True)
            if setting in kind.model_fields
        }
        text = next(iter(have.values())).description or ""
        defaults = {
            kind: "required" if field.is_required() else _format(field.default)
            for kind, field in have.items()
        }
        if setting == "name":
            own = _format(default.model_fields[setting].default)
            rows.append((prefix + setting, own, f"{text} {', '.join(names)}."))
        elif len(set(defaults.values())) == 1:
            rows.append((prefix + setting, next(iter(defaults.values())), f"{text} For {', '.join(have)}."))
        else:
            applies = ", ".join(f"{kind} {value}" for kind, value in defaults.items())
            rows.append((prefix + setting, "", f"{text} For {applies}."))
    return rows


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits a command line into plain words and overrides (`--section.key value`, `--section.key=value`)."""
    plain, overrides, needs_value = [], [], False
    for word in words:
        if needs_value or word.startswith("--"):
            overrides.append(word)
            needs_value = not needs_value and "=" not in word
        else:
            plain.append(word)
    return plain, overrides


def split_file(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Splits a command line into the settings file, if any, and overrides; raises ConfigError on two
    files."""
    files, overrides = split_words(words)
    if len(files) > 1:
        raise ConfigError(f"expected one settings file, not {' and '.join(files)}")
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


def _set(model: type[BaseModel], raw: dict[str, Any], key: str, value: Any) -> None:
    """Sets one dotted key. A section that becomes another kind keeps only what applies to that kind."""
    *sections, last = key.split(".")
    table = raw
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--{key}: {section} is a value, not a section")
        kinds = _sections(model.model_fields[section].annotation) if section in model.model_fields else ()
        if len(kinds) > 1 and last == "name" and table.get("name") != value:
            table.clear()
        model = kinds[0] if kinds else SettingsSection
    if last == "kind" and issubclass(model, SettingsSection):
        for name in [name for name in table if model.of_kind.get(name, value) != value]:
            del table[name]
    table[last] = value


def _value(model: type[BaseModel], key: str, text: str) -> Any:
    """Converts a command line's text to a value for the setting `key`."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return value if isinstance(value, str) or not _takes_text(model, key.split(".")) else text


def _takes_text(model: Any, path: Sequence[str]) -> bool:
    """Returns whether a setting's type is text, or text or None."""
    for name in path:
        kinds = [kind for kind in _sections(model) if name in kind.model_fields]
        if not kinds:
            return False
        model = kinds[0].model_fields[name].annotation
    parts = get_args(model) if get_origin(model) in (Union, UnionType) else (model,)
    plain = {get_args(part)[0] if get_origin(part) is Annotated else part for part in parts} - {NoneType}
    return plain <= {str, Path}


def _format(default: Any) -> str:
    """Formats a default as TOML; empty for None."""
    if default is None:
        return ""
    return tomli_w.dumps({"a": str(default) if isinstance(default, Path) else default})[4:].strip()


def _without_none(value: Any) -> Any:
    """Removes keys with None, which TOML cannot express; they read back as the default."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value


def _explain(error: Any, where: str, model: type[BaseModel]) -> str:
    key = ".".join(str(part) for part in error["loc"] if not _is_type_tag(part))
    if error["type"] == "extra_forbidden":
        return f"{where}: there is no setting {key!r}{_instead(key, model)}"
    if error["type"] == "missing":
        return f"{where}: the setting {key!r} is required"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] in ("string_type", "path_type"):
        message = "must be text; write it in quotes"
    if not key or (key in model.model_fields and _sections(model.model_fields[key].annotation)):
        return f"{where}: {message}"  # an error of the whole section, which names the keys itself
    if isinstance(error["input"], dict):
        return f"{where}: {key}: {message}"
    return f"{where}: {key} = {error['input']!r}: {message[:1].lower()}{message[1:]}"


def _sections(annotation: Any) -> list[type[SettingsSection]]:
    """Returns the section that an annotation is, or the kinds of section that it may be; none for a value."""
    if get_origin(annotation) is Annotated:
        return _sections(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [kind for part in get_args(annotation) for kind in _sections(part)]
    return [annotation] if isinstance(annotation, type) and issubclass(annotation, SettingsSection) else []


def _is_type_tag(part: str | int) -> bool:
    """Returns whether a part of a location is a union's branch, which pydantic adds."""
    return isinstance(part, str) and (part in ("int", "str", "none") or "[" in part)


def _instead(key: str, model: type[BaseModel]) -> str:
    """Returns the present name of a setting, or the nearest one."""
    if issubclass(model, SettingsSection) and key in model.renamed:
        return f"; it is now {model.renamed[key]!r}"
    known = [*(name for name, _, _ in known_keys(model)), *model.model_fields]
    tail = {name.rpartition(".")[2]: name for name in known}
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    close = close or [tail[name] for name in difflib.get_close_matches(key.rpartition(".")[2], tail, n=1)]
    return f"; did you mean {close[0]!r}?" if close else ""
