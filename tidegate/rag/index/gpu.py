"""Vector index on GPUs, if `faiss-gpu` is installed and finds any.

FAISS' cloner shards the index: for each GPU it copies that GPU's rows from the memory-mapped index, so that
the host holds at most one shard. Every GPU has all inverted lists of an IVF index with a part of the vectors.
Numbers are stored in float16.

Untested: no GPU was available.
"""

from __future__ import annotations

import logging
from types import ModuleType
from typing import TYPE_CHECKING

from tidegate.rag.index.index_types import IndexKind

if TYPE_CHECKING:
    import faiss

MAX_K = 2048
"""Maximum number of documents per query on a GPU."""

log = logging.getLogger("tidegate.rag")


def on_gpus(library: ModuleType, index: faiss.Index, kind: IndexKind) -> faiss.Index | None:
    """Shards the index over all visible GPUs; returns None if it stays on the CPU."""
    # `faiss-cpu` has this function, which returns 0, but not the options below.
    count = int(library.get_num_gpus())
    if count == 0:
        return None
    if kind == "sq8":
        log.warning(
            "FAISS does not support sq8 on GPUs: the index stays on the CPU; use flat or ivf-sq8 for GPUs"
        )
        return None
    options = library.GpuMultipleClonerOptions()
    options.shard = True
    options.useFloat16 = True
    log.info("sharding the index over %d GPUs", count)
    sharded: faiss.Index = library.index_cpu_to_all_gpus(index, co=options)
    return sharded
