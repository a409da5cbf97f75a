"""Files that are there whole or not at all, and the safetensors format as a stream.

The format (https://huggingface.co/docs/safetensors, "Format"): 8 bytes little-endian length of the header, the header
in JSON with dtype, shape and offsets of each tensor, then the tensors' bytes without gaps. Written here rather than by
the package because a chunk is as large as memory allows: its tensors go to the file one by one, hashed on the way,
and a full disk is an `OSError`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
}
_BLOCK_BYTES = 1 << 22


class Entry(NamedTuple):
    """One tensor of a file; `make` is called when its turn comes."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, key: str, tensor: torch.Tensor) -> Entry:
        return cls(key, tensor.dtype, tuple(tensor.shape), lambda: tensor)


def write_tensors(path: Path, entries: Sequence[Entry]) -> tuple[int, str]:
    """Write a safetensors file and make sure that it is on the disk.

    Returns:
        Its size in bytes and its sha256.

    Raises:
        OSError: for one, the disk is full; nothing is left of the file then.
    """
    header: dict[str, object] = {}
    offset = 0
    for entry in entries:
        size = math.prod(entry.shape) * entry.dtype.itemsize
        header[entry.key] = {
            "dtype": _DTYPES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": (offset, offset + size),
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def blocks() -> Iterator[memoryview]:
        yield memoryview(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            flat = entry.make().detach().contiguous().view(-1).view(torch.uint8)
            yield memoryview(flat.numpy())

    return write_whole(path, blocks())


def write_whole(path: Path, blocks: Iterable[memoryview]) -> tuple[int, str]:
    """Write a file under another name, flush it to the disk, then give it its name.

    Returns:
        Its size in bytes and its sha256.

    Raises:
        OSError: nothing is left of the file.
    """
    unfinished = path.with_name(path.name + ".unfinished")
    digest, size = hashlib.sha256(), 0
    try:
        with unfinished.open("wb", buffering=0) as file:
            for block in blocks:
                for start in range(0, len(block), _BLOCK_BYTES):
                    part = block[start : start + _BLOCK_BYTES]
                    digest.update(part)
                    size += len(part)
                    while len(part):  # a raw file may take less than it is given
                        part = part[file.write(part) or 0 :]
            os.fsync(file.fileno())
        os.replace(unfinished, path)
        flush_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise
    return size, digest.hexdigest()


def flush_folder(folder: Path) -> None:
    """Make names in a folder survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
