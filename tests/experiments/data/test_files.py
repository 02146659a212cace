"""Documents of parquet, JSON Lines and ArrayRecord; datasets of TFDS; mixtures."""

import dataclasses
import gzip
import json
import shutil

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from array_record.python import array_record_module
from tensorflow_datasets.proto import tf_example_pb2

from experiments import config as configs
from experiments.data import batches, files, mix, tfds
from experiments.errors import UserError

DOCUMENTS = [f"document {n}, ünïcode\nand a second line " * 3 for n in range(60)]


def texts_of(source) -> list[str]:
    return [source[n]["text"].decode() for n in range(len(source))]


def json_lines(documents, field="text") -> bytes:
    return "".join(json.dumps({"id": n, field: text}) + "\n" for n, text in enumerate(documents)).encode()


def zstd(content: bytes) -> bytes:
    return pyarrow.compress(content, "zstd", asbytes=True)


def write_array_record(path, records):
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


def example(text: str) -> bytes:
    made = tf_example_pb2.Example()
    made.features.feature["text"].bytes_list.value.append(text.encode())
    made.features.feature["score"].float_list.value.append(0.5)
    return made.SerializeToString()


def write(folder):
    """The documents in every format, ten in each file, and an empty one."""
    parts = [DOCUMENTS[n : n + 10] for n in range(0, 60, 10)]
    table = pyarrow.table({"id": range(11), "text": [*parts[0], None]})
    pyarrow.parquet.write_table(table, folder / "0.parquet", row_group_size=4)
    (folder / "1.jsonl").write_bytes(b"\n" + json_lines([*parts[1], "", None]) + b"\n")
    (folder / "2.json.gz").write_bytes(gzip.compress(json_lines(parts[2])))
    halves = [zstd(json_lines(parts[3][n : n + 5])) for n in (0, 5)]
    (folder / "3.jsonl.zst").write_bytes(b"".join(halves))
    write_array_record(folder / "4.array_record-00000-of-00001", map(example, parts[4]))
    write_array_record(folder / "5.arrayrecord", map(example, parts[5]))


def test_every_document_of_every_format_is_in_one_split(tmp_path):
    (tmp_path / "in").mkdir()
    write(tmp_path / "in")
    data = files.Config(files=str(tmp_path / "in/*"), root=str(tmp_path / "data"), validation=0.2, batch=2)
    records = data.records()
    train, validation = texts_of(records.train), texts_of(records.validation)
    assert sorted(train + validation) == sorted(DOCUMENTS) and 3 <= len(validation) <= 24
    assert sorted(validation) == sorted(d for d in DOCUMENTS if files.share_of(d.encode()) < 0.2)
    assert records.name == "in" and records.train[0]["path"].startswith(str(tmp_path / "in").encode())
    corpus = batches.open_corpus(data)
    assert corpus.statistics["bytes"] == sum(map(len, (t.encode() for t in train)))
    short = dataclasses.replace(data, files=str(tmp_path / "in/0.parquet"), piece=50)
    assert max(map(len, texts_of(short.records().train))) <= 50
    assert short.records().name == "0"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"text": "a"}\nno json\n', "a.jsonl, line 2 is no JSON object with a field 'text'"),
        (
            "a.jsonl",
            b'{"text": "a"}\n["text"]\n',
            "line 2 is no JSON object with a field 'text'.*data.column",
        ),
        ("a.jsonl", b'{"text": 3}\n', "line 1: the field 'text' must be a text, got 3: write --data.column"),
        ("a.jsonl.gz", b"no gzip", "a.jsonl.gz cannot be read; it is damaged"),
        ("a.jsonl.zst", b"no zstd", "a.jsonl.zst cannot be read; it is damaged"),
        ("a.jsonl.zst", zstd(json_lines(DOCUMENTS))[:-9], "a.jsonl.zst cannot be read; it is damaged"),
        ("a.parquet", b"no parquet", "a.parquet cannot be read; it is damaged"),
        ("a.array_record", b"none", "a.array_record cannot be read; it is damaged"),
        ("a.bin", b"\x00\x01", r"a.bin is none of .parquet, .*--data text --data.corpus FOLDER"),
        ("a.jsonl", b'{"text": "a"}\n', r"none of 1 documents fell to (train|validation)"),
        (".a", b"", "no file matches .*Name a file or a pattern, in quotes"),
    ],
)
def test_files_that_hold_no_documents(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    data = files.Config(files=str(tmp_path / "*"), root=str(tmp_path / "data"))
    with pytest.raises(UserError, match=words):
        data.records()


def test_columns_that_are_not_there(tmp_path):
    """The message names those that are."""
    write(tmp_path)
    root = str(tmp_path / "data")
    for column, words in (("body", "columns of text are text: write"), ("id", "'id' is int64")):
        with pytest.raises(UserError, match=rf"has no column '{column}' of text.*{words}"):
            files.Config(files=str(tmp_path / "*.parquet"), column=column, root=root).records()
    with pytest.raises(
        UserError, match="record 0 has no text in a feature 'score'; its features are score, te"
    ):
        files.Config(files=str(tmp_path / "5*"), column="score", root=root).records()
    write_array_record(tmp_path / "raw.array_record", [d.encode() for d in DOCUMENTS])
    raw = files.Config(files=str(tmp_path / "raw*"), root=root, validation=0.2)
    with pytest.raises(UserError, match=r"record 0 (is no tf.train.Example|has no text).*''"):
        raw.records()
    records = dataclasses.replace(raw, column="").records()
    assert len(records.train) + len(records.validation) == 60
    assert not list((tmp_path / "data").rglob("incomplete*"))
    with pytest.raises(UserError, match=r"data.validation is a share in \(0, 1\), got 1"):
        files.Config(validation=1.0)


def test_a_dataset_of_tfds(config):
    """Here one that this project has prepared, by the name of its folder."""
    ours = config.data.records()
    data = tfds.Config(name=str(ours.folder), seq=16, batch=2)
    records = data.records()
    assert texts_of(records.train) == texts_of(ours.train) and records.name == "local_text"
    assert texts_of(records.validation) == texts_of(ours.validation)
    with pytest.raises(UserError, match=r"data\.split is trained on"):
        dataclasses.replace(data, split="train")
    for change, words in (
        ({"split": "test"}, "has no split 'test', but train, validation"),
        ({"column": "body"}, "no text in a feature 'body'; those with text are path, text"),
        (
            {"name": "no_such"},
            "neither the folder of a prepared dataset, .* nor the name of one that is prep",
        ),
        ({"name": "wiki40b/en"}, "wiki40b/en.*Where TensorFlow is, `tfds build NAME"),
    ):
        with pytest.raises(UserError, match=words):
            dataclasses.replace(data, **change).records()


def test_statistics_of_a_dataset_of_tfds_are_computed_once(config, monkeypatch):
    data = tfds.Config(name=str(config.data.records().folder), seq=16, batch=2, root=config.data.root)
    known = batches.open_corpus(data).statistics
    monkeypatch.setattr(batches, "statistics", None)
    assert batches.open_corpus(data).statistics == known


def test_prepared_datasets_that_cannot_be_read(config, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(config.data.records().folder, folder)
    data = tfds.Config(name=str(folder), seq=16, batch=2, root=str(tmp_path))
    assert len(data.records().train) > 0
    (shard,) = folder.glob("*-train.array_record*")
    whole = shard.read_bytes()
    for content in (whole[:-70_000], b""):
        shard.write_bytes(content)
        with pytest.raises(UserError, match=r"train.array_record.* is missing or damaged: .* prepare it"):
            data.records()
    (other,) = folder.glob("*-validation.array_record*")
    shard.write_bytes(other.read_bytes())
    with pytest.raises(UserError, match=r"has \d+ records, not \d+"):
        data.records()
    info = folder / "dataset_info.json"
    info.write_text(info.read_text().replace('"array_record"', '"tfrecord"'))
    with pytest.raises(UserError, match=r"is prepared as tfrecord, .*tfds build NAME --file_format=array"):
        data.records()


@pytest.fixture
def mixed(tmp_path) -> mix.Config:
    """Digits, of which there are few, and letters."""
    for name, words in (("digits", "0123456789"), ("letters", "abcdefghijk")):
        (tmp_path / f"{name}.jsonl").write_bytes(json_lines([f"{words}" * 40 + str(n) for n in range(100)]))
    parts = (f"files:{tmp_path}/digits.jsonl=3", f"files:{tmp_path}/letters.jsonl=1")
    return mix.Config(parts=parts, root=str(tmp_path / "data"), seq=15, batch=4)


def test_a_mixture_has_shares_of_tokens_and_an_exact_position(mixed):
    corpus = batches.open_corpus(mixed)
    assert corpus.name == "digits + letters" and len(corpus.train.sources) == 2
    assert corpus.statistics["records"] == len(corpus.train) == sum(map(len, corpus.train.sources))
    assert batches.open_corpus(mixed).statistics == corpus.statistics
    iterator = batches.train_batches(corpus, mixed, 0)
    seen = [next(iterator)["tokens"] for _ in range(700)]
    position = iterator.get_state()
    letters = np.mean([(tokens[:, 3] >= ord("a")).mean() for tokens in seen])
    assert letters == pytest.approx(0.25, abs=0.03)
    again = batches.train_batches(batches.open_corpus(mixed), mixed, 0)
    again.set_state(json.loads(json.dumps(position.decode())).encode())
    for _ in range(5):
        np.testing.assert_array_equal(next(iterator)["tokens"], next(again)["tokens"])
    held_out = np.stack(batches.validation_batches(corpus, mixed, 8))
    assert 0.1 < (held_out[..., 3] >= ord("a")).mean() < 0.4


def test_statistics_of_a_mixture_are_means_by_weight(mixed):
    """A compressor that saw its text in order would see nothing but the first source."""
    known = batches.open_corpus(mixed).statistics
    digits, letters = (batches.open_corpus(mix.part_of(part, mixed)[0]).statistics for part in mixed.parts)
    assert known["bytes"] == digits["bytes"] + letters["bytes"]
    for name in ("order0_nats", "order1_nats", "xz_bits"):
        assert known[name] == pytest.approx(0.75 * digits[name] + 0.25 * letters[name])


def test_a_mixture_in_tokens(mixed):
    pytest.importorskip("tokenizers")
    corpus = batches.open_corpus(dataclasses.replace(mixed, tokenizer="train:300"))
    assert len(corpus.train.sources) == 2 and corpus.statistics["tokens"] > 100
    assert corpus.statistics["tokens"] == sum(len(part["tokens"]) for part in corpus.train)


def test_options_of_a_part(mixed):
    spec = f"files:{mixed.root}/a.jsonl,column=body,validation=0.2,piece=64=2"
    part, weight = mix.part_of(spec, mixed)
    wanted = files.Config(
        files=f"{mixed.root}/a.jsonl",
        column="body",
        validation=0.2,
        piece=64,
        root=mixed.root,
        seq=15,
        batch=4,
    )
    assert (part, weight) == (wanted, 2.0)
    for word, words in (
        ("colum=a", "it has files, column, piece, validation"),
        ("piece=x", "invalid literal"),
    ):
        with pytest.raises(UserError, match=f"'{word}' in .* is no option of that dataset: {words}"):
            mix.part_of(f"files:a,{word}=1", mixed)


def test_a_part_without_text_says_how_its_options_are_written(mixed, tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"content": ["a"]}), path := tmp_path / "a.parquet")
    spec = f"files:{path}=0.5"
    with pytest.raises(UserError, match=rf"parts: '{spec}': .* so: 'files:{path},NAME=VALUE=0.5'"):
        dataclasses.replace(mixed, parts=(spec,)).records()


def test_parts_that_are_none(mixed):
    for spec, words in (
        ("text:stdlib", "is not NAME:PLACE=WEIGHT"),
        ("text=1", "is not NAME:PLACE=WEIGHT"),
        ("text:stdlib=-1", "with a positive weight"),
        ("text:stdlib=nan", "with a positive weight"),
        ("novels:x=1", "names no dataset that --data knows: 'novels'. Use one of files, linux, text, tfds"),
        ("base:x=1", "names no dataset"),
        ("mix:x=1", "names no dataset"),
    ):
        with pytest.raises(UserError, match=words):
            dataclasses.replace(mixed, parts=(spec,)).records()
    with pytest.raises(UserError, match=r"data\.parts is empty"):
        mix.Config(parts=())


def test_a_mixture_is_kept_in_a_run(mixed, config):
    run = dataclasses.replace(config, data=mixed)
    assert configs.from_dict(json.loads(json.dumps(configs.to_dict(run)))) == run
