"""Executes the lessons: `make test-docs`. With --write, writes their results, too: `make lessons`.

python -m docs.lessons.run [--write] [NAME ...]
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import os
import re
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from docs.lessons.pages import FOLDER, lessons, with_outputs, without_results

LIMIT_S = 300.0
"""Processor time of one lesson, of all its processes: the first trains a language model. Wall time depends on
what else the machine does."""
CELL_LIMIT_S = 900
"""Wall time after which a cell counts as hanging."""
LONGEST_OUTPUT = 50
"""Lines of a cell's output on the page."""
LARGEST_PLOT = 60_000
"""Bytes of a plot."""


def notebook(page: Path) -> Any:
    """Returns the notebook of a page, without outputs."""
    made = jupytext.reads(without_results(page.read_text(encoding="utf-8")), fmt="md")
    for number, cell in enumerate(made.cells):
        cell["id"] = f"cell-{number}"  # by default random: the file would change each time
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    made.metadata = nbformat.from_dict({"kernelspec": kernel, "language_info": {"name": "python"}})
    return made


async def execute(made: Any, folder: str) -> None:
    """Executes a notebook in a folder.

    Raises:
        CellExecutionError: A cell raised.
        CellTimeoutError: A cell hangs.
        DeadKernelError: The kernel exited.
    """
    client = NotebookClient(
        made,
        timeout=CELL_LIMIT_S,
        startup_timeout=CELL_LIMIT_S,
        resources={"metadata": {"path": folder}},
        extra_arguments=["--log-level=ERROR"],
    )
    await client.async_execute()


def printed(cell: Any, folder: str) -> str:
    """Returns what a cell printed to standard output, without escape sequences and the machine's paths."""
    parts = []
    for output in cell.get("outputs", []):
        if output.output_type == "stream":
            parts.append(output.text if output.name == "stdout" else "")
        elif "image/png" not in output.get("data", {}):
            parts.append(output.get("data", {}).get("text/plain", "") + "\n")
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", "".join(parts))
    for path in (os.path.realpath(folder), str(FOLDER.parents[1])):
        text = text.replace(f"{path}/", "")
    lines = [line.rstrip() for line in text.strip("\n").splitlines()]
    if len(lines) > LONGEST_OUTPUT:
        lines = [*lines[: LONGEST_OUTPUT - 1], f"… ({len(lines) - LONGEST_OUTPUT + 1} more lines)"]
    return "\n".join(lines)


def plot(made: Any) -> bytes | None:
    """Returns the last image of an executed notebook."""
    images = [
        output.data["image/png"]
        for cell in made.cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    return base64.b64decode(images[-1]) if images else None


def write(page: Path, made: Any, folder: str) -> None:
    """Writes the outputs and the plot of an executed notebook into its page, and the notebook without them.

    Raises:
        ValueError: There is no plot, or it is too large.
    """
    image = plot(made)
    if image is None or len(image) > LARGEST_PLOT:
        found = "no plot" if image is None else f"a plot of {len(image):,} bytes"
        raise ValueError(f"{page.name} has {found}; it needs one of at most {LARGEST_PLOT:,} bytes")
    page.with_suffix(".png").write_bytes(image)
    outputs = [printed(cell, folder) for cell in made.cells if cell.cell_type == "code"]
    page.write_text(with_outputs(page.read_text(encoding="utf-8"), outputs), encoding="utf-8")
    nbformat.write(notebook(page), page.with_suffix(".ipynb"))


def run(page: Path, save: bool) -> bool:
    """Executes one lesson in a folder of its own, and prints its times; returns whether it succeeded."""
    made, began, used = notebook(page), time.monotonic(), processor_s()
    error = ""
    with tempfile.TemporaryDirectory(prefix="lesson-", ignore_cleanup_errors=True) as folder:
        try:
            asyncio.run(execute(made, folder))
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as failed:
            error = str(failed)
        seconds, processor = time.monotonic() - began, processor_s() - used
        if not error and processor > LIMIT_S:
            error = f"it needs {processor:.0f} s of processor time; the limit is {LIMIT_S:g} s"
        if not error and save:
            write(page, made, folder)
    outcome = "failed" if error else "ok"
    print(f"{page.stem:<20} {seconds:5.0f} s, processor {processor:4.0f} s  {outcome}", flush=True)
    if error:
        print(error, flush=True)
    return not error


def processor_s() -> float:
    """Returns the processor time of all processes that have ended, in seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write pages, plots and notebooks anew")
    parser.add_argument("names", nargs="*", help="lessons, by the start of their names; default: all")
    arguments = parser.parse_args()
    pages = [page for page in lessons() if page.name.startswith(tuple(arguments.names or [""]))]
    if not pages:
        parser.error(f"no lesson begins with {' or '.join(arguments.names)}")
    began = time.monotonic()
    failed = [page.stem for page in pages if not run(page, arguments.write)]
    print(f"{len(pages)} lessons in {time.monotonic() - began:.0f} s, {len(failed)} failed", flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
