"""What estimates ask a model's config: another architecture, and one whose fields have other names, are asked
in the same way."""

import ast
import dataclasses
from dataclasses import dataclass

import pytest

from experiments import launch
from experiments.models import base, decoder, qwen3
from experiments.training import memory, opening, speed
from experiments.training.step import Program
from tests.experiments.conftest import REPOSITORY

SHAPE = {"layers": 2, "d": 16, "f": 32, "heads": 2, "kv_heads": 1}
THEIRS = qwen3.Config(**SHAPE, head=8)


@dataclass(frozen=True)
class Config(base.Config):
    """A model whose fields have other names."""

    depth: int = THEIRS.layers
    half: bool = False

    def sizes(self):
        return dataclasses.replace(THEIRS.sizes(), layers=self.depth)

    def with_layers(self, layers):
        return dataclasses.replace(self, depth=layers)

    def create(self, method, vocabulary, *, rngs):
        return THEIRS.with_layers(self.depth).create(method, vocabulary, rngs=rngs)


@pytest.mark.parametrize("model", [THEIRS, Config()], ids=["qwen3", "other"])
def test_an_architecture_is_asked_as_the_decoder_is(config, model):
    """The decoder with normed queries and keys, and a gate, has the same sizes."""
    same = decoder.Config(**SHAPE, ffn="swiglu", qk_norm=True)
    first, second = (dataclasses.replace(config, model=m) for m in (same, model))
    for ask in (
        lambda c: memory.estimate(c, Program(c)).terms,
        speed.flops_per_token,
        opening.parameters,
        opening.blocks_of,
        opening.projections_of,
        lambda c: launch.parameters(c.model, c.data.tokenizer),
        lambda c: launch.needs(c, 1),
        lambda c: c.model.dtype,
    ):
        assert ask(second) == ask(first)


def test_a_gpu_is_needed_for_cudnn():
    assert qwen3.Config(attention="cudnn", dtype="bfloat16").needs_gpu() and not THEIRS.needs_gpu()


# What reads a model's config where it says itself which architecture that is.
OWN = {"benchmarks", "export.py", "docs.py", "import_model.py"}


def fields_read(text: str) -> set[str]:
    """Fields of architectures that code reads of `config.model`, or asks for by `hasattr` and `getattr`."""
    own = {f.name for kind in (decoder.Config, qwen3.Config) for f in dataclasses.fields(kind)}
    own |= {"own_shape", "shared_heads"}
    own -= {f.name for f in dataclasses.fields(base.Config)} | {"dtype"}
    found = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Attribute(value=ast.Attribute(attr="model") | ast.Name("model"), attr=name):
                found.add(name)
            case ast.Call(func=ast.Name("hasattr" | "getattr"), args=[_, ast.Constant(name), *_]):
                found.add(name)
    return found & own


def test_no_field_of_an_architecture_is_read():
    assert fields_read("config.model.heads") == {"heads"} and fields_read("getattr(m, 'ffn', 0)") == {"ffn"}
    assert not fields_read("config.model.sizes().heads") and not fields_read("config.model.dtype")
    folder, found = REPOSITORY / "experiments", {}
    for path in folder.rglob("*.py"):
        if path.relative_to(folder).parts[0] not in OWN | {"models"}:
            found[path.name] = fields_read(path.read_text())
    assert len(found) > 30 and not {place: names for place, names in found.items() if names}
