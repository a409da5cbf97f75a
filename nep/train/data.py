"""Text as training data: a corpus of bytes, cut into windows, drawn by global sample index.

Which text a sample holds is a pure function of (corpus, seq_len, seed, global index). So any slot can read
any sample, a step that is replayed reads what it read before, and another number of slots changes who reads a
sample but not which samples a step consists of. `sample_hash` gives each index a number whose sums prove it.
"""

import functools
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

# A token is a byte.
VOCAB_SIZE = 256
# Every 64th window is held out for validation.
VALIDATION_STRIDE = 64

_MASK_64 = (1 << 64) - 1


class SampleSource(Protocol):
    """What the trainer asks of a data set. Training samples count from 0 without end: epochs follow on."""

    vocab_size: int
    seq_len: int
    digest: str  # sha256 of the content, hex
    num_train_samples: int  # in one epoch
    num_validation_samples: int

    def train_batch(self, first_index: int, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Tokens and next tokens, each int64 [count, seq_len], of `count` samples from `first_index` on."""

    def validation_batch(self, first: int, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The same from the held-out samples, which do not repeat."""


class TextCorpus:
    """Bytes in memory, once, and their digest.

    Args:
        content: The text; kept without a copy and made read-only.
        name: Where it is from, for messages.

    Raises:
        ValueError: There is no text.
    """

    def __init__(self, content: bytes | bytearray, *, name: str) -> None:
        if not content:
            raise ValueError(f"data ({name}) holds no text; name text files or folders that do with --data")
        self.name = name
        self.text: npt.NDArray[np.uint8] = np.frombuffer(content, dtype=np.uint8)
        self.text.flags.writeable = False
        self.digest = hashlib.sha256(content).hexdigest()

    @property
    def num_bytes(self) -> int:
        return self.text.size

    @classmethod
    def standard_library(cls) -> "TextCorpus":
        """The source text of the running interpreter's standard library: data that every machine has.

        Equal Python releases give equal text: installed packages, tests and the files that record how and
        where the interpreter was built are left out.

        Raises:
            ValueError: The interpreter has no source text on disk.
        """
        root = Path(sysconfig.get_path("stdlib"))
        files = sorted(_standard_library_files(root), key=lambda path: path.relative_to(root).as_posix())
        if not files:
            raise ValueError(f"standard library ({root}) has no *.py files; name text files with --data")
        return cls(_joined(files), name="standard library")

    @classmethod
    def from_paths(cls, paths: Sequence[str | os.PathLike[str]]) -> "TextCorpus":
        """The text of files and folders, in the order given.

        A folder stands for its files in the order of their relative paths, subfolders included; hidden files
        and files with a zero byte (hardly text) are passed over there, but taken when named themselves.
        Between two files stands a newline, so one file alone keeps the digest that sha256sum prints.

        Raises:
            ValueError: A path is missing or unreadable, or nothing is left.
        """
        files: list[Path] = []
        for path in map(Path, paths):
            if path.is_dir():
                inside = [file for file in _visible_files(path) if _is_text(file)]
                if not inside:
                    raise ValueError(f"data folder ({path}) holds no text files; name another with --data")
                files += sorted(inside, key=lambda file: file.relative_to(path).as_posix())
            elif path.exists():
                files.append(path)
            else:
                raise ValueError(f"data path ({path}) does not exist; name text files or folders with --data")
        return cls(_joined(files), name=", ".join(map(str, paths)))

    @classmethod
    def generated(cls, seed: int, num_bytes: int) -> "TextCorpus":
        """Made-up prose that a small model can learn: a fixed lexicon, and few words that may follow each.

        Equal arguments give equal bytes on every machine and with every numpy (golden files rely on it).

        Raises:
            ValueError: num_bytes is not positive.
        """
        if num_bytes < 1:
            raise ValueError(f"num_bytes ({num_bytes}) must be positive; ask for at least one byte")
        return cls(_generated_text(seed, num_bytes), name=f"generated text, seed {seed}")

    def samples(self, *, seq_len: int, seed: int) -> "TextSamples":
        """The corpus as training and validation samples."""
        return TextSamples(self, seq_len=seq_len, seed=seed)


class TextSamples:
    """A corpus as samples: a `SampleSource`.

    The text is cut into windows of seq_len + 1 bytes (inputs, and the same moved on by one as targets) that
    do not overlap, so no byte is in a training and in a validation window. Each epoch goes through all
    training windows once, in an order drawn from (seed, epoch).

    Args:
        corpus: The text.
        seq_len: Tokens per sample.
        seed: Orders the training windows. The validation windows and their order do not depend on it, so runs
            with different seeds can be compared.

    Raises:
        ValueError: seq_len is not positive, the seed is out of range, or the text is too short for one
            validation window.
    """

    vocab_size = VOCAB_SIZE

    def __init__(self, corpus: TextCorpus, *, seq_len: int, seed: int) -> None:
        if seq_len < 1:
            raise ValueError(f"seq_len ({seq_len}) must be positive; give a sample at least one token")
        if not 0 <= seed <= _MASK_64:
            raise ValueError(f"seed ({seed}) must be in [0, 2**64); choose another")
        num_windows, needed = corpus.num_bytes // (seq_len + 1), VALIDATION_STRIDE * (seq_len + 1)
        if num_windows < VALIDATION_STRIDE:
            raise ValueError(
                f"data ({corpus.name}, {corpus.num_bytes} bytes) is too short for seq_len ({seq_len}), which "
                f"takes at least {needed} bytes; give more text or a smaller seq_len"
            )
        self.corpus, self.digest = corpus, corpus.digest
        self.seq_len, self.seed = seq_len, seed
        self._windows = corpus.text[: num_windows * (seq_len + 1)].reshape(num_windows, seq_len + 1)
        self.num_validation_samples = num_windows // VALIDATION_STRIDE
        self.num_train_samples = num_windows - self.num_validation_samples

    def train_windows(self, first_index: int, count: int) -> npt.NDArray[np.int64]:
        """Which windows of the text the samples are, by global index: int64 [count]."""
        if first_index < 0 or count < 0:
            raise ValueError(f"samples ({first_index}, count {count}) must not be negative; count from 0")
        indices = np.arange(first_index, first_index + count, dtype=np.int64)
        epochs, places = np.divmod(indices, self.num_train_samples)
        among_train = np.empty_like(indices)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            order = epoch_permutation(self.seed, int(epoch), self.num_train_samples)
            among_train[chosen] = order[places[chosen]]
        # The last of every VALIDATION_STRIDE windows is held out.
        return among_train + among_train // (VALIDATION_STRIDE - 1)

    def validation_windows(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """Which windows of the text the validation samples are: int64 [count]."""
        if first < 0 or count < 0 or first + count > self.num_validation_samples:
            raise ValueError(
                f"validation samples ({first}, count {count}) must lie within the "
                f"{self.num_validation_samples} held out; ask for fewer, give more text or a smaller seq_len"
            )
        # Shuffled, so that the first few are from all over the text; by a fixed seed, whatever the run's.
        order = epoch_permutation(0, _MASK_64, self.num_validation_samples)
        return order[first : first + count] * VALIDATION_STRIDE + VALIDATION_STRIDE - 1

    def sample(self, index: int) -> npt.NDArray[np.uint8]:
        """The training sample with this global index: uint8 [seq_len + 1]."""
        window: npt.NDArray[np.uint8] = self._windows[self.train_windows(index, 1)[0]]
        return window

    def train_batch(self, first_index: int, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Tokens and targets, int64 [count, seq_len]; see `SampleSource`."""
        return self._batch(self.train_windows(first_index, count))

    def validation_batch(self, first: int, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Tokens and targets, int64 [count, seq_len]; ValueError beyond `num_validation_samples`."""
        return self._batch(self.validation_windows(first, count))

    def _batch(self, windows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        chosen = self._windows[windows].astype(np.int64)
        return np.ascontiguousarray(chosen[:, :-1]), np.ascontiguousarray(chosen[:, 1:])


def load_text(data: Sequence[str | os.PathLike[str]] = ()) -> TextCorpus:
    """What `--data` means: the files and folders named, or the standard library's source where none is."""
    return TextCorpus.from_paths(data) if data else TextCorpus.standard_library()


@functools.lru_cache(maxsize=4)
def epoch_permutation(seed: int, epoch: int, num_samples: int) -> npt.NDArray[np.int64]:
    """The order of one epoch: a permutation of range(num_samples), read-only.

    Sorts the raw output of Philox (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011), which
    numpy keeps as it is, unlike Generator.permutation; a job may resume under another numpy.
    """
    keys = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(num_samples)
    order = np.argsort(keys, kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order


def sample_hash(index: int) -> int:
    """A 64-bit number of a global sample index, for a ledger that adds them modulo 2**64.

    SplitMix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", 2014) is a bijection: no
    two samples share a hash, and a lost or repeated sample changes the sum.
    """
    return int(_splitmix64(np.array([index], dtype=np.uint64))[0])


def expected_hash(first: int, count: int) -> int:
    """The ledger's entry for samples first ... first + count: the sum of their hashes modulo 2**64."""
    return int(_splitmix64(np.arange(first, first + count, dtype=np.uint64)).sum(dtype=np.uint64))


def _splitmix64(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The first output of SplitMix64 seeded with each entry (array arithmetic wraps at 2**64, as it must)."""
    mixed = state + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _standard_library_files(root: Path) -> Iterator[Path]:
    """Its *.py files without installed packages, tests, and records of the interpreter's own build."""
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in left_out and not name.startswith("config-")]
        for name in names:
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                yield Path(folder, name)


def _visible_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name != "__pycache__"]
        yield from (path for name in names if not name.startswith(".") and (path := Path(folder, name)).is_file())


def _is_text(path: Path) -> bool:
    return b"\0" not in _read(path)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"data file ({path}) cannot be read: {error.strerror}; correct that or leave it out"
        ) from error


def _joined(files: Iterable[Path]) -> bytearray:
    """The files' content with newlines between, in one growing buffer (not a list and then its sum)."""
    content = bytearray()
    for number, path in enumerate(files):
        if number:
            content += b"\n"
        content += _read(path)
    return content


def _generated_text(seed: int, num_bytes: int) -> bytes:
    """Sentences from a lexicon of 64 words; four may follow each word, the first of them most often."""
    letters = np.random.Philox(key=np.array([seed & _MASK_64, 0], dtype=np.uint64))
    syllables = [consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aeiou"]

    def draw(count: int, below: int) -> list[int]:
        return [int(value) for value in letters.random_raw(count) % np.uint64(below)]

    words = ["".join(syllables[i] for i in draw(2 + number % 3, len(syllables))) for number in range(64)]
    followers = [draw(4, len(words)) for _ in words]
    # Of 16 draws 10 take the first follower, 3 the second, 2 the third, 1 the fourth.
    choice = [0] * 10 + [1] * 3 + [2] * 2 + [3]
    parts: list[str] = []
    length, word = 0, 0
    while length < num_bytes:
        sentence: list[str] = []
        for pick in draw(6 + draw(1, 7)[0], len(choice)):
            word = followers[word][choice[pick]]
            sentence.append(words[word])
        parts.append(" ".join(sentence).capitalize() + ".\n")
        length += len(parts[-1])
    return "".join(parts).encode("ascii")[:num_bytes]
