import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nep.train.data import (
    TextCorpus,
    TextSamples,
    epoch_permutation,
    expected_hash,
    load_text,
    sample_hash,
)


@pytest.fixture(scope="module")
def samples() -> TextSamples:
    return TextCorpus.generated(3, 20_000).samples(seq_len=15, seed=7)


def test_bytes_are_tokens_and_targets_are_the_next_ones(samples):
    tokens, targets = samples.train_batch(5, 4)
    assert tokens.dtype == targets.dtype == np.int64
    assert tokens.shape == targets.shape == (4, 15)
    text = bytes(samples.corpus.text)
    for row, next_row in zip(tokens, targets, strict=True):
        assert list(row[1:]) == list(next_row[:-1])
        assert bytes(row.astype(np.uint8)) + bytes(next_row[-1:].astype(np.uint8)) in text
    assert samples.vocab_size == 256


def test_a_batch_is_its_samples_whoever_reads_them(samples):
    # Across the end of an epoch too: a step takes what comes next.
    first = samples.num_train_samples - 5
    tokens, targets = samples.train_batch(first, 12)
    for place in range(12):
        window = samples.sample(first + place)
        assert (tokens[place] == window[:-1]).all()
        assert (targets[place] == window[1:]).all()
    again = TextCorpus.generated(3, 20_000).samples(seq_len=15, seed=7)
    halves = [again.train_batch(first + 6, 6)[0], again.train_batch(first, 6)[0]]
    assert (np.concatenate(halves[::-1]) == tokens).all()


@given(
    seq_len=st.integers(1, 40),
    extra=st.integers(0, 5_000),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 3),
)
def test_an_epoch_is_every_training_window_once_and_no_held_out_one(seq_len, extra, seed, epoch):
    corpus = TextCorpus(bytes(64 * (seq_len + 1) + extra), name="zeros")
    samples = corpus.samples(seq_len=seq_len, seed=seed)
    size = samples.num_train_samples
    train = samples.train_windows(epoch * size, size)
    held_out = samples.validation_windows(0, samples.num_validation_samples)
    assert sorted([*train, *held_out]) == list(range(corpus.num_bytes // (seq_len + 1)))
    assert all(window % 64 == 63 for window in held_out)


def test_order_depends_on_seed_and_epoch_but_validation_on_neither(samples):
    size = samples.num_train_samples
    other = samples.corpus.samples(seq_len=15, seed=8)
    first_epoch = samples.train_windows(0, size)
    assert not (first_epoch == samples.train_windows(size, size)).all()
    assert not (first_epoch == other.train_windows(0, size)).all()
    assert (samples.validation_batch(0, 3)[0] == other.validation_batch(0, 3)[0]).all()


def test_order_is_pinned():
    # Not numpy's to change: runs that resume with another release must go on in the same order.
    assert epoch_permutation(1, 2, 10).tolist() == [4, 2, 0, 6, 1, 5, 9, 8, 7, 3]


def test_empty_batches_have_their_shape(samples):
    for tokens, targets in (samples.train_batch(9, 0), samples.validation_batch(0, 0)):
        assert tokens.shape == targets.shape == (0, 15)


def test_validation_does_not_wrap(samples):
    number = samples.num_validation_samples
    assert samples.validation_batch(0, number)[0].shape == (number, 15)
    with pytest.raises(ValueError, match=f"must lie within the {number} held out"):
        samples.validation_batch(1, number)


@pytest.mark.parametrize(
    ("seq_len", "seed", "message"),
    [
        (0, 0, r"seq_len \(0\) must be positive"),
        (15, -1, r"seed \(-1\) must be in"),
        (400, 0, r"20000 bytes\) is too short for seq_len \(400\), which takes at least 25664 bytes"),
    ],
)
def test_sizes_that_cannot_be_are_refused(samples, seq_len, seed, message):
    with pytest.raises(ValueError, match=message):
        samples.corpus.samples(seq_len=seq_len, seed=seed)


def test_the_shortest_text_that_suffices():
    assert TextCorpus(bytes(64 * 16), name="x").samples(seq_len=15, seed=0).num_validation_samples == 1
    with pytest.raises(ValueError, match="too short"):
        TextCorpus(bytes(64 * 16 - 1), name="x").samples(seq_len=15, seed=0)


class TestGenerated:
    def test_is_pinned(self):
        corpus = TextCorpus.generated(0, 200_000)
        assert corpus.num_bytes == 200_000
        assert corpus.digest == "861b0fe0f4024c1ef2502c03633a6dbd7d5aa697749da74b2c9ae2550f5c57a3"

    def test_depends_on_the_seed_and_a_shorter_one_is_a_beginning(self):
        text = bytes(TextCorpus.generated(4, 1000).text)
        assert text[:300] == bytes(TextCorpus.generated(4, 300).text)
        assert text != bytes(TextCorpus.generated(5, 1000).text)

    def test_has_structure_to_learn(self):
        """The byte is far easier to guess from the two before it than from how often it occurs."""
        text = TextCorpus.generated(0, 100_000).text.astype(np.int64)

        def entropy(symbols):
            share = np.unique(symbols, return_counts=True)[1] / len(symbols)
            return -(share * np.log2(share)).sum()

        pairs = text[:-2] * 256 + text[1:-1]
        conditional = entropy(pairs * 256 + text[2:]) - entropy(pairs)
        assert entropy(text) > 3.5
        assert conditional < 0.6 * entropy(text)

    def test_no_bytes_are_refused(self):
        with pytest.raises(ValueError, match=r"num_bytes \(0\)"):
            TextCorpus.generated(0, 0)


class TestPaths:
    def test_one_file_keeps_the_digest_of_its_bytes(self, tmp_path):
        (tmp_path / "a.txt").write_bytes(b"abc")
        corpus = TextCorpus.from_paths([tmp_path / "a.txt"])
        assert corpus.digest == hashlib.sha256(b"abc").hexdigest()
        assert corpus.text.dtype == np.uint8
        assert not corpus.text.flags.writeable

    def test_folders_in_path_order_without_hidden_and_binary_files(self, tmp_path):
        for name, content in {
            "b.txt": b"2", "a/z.txt": b"1", "c/d/e": b"3", ".git/x": b"-", "a/.h": b"-", "d.bin": b"\0-",
            "__pycache__/m.pyc": b"-",
        }.items():  # fmt: skip
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(content)
        assert bytes(TextCorpus.from_paths([tmp_path]).text) == b"1\n2\n3"
        # The order of arguments counts, and a file that is named is taken as it is.
        named = TextCorpus.from_paths([tmp_path / "d.bin", tmp_path / "a"])
        assert bytes(named.text) == b"\0-\n1"

    def test_missing_empty_and_unreadable_are_refused_with_the_remedy(self, tmp_path):
        with pytest.raises(ValueError, match=r"missing\) does not exist; name .* --data"):
            TextCorpus.from_paths([tmp_path / "missing"])
        with pytest.raises(ValueError, match="holds no text files; name another with --data"):
            TextCorpus.from_paths([tmp_path])
        (tmp_path / "empty").touch()
        with pytest.raises(ValueError, match=r"holds no text; name .* --data"):
            TextCorpus.from_paths([tmp_path / "empty"])
        (tmp_path / "loop").symlink_to(tmp_path / "loop")
        with pytest.raises(ValueError, match="loop"):
            TextCorpus.from_paths([tmp_path / "loop"])


class TestStandardLibrary:
    def test_default_is_source_text_without_tests_and_packages(self):
        corpus = load_text()
        text = bytes(corpus.text)
        assert corpus.digest == TextCorpus.standard_library().digest
        assert corpus.num_bytes > 5_000_000
        assert b"def namedtuple(" in text
        assert b"class TestCase(" in text  # unittest itself stays ...
        assert b"class BaseExceptionReportingTests" not in text  # ... test.test_traceback does not
        assert b"class DistInfoDistribution" not in text  # nor pip's vendored packages

    def test_an_interpreter_without_source_is_refused(self, tmp_path, monkeypatch):
        monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
        with pytest.raises(ValueError, match=r"has no \*.py files; name text files with --data"):
            TextCorpus.standard_library()

    def test_what_was_built_where_is_left_out(self, tmp_path, monkeypatch):
        left_out = "test/x.py a/tests/x.py site-packages/x.py _sysconfigdata_x.py config-3.11/x.py a/data.txt"
        for name in ("b.py", "a/c.py", *left_out.split()):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(name)
        monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
        assert bytes(TextCorpus.standard_library().text) == b"a/c.py\nb.py"


class TestLedger:
    def test_hash_is_splitmix64(self):
        # The generator's published first outputs for these seeds.
        assert sample_hash(0) == 0xE220A8397B1DCDAF
        assert sample_hash(1234567) == 6457827717110365317

    @given(first=st.integers(0, 2**40), count=st.integers(0, 200))
    def test_a_range_is_the_sum_of_its_samples(self, first, count):
        total = sum(sample_hash(index) for index in range(first, first + count)) % 2**64
        assert expected_hash(first, count) == total

    def test_a_lost_or_repeated_sample_shows(self):
        whole = expected_hash(100, 16)
        for index in range(100, 116):
            assert (whole - sample_hash(index)) % 2**64 != whole
        for index in range(101, 116):  # one in the place of another
            assert (whole - sample_hash(index) + sample_hash(100)) % 2**64 != whole
