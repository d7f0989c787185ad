"""Writes published versions: all weights every few versions, and the difference from the last one between.

A difference is used only while it pays: it must have fewer bytes and take no more time than all weights.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tidegate.trainer.checkpoint.huggingface import write_shards
from tidegate.trainer.publish.broadcast import Bucket
from tidegate.weights import checksum, delta_files
from tidegate.weights.delta_files import VersionTensor
from tidegate.weights.files import INDEX_FILE, WeightsError, replacing, stored_names, weight_files
from tidegate.weights.process_group import HOST, bytes_of

VERSION, DELTA, CANDIDATE = "v{:06d}", "delta-v{:06d}", "candidate-v{:06d}"
"""Directories of a version with all weights, of a difference, and of a version that is tested first."""
BUCKET_BYTES = 256 * 2**20
WORTHWHILE = 0.5
"""Largest size of a difference, as a share of all weights; above it reading and decoding cost more time."""
SLACK_S = 0.05
"""Seconds that a publish of a difference may take beyond one of all weights, so that noise does not count."""
MOST_REFUSALS = 2
"""Refused differences in a row after which the engines are taken for ones that cannot load any."""


class FullVersion(NamedTuple):
    """What later versions have in common with a version in files."""

    names: set[str]
    """Names of the tensors."""
    others: dict[str, bytes]
    """The files without weights, by name."""

    @staticmethod
    def read(place: Path) -> FullVersion:
        weights = {*weight_files(place), place / INDEX_FILE, place / checksum.FILE}
        others = {path for path in place.rglob("*") if path.is_file()} - weights
        files = {str(path.relative_to(place)): path.read_bytes() for path in others}
        return FullVersion(stored_names(place), files)


@dataclass(slots=True, kw_only=True)
class VersionWriter:
    """Writes versions to a directory.

    Args:
        directory: directory of the published versions.
        save_weights: writes all weights to a directory in a data type (None: as they are).
        buckets: yields the parameters in host memory, in buckets of at most the given number of bytes.
        dtype: data type of published weights, that of the engines.
        full_every: number of versions from one with all weights to the next; 1: no differences.
        note: prints a message.
    """

    directory: Path
    save_weights: Callable[..., object]
    buckets: Callable[[int], Iterator[dict[str, Tensor]]] = lambda max_bytes: iter(())
    dtype: str = "float32"
    full_every: int = 1
    note: Callable[[str], None] = lambda message: None
    _last: Path | None = None
    _tensors: dict[str, VersionTensor] = field(default_factory=dict)
    """The last version if it was written as a difference; one with all weights is read from its files."""
    _checksum: int = 0
    _differences: int = 0
    """Differences since the last version with all weights."""
    _pause: int = 0
    """Versions for which no difference is computed, as one did not pay."""
    _sent: list[Bucket] = field(default_factory=list)
    """Copies of the buckets that were sent last, in host memory."""
    _spare: list[Tensor] = field(default_factory=list)
    """Memory of earlier copies."""
    _full: FullVersion | None = None
    """The version that `write_full` wrote last, if its weights were sent."""
    _refusals: int = 0
    _full_s: float = math.inf
    """Seconds of the last publish of all weights."""
    _timed: bool = True
    """Whether no difference was computed in vain in the current publish."""

    def write(self, version: int) -> Path:
        """Write a version, as a difference if that pays, and return its directory. Raises OSError."""
        return self.write_delta(version) or self.write_full(version)

    def write_delta(self, version: int) -> Path | None:
        """Write a version as a difference and return its directory; None if all weights are to be written.

        Raises OSError.
        """
        if self.full_every > 1 and self._last is not None and self._differences < self.full_every - 1:
            if self._pause == 0:
                place = self._write_delta(version)
                if place is not None:
                    return place
                self._pause, self._timed = self.full_every, False
            self._pause -= 1
        return None

    def write_full(self, version: int) -> Path:
        """Write a version with all weights. Raises OSError."""
        place = self.directory / VERSION.format(version)
        self.save_weights(place, dtype=self.dtype)
        self._on_full(place)
        self._full = FullVersion.read(place) if self._sent else None
        return place

    def begin_sending(self) -> None:
        """Forget the copies of `keep`, whose memory is used again."""
        self._spare, self._sent = [bucket.data for bucket in self._sent], []

    def keep(self, bucket: Bucket) -> None:
        """Keep a copy of a bucket that is sent, for `write_sent`."""
        data = bucket.data
        if data.device != HOST:
            # Pinned memory, which is slow to allocate, makes the copy as fast as the bus.
            same = [number for number, spare in enumerate(self._spare) if spare.shape == data.shape]
            pinned = (
                self._spare.pop(same[0]) if same else torch.empty_like(data, device=HOST, pin_memory=True)
            )
            data = pinned.copy_(data)
        self._sent.append(bucket._replace(data=data))

    def place(self, version: int) -> Path:
        """Return the directory of a version with all weights."""
        return self.directory / VERSION.format(version)

    def can_write_sent(self) -> bool:
        """Whether what was sent are the tensors of the version that `write_full` wrote last."""
        sent = {name for bucket in self._sent for name in bucket.fields["names"]}
        return self._full is not None and sent == self._full.names

    def write_sent(self, version: int) -> Path:
        """Write the weights that were sent, a file for each bucket, and the config and the tokenizer of the
        version that `write_full` wrote last. The policy may change meanwhile. Raises OSError."""
        assert self._full is not None
        place = self.place(version)
        with replacing(place) as partial:
            # Copies, one bucket at a time: safetensors refuses tensors that share memory.
            shards = ({name: value.clone() for name, value in one.tensors().items()} for one in self._sent)
            write_shards(partial, shards, len(self._sent))
            checksum.write(partial, sum(bucket.checksum for bucket in self._sent) % checksum.MODULUS)
            for name, content in self._full.others.items():
                (partial / name).parent.mkdir(exist_ok=True)
                (partial / name).write_bytes(content)
        self._on_full(place)
        return place

    def _on_full(self, place: Path) -> None:
        # Not kept: the tensors are as large as the model, and a following difference can read them from the
        # files.
        self._last, self._tensors, self._differences = place, {}, 0

    def write_candidate(self, version: int) -> Path:
        """Write all weights of a version that is tested first. Raises OSError."""
        place = self.directory / CANDIDATE.format(version)
        self.save_weights(place, dtype=self.dtype)
        return place

    def promote(self, candidate: Path, version: int) -> Path:
        """Make a candidate a version; the next one has all weights, as engines had others than the last."""
        self._last = None
        self._tensors = {}
        return candidate.replace(self.directory / VERSION.format(version))

    def on_refused(self, reason: str) -> None:
        """Count a difference that an engine refused; repeated refusals switch differences off."""
        self._refusals += 1
        self._timed = False
        self.note(f"an engine refused a difference of weights and loads all of them instead: {reason}")
        if self._refusals >= MOST_REFUSALS and self.full_every > 1:
            self.full_every = 1
            self.note("no further differences are published, as engines refused them repeatedly")

    def on_published(self, seconds: float) -> None:
        """Compare the time of the last publish, from writing to loading, with that of all weights.

        The time does not count if it was also spent on a difference that was not used.
        """
        timed, self._timed = self._timed, True
        if not timed:
            return
        if not self._differences:
            self._full_s = seconds
        elif seconds > self._full_s + SLACK_S:
            self._pause = self.full_every

    def on_loaded(self) -> None:
        self._refusals = 0

    def prune(self, kept: int, roots: Iterable[Path]) -> None:
        """Remove candidates, incomplete versions, and all but the last `kept` versions and those that `roots`
        need."""
        for candidate in self.directory.glob("candidate-v*"):
            shutil.rmtree(candidate, ignore_errors=True)
        used = {path for root in roots for path in _used_by(root)}
        # By length first: `v1000000` follows `v999999`.
        published = sorted(self.directory.glob("v*"), key=lambda path: (len(path.name), path.name))
        for old in [*published[:-kept], *self.directory.glob("delta-v*")]:
            if old not in used:
                shutil.rmtree(old, ignore_errors=True)

    def _write_delta(self, version: int) -> Path | None:
        """Write the difference from the last version; None if it does not pay."""
        assert self._last is not None
        news = self._current()
        if not self._tensors:
            widths = {name: item.width for name, item in news.items()}
            try:
                self._tensors = delta_files.read_tensors(self._last, widths)
            except WeightsError as error:  # a family whose files hold other tensors than the model
                self.full_every = 1
                self.note(f"no differences are published: {error}")
                return None
            self._checksum = delta_files.checksum_of(self._tensors)
        blobs = delta_files.encode(self._tensors, news)
        size = sum(map(len, blobs.values()))
        if size > WORTHWHILE * sum(item.data.size for item in news.values()):
            return None
        checksum = delta_files.checksum_of(news)
        place = self.directory / DELTA.format(version)
        delta_files.write(place, self._last, self._checksum, checksum, news, blobs)
        self._last, self._tensors, self._checksum = place, news, checksum
        self._differences += 1
        return place

    def _current(self) -> dict[str, VersionTensor]:
        """Return a copy of the current parameters in the published data type."""
        dtype = getattr(torch, self.dtype)
        tensors = {}
        for bucket in self.buckets(BUCKET_BYTES):
            for name, value in bucket.items():
                # A copy: in the same type `to` returns the parameter's own memory, which the next step
                # changes.
                data = bytes_of(value.to(dtype, copy=True))
                tensors[name] = VersionTensor(data, dtype.itemsize)
        return tensors


def _used_by(weights: Path) -> set[Path]:
    """Return the directories that a version needs."""
    try:
        return set(delta_files.chain(weights))
    except WeightsError:  # it is damaged, and engines get the next version
        return {weights}
