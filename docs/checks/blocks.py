"""The fenced code blocks of pages: which of their commands `make test-docs` runs.

A block with other commands has a mark on the line before it: `<!-- not run: the reason -->`.
So has a block of settings that are not Tidegate's.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAMS = {
    "cd", "docker", "export", "git", "hf", "kubectl", "make", "npm", "pip", "python", "python3",
    "sbatch", "sky", "tidegate", "uv", "uvicorn",
}  # fmt: skip
"""First words by which a block without a language is recognised as commands."""
CHEAP = {"audit", "doctor", "tasks"}
"""Commands of tidegate that only read, or run one episode."""
HARMLESS = {"--dry-run", "--help", "--settings"}
"""Options with which a command starts nothing."""

_BLOCK = re.compile(
    r"(?:^ *<!-- not run: (?P<reason>[^\n]+?) -->\n\n?)?^ *```(?P<language>\w*)\n(?P<text>.*?)^ *```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block.

    Attributes:
        page: Path of the page, relative to the repository.
        line: Line of the block or of its mark.
        language: Language after the fence, in lower case; `bash` for commands without a language.
        text: Content.
        reason: Why the block is not run; empty without a mark.
    """

    page: str
    line: int
    language: str
    text: str
    reason: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> list[str]:
        """Returns the block's commands without comments, continuation lines joined.

        In a block with a prompt (`$ `) all other lines are output.
        """
        lines = re.sub(r"\s*\\\n\s*", " ", self.text).splitlines()
        prompted = [line[2:] for line in lines if line.startswith("$ ")]
        commands = (re.sub(r"(?:^|\s)#.*", "", line).strip() for line in prompted or lines)
        return [command for command in commands if command]


def pages() -> list[Path]:
    """Returns the pages whose blocks are checked. Lessons are executed as a whole (docs/lessons/run.py)."""
    return [
        ROOT / "README.md",
        ROOT / "AGENTS.md",
        *sorted(ROOT.glob("docs/*.md")),
        *sorted(ROOT.glob("examples/*/README.md")),
    ]


def blocks() -> Iterator[Block]:
    """Yields every block of every page."""
    for path in pages():
        page = str(path.relative_to(ROOT))
        yield from blocks_of(page, path.read_text(encoding="utf-8"))


def blocks_of(page: str, text: str) -> Iterator[Block]:
    """Yields the blocks of one page's text."""
    for found in _BLOCK.finditer(text):
        indent = re.search(r"^( *)```", found[0], re.MULTILINE)
        width = len(indent[1]) if indent else 0
        content = re.sub(rf"^ {{{width}}}", "", found["text"], flags=re.MULTILINE)
        language = found["language"].lower()
        if not language and _is_commands(content):
            language = "bash"
        yield Block(page, text.count("\n", 0, found.start()) + 1, language, content, found["reason"] or "")


def runs(command: str) -> bool:
    """Whether `make test-docs` runs a command: it is cheap, ends, and its files exist."""
    words = shlex.split(command) if not re.search(r"[|;&<>]|\.\.\.", command) else []
    if not words:
        return False
    if words[0].endswith(".sh"):
        return "--dry-run" in words and not any(word.isupper() for word in words)
    if words[0].rpartition("/")[2] != "tidegate" or len(words) < 2:
        return False
    if words[1] not in CHEAP and not HARMLESS & set(words):
        return False
    files = re.findall(r"[\w./-]+\.(?:js|jsonl|py|toml)\b|\bruns/\w+", command)
    return not any(word.isupper() for word in words) and all(
        (ROOT / file).exists() or file == "runs/demo" for file in files
    )


def _is_commands(text: str) -> bool:
    first = text.strip().partition("\n")[0].removeprefix("$ ")
    program = re.sub(r"^(?:[A-Z_]+=\S* )+", "", first).partition(" ")[0]
    return program in PROGRAMS or program.startswith((".venv/", "examples/"))
