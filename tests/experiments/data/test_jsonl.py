"""Documents of a JSON Lines file."""

import json

import numpy as np
import pytest

from experiments.data import batches, jsonl
from experiments.errors import UserError


def write(path, documents, field="text"):
    path.write_text("".join(json.dumps({"id": n, field: text}) + "\n" for n, text in enumerate(documents)))
    return path


def texts_of(source) -> list[str]:
    return [source[n]["text"].decode() for n in range(len(source))]


def test_every_document_is_in_one_split(tmp_path):
    documents = [f"document {n}, ünïcode\nand a second line" for n in range(200)]
    path = write(tmp_path / "a.jsonl", documents, field="body")
    path.write_text("\n" + path.read_text() + "\n\n")  # empty lines are none
    records = jsonl.Config(file=str(path), field="body").records()
    train, validation = texts_of(records.train), texts_of(records.validation)
    assert sorted(train + validation) == sorted(documents) and records.name == "a.jsonl"
    assert 2 <= len(validation) <= 25  # 5 % of 200, by chance


def test_the_split_does_not_depend_on_other_documents_and_keeps_equal_ones_together(tmp_path):
    documents = [f"document {n}" for n in range(300)]
    config = jsonl.Config(file=str(write(tmp_path / "a.jsonl", documents)))
    held_out = set(texts_of(config.records().validation))
    more = ["another one", *reversed(documents), *documents[:100]]
    config = jsonl.Config(file=str(write(tmp_path / "b.jsonl", more)))
    again = config.records()
    assert set(texts_of(again.validation)) - {"another one"} == held_out
    assert not set(texts_of(again.validation)) & set(texts_of(again.train))


@pytest.mark.parametrize("validation", [1e-9, 1 - 1e-9])
def test_neither_split_is_empty(tmp_path, validation):
    path = write(tmp_path / "a.jsonl", ["one", "one", "two", "three"])
    records = jsonl.Config(file=str(path), validation=validation).records()
    assert len(records.train) and len(records.validation)
    assert not set(texts_of(records.train)) & set(texts_of(records.validation))


def test_batches_and_a_digest_of_the_documents(tmp_path):
    path = write(tmp_path / "a.jsonl", [f"{n} " * 30 for n in range(100)])
    data = jsonl.Config(file=str(path), seq=16, batch=2)
    corpus = batches.open_corpus(data)
    assert corpus.statistics["bytes"] == sum(map(len, texts_of(corpus.train)))
    first, again = (next(batches.train_batches(batches.open_corpus(data), data, 3)) for _ in range(2))
    assert first["tokens"].shape == (2, 17) and first["tokens"].dtype == np.int32
    np.testing.assert_array_equal(first["tokens"], again["tokens"])
    path.write_text(path.read_text().replace("99 99", "99 98"))
    assert batches.open_corpus(data).statistics["digest"] != corpus.statistics["digest"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"text": "a"}\nno json\n', r"a.jsonl, line 2 is no JSON object with a field 'text'"),
        ('{"text": "a"}\n{"body": "b"}\n', r"line 2 is no JSON object with a field 'text' \(KeyError"),
        ('["text"]\n', "line 1 is no JSON object with a field 'text'"),
        ('{"text": "a"}\n{"text": 3}\n', "line 2: the field 'text' must be a text that is not empty, got 3"),
        ('{"text": ""}\n', "line 1: the field 'text' must be a text that is not empty"),
        ('{"text": "a"}\n{"text": "a"}\n', "has 1 different documents, but training and validation need one"),
        ("", "has 0 different documents"),
    ],
)
def test_files_that_hold_no_documents(tmp_path, content, words):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(UserError, match=words):
        jsonl.Config(file=str(tmp_path / "a.jsonl")).records()


def test_rules(tmp_path):
    with pytest.raises(UserError, match=r"data\.file must be a file of JSON lines"):
        jsonl.Config(file=str(tmp_path)).records()
    with pytest.raises(UserError, match=r"data.validation is a share in \(0, 1\), got 1"):
        jsonl.Config(validation=1.0)
    with pytest.raises(UserError, match=r"data\.seq must be positive, got 0"):
        jsonl.Config(seq=0)
