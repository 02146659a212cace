"""Corpora and batches."""

import collections
import contextlib
import dataclasses
import errno
import math
import os
import resource
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from experiments.data import batches as datas
from experiments.data import text as corpora
from experiments.errors import UserError
from tests.experiments.conftest import REPOSITORY, write_corpus


@pytest.fixture
def data(shared, config):
    return config.data


def take(iterator, count):
    return [next(iterator)["tokens"] for _ in range(count)]


def equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_tokens_are_the_bytes_of_the_files(data, shared):
    corpus = datas.open_corpus(data)
    texts = collections.defaultdict(dict)
    for source in (corpus.train, corpus.validation):
        for index in range(len(source)):
            record = source[index]
            texts[record["path"].decode()][index] = record["text"]
    files = {path.name: path.read_bytes() for path in (shared / "corpus").iterdir()}
    assert set(texts) == set(files)
    for name, parts in texts.items():
        assert collections.Counter(b"".join(parts.values())) == collections.Counter(files[name])
        assert all(part in files[name] and len(part) <= 4096 for part in parts.values())
    tokens = datas.tokens_of(data.vocabulary, {"text": b"ab\xff"})["tokens"]
    assert tokens.tolist() == [97, 98, 255, data.vocabulary.separator]


def test_split_is_by_file_and_does_not_depend_on_other_files():
    names = [f"file{i}" for i in range(500)]
    train, validation = corpora.split_by_file(names)
    assert not set(train) & set(validation) and sorted(train + validation) == sorted(names)
    assert 10 <= len(validation) <= 45  # 5 % of 500
    few = corpora.split_by_file(names[:250])
    assert set(few[0]) <= set(train) and set(few[1]) <= set(validation)
    assert [len(part) for part in corpora.split_by_file(["a", "b"])] == [1, 1]


def test_pieces():
    text = b"".join(b"x" * n + b"\n" for n in (10, 4000, 300, 9000, 0, 5)) + b"end"
    parts = list(corpora.pieces(text, 4096))
    assert b"".join(piece for _, piece in parts) == text
    assert all(text[start : start + len(piece)] == piece for start, piece in parts)
    assert all(0 < len(piece) <= 4096 for _, piece in parts)
    assert parts[0][1].endswith(b"\n")
    assert list(corpora.pieces(b"", 4096)) == []


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 10, 97, 4096])
def test_pieces_divide_no_character(most):
    """A cut character would be two replacement characters for every tokenizer but bytes."""
    for words in ("日本語" * 1500, "naïve déjà " * 800, "a𝕏b" * 1500, "𝕏日é" * 500):
        text = words.encode()
        parts = list(corpora.pieces(text, most))
        assert b"".join(piece for _, piece in parts) == text
        assert all(text[start : start + len(piece)] == piece for start, piece in parts)
        assert all(0 < len(piece) <= most for _, piece in parts)
        if most >= 4:
            assert "".join(piece.decode() for _, piece in parts) == words
            assert len(parts) <= len(text) // (most - 3) + 1
    for text in (b"\xff" * 100, b"\x80" * 100, b"x" * 50 + b"\xe9" * 9 + b"x" * 50):  # no UTF-8
        parts = list(corpora.pieces(text, most))
        assert b"".join(piece for _, piece in parts) == text and all(piece for _, piece in parts)


def test_order_is_fixed_by_the_seed(data):
    corpus = datas.open_corpus(data)
    one, again, other = (take(datas.train_batches(corpus, data, seed), 20) for seed in (0, 0, 1))
    assert equal(one, again)
    assert not equal(one, other)
    assert one[0].shape == (data.batch, data.seq + 1) and one[0].dtype == np.int32
    validation = [datas.validation_batches(corpus, data, 3) for _ in range(2)]
    assert equal(*validation) and len(validation[0]) == 3


@pytest.mark.parametrize("read", [0, 7, 600])
def test_position_can_be_saved(data, read):
    """Also before the first record is used up, and in a later window of the shuffle."""
    corpus = datas.open_corpus(data)
    iterator = datas.train_batches(corpus, data, 0)
    take(iterator, read)
    state = iterator.get_state()
    expected = take(iterator, 30)
    fresh = datas.train_batches(corpus, data, 0)
    take(fresh, 2)
    fresh.set_state(state)
    assert equal(take(fresh, 30), expected)


class Counting:
    """Records of one sequence each, and how many were read."""

    read = 0

    def __len__(self):
        return 10**5

    def __getitem__(self, index):
        self.read += 1
        return {"tokens": np.full(9, index, np.int32)}


def test_the_next_window_is_read_while_batches_of_this_one_are_taken():
    """Else steps that take less time than reading a window wait for it."""
    source, data = Counting(), corpora.Config(seq=8, batch=64)
    corpus = datas.Corpus("counted", source, source, data.vocabulary, {})
    with contextlib.closing(datas.train_batches(corpus, data, 0)) as batches:
        next(batches)
        end = time.monotonic() + 60
        while source.read < 2 * datas.SHUFFLE_WINDOW and time.monotonic() < end:
            time.sleep(0.02)
    assert source.read >= 2 * datas.SHUFFLE_WINDOW


def test_prepared_once_and_anew_when_files_change(tmp_path, capsys):
    write_corpus(tmp_path / "text", files=3)
    data = corpora.Config(corpus=str(tmp_path / "text"), root=str(tmp_path / "data"), seq=16, batch=2)
    first = corpora.prepare(data)
    assert capsys.readouterr().err == "text: reading the text, once\n"
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("*") if path.is_file()}
    assert corpora.prepare(data).data_dir == first.data_dir
    assert capsys.readouterr().err == ""
    assert stamps == {path: path.stat().st_mtime_ns for path in stamps}
    (tmp_path / "text" / "new.txt").write_text("something else\n")
    assert corpora.prepare(data).data_dir != first.data_dir
    assert first.info.file_format.value == "array_record"


def test_several_prepare_it_at_once(tmp_path):
    """As the runs of an ablation do that start at the same time."""
    (tmp_path / "text").mkdir()
    for name in "abc":
        (tmp_path / f"text/{name}.txt").write_text(f"{name}\n" * 4000)
    data, start = (
        corpora.Config(corpus=str(tmp_path / "text"), root=str(tmp_path / "data")),
        threading.Barrier(4),
    )

    def prepared(_):
        start.wait()
        return [record["text"] for record in corpora.prepare(data).as_data_source("train")]

    with ThreadPoolExecutor(4) as pool:
        first, *others = pool.map(prepared, range(4))
    assert first and all(other == first for other in others)


def test_a_disk_without_room(tmp_path):
    """ArrayRecord has an error of its own, which commands showed as a traceback."""
    write_corpus(tmp_path / "text", files=4, words=20000)
    data = corpora.Config(corpus=str(tmp_path / "text"), root=str(tmp_path / "data"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, before[1]))
    try:
        with pytest.raises(OSError, match="local_text/text-") as raised:
            data.records()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert raised.value.errno == errno.EFBIG and not list(tmp_path.rglob("*.array_record*"))
    assert len(data.records().train) > 1


def test_another_prepares_it_as_it_is_looked_for(tmp_path, monkeypatch):
    """Between a builder, which reads its splits as it is made, and the question whether there are some."""
    (tmp_path / "text").mkdir()
    for name in "abc":
        (tmp_path / f"text/{name}.txt").write_text(f"{name}\n" * 4000)
    data = corpora.Config(corpus=str(tmp_path / "text"), root=str(tmp_path / "data"))
    made, first = corpora.LocalText.__init__, []

    def late(builder, **options):
        made(builder, **options)
        if not first:
            first.append(builder)
            corpora.prepare(data)

    monkeypatch.setattr(corpora.LocalText, "__init__", late)
    assert set(corpora.prepare(data).info.splits) == {"train", "validation"}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no non-empty file that matches"),
        ({"a.txt": "", "b.txt": ""}, "no non-empty file that matches"),
        ({"a.bin": "x", "b.bin": "y"}, r"matches \*.txt, \*.md"),
        ({".hidden/a.txt": "x", ".b.txt": "y"}, "no non-empty file that matches"),
        ({"a.txt": "x"}, r"one file that matches .*\(a.txt\).*by file"),
    ],
)
def test_empty_corpus(tmp_path, files, message):
    for name, text in files.items():
        path = tmp_path / "text" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "text").mkdir(exist_ok=True)
    with pytest.raises(UserError, match=message):
        corpora.prepare(corpora.Config(corpus=str(tmp_path / "text"), root=str(tmp_path / "data")))
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("name", [b"caf\xe9.txt", b"a\xff/b.txt"])
def test_a_file_name_that_is_no_utf8(tmp_path, name):
    write_corpus(tmp_path / "text", files=2)
    path = os.path.join(os.fsencode(tmp_path / "text"), name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write("words")
    with pytest.raises(UserError, match=r"name is no UTF-8: b'.*(e9|xff).*Rename it"):
        corpora.prepare(corpora.Config(corpus=str(tmp_path / "text"), root=str(tmp_path / "data")))
    assert not (tmp_path / "data").exists()


def test_a_link_to_another_file_is_no_second_one(tmp_path):
    """It could be held out while the file is trained on. Links to files elsewhere are files like others."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "b.txt").write_text("own")
    (tmp_path / "elsewhere.txt").write_text("other")
    for name in ("a", "c", "d"):
        (tmp_path / "text" / f"{name}.txt").symlink_to("b.txt")
    for name in ("e", "f"):
        (tmp_path / "text" / f"{name}.txt").symlink_to(tmp_path / "elsewhere.txt")
    assert corpora.local_files(tmp_path / "text", corpora.Config()) == ["b.txt", "e.txt"]


def test_files_that_are_no_text(tmp_path):
    """Random bytes have control characters; text in any encoding of bytes has hardly one."""
    draw = np.random.default_rng(0)
    write_corpus(tmp_path / "text", files=2)
    (tmp_path / "text" / "latin.txt").write_bytes("Käse, Öl und Brötchen\n\x1b[1m\f".encode("latin-1") * 99)
    data = corpora.Config(corpus=str(tmp_path / "text"), root=str(tmp_path / "data"))
    corpora.check_text(tmp_path / "text", corpora.local_files(tmp_path / "text", data))
    for n in range(3):
        (tmp_path / "text" / f"weights{n}.txt").write_bytes(draw.bytes(500))
    with pytest.raises(UserError, match=r"3 of 6 files .* are no text.*weights0.txt"):
        corpora.prepare(data)
    assert not (tmp_path / "data").exists()
    folder = corpora.Path(corpora.sysconfig.get_paths()["stdlib"])
    corpora.check_text(folder, corpora.stdlib_files(folder))


@pytest.mark.parametrize("pattern", ["/etc/*", "", "."])
def test_patterns_that_are_of_no_files_below(pattern):
    with pytest.raises(UserError, match=r"data\.patterns are of files below data\.corpus"):
        corpora.Config(patterns=("*.txt", pattern))


def test_patterns(tmp_path):
    write_corpus(tmp_path / "text", files=2)
    for path in (tmp_path / "text").iterdir():
        path.rename(path.with_suffix(".tex"))
    data = corpora.Config(corpus=str(tmp_path / "text"), root=str(tmp_path / "data"), patterns=("*.tex",))
    assert set(corpora.prepare(data).info.splits) == {"train", "validation"}


def test_statistics():
    # "abab...": one bit alone, nothing left once the byte before is known.
    record = [{"text": b"ab" * 1000}]
    found = datas.statistics(record)
    assert found["bytes"] == 2000 and found["records"] == 1
    assert found["order0_nats"] == pytest.approx(math.log(2))
    assert found["order1_nats"] == pytest.approx(0, abs=1e-9)
    uniform = [{"text": np.random.default_rng(0).integers(0, 4, 200_000).astype(np.uint8).tobytes()}]
    assert datas.statistics(uniform)["order1_nats"] == pytest.approx(math.log(4), rel=1e-3)


@pytest.mark.slow
def test_standard_library_without_tensorflow(tmp_path):
    code = (
        "import sys; from experiments.data import batches as data; from experiments.data.text import Config\n"
        f"data.COMPRESSED_BYTES = 10**5; d = Config(root={str(tmp_path)!r}); c = data.open_corpus(d)\n"
        "next(data.train_batches(c, d, 0)); data.validation_batches(c, d, 2)\n"
        "assert 'tensorflow' not in sys.modules\n"
        "print(c.statistics['bytes'], c.statistics['order1_nats'])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    size, order1 = map(float, result.stdout.split())
    assert size > 1e6 and 2.0 < order1 < 3.0
    assert "ownload" not in result.stdout + result.stderr


def test_standard_library_leaves_out_packages_and_tests():
    folder = corpora.Path(corpora.sysconfig.get_paths()["stdlib"])
    files = corpora.stdlib_files(folder)
    assert "argparse.py" in files
    assert not [file for file in files if corpora.STDLIB_WITHOUT & set(file.split("/"))]
    with pytest.raises(UserError, match=r"--data\.corpus FOLDER"):
        corpora.stdlib_files(folder / "site-packages" / "nothing")


def test_a_split_without_records(data):
    corpus = datas.open_corpus(data)
    small = dataclasses.replace(corpus, train=[])
    with pytest.raises(UserError, match=r"The training split of \w+ has no records. Add text"):
        datas.train_batches(small, data, 0)
