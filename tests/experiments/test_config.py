"""Configs: files, rules, JSON."""

import dataclasses
import json

import pytest
from flax import nnx

import jax_sparse24 as s24
from experiments import config as configs
from experiments.config import Config, Optim, Train
from experiments.data import text
from experiments.errors import UserError
from experiments.models import decoder


def all_specs():
    for file in configs.listing():
        for name in configs.functions_of(configs.REPOSITORY / file):
            yield f"{file}:{name}"


@pytest.mark.parametrize("spec", sorted(all_specs()))
def test_every_config_survives_json(spec, tmp_path):
    config = configs.load(spec)
    configs.write(config, tmp_path / "config.json")
    assert configs.read(tmp_path / "config.json") == config


def test_what_is_no_config_file_is_named(tmp_path):
    """A file that Python does not import ended in a traceback; the folder of a run was told that no file has
    its name."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"config.json is no Python file, .* such as configs/dense.py:cpu"):
        configs.load(f"{tmp_path}/config.json")
    with pytest.raises(UserError, match=r"is the folder of a run and no config file. .* --resume"):
        configs.load(str(tmp_path))


def test_json_of_runs_from_before_components_had_names():
    """A model and data without a class are the decoder and files of text, and are written so still."""
    config = Config(model=decoder.Config(layers=2), data=text.Config(corpus="folder", patterns=("*.txt",)))
    data = json.loads(json.dumps(configs.to_dict(config)))
    assert "class" not in data["model"] and "class" not in data["data"]
    assert data["data"]["patterns"] == ["*.txt"]
    assert configs.from_dict(data) == config


USER_MODEL = """
from dataclasses import dataclass
from experiments.models import base, decoder

@dataclass(frozen=True)
class Config(base.Config):
    depth: int = 3
    tied: bool = True
    def create(self, method, vocabulary, *, rngs):
        return decoder.Config(layers=self.depth, d=8, f=16, heads=1).create(method, vocabulary, rngs=rngs)
"""


def test_a_model_of_the_user_s_own_survives_json(tmp_path, monkeypatch):
    (tmp_path / "own_model.py").write_text(USER_MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    import own_model

    config = Config(model=own_model.Config(depth=2))
    data = json.loads(json.dumps(configs.to_dict(config)))
    assert data["model"] == {"class": "own_model", "depth": 2, "tied": True, "vocabulary": 0}
    assert configs.from_dict(data) == config
    assert len(nnx.eval_shape(config.create_model).blocks) == 2
    with pytest.raises(UserError, match=r"own_model\.Config does not know: layers"):
        configs.from_dict(data | {"model": {"class": "own_model", "layers": 1}})
    with pytest.raises(UserError, match="names the model 'nowhere', which is neither one of decoder"):
        configs.from_dict(data | {"model": {"class": "nowhere"}})


def test_every_file_of_models_and_data_is_known_by_its_name():
    assert configs.components("model")["decoder"] is decoder.Config
    assert configs.components("data")["text"] is text.Config
    assert not {"base", "batches", "vocabulary"} & {*configs.components("model"), *configs.components("data")}


def test_arms_of_the_demo_differ_in_the_method_only():
    dense, *others = (configs.load(f"configs/demo.py:{arm}") for arm in ("dense", "fst", "venom"))
    for other in others:
        assert dataclasses.replace(other, name=dense.name, method=dense.method) == dense


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("configs/demos.py", ["configs/demos.py", "Did you mean configs/demo.py?"]),
        ("configs/demo.py:fts", ["fts", "dense, fst, venom", "Did you mean configs/demo.py:fst?"]),
        ("configs/demo.py", ["'config'", "dense, fst, venom"]),
    ],
)
def test_load_names_the_nearest(spec, parts):
    with pytest.raises(UserError) as error:
        configs.load(spec)
    assert all(part in str(error.value) for part in parts)


def test_load_wants_a_config(tmp_path):
    (tmp_path / "bad.py").write_text("def config():\n    return 3\n")
    with pytest.raises(UserError, match=r"must return an experiments\.config\.Config, not int"):
        configs.load(str(tmp_path / "bad.py"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: decoder.Config(d=20, heads=4), "d=20 and heads=4.*multiple of 2"),
        (lambda: decoder.Config(layers=0), "model.layers must be positive, got 0"),
        (
            lambda: Config(data=text.Config(corpus="folder", patterns=["*.md"])),
            "data.patterns is a list, which can change after the config is made; write a tuple",
        ),
        (lambda: text.Config(batch=-1), "data.batch must be positive, got -1"),
        (lambda: text.Config(patterns=()), "data.patterns is empty"),
        (lambda: Optim(lr=0.0), "optim.lr must be positive"),
        (lambda: Optim(final=2.0), r"optim.final .* \[0, 1\], got 2.0"),
        (lambda: Train(eval_every=-1), "train.eval_every must not be negative"),
        (lambda: Config(train=Train(accumulate=3)), "accumulate=3 and batch=16"),
        (lambda: Config(optim=Optim(warmup=600)), "warmup must be shorter than train.steps"),
    ],
)
def test_rules(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_read_errors(tmp_path):
    path = tmp_path / "config.json"
    data = configs.to_dict(Config())
    path.write_text(json.dumps({**data, "optim": {**data["optim"], "lrr": 1}}))
    with pytest.raises(UserError, match="Optim does not know: lrr"):
        configs.read(path)
    path.write_text(json.dumps({**data, "method": {"class": "Magic"}}))
    with pytest.raises(UserError, match="Magic"):
        configs.read(path)
    path.write_text('{"name": ')
    with pytest.raises(UserError, match="not readable JSON"):
        configs.read(path)


def test_dense_steps_first():
    config = Config(method=s24.methods.FST(dense_fraction=0.25), train=Train(steps=600, dense_first=1 / 6))
    phases = [(start, end, phase.sparse) for start, end, phase in config.schedule.boundaries()]
    assert phases == [(0, 100, False), (100, 475, True), (475, 600, False)]
    plain = Config(method=s24.methods.FST())
    assert plain.schedule == plain.method.schedule(plain.train.steps)
    with pytest.raises(UserError, match=r"train.dense_first .* got 1"):
        Train(dense_first=1.0)


def test_differences():
    fst = Config(method=s24.methods.FST(decay=1e-4))
    assert configs.differences(fst, fst) == []
    changed = dataclasses.replace(fst, optim=Optim(lr=2e-3), method=s24.methods.FST(decay=2e-4))
    assert configs.differences(fst, changed) == ["optim.lr: 0.001 -> 0.002", "method.decay: 0.0001 -> 0.0002"]
    assert "method.class: FST -> Dense" in configs.differences(fst, Config())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import nowhere\n", r"bad.py raises ModuleNotFoundError in line 1: No module named 'nowhere'"),
        ("def config(:\n", r"bad.py raises SyntaxError in line 1: "),
        ("def config():\n    return 1 / 0\n", r"bad.py raises ZeroDivisionError in line 2: division by zero"),
        ("raise SystemExit(3)\n", r"bad.py raises SystemExit in line 1: 3"),
    ],
)
def test_a_file_that_raises_is_a_mistake_of_its_author(tmp_path, text, words):
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(UserError, match=words):
        configs.load(str(tmp_path / "bad.py"))


@pytest.mark.parametrize("seed", [-1, 2**32 - 1, 2**63])
def test_a_seed_has_32_bits(seed):
    """JAX takes the lower ones, so that 2**32 was seed 0, and grain no more than these."""
    with pytest.raises(UserError, match=f"seed must lie in 0 to 4294967294, got {seed}"):
        Config(seed=seed)


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".", "..", "a\0b"])
def test_a_name_is_that_of_one_folder(name):
    with pytest.raises(UserError, match="name must be that of one folder"):
        Config(name=name)
