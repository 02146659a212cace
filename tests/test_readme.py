"""What the README shows is what a newcomer gets: the quickstart runs, and the names it uses exist."""

import re
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from flax import nnx

import jax_sparse24 as s24

pytestmark = pytest.mark.optimised

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_quickstart_is_short_and_trains(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(code.strip().splitlines()) <= 12
    scope = {}
    exec(code, scope)
    printed = re.findall(r"^(\d+) (\w+) ([\d.e-]+)$", capsys.readouterr().out, re.M)
    assert [(step, phase) for step, phase, _ in printed] == [
        *((str(step), "sparse") for step in (19, 39, 59, 79)),
        ("99", "dense"),
    ]
    assert float(printed[-1][2]) < 0.5 * float(printed[0][2])
    # The loss it minimises is far below that of the block it started from.
    jnp, x, ffn = scope["jnp"], scope["x"], scope["ffn"]
    target = jnp.roll(x, 1, -1)
    start = scope["s24"].nn.FFN(256, 1024, method=ffn.up.method, rngs=scope["nnx"].Rngs(0))
    assert jnp.mean((ffn(x) - target) ** 2) < 0.5 * jnp.mean((start(x) - target) ** 2)


def test_named_files_exist():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), f"README links {target}, which does not exist"


def test_named_make_targets_and_configs_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"^ +make (\w+)|`make (\w+)`", README, re.M)):
        name = "".join(target)
        assert re.search(rf"^{name}:", makefile, re.M), (
            f"README names `make {name}`, the Makefile has no such target"
        )
    for path in re.findall(r"configs/[\w/]+\.py", README):
        assert (ROOT / path).exists(), f"README names {path}, which does not exist"


def test_the_way_of_one_tensor_is_that_of_a_call():
    """The Python files that the README names are entered in the order in which it names them."""
    section = README.split("## The way of one tensor")[1].split("\n## ")[0]
    named = re.findall(r"\]\(jax_sparse24/([\w/]+\.py)\)", section)
    assert len(named) == 6
    root, entered = str(ROOT / "jax_sparse24") + "/", []

    def note(frame, event, _):
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(root) and file[len(root) :] not in entered:
            entered.append(file[len(root) :])

    ffn = s24.nn.FFN(64, 128, method=s24.methods.FST(), rngs=nnx.Rngs(0))
    sys.setprofile(note)
    try:
        ffn(jnp.ones((32, 64)))
    finally:
        sys.setprofile(None)
    assert [file for file in entered if file in named] == named, entered
