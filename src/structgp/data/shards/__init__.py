"""Corpora that do not fit in memory: encoded once, kept on disk in shards, read batch by batch.

``write(sequences, folder)`` goes through pairs (x, y) without holding them, and gives the shards that
:meth:`structgp.StructuredGPClassifier.fit` takes; ``read(folder)`` gives the same another day.
"""

from structgp.data.shards.batches import ShardBatches
from structgp.data.shards.examples import ShardedExamples, read_sharded
from structgp.data.shards.layout import Shards, read
from structgp.data.shards.write import write

__all__ = ["ShardBatches", "ShardedExamples", "Shards", "read", "read_sharded", "write"]
