from __future__ import annotations

import errno
import hashlib
import itertools
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nep.checkpoint.files import Entry, sha256_of, write_tensors, write_whole


def test_what_is_written_is_safetensors(tmp_path: Path) -> None:
    tensors = {
        "a/b[0:2]": torch.randn(2, 3, dtype=torch.float64),
        "float": torch.randn(5),
        "strided": torch.randn(4, 6)[:, ::2],
        "none": torch.empty(0, 4),
        "integers": torch.arange(7),
        "half": torch.randn(3).bfloat16(),
        "scalar": torch.tensor(2.5),
    }
    path = tmp_path / "x.safetensors"
    size, digest = write_tensors(path, [Entry.of(name, tensor) for name, tensor in tensors.items()])
    assert path.stat().st_size == size
    assert sha256_of(path) == digest == hashlib.sha256(path.read_bytes()).hexdigest()
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_a_tensor_is_made_when_its_turn_comes(tmp_path: Path) -> None:
    made = []

    def entry(index: int) -> Entry:
        def make() -> torch.Tensor:
            made.append((index, (tmp_path / "x.unfinished").stat().st_size))
            return torch.zeros(1000)

        return Entry(str(index), torch.float32, (1000,), make)

    write_tensors(tmp_path / "x", [entry(index) for index in range(3)])
    sizes = [size for _, size in made]
    assert [b - a for a, b in itertools.pairwise(sizes)] == [4000, 4000]


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may be longer than 10,000 bytes: the nearest thing to a full disk that needs no rights."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.usefixtures("small_files")
def test_no_space_leaves_nothing_and_the_file_before(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_tensors(path, [Entry.of("small", torch.ones(3))])
    with pytest.raises(OSError) as caught:
        write_tensors(path, [Entry.of("large", torch.zeros(100_000))])
    assert caught.value.errno == errno.EFBIG
    assert os.listdir(tmp_path) == ["x"]
    assert load_file(path)["small"].sum() == 3


def test_a_write_that_takes_less_than_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        """A raw file that takes seven bytes at a time."""

        def __init__(self, path: Path):
            self._file = path.open("wb", buffering=0)

        def __enter__(self) -> Slow:
            return self

        def __exit__(self, *error: object) -> None:
            self._file.close()

        def write(self, data: memoryview) -> int:
            return self._file.write(data[:7])

        def fileno(self) -> int:
            return self._file.fileno()

    opened = Path.open
    with monkeypatch.context() as patch:
        path = tmp_path / "x"
        slow = lambda self, *mode, **options: _slow(self)  # noqa: E731

        def _slow(self: Path) -> Slow:
            patch.setattr(Path, "open", opened)
            return Slow(self)

        patch.setattr(Path, "open", slow)
        size, digest = write_whole(path, [memoryview(bytes(range(100)))])
    assert size == 100 and path.read_bytes() == bytes(range(100))
    assert digest == sha256_of(path)
