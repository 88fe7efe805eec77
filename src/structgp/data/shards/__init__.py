"""Corpora that do not fit in memory: encoded once, kept on disk in shards, read batch by batch.

``write(sequences, folder)`` encodes sequences and their labels without holding them all, and returns the
shards that :meth:`structgp.StructuredGPClassifier.fit` takes; ``read(folder)`` returns them again later."""

from structgp.data.shards.folder import Shards, read
from structgp.data.shards.shard_examples import ShardBatches, ShardedExamples, read_sharded
from structgp.data.shards.write import write

__all__ = ["ShardBatches", "ShardedExamples", "Shards", "read", "read_sharded", "write"]
