"""Sends files through Ray's object store to nodes that do not see the run's directory."""

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
    """References to the bytes (uint8) of a directory's files, by name."""

    name: str
    files: Mapping[str, Any]


class FileSender:
    """Puts directories into the object store; keeps the last two."""

    def __init__(self) -> None:
        self._sent: dict[Path, FileBundle] = {}
        self._count = 0

    def bundle(self, directory: Path) -> FileBundle:
        """Put the directory's files into the object store, on the first call only. Blocks. Raises OSError.

        A directory is identified by its path and must not change afterwards.
        """
        bundle = self._sent.pop(directory, None)
        if bundle is None:
            self._count += 1
            files = {
                file.name: ray.put(np.fromfile(file, dtype=np.uint8))
                for file in sorted(directory.iterdir())
                if file.is_file()
            }
            bundle = FileBundle(f"{self._count:06d}-{directory.name}", files)
        # Last in the order, so that the directory in use is not the one that is dropped.
        self._sent[directory] = bundle
        for oldest in list(self._sent)[:-KEPT]:
            del self._sent[oldest]
        return bundle


class FileCache:
    """Unpacks bundles on this node; keeps the last two."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._unpacked: list[Path] = []
        self._lock = asyncio.Lock()

    async def unpack(self, bundle: FileBundle) -> Path:
        """Write the files and return their directory; concurrent calls write once.

        Raises OSError, or RayError if the objects are lost.
        """
        place = self._directory / bundle.name
        async with self._lock:
            if place not in self._unpacked:
                await _write(bundle, place)
                self._unpacked.append(place)
            while len(self._unpacked) > KEPT:
                shutil.rmtree(self._unpacked.pop(0), ignore_errors=True)
        return place


async def _write(bundle: FileBundle, place: Path) -> None:
    part = place.with_suffix(".partial")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for name, reference in bundle.files.items():
        content = await reference
        await asyncio.to_thread(content.tofile, part / name)
    part.replace(place)
