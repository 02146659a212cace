"""Tokenizers, and text that is tokenised once."""

import dataclasses
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

import jax_sparse24 as s24
from experiments import evaluate, generate
from experiments.analysis import comparison
from experiments.data import base, batches, text, tokens, vocabulary
from experiments.errors import UserError
from experiments.training import rundir
from experiments.training.loop import train
from experiments.training.start import check_start
from tests.experiments.conftest import REPOSITORY, write_corpus

tokenizers = pytest.importorskip("tokenizers")
WORDS = "if (n < 1024) { return x_max; }\n\tnaïve 𝕏 — 日本\r\n\x00\x7f" * 3
LITERAL = "a <|endoftext|> in the text"


@pytest.fixture(scope="module")
def trained() -> vocabulary.Subwords:
    """A byte-level tokenizer of 300 tokens, in 384 rows."""
    return vocabulary.Subwords(tokens.train([WORDS, "the cat and the hat " * 20], 300), "here")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> text.Config:
    folder = tmp_path_factory.mktemp("tokens")
    write_corpus(folder / "text", files=4, words=800)
    return text.Config(
        corpus=str(folder / "text"), root=str(folder / "data"), tokenizer="train:300", seq=16, batch=2
    )


def sentence_pieces() -> vocabulary.Subwords:
    """A tokenizer as that of Llama 2: pieces of sentences, and bytes where there is no piece."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a"]
    model = tokenizers.models.BPE(
        {name: n for n, name in enumerate(names)},
        [("▁", "a")],
        byte_fallback=True,
        unk_token="<unk>",
    )
    made = tokenizers.Tokenizer(model)
    made.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    made.add_special_tokens(names[:3])
    return vocabulary.Subwords(made.to_str(), "here")


@pytest.mark.parametrize("words", [WORDS, LITERAL, "", "\n\n  \n", "déjà " * 40])
def test_tokens_are_the_text(trained, words):
    """To the byte, also words that name a special token; and `lengths` counts these bytes."""
    for one in (trained, sentence_pieces()):
        found = one.encode(words.encode())
        assert found.dtype == np.int32 and one.decode(found) == words.encode()
        assert one.lengths[found].sum() == len(words.encode())
        assert one.separator not in found and one.lengths[one.separator] == 1
        assert one.decode([one.separator]) == b"\f" and one.size % 128 == 0


def test_a_trained_tokenizer_merges_words_and_not_across_them(trained):
    cat = trained.encode(b" the cat")
    assert len(cat) == 2 and trained.size == 384 and trained.separator == 0
    assert len(trained.encode(b"1234567")) >= 3  # at most three digits
    assert trained.decode(trained.encode(b"\xff\xfe")) == "\ufffd\ufffd".encode()


def test_stored_type_follows_the_vocabulary(trained, data, tmp_path):
    """And not the rows of the embedding, of which what is stored knows nothing: a tokenizer with fewer tokens
    than `train:N` asked for, named again by its file, reads the same tokens."""
    assert trained.dtype == np.uint16
    many = vocabulary.Subwords(trained.text, "here", rows=2**16 + 128)
    assert many.dtype == np.uint16
    many.tokens = 2**16 + 1
    assert many.dtype == np.uint32
    here = dataclasses.replace(data, root=str(tmp_path), tokenizer="train:70000")
    corpus = batches.open_corpus(here)
    assert corpus.vocabulary.size > 2**16 > corpus.vocabulary.tokens
    (tmp_path / "tokenizer.json").write_text(corpus.vocabulary.text)
    again = batches.open_corpus(dataclasses.replace(here, tokenizer=str(tmp_path)))
    for split in ("train", "validation"):
        one, other = getattr(corpus, split), getattr(again, split)
        assert all(np.array_equal(one[n]["tokens"], other[n]["tokens"]) for n in range(len(one)))


def test_stored_tokens_of_another_kind_are_refused(data, tmp_path, monkeypatch):
    """As were written, before, in four bytes each for more rows than there are tokens."""
    here = dataclasses.replace(data, root=str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(vocabulary.Subwords, "dtype", np.dtype(np.uint32))
        batches.open_corpus(here)
    with pytest.raises(UserError, match=r"not those that this tokenizer makes of their text.*Delete"):
        batches.open_corpus(here)
    for folder in (tmp_path / "tokens").iterdir():
        shutil.rmtree(folder)
    batches.open_corpus(here)
    shutil.rmtree(tmp_path / "local_text")
    with monkeypatch.context() as patch:  # the text is prepared in other pieces than it had been
        patch.setattr(text, "pieces", lambda content, most: [(0, content[:3000]), (3000, content[3000:])])
        with pytest.raises(UserError, match=r"not those that this tokenizer makes of their text"):
            batches.open_corpus(here)


def test_text_is_tokenised_once(data, capsys):
    corpus = batches.open_corpus(data)
    plain = batches.open_corpus(dataclasses.replace(data, tokenizer="bytes"))
    assert data.vocabulary.size == corpus.vocabulary.size == 384
    for split in ("train", "validation"):
        source, original = getattr(corpus, split), getattr(plain, split)
        for place in range(len(original)):
            found = source[place]["tokens"]
            assert corpus.vocabulary.decode(found) == original[place]["text"] + b"\f"
    known = corpus.statistics
    assert known["digest"] == plain.statistics["digest"] and known["tokens"] < known["bytes"] / 1.8
    assert known["tokens"] == sum(len(corpus.train[n]["tokens"]) for n in range(len(corpus.train)))
    assert "training a tokenizer of 300 tokens" in capsys.readouterr().err
    folder = next((text.Path(data.root) / "tokens").iterdir())
    assert folder.name == f"{data.records().fingerprint}-{corpus.vocabulary.fingerprint}"
    stamps = {path: path.stat().st_mtime_ns for path in text.Path(data.root).rglob("*")}
    batches.open_corpus(data)
    assert stamps == {path: path.stat().st_mtime_ns for path in text.Path(data.root).rglob("*")}
    assert capsys.readouterr().err == ""


def test_bytes_of_scored_tokens(data):
    """All but the first token of every sequence; a record's end counts as one byte."""
    corpus = batches.open_corpus(data)
    some = batches.validation_batches(corpus, data, 3)
    text_of = [corpus.vocabulary.decode(row[1:]) for batch in some for row in batch]
    expected = sum(map(len, text_of)) / (3 * 2 * 16)
    assert batches.bytes_per_token(corpus.vocabulary, some) == pytest.approx(expected)
    assert batches.bytes_per_token(vocabulary.Bytes(), [some[0] % 257]) == 1
    assert vocabulary.bits_per_byte(np.log(4), 2.0) == pytest.approx(1.0)


def test_what_a_killed_process_left_is_deleted(data, tmp_path):
    """It is in a folder of another name until it is whole."""
    data = dataclasses.replace(data, root=str(tmp_path))
    records = data.records()
    left = tmp_path / "local_text" / records.fingerprint / "incomplete.ABC_1.0.0"
    assert not left.exists() and [*left.parent.glob("1.0.0/*.array_record*")]
    (left / "deeper").mkdir(parents=True)
    next(left.parent.glob("1.0.0")).rename(tmp_path / "gone")
    again = data.records()
    assert not left.exists() and len(again.train) == len(records.train)


@pytest.mark.slow
def test_killed_twice_in_the_middle(data, tmp_path):
    """While text is prepared, and while it becomes tokens: nothing half-written is taken for whole."""
    here = dataclasses.replace(data, root=str(tmp_path))
    for kind, folder, left in (("text.TextFiles", "local_text", False), ("tokens.Tokens", "tokens", True)):
        code = (
            "import os, signal; from experiments.data import batches, text, tokens\n"
            f"whole = {kind}._generate_examples\n"
            "def some(self, *args):\n"
            "    yield from list(whole(self, *args))[:1]\n"
            "    os.kill(os.getpid(), signal.SIGKILL)\n"
            f"{kind}._generate_examples = some\n"
            f"batches.open_corpus(text.{here!r})"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
        assert done.returncode == -signal.SIGKILL, done.stderr
        (name,) = (path for path in (tmp_path / folder).iterdir() if path.is_dir())
        assert not (name / "1.0.0").exists() and len([*name.glob("incomplete.*")]) == 1
        assert (tmp_path / "tokens").exists() == left
    corpus = batches.open_corpus(here)
    assert corpus.statistics == batches.open_corpus(data).statistics
    assert not [*tmp_path.rglob("incomplete.*")]


@pytest.mark.parametrize(
    ("tokenizer", "words"),
    [
        ("train:", "Write train:32768"),
        ("train:256", "more than 256, since every byte is one"),
        ("train:many", "got 'train:many'"),
        ("byte", "bytes, train:N or the path of a tokenizer.json; there is no file 'byte'"),
        ("{folder}/no.json", "is no tokenizer.json that the package tokenizers can read"),
        ("{folder}/binary.json", "is no tokenizer.json: it is no text"),
        ("{folder}/lossy.json", "are not bytes of text.*train:32768"),
    ],
)
def test_what_is_no_tokenizer(tmp_path, tokenizer, words):
    (tmp_path / "no.json").write_text('{"model": 3}')
    (tmp_path / "binary.json").write_bytes(b"\xff\x00\xfe")
    lossy = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    lossy.save(str(tmp_path / "lossy.json"))
    with pytest.raises(UserError, match=words):
        _ = base.Config(tokenizer=tokenizer.format(folder=tmp_path)).vocabulary


def test_a_missing_package(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(UserError, match=r"needs the package tokenizers: pip install -e '\.\[tokenizers\]'"):
        vocabulary.read(tmp_path / "a.json")


@pytest.mark.slow
def test_a_run_in_tokens(data, config, tmp_path, capsys):
    """Trained, resumed elsewhere, evaluated, sampled, reported; losses also in bits per byte."""
    model = dataclasses.replace(config.model, layers=1, d=8, f=16)
    small = dataclasses.replace(
        config.train, steps=2, eval_every=0, monitor_every=0, probe_every=0, eval_batches=2
    )
    optim = dataclasses.replace(config.optim, warmup=1)
    run = dataclasses.replace(
        config, data=data, model=model, train=small, optim=optim, method=s24.methods.Dense()
    )
    # From the path of a file, whose tokens are those of what was trained; then longer, without the file.
    corpus = batches.open_corpus(data)
    (tmp_path / "trained.json").write_text(corpus.vocabulary.text)
    named = dataclasses.replace(data, tokenizer=str(tmp_path / "trained.json"))
    assert batches.open_corpus(named).statistics == corpus.statistics
    result = train(dataclasses.replace(run, data=named), tmp_path / "made", show=False)
    assert result.bytes_per_token > 1.5
    out = result.out.rename(tmp_path / "run")
    assert rundir.vocabulary(out).text == (tmp_path / "trained.json").read_text()
    (tmp_path / "trained.json").unlink()
    longer = dataclasses.replace(rundir.open_run(out), train=dataclasses.replace(small, steps=3))
    assert train(longer, out, resume=True, show=False).step == 3
    rows = rundir.read_metrics(out)
    last = next(row for row in rows[::-1] if row["kind"] == "eval")
    first = next(row for row in rows if row["kind"] == "train")
    assert first["bits_per_byte"] < first["loss"] / np.log(2)
    bits = last["dense"] / last["bytes_per_token"] / np.log(2)
    capsys.readouterr()
    evaluate.main([str(out), "--batches", "2"])
    said = f"{last['dense']:.4f} nats per token, {bits:.4f} bits per byte"
    assert said in capsys.readouterr().out
    generate.main([str(out), "--prompt", "ab", "--tokens", "5"])
    assert capsys.readouterr().out.startswith("ab")
    assert f"{bits:.3f}" in comparison.table(comparison.read_runs([out]))
    # Another tokenizer than that of the checkpoint.
    from_run = dataclasses.replace(run, train=dataclasses.replace(small, start_from=str(out)))
    check_start(from_run, rundir.vocabulary(out))
    with pytest.raises(UserError, match=r"trained on other tokens .*--data.tokenizer .*tokenizer.json"):
        check_start(from_run, vocabulary.Bytes())
    rundir.own_tokenizer(out).write_text(tokens.train([WORDS], 300))
    for command in (generate.main, evaluate.main):
        with pytest.raises(SystemExit):
            command([str(out)])
        assert "is not the tokenizer that this run was trained with" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"data.tokenizer: .*tokenizer.json -> bytes"):
        bytes_now = dataclasses.replace(longer, data=dataclasses.replace(data, tokenizer="bytes"))
        rundir.check_new(out, bytes_now, resume=True)
    rundir.own_tokenizer(out).unlink()
    with pytest.raises(UserError, match="is gone, without which nobody knows"):
        rundir.vocabulary(out)
