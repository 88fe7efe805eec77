"""Reads and writes the files of annotation tools, as documents, one by one.

    for document in formats.read("train.jsonl", format="prodigy"): ...
    formats.write(documents, "tasks.json", format="label-studio")

The formats are CoNLL columns ('conll'), CoNLL-U ('conllu'), Prodigy's and doccano's JSON lines ('prodigy',
'doccano'), Label Studio's tasks ('label-studio'), brat's standoff ('brat'), spaCy's DocBin ('spacy') and
plain lines ('text'). Besides files, there are pandas DataFrames and Hugging Face datasets."""

from structgp.data.formats.file_formats import FORMATS, read, write
from structgp.data.formats.format_parts import Reading
from structgp.data.formats.frames import from_pandas, to_pandas
from structgp.data.formats.hf_datasets import from_dataset, to_dataset

__all__ = ["FORMATS", "Reading", "from_dataset", "from_pandas", "read", "to_dataset", "to_pandas", "write"]
