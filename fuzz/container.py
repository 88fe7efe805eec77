"""An independent reader and writer of safetensors files.

Such a file has 8 bytes with the size of a JSON header, the header, and the numbers. This writer allows what
the real one refuses, and signs a file as structgp does."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

DTYPES = {"F64": "torch.float64", "F32": "torch.float32", "I64": "torch.int64", "U8": "torch.uint8"} | {
    "BOOL": "torch.bool",
    "F16": "torch.float16",
    "I32": "torch.int32",
}
"""Maps types in a file to their names in torch, which are part of the digest."""


@dataclass
class Tensor:
    dtype: str
    shape: list[int]
    data: bytes


@dataclass
class Container:
    """The content of a file. metadata : texts by name. tensors : tensors by name, in the order of the
    file."""

    metadata: dict[str, str]
    tensors: dict[str, Tensor]

    @staticmethod
    def read(content: bytes) -> Container:
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        numbers = content[8 + size :]
        metadata = header.pop("__metadata__", {})
        tensors = {}
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            tensors[name] = Tensor(entry["dtype"], entry["shape"], numbers[start:stop])
        return Container(metadata, tensors)

    def write(self) -> bytes:
        header: dict[str, Any] = {"__metadata__": self.metadata}
        offset = 0
        for name, tensor in self.tensors.items():
            stop = offset + len(tensor.data)
            header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [offset, stop]}
            offset = stop
        text = json.dumps(header).encode("utf-8", errors="surrogatepass")
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text + b"".join(t.data for t in self.tensors.values())

    def sign(self, key: str) -> None:
        """Sets the digest that matches the content. key : 'structgp' for models, 'checkpoint' for
        checkpoints, whose digest does not include names, types and shapes."""
        digest = hashlib.sha256(self.metadata[key].encode("utf-8", errors="surrogatepass"))
        for name in sorted(self.tensors):
            tensor = self.tensors[name]
            if key == "structgp":
                dtype = DTYPES.get(tensor.dtype, tensor.dtype)
                digest.update(f"{name} {dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.data)
        self.metadata["digest"] = digest.hexdigest()
