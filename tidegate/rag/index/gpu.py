"""A vector index on GPUs, where `faiss-gpu` is installed and sees some.

FAISS' own cloner shares the index out: for one GPU after the other it takes that GPU's rows from the index,
which is mapped from its file, and copies them over. So the host never holds more than one shard, and a cell
index keeps all its cells on each GPU with a part of each cell's vectors. Numbers are kept in float16.

Reasoned from FAISS' interface, not run: the machines on which Tidegate is tested have no GPU.
"""

from __future__ import annotations

import logging
from types import ModuleType
from typing import TYPE_CHECKING

from tidegate.rag.index.index_types import IndexKind

if TYPE_CHECKING:
    import faiss

MAX_K = 2048
"""Documents that a search on a GPU gives at most."""

log = logging.getLogger("tidegate.rag")


def on_gpus(library: ModuleType, index: faiss.Index, kind: IndexKind) -> faiss.Index | None:
    """The index in shards over all GPUs that CUDA_VISIBLE_DEVICES leaves; None where it stays on the CPU."""
    # FAISS for CPUs has the call, but not the options: it counts no GPUs.
    count = int(library.get_num_gpus())
    if count == 0:
        return None
    if kind == "sq8":
        log.warning("FAISS has no sq8 on GPUs: the index stays on the CPU; flat and ivf-sq8 would not")
        return None
    options = library.GpuMultipleClonerOptions()
    options.shard = True
    options.useFloat16 = True
    log.info("sharing the index out to %d GPUs", count)
    shared: faiss.Index = library.index_cpu_to_all_gpus(index, co=options)
    return shared
