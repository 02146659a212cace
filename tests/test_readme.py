"""What the README shows is what a newcomer gets: the quickstart runs, and the names it uses exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
        *((str(step), "sparse") for step in (39, 79, 119, 159)),
        ("199", "dense"),
    ]
    losses = [float(loss) for _, _, loss in printed]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.5 * losses[0]
    # The loss it minimises is far below that of the block it started from.
    jnp, x, ffn = scope["jnp"], scope["x"], scope["ffn"]
    target = jnp.roll(x, 1, -1)
    start = scope["s24"].nn.FFN(256, 1024, method=ffn.up.method, rngs=scope["nnx"].Rngs(0))
    assert jnp.mean((ffn(x) - target) ** 2) < 0.5 * jnp.mean((start(x) - target) ** 2)


def test_named_make_targets_and_configs_exist():
    makefile = (ROOT / "Makefile").read_text()
    for name in set(re.findall(r"`make (\w+)`", README)):
        assert re.search(rf"^{name}:", makefile, re.M), (
            f"README names `make {name}`, the Makefile has no such target"
        )
    for path in re.findall(r"configs/[\w/]+\.py", README):
        assert (ROOT / path).exists(), f"README names {path}, which does not exist"


# A call in a process that has made none, so that nothing is remembered. By this table packed is faster; what
# the machine has measured does not matter then.
CALL = """
import sys
import jax.numpy as jnp
from flax import nnx
import jax_sparse24 as s24
from jax_sparse24.dispatch import table

entry = {"product": "fwd", "sparse": "right", "pattern": "2:4", "dtype": "float32", "shape": [32, 128, 128]}
times = {"implementation": "ffi", "status": "ok", "dense_us": 2.0, "masked_us": 2.0, "packed_us": 1.0}
table.use({"versions": {}, "products": [entry | times]})
ffn = s24.nn.FFN(64, 128, method=s24.methods.FST(), rngs=nnx.Rngs(0))
x, root, entered = jnp.ones((32, 64)), s24.__file__.removesuffix("__init__.py"), {}

def note(frame, event, _):
    if event == "call" and frame.f_code.co_filename.startswith(root):
        entered.setdefault(frame.f_code.co_filename.removeprefix(root))

sys.setprofile(note)
ffn(x)
sys.setprofile(None)
print(*entered)
"""


def test_the_way_of_one_tensor_is_that_of_a_call():
    """The files that the README names are entered in the order in which it names them.

    docs/architecture.md lists all Python files that are entered, and no other; both pages say how many."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    entered = subprocess.check_output([sys.executable, "-c", CALL], text=True, env=environment).split()
    page = (ROOT / "docs/architecture.md").read_text()
    short, whole = (text.split("## The way of one tensor")[1].split("\n## ")[0] for text in (README, page))
    named = re.findall(r"\]\(jax_sparse24/([\w/]+\.py)\)", short)
    assert len(named) == 6
    assert [file for file in entered if file in named] == named, entered
    listed = re.findall(r"`([\w/]+\.py)`", whole)
    assert sorted(listed) == sorted(entered)
    for text in (short, whole):
        assert re.findall(r"(\d+)\s+Python\s+files", text) == [str(len(entered))]
