"""Outputs that pages quote below a command (`$ …`), against the command's; `[...]` stands for other lines."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from docs.checks.blocks import HARMLESS, Block, blocks
from docs.checks.commands import workplace

OMITTED = "[...]"
QUOTED = [block for block in blocks() if block.text.startswith("$ ")]


def test_quoted_outputs_are_of_commands_that_start_nothing() -> None:
    assert QUOTED
    for block in QUOTED:
        assert all(HARMLESS & set(shlex.split(command)) for command in block.commands()), str(block)


@pytest.mark.parametrize("block", QUOTED, ids=str)
def test_a_quoted_output_is_that_of_the_command(block: Block, tmp_path: Path) -> None:
    workplace(tmp_path)
    [command] = block.commands()
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    printed = done.stdout.splitlines()
    for part in "\n".join(block.text.splitlines()[1:]).split(OMITTED):
        quoted = part.strip("\n").splitlines()
        if not quoted:
            continue
        starts = [at for at in range(len(printed)) if printed[at : at + len(quoted)] == quoted]
        assert starts, f"{block}: not in the output, or not in this order:\n{part}\n---\n" + "\n".join(
            printed
        )
        printed = printed[starts[0] + len(quoted) :]
