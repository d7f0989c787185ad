"""Files for nodes that do not see the run's directory: put into Ray's object store once for all."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray

KEPT = 2


@dataclass(frozen=True, slots=True)
class FileBundle:
    """A directory's files, by name, as references to their bytes (uint8)."""

    name: str
    files: Mapping[str, Any]


class FileSender:
    """Sends directories; the last two stay in the object store."""

    def __init__(self) -> None:
        self._sent: dict[Path, FileBundle] = {}
        self._numbers = 0

    def parcel(self, directory: Path) -> FileBundle:
        """The directory's files, put there when they are first asked for. It blocks. Raises OSError.

        Directories are told apart by their paths, and are not changed once they are named.
        """
        found = self._sent.pop(directory, None)
        if found is None:
            self._numbers += 1
            files = {
                file.name: ray.put(np.fromfile(file, dtype=np.uint8))
                for file in sorted(directory.iterdir())
                if file.is_file()
            }
            found = FileBundle(f"{self._numbers:06d}-{directory.name}", files)
        self._sent[directory] = found
        for oldest in list(self._sent)[:-KEPT]:
            del self._sent[oldest]
        return found


class FileCache:
    """Where parcels are unpacked; the last two stay."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._kept: list[Path] = []
        self._unpacking = asyncio.Lock()

    async def unpack(self, parcel: FileBundle) -> Path:
        """Write the files, and name the directory when it is whole; once, also where a start and a load ask
        for it at the same time. Raises OSError, and RayError where they are lost."""
        place = self._directory / parcel.name
        async with self._unpacking:
            if place not in self._kept:
                await _write(parcel, place)
                self._kept.append(place)
            while len(self._kept) > KEPT:
                shutil.rmtree(self._kept.pop(0), ignore_errors=True)
        return place


async def _write(parcel: FileBundle, place: Path) -> None:
    part = place.with_suffix(".partial")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for name, reference in parcel.files.items():
        content = await reference
        await asyncio.to_thread(content.tofile, part / name)
    part.replace(place)
