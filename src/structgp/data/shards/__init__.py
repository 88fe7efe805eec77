"""Corpora that do not fit in memory: encoded once, kept on disk in shards, read batch by batch::

shards = write(sequences, folder)     # (x, y) pairs, gone through twice or so, never held
StructuredGPClassifier().fit(shards)
shards = read(folder)                 # another day
"""

from structgp.data.shards.batches import ShardBatches
from structgp.data.shards.examples import ShardedExamples, read_sharded
from structgp.data.shards.layout import Shards, read
from structgp.data.shards.write import write

__all__ = ["ShardBatches", "ShardedExamples", "Shards", "read", "read_sharded", "write"]
