"""Builds an index from a corpus in resumable stages: documents, vectors, index, manifest.

DIR/manifest.json names the generation, a directory DIR/g-… with all other files. It is replaced last, so that
a reader finds either the complete old index or the complete new one.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import orjson

from tidegate.errors import ConfigError, CorpusError, StorageError
from tidegate.failpoints import reach
from tidegate.progress import Progress
from tidegate.rag.corpus import corpus
from tidegate.rag.corpus.corpus import Corpus
from tidegate.rag.corpus.ingest import ingest
from tidegate.rag.corpus.source import count_rows, source_files
from tidegate.rag.encoders import (
    WORD_RULES,
    Dtype,
    Encoder,
    EncoderPrefixes,
    HashEncoder,
    load_encoder,
)
from tidegate.rag.index import bm25, vector_index
from tidegate.rag.index.bm25 import build_bm25, require_bm25s
from tidegate.rag.index.index_types import IndexKind, check_kind, choose
from tidegate.rag.index.manifest import (
    CHECK_VECTORS,
    NAME,
    EncoderEntry,
    FileEntry,
    IndexEntry,
    Manifest,
    versions,
    write_check_vectors,
)
from tidegate.rag.index.recall import TARGET, K, measure
from tidegate.rag.index.vector_index import build_index, require_faiss
from tidegate.rag.index.vectors import Vectors
from tidegate.service.directory_lock import DirectoryLock

SHARD = 4096
_VECTORS = "vectors"
_GENERATION = re.compile(r"g-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True)
class Plan:
    """Options of a build.

    `encoder` None: no vectors. `kind` None: chosen by the size of the corpus. `prefixes` None: the encoder's
    own. `recall` is the target of recall@10, None for `TARGET`. `shard` is the number of documents that are
    read or encoded again after an interruption, at most.
    """

    sources: Sequence[Path]
    out: Path
    encoder: str | None = None
    bm25: bool = False
    kind: IndexKind | None = None
    threads: int = 1
    device: str = "cpu"
    dtype: Dtype = "float32"
    _: KW_ONLY
    prefixes: EncoderPrefixes | None = None
    recall: float | None = None
    replace: bool = False
    shard: int = SHARD

    def __post_init__(self) -> None:
        if self.recall is not None and not 0 < self.recall <= 1:
            raise ConfigError(f"--recall {self.recall:g}: it must be more than 0 and at most 1")
        if self.encoder is None and (self.kind or self.recall):
            raise ConfigError("--index and --recall apply to vectors: give --encoder, too")

    def generation(self, files: Sequence[Path]) -> str:
        """Returns the generation's name: a hash of settings and of names, sizes and times of all files.

        The files of an encoder's directory are included: a build never resumes that of another encoder.
        """
        inputs = [*files, *_files_of(self.encoder)]
        stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in inputs]
        prefixes = None if self.prefixes is None else [self.prefixes.query, self.prefixes.passage]
        settings = [self.encoder, self.bm25, self.kind, self.dtype, prefixes, self.shard, self.recall]
        return f"g-{hashlib.blake2b(orjson.dumps([stats, settings]), digest_size=6).hexdigest()}"


def _files_of(encoder: str | None) -> list[Path]:
    """Returns the files of an encoder's local directory; empty if it has none."""
    if encoder is None or encoder == HashEncoder.name:
        return []
    return sorted(path for path in Path(encoder).rglob("*") if path.is_file())


def build(plan: Plan, progress: Progress, encoder: Encoder | None = None) -> Manifest:
    """Builds the index; resumes an interrupted build of the same plan.

    `encoder` is used in place of the one that is loaded by the plan's name.

    Raises ConfigError, CorpusError and StorageError; an existing index then stays.
    """
    if plan.threads < 1:
        raise ConfigError(f"--threads {plan.threads}: it must be at least 1")
    if plan.encoder is None and not plan.bm25:
        raise ConfigError("an index needs an encoder, BM25 or both: give --encoder, --bm25 or both")
    if plan.encoder is not None and plan.device != "cpu":
        from tidegate.devices import find_device  # imports torch

        find_device("--device", plan.device)  # before the corpus is read
    files = source_files(plan.sources)
    generation = plan.generation(files)
    try:
        plan.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"--out {plan.out}: cannot create the directory: {error.strerror}") from None
    with DirectoryLock(plan.out, "tidegate rag build"):
        manifest = _existing(plan, generation, progress)
        if manifest is None:
            try:
                manifest = _Build(plan, generation, progress, encoder).run(files)
                manifest.write(plan.out)
            except OSError as error:
                raise StorageError(
                    f"--out {plan.out}: cannot write the index: {error.strerror or error}; make room "
                    "or make it writable, then run the same command again, which resumes the build"
                ) from error
        _remove_leftovers(plan.out, generation)
    return manifest


class _Build:
    """Build of one generation."""

    def __init__(
        self, plan: Plan, generation: str, progress: Progress, encoder: Encoder | None = None
    ) -> None:
        self.plan = plan
        self.progress = progress
        self.encoder = encoder
        self.generation = generation
        self.directory = plan.out / generation

    def run(self, files: Sequence[Path]) -> Manifest:
        plan = self.plan
        encoder = self.encoder
        if plan.encoder is not None:
            require_faiss()
            encoder = encoder or load_encoder(
                plan.encoder, threads=plan.threads, device=plan.device, dtype=plan.dtype,
                prefixes=plan.prefixes,
            )  # fmt: skip
        if plan.bm25:
            require_bm25s()
        if encoder is not None and (prefixes := encoder.prefixes) != EncoderPrefixes():
            self.progress.print(
                f"prefixes: {prefixes.query!r} for queries, {prefixes.passage!r} for passages"
            )
        self.directory.mkdir(exist_ok=True)
        documents = ingest(files, self.directory, plan.shard, count_rows(files), self.progress.stage("read"))
        if plan.bm25:
            build_bm25(documents, self.directory, self.progress.stage("BM25"))
        entry = None if encoder is None else self._index(documents, encoder)
        reach("rag.index")
        return Manifest(
            generation=self.generation,
            documents=len(documents),
            corpus=FileEntry.of(self.directory, corpus.DATA).blake2b,
            encoder=None if encoder is None else EncoderEntry.of(encoder),
            index=entry,
            bm25=plan.bm25,
            word_rules=WORD_RULES,
            files=tuple(FileEntry.of(self.directory, name) for name in self._files(entry)),
            versions=versions(),
        )

    def _index(self, documents: Corpus, encoder: Encoder) -> IndexEntry:
        plan = self.plan
        kind = plan.kind
        if kind is None:
            choice = choose(len(documents), encoder.dimension)
            self.progress.print(f"index {choice.kind}: {choice.reason}")
            kind = choice.kind
        check_kind(kind, len(documents))
        vectors = Vectors(self.directory / _VECTORS, len(documents), encoder.dimension, plan.shard)
        vectors.encode(documents, encoder, self.progress.stage("encoded"))
        if not all((self.directory / name).is_file() for name in vector_index.files(kind)):
            build_index(kind, vectors, self.directory, plan.threads, self.progress)
        write_check_vectors(encoder, self.directory)
        target = plan.recall or TARGET
        nprobe, recall = measure(
            kind, documents, vectors, encoder, self.directory, plan.threads, target, self.progress
        )
        entry = IndexEntry(kind=kind, nprobe=nprobe, recall={K: recall}, target=target)
        self.progress.print(f"against exact search: {entry.summary}")
        if entry.warning is not None:
            self.progress.print(f"warning: {entry.warning}")
        return entry

    def _files(self, entry: IndexEntry | None) -> Iterator[str]:
        yield from corpus.FILES
        if entry is not None:
            yield from (*vector_index.files(entry.kind), CHECK_VECTORS)
        if self.plan.bm25:
            yield from bm25.FILES


def _existing(plan: Plan, generation: str, progress: Progress) -> Manifest | None:
    """Returns the manifest if this index is already built and intact; removes it if it is damaged.

    Raises ConfigError if there is another index and `replace` is not set.
    """
    if not (plan.out / NAME).exists():
        return None
    try:
        manifest = Manifest.read(plan.out)
    except CorpusError:
        if plan.replace:
            return None
        raise
    if manifest.generation != generation:
        if plan.replace:
            return None
        raise ConfigError(
            f"{plan.out} already holds another index ({manifest.documents:,} documents,"
            f" {', '.join(manifest.modes)}): choose another --out, or replace the index with --replace"
        )
    try:
        manifest.check_files(plan.out, full=True)
    except CorpusError as error:
        progress.print(f"{error}; it is now built again")
        (plan.out / NAME).unlink()
        if (plan.out / generation).is_dir():
            shutil.rmtree(plan.out / generation)
        return None
    progress.print(f"{plan.out} is already built from the same files with the same settings")
    return manifest


def _remove_leftovers(directory: Path, generation: str) -> None:
    """Removes intermediate vectors and other generations; processes that have them open can still read."""
    others = (
        path for path in directory.iterdir() if _GENERATION.fullmatch(path.name) and path.name != generation
    )
    for leftover in (directory / generation / _VECTORS, *others):
        if leftover.is_dir():
            shutil.rmtree(leftover)
