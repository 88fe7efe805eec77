"""Files that annotation tools read and write, as documents and back, one by one.

    for document in formats.read("train.jsonl", format="prodigy"): ...
    formats.write(documents, "tasks.json", format="label-studio")

The formats are CoNLL columns ('conll'), CoNLL-U ('conllu'), Prodigy's and doccano's JSON lines ('prodigy',
'doccano'), Label Studio's tasks ('label-studio'), brat's standoff ('brat') and plain lines ('text')."""

from structgp.data.formats.file_formats import FORMATS, read, write
from structgp.data.formats.format_parts import Reading

__all__ = ["FORMATS", "Reading", "read", "write"]
