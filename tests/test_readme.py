"""What the README shows is what a newcomer gets: the quickstart runs, and the names it uses exist."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.optimised

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_quickstart_is_short_and_trains():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(code.strip().splitlines()) <= 12
    scope = {}
    exec(code, scope)
    assert scope["step"] == 99
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
