"""Loads agents and environments by their names in settings: a built-in name, or `file.py:Name`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import re
import symtable
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from tidegate.errors import ConfigError, TidegateError
from tidegate.tracebacks import where


def load_object(use: str, builtin: Mapping[str, str], what: str) -> Any:
    """Loads the object that `use` names.

    Args:
        use: A key of `builtin`, `path/to/file.py:Name`, or `module:Name`.
        builtin: Built-in names with their `module:Name`.
        what: Kind of the object for messages, such as "agent".

    Raises:
        ConfigError: There is no such object, or its module cannot be imported.
    """
    where, name = find_object(use, builtin, what)
    module = _file(Path(where), what) if where.endswith(".py") else _module(where, what)
    try:
        return getattr(module, name)
    except AttributeError:
        raise _no_such_name(where, what, name, vars(module)) from None


def check_object(use: str, builtin: Mapping[str, str], what: str) -> None:
    """Reads the file that `use` names, and runs none of it. Of a module only the form is checked.

    Args:
        use: As for `load_object`.
        builtin: As for `load_object`.
        what: As for `load_object`.

    Raises:
        ConfigError: There is no such file, it is no Python, or it does not define the name.
    """
    where, name = find_object(use, builtin, what)
    if not where.endswith(".py"):
        return
    source = _source(Path(where))
    table = symtable.symtable(source, where, "exec")
    names = [one.get_name() for one in table.get_symbols() if one.is_assigned() or one.is_imported()]
    if name not in names and not _NAMES_AT_RUN_TIME.search(source):
        raise _no_such_name(where, what, name, names)


_NAMES_AT_RUN_TIME = re.compile(r"import \*|globals\(\)|__getattr__|\bexec\(")
"""Source that may define names which reading it does not show."""


def _no_such_name(where: str, what: str, name: str, names: Iterable[str]) -> ConfigError:
    public = [name for name in names if not name.startswith("_")]
    return ConfigError(f"{where} has no {what} {name!r}{did_you_mean(name, public)}")


def find_object(use: str, builtin: Mapping[str, str], what: str) -> tuple[str, str]:
    """Returns the file or module of the object that `use` names, and its name there. Imports nothing.

    Raises:
        ConfigError: It is neither built in nor of the form `file.py:Name` or `module:Name`, or there is no
            such file.
    """
    where, colon, name = builtin.get(use, use).rpartition(":")
    if not colon and use.endswith(".py"):
        raise ConfigError(f"the {what} {use!r} is a file: name the object in it, as '{use}:Name'")
    if not colon:
        known = f"built in are {', '.join(builtin)}, and " if builtin else ""
        raise ConfigError(
            f"there is no {what} {use!r}{did_you_mean(use, builtin)}; "
            f"{known}your own are 'file.py:Name' or 'module:Name'"
        )
    if where.endswith(".py") and not Path(where).is_file():
        raise ConfigError(
            f"{where}: there is no such file to load the {what} from: looked for {Path(where).absolute()}; "
            "give its path, absolute or from the directory of the start"
        )
    return where, name


def construct(cls: type[Any], options: Mapping[str, Any], what: str) -> Any:
    """Returns `cls(**options)`.

    Raises:
        ConfigError: An option is unknown or missing, the class lacks a method, or the constructor raised.
    """
    parameters = inspect.signature(cls).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for option in options:
        if option not in parameters and not takes_any:
            raise ConfigError(f"the {what} has no option {option!r}{did_you_mean(option, parameters)}")
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and name not in options
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    if missing:
        raise ConfigError(f"the {what} needs the option {', '.join(map(repr, missing))}")
    if lacking := sorted(getattr(cls, "__abstractmethods__", ())):
        raise ConfigError(f"the {what} lacks the method {', '.join(lacking)}, which its base class needs")
    try:
        return cls(**options)
    except TidegateError:
        raise
    except Exception as error:
        cause = f"{type(error).__name__}: {error}{where(error)}"
        raise ConfigError(f"the {what} cannot be constructed: {cause}") from error


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns `; did you mean …?` with the nearest known word, or an empty text."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _source(path: Path) -> str:
    """Returns the text of a Python file; raises ConfigError, with the line, if it is not Python."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    try:
        source = importlib.util.decode_source(data)
    except (SyntaxError, UnicodeDecodeError) as error:  # SyntaxError: also of an unknown encoding
        raise ConfigError(_not_text(path, data, error)) from None
    try:
        compile(source, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes
        raise ConfigError(_not_python(path, error)) from None
    return source


def _not_text(path: Path, data: bytes, error: SyntaxError | UnicodeDecodeError) -> str:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as wrong:
        line = data.count(b"\n", 0, wrong.start) + 1
        return f"{path}, line {line}: byte {data[wrong.start]:#x} is not UTF-8; save the file as UTF-8"
    return _not_python(path, error)


def _not_python(path: Path, error: SyntaxError | ValueError) -> str:
    if not isinstance(error, SyntaxError):
        return f"{path} is not Python: {error}"
    line_of = f", line {error.lineno}" if error.lineno else ""
    shown = f": {error.text.strip()}" if error.text else ""
    return f"{path}{line_of}: {type(error).__name__}: {error.msg}{shown}"


def _file(path: Path, what: str) -> ModuleType:
    _source(path)
    _allow_imports_from(path.resolve().parent, Path.cwd())  # as with a script
    spec = importlib.util.spec_from_file_location(f"tidegate_{what}_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        cause = f"{type(error).__name__}: {error}{where(error)}"
        raise ConfigError(f"{path} cannot be loaded: {cause}") from error
    return module


def _allow_imports_from(*folders: Path) -> None:
    """Appends folders to the module path: last, so that no file in them replaces an installed module. The
    processes of a run start without their working directory on it (`python -P`)."""
    sys.path += [folder for folder in map(str, folders) if folder not in sys.path]


def _module(name: str, what: str) -> ModuleType:
    if not name.startswith("tidegate."):
        _allow_imports_from(Path.cwd())
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"the {what}'s module {name!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
