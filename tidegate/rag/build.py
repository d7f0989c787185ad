"""From a corpus to an index: documents, vectors, index, manifest, each stage going on where it was killed.

DIR/manifest.json names the generation, a directory DIR/g-… with all other files; it is replaced last, so
that a reader finds the old index or the new one, whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from tidegate.errors import ConfigError, CorpusError, StorageError
from tidegate.failpoints import reach
from tidegate.rag.corpus import corpus
from tidegate.rag.corpus.corpus import Corpus
from tidegate.rag.corpus.ingest import ingest
from tidegate.rag.corpus.source import Extent, extent, source_files
from tidegate.rag.encoders.encoder import Dtype, Encoder, load_encoder
from tidegate.rag.encoders.hashing import HashEncoder
from tidegate.rag.encoders.prefixes import EncoderPrefixes
from tidegate.rag.estimate import check_disk, estimate, memory_warning
from tidegate.rag.index import bm25, encoder_check, vector_index
from tidegate.rag.index.bm25 import build_bm25, require_bm25s
from tidegate.rag.index.encoder_check import write_probe
from tidegate.rag.index.index_types import IndexKind, check_kind, choose
from tidegate.rag.index.manifest import NAME, EncoderEntry, FileEntry, IndexEntry, Manifest, versions
from tidegate.rag.index.recall import K, measure
from tidegate.rag.index.vector_index import build_index, require_faiss
from tidegate.rag.index.vectors import Vectors
from tidegate.rag.progress import BuildProgress

SHARD = 4096
_VECTORS = "vectors"
_GENERATION = re.compile(r"g-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True)
class Plan:
    """What to build: the corpus' files or directories, where to, and what of it.

    `encoder` None: no vectors. `kind` None: the one that fits the corpus. `prefixes` None: the encoder's own.
    `shard`: documents that a killed build may have to read or encode again.
    """

    sources: Sequence[Path]
    out: Path
    encoder: str | None = None
    bm25: bool = False
    kind: IndexKind | None = None
    threads: int = 1
    device: str = "cpu"
    dtype: Dtype = "float32"
    prefixes: EncoderPrefixes | None = None
    replace: bool = False
    shard: int = SHARD

    def generation(self, files: Sequence[Path]) -> str:
        """The same for the same index of the same files, the encoder's where it is a directory among them, by
        their names, sizes and times: what another encoder did at its place is never gone on with."""
        read = [*files, *_files_of(self.encoder)]
        stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in read]
        prefixes = None if self.prefixes is None else [self.prefixes.query, self.prefixes.passage]
        settings = [self.encoder, self.bm25, self.kind, self.dtype, prefixes, self.shard]
        return f"g-{hashlib.blake2b(orjson.dumps([stats, settings]), digest_size=6).hexdigest()}"


def _files_of(encoder: str | None) -> list[Path]:
    """Those of a model's directory; none of an encoder that has no directory, or comes from the hub."""
    if encoder is None or encoder == HashEncoder.name:
        return []
    return sorted(one for one in Path(encoder).rglob("*") if one.is_file())


def build(plan: Plan, news: BuildProgress) -> Manifest:
    """Build the index; what an earlier, killed build of the same plan has done is kept.

    Raises ConfigError, CorpusError and StorageError; the index that was there before stays.
    """
    if plan.threads < 1:
        raise ConfigError(f"--threads {plan.threads}: at least one is needed")
    if plan.encoder is None and not plan.bm25:
        raise ConfigError("an index needs an encoder, BM25 or both: give --encoder, --bm25")
    files = source_files(plan.sources)
    generation = plan.generation(files)
    try:
        plan.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"--out {plan.out} cannot be made a directory: {error.strerror}") from None
    with _alone(plan.out):
        manifest = _standing(plan, generation, news)
        if manifest is None:
            manifest = _Build(plan, generation, news).run(files)
            manifest.write(plan.out)
        _tidy(plan.out, generation)
    return manifest


class _Build:
    """One build of one generation."""

    def __init__(self, plan: Plan, generation: str, news: BuildProgress) -> None:
        self.plan = plan
        self.news = news
        self.generation = generation
        self.directory = plan.out / generation

    def run(self, files: Sequence[Path]) -> Manifest:
        plan = self.plan
        encoder = self._encoder()
        if plan.bm25:
            require_bm25s()
        found = extent(files)
        self._announce(found, encoder)
        self.directory.mkdir(exist_ok=True)
        read = ingest(files, self.directory, plan.shard, found.documents, self.news.stage("read"))
        if plan.bm25:
            build_bm25(read, self.directory, self.news.stage("BM25"))
        entry = None if encoder is None else self._index(read, encoder)
        reach("rag.index")
        return Manifest(
            generation=self.generation,
            documents=len(read),
            corpus=FileEntry.of(self.directory, corpus.DATA).blake2b,
            encoder=None if encoder is None else _entry(encoder),
            index=entry,
            bm25=plan.bm25,
            files=tuple(FileEntry.of(self.directory, name) for name in self._files()),
            versions=versions(),
        )

    def _encoder(self) -> Encoder | None:
        plan = self.plan
        if plan.encoder is None:
            return None
        require_faiss()
        return load_encoder(
            plan.encoder, threads=plan.threads, device=plan.device, dtype=plan.dtype, prefixes=plan.prefixes
        )

    def _announce(self, found: Extent, encoder: Encoder | None) -> None:
        """What it will take, before any of it is done."""
        kind, dimension = None, 0
        if encoder is not None:
            dimension = encoder.dimension
            kind = self._kind(found.documents, dimension, say=False)
            if encoder.prefixes != EncoderPrefixes():
                before = encoder.prefixes
                self.news.say(f"prefixes: {before.query!r} for queries, {before.passage!r} for passages")
        needed = estimate(found, kind, dimension, self.plan.bm25)
        self.news.say(needed.sentence())
        check_disk(self.plan.out, needed)
        warning = memory_warning(needed)
        if warning is not None:
            self.news.say(f"warning: {warning}")

    def _kind(self, count: int, dimension: int, *, say: bool) -> IndexKind:
        if self.plan.kind is not None:
            return self.plan.kind
        choice = choose(count, dimension)
        if say:
            self.news.say(f"index {choice.kind}: {choice.reason}")
        return choice.kind

    def _index(self, read: Corpus, encoder: Encoder) -> IndexEntry:
        plan = self.plan
        kind = self._kind(len(read), encoder.dimension, say=True)
        check_kind(kind, len(read))
        vectors = Vectors(self.directory / _VECTORS, len(read), encoder.dimension, plan.shard)
        vectors.encode(read, encoder, self.news.stage("encoded"))
        if not (self.directory / vector_index.FILE).is_file():
            build_index(kind, vectors, self.directory, plan.threads, self.news)
        write_probe(encoder, self.directory)
        nprobe, recall = measure(kind, read, vectors, encoder, self.directory, plan.threads, self.news)
        self.news.say(f"recall@{K} against Flat: {recall:.3f}" + (f" (nprobe {nprobe})" if nprobe else ""))
        return IndexEntry(kind=kind, nprobe=nprobe, recall={K: recall})

    def _files(self) -> Iterator[str]:
        yield from corpus.FILES
        if self.plan.encoder is not None:
            yield from (vector_index.FILE, encoder_check.FILE)
        if self.plan.bm25:
            yield from bm25.FILES


def _entry(encoder: Encoder) -> EncoderEntry:
    return EncoderEntry(
        name=encoder.name,
        dimension=encoder.dimension,
        metric=encoder.metric,
        query_prefix=encoder.prefixes.query,
        passage_prefix=encoder.prefixes.passage,
    )


def _standing(plan: Plan, generation: str, news: BuildProgress) -> Manifest | None:
    """The manifest of this very index where it is built already, and whole.

    Raises ConfigError where there is another one that must not be replaced.
    """
    if not (plan.out / NAME).exists():
        return None
    try:
        manifest = Manifest.read(plan.out)
    except CorpusError:
        if plan.replace:
            return None
        raise
    if manifest.generation == generation:
        return _whole(manifest, plan.out, news)
    if plan.replace:
        return None
    raise ConfigError(
        f"{plan.out} holds another index already ({manifest.documents:,} documents,"
        f" {', '.join(manifest.modes)}): choose another --out, or put this one in its place with --replace"
    )


def _whole(manifest: Manifest, directory: Path, news: BuildProgress) -> Manifest | None:
    """This manifest, if its files are as they were written; otherwise they are removed, to be built again."""
    try:
        manifest.check_files(directory, whole=True)
    except CorpusError as error:
        news.say(f"{error}; that is done now")
        (directory / NAME).unlink()
        if (directory / manifest.generation).is_dir():
            shutil.rmtree(directory / manifest.generation)
        return None
    news.say(f"{directory} is built already: the same files, the same settings")
    return manifest


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Raises ConfigError where another build is at work in the directory."""
    with (directory / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another build is at work in {directory}: wait for it, or end it") from None
        yield


def _tidy(directory: Path, generation: str) -> None:
    """Remove the vectors that the index was made of, and what other builds left. Who reads keeps reading."""
    others = (
        one for one in directory.iterdir() if _GENERATION.fullmatch(one.name) and one.name != generation
    )
    for finished in (directory / generation / _VECTORS, *others):
        if finished.is_dir():
            shutil.rmtree(finished)
