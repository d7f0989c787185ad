"""Generated tasks on files: find, count, edit, move and extract.

Every task has the files of its folder before and after, and commands that solve it. All names are two
syllables; names of the held-out split occur in no training task, and its folders have more files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Literal

from examples.bases.names import SYLLABLES, held_out_name

Split = Literal["train", "held_out"]
Kind = Literal["find", "count", "edit", "move", "extract"]
Files = Mapping[str, str]
"""Path in the working directory → content."""

FIRST, SECOND = SYLLABLES[:40], SYLLABLES[40:]
ANSWER = "answer.txt"
SUFFIXES = (".txt", ".log", ".cfg", ".csv", ".json")
SETTINGS = ("host", "user", "zone", "group")
FIELDS = ("city", "boss")
SIZES: Mapping[Split, tuple[int, int]] = {"train": (3, 4), "held_out": (5, 7)}
"""Least and largest number of files."""


@dataclass(frozen=True, slots=True)
class Step:
    """A command with its output."""

    command: str
    output: str = ""


@dataclass(frozen=True, slots=True)
class ShellTask:
    """One task with a solution."""

    kind: Kind
    prompt: str
    before: Files
    after: Files
    steps: tuple[Step, ...]
    """Commands that lead from `before` to `after`."""
    target: str
    """The file that the task is about."""
    names: tuple[str, ...]
    """The name in question, then others that the task is about."""
    field: str = ""
    """The setting or field in question."""


class Folder:
    """Draws the names and files of one task.

    Args:
        rng: Source of all choices.
        split: Determines which names are drawn, and the number of files.
    """

    def __init__(self, rng: Random, split: Split) -> None:
        self.rng = rng
        self._split = split
        self._names = draw_names(rng, split)
        self._folder = self.name()
        self.files: dict[str, str] = {}

    def name(self) -> str:
        """Returns a name that the task does not have yet."""
        return next(self._names)

    def path(self, suffix: str) -> str:
        file = self.name() + suffix
        return self.rng.choice((file, f"{self._folder}/{file}"))

    def fill(self, suffix: str, content: Callable[[], str]) -> str:
        """Adds files of one kind; returns the path of one of them."""
        size = self.rng.randint(*SIZES[self._split])
        added = [self.path(suffix) for _ in range(size)]
        self.files |= {path: content() for path in added}
        return self.rng.choice(added)

    def notes(self) -> str:
        return "".join(f"{self.name()} and {self.name()}\n" for _ in range(self.rng.randint(1, 2)))

    def insert(self, path: str, line: str) -> None:
        """Adds a line to a file, at any place."""
        lines = self.files[path].splitlines()
        lines.insert(self.rng.randint(0, len(lines)), line)
        self.files[path] = "".join(f"{one}\n" for one in lines)


def draw_names(rng: Random, split: Split) -> Iterator[str]:
    """Yields distinct names of the split; the first 40 have distinct first syllables."""
    held_out = split != "train"
    used: set[str] = set()
    while True:
        for first in rng.sample(FIRST, len(FIRST)):
            names = (first + second for second in SECOND)
            fitting = [name for name in names if held_out_name(name) == held_out and name not in used]
            if fitting:
                used.add(name := rng.choice(fitting))
                yield name


def find(folder: Folder) -> ShellTask:
    name, other = folder.name(), folder.name()
    path = folder.fill(".txt", folder.notes)
    folder.insert(path, f"{name} and {other}")
    return ShellTask(
        "find",
        f"Which file contains {name}? Write its path to {ANSWER}.",
        folder.files,
        {**folder.files, ANSWER: f"{path}\n"},
        (Step(f"grep -rl {name} *", path), Step(f"echo {path} > {ANSWER}")),
        path,
        (name, other),
    )


def count(folder: Folder) -> ShellTask:
    name = folder.name()
    others = [folder.name() for _ in range(2)]
    number = folder.rng.randint(2, 5)

    def log() -> str:
        return "".join(f"{folder.rng.choice(others)} ok\n" for _ in range(folder.rng.randint(1, 4)))

    path = folder.fill(".log", log)
    for _ in range(number):
        folder.insert(path, f"{name} ok")
    return ShellTask(
        "count",
        f"How many lines of {path} contain {name}? Write the number to {ANSWER}.",
        folder.files,
        {**folder.files, ANSWER: f"{number}\n"},
        (Step(f"grep -c {name} {path}", str(number)), Step(f"echo {number} > {ANSWER}")),
        path,
        (name,),
    )


def edit(folder: Folder) -> ShellTask:
    name, value = folder.name(), folder.name()
    keys = folder.rng.sample(SETTINGS, 2)

    def settings(name: str) -> str:
        lines = [f"name={name}", *(f"{key}={folder.name()}" for key in keys)]
        return "".join(f"{line}\n" for line in lines)

    path = folder.fill(".cfg", lambda: settings(folder.name()))
    folder.files[path] = settings(name)
    key = folder.rng.choice(keys)
    return ShellTask(
        "edit",
        f"Set {key}={value} in the settings of {name}.",
        folder.files,
        {**folder.files, path: re.sub(f"{key}=.*", f"{key}={value}", folder.files[path])},
        (Step(f"grep -rl {name} *", path), Step(f"sed -i s/{key}=.*/{key}={value}/ {path}")),
        path,
        (name, value),
        key,
    )


def move(folder: Folder) -> ShellTask:
    name, other, into = folder.name(), folder.name(), folder.name()
    path = folder.fill(".txt", folder.notes)
    folder.insert(path, f"{name} and {other}")
    if "/" in path:  # so that no empty folder remains
        folder.files[f"{path.partition('/')[0]}/{folder.name()}.txt"] = folder.notes()
    after = {one: content for one, content in folder.files.items() if one != path}
    after[f"{into}/{path.rpartition('/')[2]}"] = folder.files[path]
    return ShellTask(
        "move",
        f"Make the folder {into} and move the file that contains {name} into it.",
        folder.files,
        after,
        (Step(f"grep -rl {name} *", path), Step(f"mkdir {into}"), Step(f"mv {path} {into}")),
        path,
        (name, other, into),
    )


def extract(folder: Folder) -> ShellTask:
    suffix, record = folder.rng.choice(list(RECORDS.items()))
    name, city, boss = folder.name(), folder.name(), folder.name()

    def records() -> str:
        rows = [record(*(folder.name() for _ in range(3))) for _ in range(folder.rng.randint(1, 2))]
        return "".join(f"{row}\n" for row in rows)

    path = folder.fill(suffix, records)
    line = record(name, city, boss)
    folder.insert(path, line)
    if suffix == ".csv":
        folder.files |= {path: f"name,city,boss\n{content}" for path, content in folder.files.items()}
    field = folder.rng.choice(FIELDS)
    found = city if field == "city" else boss
    return ShellTask(
        "extract",
        f"Write the {field} of {name} to {ANSWER}.",
        folder.files,
        {**folder.files, ANSWER: f"{found}\n"},
        (Step(f"grep -rh {name} *", line), Step(f"echo {found} > {ANSWER}")),
        path,
        (name, city, boss),
        field,
    )


RECORDS: Mapping[str, Callable[[str, str, str], str]] = {
    ".csv": lambda name, city, boss: f"{name},{city},{boss}",
    ".json": lambda name, city, boss: json.dumps({"name": name, "city": city, "boss": boss}),
    ".log": lambda name, city, boss: f"name={name} city={city} boss={boss}",
}
"""Suffix → a record in this format."""

KINDS: Mapping[Kind, Callable[[Folder], ShellTask]] = {
    "find": find,
    "count": count,
    "edit": edit,
    "move": move,
    "extract": extract,
}


def draw_task(rng: Random, split: Split, kind: Kind | None = None) -> ShellTask:
    """Returns a task of the split.

    Args:
        rng: Source of all choices.
        split: `train`, or `held_out` with other names and larger folders.
        kind: None draws one.
    """
    draw = rng.choice(list(KINDS.values())) if kind is None else KINDS[kind]
    return draw(Folder(rng, split))
