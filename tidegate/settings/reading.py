"""Reads settings: from TOML, with dotted overrides of the command line, validated.

Errors about unknown keys name the nearest known one.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from tidegate.errors import ConfigError
from tidegate.settings.sections import (
    MOST,
    SettingsSection,
    flat,
    is_number,
    known_keys,
    named_section,
    sections_of,
    too_large,
    value_as_toml,
)

Model = TypeVar("Model", bound=BaseModel)
STARTED = "started in "
"""Text before the directory of the start, in the first line of a run's `config.toml`."""


def load(
    model: type[Model], path: Path | None, overrides: Sequence[str] = (), only: Sequence[str] = ()
) -> Model:
    """Reads settings from a TOML file and dotted overrides.

    Args:
        model: Class of the settings.
        path: The TOML file; None: defaults only.
        overrides: `--section.key value` or `--section.key=value`. Values of text settings are text; a list is
            TOML, or one of its elements, and may be repeated; others are read as TOML if that is possible,
            else as text.
        only: Path of the section of the file that is read, as ("env", "judge"); by default all of them.

    Raises:
        ConfigError: A setting is invalid; the message names the key, the file and the nearest known key.
    """
    raw = _read_toml(path) if path is not None else {}
    return _load(model, _part(raw, only) if only else raw, overrides, path)


def overlay(model: Model, overrides: Sequence[str]) -> Model:
    """Returns a copy of settings with dotted overrides; raises ConfigError."""
    # A default may be one that no one may set, such as infinity.
    return _load(type(model), model.model_dump(exclude_unset=True), overrides, None)


def _part(raw: dict[str, Any], path: Sequence[str]) -> dict[str, Any]:
    """Returns the tables with the section at a path alone; empty if there is none."""
    table = raw.get(path[0], {})
    if len(path) > 1:
        table = _part(table, path[1:]) if isinstance(table, dict) else {}
    return {path[0]: table} if table else {}


def _load(model: type[Model], raw: dict[str, Any], overrides: Sequence[str], file: Path | None) -> Model:
    given: dict[str, list[str]] = {}
    for key, text in _pairs(model, overrides):
        given.setdefault(key, []).append(text)
    for key in sorted(given, key=_order):
        _set(model, raw, key, _value(_annotation(model, key.split(".")), given[key]))
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        lines = dict.fromkeys(_explain(detail, file, given, model) for detail in error.errors())
        raise ConfigError("\n".join(lines)) from None


def _order(key: str) -> tuple[int, int]:
    """Sorts keys by depth, and first those that select a section's kind or a class, which reset others."""
    return key.count("."), {"kind": 0, "source": 0, "name": 0, "use": 1}.get(key.rpartition(".")[2], 2)


def arguments_of(settings: SettingsSection, *without: str) -> list[str]:
    """Returns `--section.key=value` for each setting that is not the default, except those in `without`."""
    changed = flat(settings.model_dump(mode="json", exclude_defaults=True))
    return [
        f"--{key}={element if _as_toml(str(element)) == element else value_as_toml(element)}"
        for key, value in changed
        if not is_within(key, without)
        for element in _elements(value)
    ]


def _elements(value: Any) -> list[Any]:
    """Returns the values to give for a setting: each text of a list of its own, numbers as one list."""
    if not isinstance(value, list):
        return [value]
    return [value] if value and all(map(is_number, value)) else value


def is_within(key: str, sections: Iterable[str]) -> bool:
    """Returns whether a dotted key is one of the settings or sections, or in one."""
    return any(f"{key}.".startswith(f"{section}.") for section in sections)


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
        if bare := [word for word in overrides if word.startswith("--") and "." not in word]:
            raise ConfigError(f"the command line: there is no setting {bare[0][2:]!r}{_AS_WRITTEN}")
        raise ConfigError(f"expected one settings file, not {' and '.join(files)}")
    return Path(files[0]) if files else None, overrides


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors write a byte order mark
        raw = tomllib.loads(text)
        if STARTED in text.partition("\n")[0] and isinstance(trainer := raw.get("trainer"), dict):
            trainer.setdefault("beta1", 0.9)  # a run of before, when it was no setting
        return raw
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such settings file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a directory; name the settings file in it") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not valid UTF-8: byte {error.object[error.start]:#x} at position {error.start}; "
            "save it as UTF-8"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def _pairs(model: type[BaseModel], overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    rest = list(overrides)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or len(word) == 2:
            raise ConfigError(f"{word!r} is not a setting; settings are given as --section.key value")
        key, equals, value = word[2:].partition("=")
        if not equals:
            if not rest and _annotation(model, key.split(".")) is None:
                raise ConfigError(f"the command line: there is no setting {key!r}{_instead(key, model)}")
            if not rest:
                raise ConfigError(f"--{key} needs a value")
            value = rest.pop(0)
        yield key, value


def _set(model: type[BaseModel], raw: dict[str, Any], key: str, value: Any) -> None:
    """Sets one dotted key. A section that becomes another kind keeps only what applies to that kind; the
    options of another class are removed."""
    *sections, last = key.split(".")
    table = raw
    named: type[SettingsSection] | None = None
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--{key}: {section} is a value, not a section")
        if named is not None:
            model, named = named, None
            continue
        if section in model.model_fields:
            named = named_section(model.model_fields[section].annotation)
        kinds = sections_of(model.model_fields[section].annotation) if section in model.model_fields else ()
        if len(kinds) > 1 and last == "name" and _name(table, model.model_fields[section].default) != value:
            table.clear()
        model = kinds[0] if kinds else SettingsSection
    if issubclass(model, SettingsSection) and last == model.selector:
        for name in [name for name in table if model.of_kind.get(name, value) != value]:
            del table[name]
    field = model.model_fields.get("use")
    if last == "use" and field is not None and table.get("use", field.default) != value:
        table.pop("options", None)
    table[last] = value


def _name(table: Mapping[str, Any], default: Any) -> Any:
    """Returns the kind of a section that has several: the named one, `custom` with `use`, or the default."""
    return table.get("name", "custom" if "use" in table else default.name)


def _value(annotation: Any, texts: Sequence[str]) -> Any:
    """Converts the texts that the command line gives for a setting of this type."""
    values = [_as_toml(text) for text in texts]
    if get_origin(annotation) is list and not isinstance(values[-1], list):
        pairs = [pair for pair in zip(values, texts, strict=True) if not isinstance(pair[0], list)]
        return [value if isinstance(value, str) else text for value, text in pairs]
    return texts[-1] if _is_text(annotation) and not isinstance(values[-1], str) else values[-1]


def _as_toml(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _annotation(annotation: Any, path: Sequence[str]) -> Any:
    """Returns the type of the setting at a path; None if there is no such setting."""
    for name in path:
        if (section := named_section(annotation)) is not None:
            annotation = section
            continue
        kinds = [kind for kind in sections_of(annotation) if name in kind.model_fields]
        if not kinds:
            return None
        annotation = kinds[0].model_fields[name].annotation
    return annotation


def _is_text(annotation: Any) -> bool:
    """Returns whether a type is text, or text or None."""
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    plain = {get_args(part)[0] if get_origin(part) is Annotated else part for part in parts} - {NoneType}
    return annotation is not None and plain <= {str, Path}


def _explain(error: Any, file: Path | None, given: Collection[str], model: type[BaseModel]) -> str:
    """Explains an error of validation. Keys in `given` are of the command line, the others of the file."""
    key = ".".join(str(part) for part in error["loc"] if not _is_type_tag(part))
    inside = [name for name in given if is_within(name, [key])] if key else given
    where = "the command line" if file is None or (key and is_within(key, given)) else str(file)
    if inside and where == str(file):
        where = "the command line" if error["type"] == "extra_forbidden" else f"{file} with the command line"
    if error["type"] == "extra_forbidden":
        return f"{where}: there is no setting {key!r}{_instead(key, model)}"
    if error["type"] == "missing":
        required = [name for name, default, _ in known_keys(model) if default == "required"]
        names = [name for name in required if is_within(name, [key])]
        return f"{where}: the setting {', '.join(map(repr, names)) or repr(key)} is required"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "model_type":
        return f"{where}: {key} is a section, not a value{_instead(key, model)}"
    if error["type"] in ("string_type", "path_type"):
        message = "must be text; write it in quotes"
    if error["type"] == "int_parsing_size":
        message = too_large(MOST)
    if error["type"] == "dict_type":
        message = """must be a table, as '{name = "text", number = 1}'; write texts in quotes"""
    if not key or (key in model.model_fields and sections_of(model.model_fields[key].annotation)):
        return f"{where}: {message}"  # an error of the whole section, which names the keys itself
    if isinstance(error["input"], dict):
        return f"{where}: {key}: {message}"
    return f"{where}: {key} = {error['input']!r}: {message[:1].lower()}{message[1:]}"


def _is_type_tag(part: str | int) -> bool:
    """Returns whether a part of a location is a union's branch, which pydantic adds."""
    return isinstance(part, str) and (part in ("int", "str", "none") or "[" in part)


_AS_WRITTEN = "; settings are written as section.name, and --settings lists them"


USUAL_NAMES = {
    "lr": "learning_rate", "num_generations": "group_size", "batch_size": "groups_per_batch",
    "train_batch_size": "groups_per_batch", "max_steps": "steps", "num_train_epochs": "steps",
    "max_new_tokens": "max_tokens", "max_completion_length": "max_tokens", "beta": "kl_coef",
    "max_model_len": "max_context", "off_policy_steps": "max_staleness", "data": "options",
}  # fmt: skip
"""Setting names of other projects → ours."""


REMOVED = {
    "trainer.curriculum": "it was removed, as its choice of tasks saved no tokens: remove the section, and "
    "every training task is issued in the environment's order",
}
"""Sections of earlier versions → why they are gone, and what to do."""


def _instead(key: str, model: type[BaseModel]) -> str:
    """Returns why a section was removed, the settings of a section, or the nearest name."""
    if gone := [why for section, why in REMOVED.items() if is_within(key, [section])]:
        return f"; {gone[0]}"
    known = [name for name, _, _ in known_keys(model)]
    if inside := [name for name in known if is_within(name, [key])]:
        return f"; its settings are {', '.join(inside)}"
    tail = {name.rpartition(".")[2]: name for name in known}
    # Names that others use for the same thing, which no spelling distance finds.
    section, _, last = key.rpartition(".")
    if usual := USUAL_NAMES.get(last):
        meant = [name for name in known if name.rpartition(".")[2] == usual]
        meant.sort(key=lambda name: name.rpartition(".")[0] not in (section or "trainer",))
        if meant:
            return f"; did you mean {meant[0]!r}?"
    if len(same := [name for name in known if name.rpartition(".")[2] == last]) == 1:
        return f"; did you mean {same[0]!r}?"
    # A setting is never meant to be its whole section: 'trainer.lr' is not 'trainer'.
    known += [] if "." in key else model.model_fields
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    close = close or [tail[name] for name in difflib.get_close_matches(last, tail, n=1)]
    if not close and not section:
        return _AS_WRITTEN
    return f"; did you mean {close[0]!r}?" if close else ""


def start_directory(config: Path) -> Path | None:
    """Returns the directory to which relative paths in a run's `config.toml` refer.

    None if the file names none, or the run has been moved or copied since: the paths in it are those of
    another run then.
    """
    try:
        text = config.read_text(encoding="utf-8")
        start = Path(json.loads(text.partition("\n")[0].partition(STARTED)[2]))
        run = tomllib.loads(text)["run"]
        return start if (start / run["dir"] / run["name"]).samefile(config.parent) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
