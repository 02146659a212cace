"""The source of Linux, of a few files here."""

import dataclasses
import tarfile

import numpy as np
import pytest

from experiments.data import linux
from experiments.errors import UserError

LINES = "static int probe(struct device *dev)\n{\n\treturn dev->id;\n}\n"


@pytest.fixture
def kernel(tmp_path):
    root = tmp_path / "linux-source-6.1"
    draw = np.random.default_rng(0)
    names = [f"drivers/net/ethernet/{name}/{part}.c" for name in "abcdefgh" for part in ("main", "init")]
    names += [f"fs/fs{n}/inode.c" for n in range(40)]
    files = {name: f"/* {name} */\n{LINES}".encode() for name in names}
    files["Kbuild"] = b"obj-y\n"
    files["fs/fs1/notes.bin"] = b"binary"
    files["fs/fs1/empty.c"] = b""
    files[f"{linux.TABLES}table.h"] = b"#define A 1\n"
    files["fs/fs2/repeated.c"] = LINES.encode() * 1000
    files["fs/fs2/hex.c"] = draw.bytes(4000).hex().encode()
    files["fs/fs2/random.c"] = bytes(draw.choice([*b"ghijklmnopq \n"], 9000).tolist())
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def texts_of(source) -> dict:
    found = {}
    for n in range(len(source)):
        found.setdefault(source[n]["path"].decode(), []).append(source[n]["text"])
    return found


def test_what_is_taken_and_held_out(kernel, tmp_path):
    data = linux.Config(source=str(kernel), root=str(tmp_path / "data"), piece=64, validation=0.2)
    records = data.records()
    train, validation = texts_of(records.train), texts_of(records.validation)
    left_out = ("notes.bin", "empty.c", "table.h", "repeated.c", "hex.c", "Kbuild")
    taken = {str(p.relative_to(kernel)) for p in kernel.rglob("*") if p.is_file() and p.name not in left_out}
    assert train.keys() | validation.keys() == taken and "fs/fs2/random.c" in taken
    folders = [{"/".join(name.split("/")[:-1][:3]) for name in part} for part in (train, validation)]
    assert not folders[0] & folders[1] and len(folders[1]) > 1
    assert all(len(piece) <= 64 for part in (train, validation) for p in part.values() for piece in p)
    some = dataclasses.replace(data, folders=("fs/",)).records()
    chosen = texts_of(some.train).keys() | texts_of(some.validation).keys()
    assert chosen == {name for name in taken if name.startswith("fs/")}
    assert some.fingerprint != records.fingerprint
    (kernel / "fs/fs1/inode.c").write_text("another")
    assert data.records().fingerprint != records.fingerprint
    # The tarball holds the same.
    with tarfile.open(tmp_path / "linux-source-6.1.tar.xz", "w:xz") as archive:
        archive.add(kernel, arcname="linux-source-6.1")
    packed = linux.Config(source=str(tmp_path), root=str(tmp_path / "data"), piece=64, validation=0.2)
    again = packed.records()
    assert texts_of(again.validation).keys() == validation.keys()
    assert again.fingerprint.startswith("linux-source-6.1-") and again.fingerprint != records.fingerprint


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("nowhere", "does not exist"),
        ("", "neither the source of Linux .*apt-get install linux-source.*--data.source PATH"),
        ("file.txt", "neither a folder nor a tarball"),
    ],
)
def test_what_is_no_source(tmp_path, source, words):
    (tmp_path / "file.txt").write_text("text")
    with pytest.raises(UserError, match=words):
        linux.Config(source=str(tmp_path / source), root=str(tmp_path / "data")).records()
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/Kbuild").touch()
    with pytest.raises(UserError, match="no source files for train: is it the source of Linux, whole"):
        linux.Config(source=str(tmp_path / "empty"), root=str(tmp_path / "data")).records()
