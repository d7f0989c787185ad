"""Finding an agent or an environment by what the settings say of it: a name, or `file.py:Name`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from tidegate.errors import ConfigError
from tidegate.tracebacks import where


def load_object(use: str, builtin: Mapping[str, str], what: str) -> Any:
    """The object that `use` names.

    `use` is a key of `builtin` (whose values are `module:Name`), `path/to/file.py:Name`, or
    `module:Name`. `what` says in errors what was looked for ("agent"). Raises ConfigError.
    """
    where, colon, name = builtin.get(use, use).rpartition(":")
    if not colon:
        raise ConfigError(
            f"there is no {what} {use!r}{did_you_mean(use, builtin)}; "
            f"built in are {', '.join(builtin)}, and your own are 'file.py:Name' or 'module:Name'"
        )
    module = _file(Path(where), what) if where.endswith(".py") else _module(where, what)
    try:
        return getattr(module, name)
    except AttributeError:
        public = [one for one in vars(module) if not one.startswith("_")]
        raise ConfigError(f"{where} has no {what} {name!r}{did_you_mean(name, public)}") from None


def construct(cls: type[Any], options: Mapping[str, Any], what: str) -> Any:
    """`cls(**options)`; raises ConfigError that names an option which the constructor doesn't take."""
    parameters = inspect.signature(cls).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    for option in options:
        if option not in parameters and not takes_any:
            raise ConfigError(f"the {what} has no option {option!r}{did_you_mean(option, parameters)}")
    missing = [
        name
        for name, one in parameters.items()
        if one.default is one.empty
        and name not in options
        and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
    ]
    if missing:
        raise ConfigError(f"the {what} needs the option {', '.join(map(repr, missing))}")
    return cls(**options)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean …?`, or nothing where nothing is near."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _file(path: Path, what: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file to load the {what} from")
    # A file may import its neighbours, as a script may.
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(f"tidegate_{what}_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        what = f"{type(error).__name__}: {error}{where(error)}"
        raise ConfigError(f"{path} cannot be loaded: {what}") from error
    return module


def _module(name: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise ConfigError(
            f"the {what}'s module {name!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
