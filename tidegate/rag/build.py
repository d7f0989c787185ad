"""From a corpus to an index: documents, vectors, index, manifest, each stage going on where it was killed.

DIR/manifest.json names the generation, a directory DIR/g-… with all other files; it is replaced last, so
that a reader finds the old index or the new one, whole.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from tidegate.rag import corpus as corpora
from tidegate.rag.encode import Encoder, load_encoder
from tidegate.rag.files import digest
from tidegate.rag.index import FILE as INDEX_FILE
from tidegate.rag.index import build_index
from tidegate.rag.ingest import ingest
from tidegate.rag.manifest import EncoderEntry, FileEntry, Manifest, versions
from tidegate.rag.source import source_files
from tidegate.rag.vectors import Vectors

SHARD = 4096
VECTORS = "vectors"


@dataclass(frozen=True, slots=True)
class Plan:
    """What to build: the corpus' files or directories, where to, with which encoder."""

    sources: Sequence[Path]
    out: Path
    encoder: str
    threads: int
    shard: int = SHARD


def build(plan: Plan, say: Callable[[str], None] = print) -> Manifest:
    """Build the index; what an earlier, killed build of the same plan has done is kept.

    Raises ConfigError and CorpusError; the index that was there before stays.
    """
    files = source_files(plan.sources)
    encoder = load_encoder(plan.encoder, threads=plan.threads)
    generation = _generation(plan, files)
    directory = plan.out / generation
    directory.mkdir(parents=True, exist_ok=True)
    corpus = ingest(files, directory, plan.shard, lambda done, _: say(f"read {done:,} documents"))
    vectors = Vectors(directory / VECTORS, len(corpus), encoder.dimension, plan.shard)
    vectors.encode(corpus, encoder, lambda done, total: say(f"encoded {done:,} of {total:,}"))
    index = build_index(vectors, directory, plan.threads)
    shutil.rmtree(vectors.directory)
    manifest = Manifest(
        generation=generation,
        documents=len(corpus),
        corpus=digest(directory / corpora.DATA),
        encoder=_entry(encoder),
        index=index,
        files=tuple(FileEntry.of(directory, name) for name in (*corpora.FILES, INDEX_FILE)),
        versions=versions(),
    )
    manifest.write(plan.out)
    return manifest


def _entry(encoder: Encoder) -> EncoderEntry:
    return EncoderEntry(
        name=encoder.name,
        dimension=encoder.dimension,
        metric=encoder.metric,
        query_prefix=encoder.query_prefix,
        passage_prefix=encoder.passage_prefix,
        probe=(),
    )


def _generation(plan: Plan, files: Sequence[Path]) -> str:
    """The same for the same settings and the same files, by their names, sizes and times."""
    stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    text = orjson.dumps([stats, plan.encoder, plan.shard])
    return f"g-{hashlib.blake2b(text, digest_size=6).hexdigest()}"
