"""Sections of settings: their base class, the types of values, their keys, and settings as TOML."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin
from urllib.parse import urlsplit

import tomli_w
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)


def _directory_name(name: str) -> str:
    if name in ("", ".", "..") or any(mark in name for mark in "/\\\0"):
        raise ValueError("must be the name of a directory in run.dir; to write elsewhere, set run.dir")
    return name


def http_url(url: str) -> str:
    """Returns the URL without a slash at its end; raises ValueError if it has no host."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise ValueError(f"not a URL: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("not a URL with scheme and host, such as http://127.0.0.1:30000")
    return url.rstrip("/")


def _secret(key: str) -> str:
    if not key.strip():
        raise ValueError("is empty, and is no key: give a secret, or leave it out")
    return key.strip()


DirectoryName = Annotated[str, AfterValidator(_directory_name)]
HttpUrl = Annotated[str, AfterValidator(http_url)]
SecretKey = Annotated[str, AfterValidator(_secret)]


MOST = 10**12
"""Largest number that a setting takes, except seeds: a count beyond it is a slip, and no file or protocol
holds every integer."""
MOST_PROCESSES = 1024
"""Largest number of processes of one kind, and of threads, that a setting takes."""
Processes = Annotated[int, Field(ge=1, le=MOST_PROCESSES)]


class SettingsSection(BaseModel):
    """A group of settings; unknown keys are an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    selector: ClassVar[str] = "kind"
    """Setting that selects the kind of the section."""
    of_kind: ClassVar[Mapping[str, str]] = {}
    """Settings that apply to one kind of the section. Another kind on the command line leaves them out."""

    @field_validator("*", mode="after")
    @classmethod
    def _bounded(cls, value: Any, info: ValidationInfo) -> Any:
        most = 2**63 - 1 if info.field_name == "seed" else MOST
        if isinstance(value, int | float) and not abs(value) <= most:
            raise ValueError(too_large(most))
        return value

    def other_than_default(self, *names: str) -> list[str]:
        """Returns those of the settings that differ from their defaults."""
        return [name for name in names if getattr(self, name) != type(self).model_fields[name].default]


def dump(settings: BaseModel) -> str:
    """Returns settings as TOML, which `load` reads again."""
    return to_toml(settings.model_dump(mode="json"))


def to_toml(values: dict[str, Any]) -> str:
    """Returns dumped settings as TOML, without those that are None."""
    return tomli_w.dumps(_without_none(values))


def differences(before: BaseModel, after: BaseModel) -> list[str]:
    """Returns the dotted keys that differ; with their values if they are numbers, which are not secret."""
    old, new = (dict(flat(settings.model_dump(mode="json"))) for settings in (before, after))
    return [
        f"{key} {old[key]} → {new[key]}" if is_number(old.get(key)) and is_number(new.get(key)) else key
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def is_number(value: Any) -> bool:
    return isinstance(value, int | float)


@functools.cache
def descriptions(model: type[BaseModel]) -> Mapping[str, str]:
    """Returns the descriptions of a section's settings: docstrings below them, or those of their types."""
    # Pydantic would parse the source of every section at every start of a process.
    found = dict[str, str]()
    for base in reversed(model.__mro__):
        if issubclass(base, SettingsSection):
            (definition,) = ast.parse(inspect.getsource(base)).body
            assert isinstance(definition, ast.ClassDef)
            for field, text in zip(definition.body, definition.body[1:], strict=False):
                match field, text:
                    case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(words))):
                        found[name] = inspect.cleandoc(words)
    return {name: field.description or found.get(name, "") for name, field in model.model_fields.items()}


def known_keys(model: type[BaseModel], prefix: str = "") -> list[tuple[str, str, str]]:
    """Returns all settings as (dotted key, default, description).

    The description of a setting that only some kinds of a section have names these kinds.
    """
    keys = []
    for name, field in model.model_fields.items():
        # A section that may be left out is one of another place, whose settings are listed there.
        kinds = [] if field.default is None else sections_of(field.annotation)
        if (named := named_section(field.annotation)) is not None:
            keys += known_keys(named, f"{prefix}{name}.NAME.")
        elif len(kinds) == 1:
            keys += known_keys(kinds[0], f"{prefix}{name}.")
        elif kinds:
            keys += _keys_of_kinds(kinds, type(field.default), f"{prefix}{name}.")
        else:
            default = "required" if field.is_required() else value_as_toml(field.default)
            keys.append((prefix + name, default, descriptions(model)[name]))
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
        text = descriptions(next(kind for kind in kinds if setting in kind.model_fields))[setting]
        defaults = {
            kind: "required" if field.is_required() else value_as_toml(field.default)
            for kind, field in have.items()
        }
        if setting == "name":
            own = value_as_toml(default.model_fields[setting].default)
            rows.append((prefix + setting, own, f"{text} {', '.join(names)}."))
        elif len(set(defaults.values())) == 1:
            rows.append((prefix + setting, next(iter(defaults.values())), f"{text} For {', '.join(have)}."))
        else:
            applies = ", ".join(f"{kind} {value}" for kind, value in defaults.items())
            rows.append((prefix + setting, "", f"{text} For {applies}."))
    return rows


def too_large(most: int) -> str:
    return f"must not exceed {most:,}"


def value_as_toml(default: Any) -> str:
    """Formats a default as TOML; empty for None."""
    if default is None:
        return ""
    return tomli_w.dumps({"a": str(default) if isinstance(default, Path) else default})[4:].strip()


def _without_none(value: Any) -> Any:
    """Removes keys with None, which TOML cannot express; they read back as the default."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value


def sections_of(annotation: Any) -> list[type[SettingsSection]]:
    """Returns the section that an annotation is, or the kinds of section that it may be; none for a value."""
    if get_origin(annotation) is Annotated:
        return sections_of(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [kind for part in get_args(annotation) for kind in sections_of(part)]
    return [annotation] if isinstance(annotation, type) and issubclass(annotation, SettingsSection) else []


def named_section(annotation: Any) -> type[SettingsSection] | None:
    """Returns the section that each value of a dict by names is, if an annotation is such a dict."""
    found = sections_of(get_args(annotation)[1]) if get_origin(annotation) is dict else []
    return found[0] if found else None
