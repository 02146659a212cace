"""Models as Hugging Face's libraries read them, and back."""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_sparse24 as s24
from experiments import config as configs
from experiments import export as exporting
from experiments import import_model, launch
from experiments.analysis.sampling import Sampler
from experiments.data import vocabulary
from experiments.errors import UserError
from experiments.models import decoder, huggingface
from experiments.training import rundir, stored
from experiments.training.loop import train

pytest.importorskip("safetensors")
from safetensors.numpy import save_file

from jax_sparse24 import huggingface as huggingface_of_s24
from jax_sparse24.huggingface import read_tensors

ROWS = 64
MODELS = {
    "arcee": decoder.Config(layers=2, d=16, f=32, heads=2),
    "gelu": decoder.Config(layers=1, d=16, f=32, heads=2, ffn="gelu", tied=False),
    "llama": decoder.Config(
        layers=2, d=16, f=32, heads=4, kv_heads=2, head_dim=8, ffn="swiglu", tied=False, rope_base=5e5
    ),
    "qwen3": decoder.Config(
        layers=1, d=16, f=32, heads=4, kv_heads=1, head_dim=8, ffn="swiglu", qk_norm=True, norm_eps=1e-5
    ),
}


def built(model: decoder.Config, method=s24.methods.Dense()):  # noqa: B008
    return model.create(method, ROWS, rngs=nnx.Rngs(params=0, default=1))


def flat(model) -> dict:
    found = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): np.asarray(value[...]) for path, value in found}


def written(model, folder, **options):
    described = huggingface.description(model.model, ROWS, 32, 0)
    rename = lambda params: huggingface.tensors_of(model.model, params)  # noqa: E731
    return s24.export(model, folder, config=described, rename=rename, **options)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_exported_is_read_bit_for_bit(name, tmp_path):
    model = built(MODELS[name])
    shapes = written(model, tmp_path / "out")
    described = json.loads((tmp_path / "out/config.json").read_text())
    tensors = read_tensors(tmp_path / "out")
    assert {key: tensor.shape for key, tensor in tensors.items()} == shapes
    again, before = huggingface.model_of(described), flat(model)
    after = huggingface.params_of(again, tensors, before)
    assert before.keys() == after.keys() and again.own_shape == MODELS[name].own_shape
    for key, value in before.items():
        np.testing.assert_array_equal(after[key], value, strict=True)
    same = ("layers", "d", "f", "heads", "ffn", "tied", "rope_base", "norm_eps", "qk_norm")
    assert all(getattr(again, field) == getattr(MODELS[name], field) for field in same)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_same(name, tmp_path):
    """Logits in float32, and the likeliest continuation of 64 tokens."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = built(MODELS[name])
    params = nnx.state(model, nnx.Param)  # larger than at the start, so that tokens differ in likelihood
    nnx.update(model, jax.tree.map(lambda x: x * 3 if x.ndim > 1 else x, params))
    written(model, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokens = np.random.default_rng(0).integers(0, ROWS, (2, 16))
    with torch.no_grad():
        wanted = theirs(torch.tensor(tokens)).logits.numpy()
        greedy = theirs.generate(
            torch.tensor(tokens[:1]), max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    np.testing.assert_allclose(model(jnp.asarray(tokens, jnp.int32)), wanted, atol=1e-4)

    @jax.jit
    def likeliest(known, length):
        return model(known)[0, length - 1].argmax()

    known = np.zeros((1, 80), np.int32)
    known[0, :16] = tokens[0]
    for length in range(16, 80):
        known[0, length] = likeliest(known, length)
    assert known[0].tolist() == greedy[0].tolist() and len(set(known[0, 16:])) > 1


def test_sparse_weights_and_unrolled_blocks(tmp_path):
    """What the products multiply, with masks for the kernels as they are; the model stays as it is."""
    method = s24.methods.FST()
    scanned = built(dataclasses.replace(MODELS["arcee"], scan=True), method)
    before = flat(scanned)
    model = decoder.unrolled(scanned)
    own = flat(model)
    written(model, tmp_path / "sparse", weights="sparse", dtype="bfloat16")
    written(model, tmp_path / "dense", weights="dense")
    for key, value in flat(model).items():
        np.testing.assert_array_equal(value, own[key])
    sparse, dense = (
        huggingface.params_of(model.model, read_tensors(tmp_path / name), flat(model))
        for name in ("sparse", "dense")
    )
    assert flat(scanned).keys() == before.keys()
    for key, value in flat(model).items():
        np.testing.assert_array_equal(dense[key], value)
        kept = np.asarray(s24.transposable_mask24(value)) if ".ffn." in key else True
        np.testing.assert_array_equal(sparse[key], np.where(kept, value, 0).astype(jnp.bfloat16))


def test_statistics_of_batch_norms_are_written(tmp_path):
    """They were left out, so that a reader had those of the start."""
    model = nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.BatchNorm(8, rngs=nnx.Rngs(0)))
    model(jnp.arange(12.0).reshape(3, 4))
    shapes = s24.export(model, tmp_path / "out", config={})
    tensors = read_tensors(tmp_path / "out")
    assert {"layers.0.kernel", "layers.1.scale", "layers.1.mean", "layers.1.var"} < shapes.keys()
    for name in ("mean", "var"):
        want = getattr(model.layers[1], name)[...]
        np.testing.assert_array_equal(tensors[f"layers.1.{name}"], want)
        assert np.asarray(want).std() > 0


def test_several_files(tmp_path, monkeypatch):
    import jax_sparse24.huggingface as module

    monkeypatch.setattr(module, "SHARD_BYTES", 5000)
    shapes = written(built(MODELS["arcee"]), tmp_path / "out")
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert set(index["weight_map"].values()) == set(files) and len(files) > 2
    assert index["weight_map"].keys() == shapes.keys() == read_tensors(tmp_path / "out").keys()


@pytest.mark.slow
def test_a_run_there_and_back(finished, tmp_path, capsys):
    """The commands: a run of bytes exported, imported, exported again; another starts from it."""
    exporting.main([str(finished), "--out", str(tmp_path / "dense")])
    assert "ArceeForCausalLM" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        exporting.main([str(finished), "--out", str(tmp_path / "dense")])
    assert "exists already" in capsys.readouterr().err
    pytest.importorskip("tokenizers")
    own = vocabulary.Bytes()
    made = vocabulary.Subwords(own.text, "bytes", rows=own.size)
    for words in (bytes(range(127)), "Käse <|endoftext|>".encode()):
        np.testing.assert_array_equal(made.encode(words), own.encode(words))
    assert made.separator == own.separator
    import_model.main([str(tmp_path / "dense"), "--out", str(tmp_path / "run"), "--seq", "16"])
    command = next(line for line in capsys.readouterr().out.splitlines() if "experiments.launch" in line)
    parsed = launch.parse(command.split()[3:]).config
    config, _, step, state = stored.load_state(tmp_path / "run")
    assert step == config.train.steps and parsed.model == config.model
    assert parsed.train.start_from == str(tmp_path / "run")
    before = stored.load_state(finished)[3]["params"]
    jax.tree.map(np.testing.assert_array_equal, before, state["params"])
    assert rundir.vocabulary(tmp_path / "run").tokens == config.model.vocabulary == 257


@pytest.mark.slow
def test_a_run_that_ends_with_sparse_weights_is_exported_and_sampled_with_them(
    config, finished, tmp_path, capsys
):
    """Not a checkpoint of steps that were dense."""
    short = dataclasses.replace(config.train, steps=4, monitor_every=0, probe_every=0, dense_first=0.5)
    short = dataclasses.replace(short, checkpoint_every=2)
    train(dataclasses.replace(config, method=s24.methods.STE(), train=short), tmp_path / "run", show=False)
    capsys.readouterr()
    exporting.main([str(tmp_path / "run"), "--out", str(tmp_path / "sparse")])
    said = capsys.readouterr()
    assert "sparse weights in float32" in said.out and not said.err
    exporting.main([str(tmp_path / "run"), "--out", str(tmp_path / "dense"), "--weights", "dense"])
    said = capsys.readouterr()
    assert "dense weights" in said.out and "step 4 of this run, by STE, was by sparse weights" in said.err
    zeros = {
        name: [np.mean(value == 0) for key, value in read_tensors(tmp_path / name).items() if "mlp" in key]
        for name in ("sparse", "dense")
    }
    assert zeros == {"sparse": [0.5, 0.5], "dense": [0, 0]}
    assert [Sampler(run).sparse for run in (tmp_path / "run", finished)] == [True, False]
    assert not Sampler(tmp_path / "run", sparse=False).sparse
    capsys.readouterr()
    exporting.main([str(tmp_path / "run"), "--out", str(tmp_path / "before"), "--step", "2"])
    said = capsys.readouterr()
    assert "dense weights" in said.out and not said.err


@pytest.mark.parametrize("method", [s24.methods.Dense(), s24.methods.Activation24(dense_warmup=1)])
def test_a_method_without_sparse_weights_has_none_to_export(method, config, tmp_path):
    """Kernels as they are were written, and called sparse in config.json."""
    short = dataclasses.replace(config.train, steps=3, eval_every=0, monitor_every=0, probe_every=0)
    train(dataclasses.replace(config, method=method, train=short), tmp_path / "run", show=False)
    with pytest.raises(UserError, match=rf"trained by {type(method).__name__}, so it has no sparse weights"):
        exporting.write(tmp_path / "run", tmp_path / "out", weights="sparse")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architecture GPT2LMHeadModel.*give a folder of one of these",
        ),
        ({"architectures": None}, "architecture none"),
        ({"hidden_act": "silu"}, "ArceeForCausalLM with hidden_act 'silu'"),
        ({"attention_bias": True}, "has attention_bias, which our decoder does not"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "has rope_scaling"),
        ({"hidden_size": 15}, "must be an even number|head_dim must be even"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "has rope_scaling"),
        ({"rope_scaling": "linear"}, "has rope_scaling"),
        ({"rope_scaling": {"factor": 2.0}}, "has rope_scaling"),
        (
            {"rope_scaling": {"factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
            "has rope_scaling",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear"}}}, "has rope_scaling"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "has partial_rotary_factor"),
        ({"partial_rotary_factor": [1]}, "has partial_rotary_factor"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "has layer_types"),
        ({"hidden_size": "16"}, "hidden_size must be a positive whole number, got '16'"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a positive whole number, got 0"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "kv_heads must divide"),
        ({"rope_theta": "big"}, "rope_theta must be a positive number, got 'big'"),
        ({"vocab_size": ...}, "lacks 'vocab_size'"),
    ],
)
def test_another_architecture(changes, words):
    described = huggingface.description(MODELS["arcee"], ROWS, 32, 0) | changes
    if changes.get("vocab_size") is ...:
        del described["vocab_size"]
    described.pop("head_dim")
    with pytest.raises(UserError, match=words):
        huggingface.model_of(described)


def test_what_is_no_config():
    for content in ([1], None, "text"):
        with pytest.raises(UserError, match=r"config\.json holds no object"):
            huggingface.model_of(content)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of Hugging Face with the tokenizer of bytes, whose 257 tokens fill the embedding."""
    model = decoder.Config(layers=1, d=16, f=32, heads=2)
    made, own = model.create(s24.methods.Dense(), 257, rngs=nnx.Rngs(0)), vocabulary.Bytes()
    place = tmp_path_factory.mktemp("huggingface") / "folder"
    described = huggingface.description(model, 257, 32, own.separator)
    rename = lambda params: huggingface.tensors_of(model, params)  # noqa: E731
    s24.export(made, place, config=described, rename=rename, others={"tokenizer.json": own.text})
    return place


def sharded(place) -> dict:
    """Divides the weights into two files with an index; its content."""
    tensors = read_tensors(place)
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    index = {"weight_map": {key: names[n % 2] for n, key in enumerate(tensors)}}
    for name in names:
        own = {key: tensors[key] for key, file in index["weight_map"].items() if file == name}
        save_file(own, place / name)
    (place / "model.safetensors").unlink()
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors


def test_files_of_a_folder(folder, tmp_path):
    """Those of the index alone; one that is missing, or that has a tensor of another, is an error."""
    place = shutil.copytree(folder, tmp_path / "folder")
    assert {file.stat().st_mode for file in place.iterdir()} == {(place / "config.json").stat().st_mode}
    tensors = sharded(place)
    save_file({key: value * 0 for key, value in tensors.items()}, place / "other.safetensors")
    found = read_tensors(place)
    assert found.keys() == tensors.keys()
    for key, value in tensors.items():
        np.testing.assert_array_equal(found[key], value)
    (place / "model-00002-of-00002.safetensors").rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError, match=r"lacks model-00002-of-00002.safetensors, which"):
        read_tensors(place)
    (place / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ValueError, match="is no index of safetensors"):
        read_tensors(place)
    (place / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match="in another file of the folder"):
        read_tensors(place)


def test_an_import_that_is_killed_leaves_no_run(folder, tmp_path, monkeypatch):
    """Which would have no checkpoint, and begin at random when it is resumed."""
    out, partial = tmp_path / "run", tmp_path / ".run.importing"

    def killed(self, *_):
        shutil.copytree(partial, tmp_path / "left")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(import_model.Checkpoints, "save", killed)
        import_model.read(folder, out)
    assert not out.exists() and not partial.exists()
    (tmp_path / "left").rename(partial)
    import_model.read(folder, out)
    assert rundir.open_run(out).train.steps == 1 and not partial.exists()
    assert stored.load_state(out)[2] == 1


def test_an_imported_run_is_not_lengthened(folder, tmp_path, shared):
    """It has no position in a text; it is not said to be damaged."""
    import_model.read(folder, tmp_path / "run", seq=16)
    config = rundir.open_run(tmp_path / "run")
    data = dataclasses.replace(config.data, corpus=str(shared / "corpus"), root=str(shared / "data"), batch=2)
    config = dataclasses.replace(config, data=data)
    configs.write(config, tmp_path / "run" / "config.json")
    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=3))
    with pytest.raises(UserError, match=r"has no position in a text.* --train\.start-from .*/run\."):
        train(longer, tmp_path / "run", resume=True, show=False)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", "{", "config.json is no JSON"),
        ("config.json", None, "is no folder of Hugging Face: it has no config.json"),
        ("tokenizer.json", None, "has no tokenizer.json. If it has another"),
        ("tokenizer.json", "{}", "is no tokenizer.json that"),
        (
            "tokenizer.json",
            "<end_of_turn>",
            "has 258 tokens .one of them for the end .* more than the 257 rows",
        ),
        (
            "tokenizer.json",
            "added",
            "has 258 tokens, more than the 257 rows .* that belongs to these weights",
        ),
        ("model.safetensors", "no", "cannot be read"),
        ("model.safetensors", None, "has no .*safetensors"),
    ],
)
def test_folders_that_are_not_imported(file, content, words, folder, tmp_path, capsys):
    pytest.importorskip("tokenizers")
    place = shutil.copytree(folder, tmp_path / "folder")
    if content == "<end_of_turn>":  # a tokenizer whose end has another name
        content = (place / file).read_text(encoding="utf-8").replace(vocabulary.ENDS[0], content)
    if content == "added":  # another tokenizer
        described = json.loads((place / file).read_text(encoding="utf-8"))
        described["added_tokens"].append(described["added_tokens"][0] | {"id": 257, "content": "<other>"})
        content = json.dumps(described)
    (place / file).unlink()
    if content is not None:
        (place / file).write_text(content)
    with pytest.raises(SystemExit, match="2"):
        import_model.main([str(place), "--out", str(tmp_path / "run")])
    assert re.search(words, capsys.readouterr().err) and not (tmp_path / "run").exists()


def test_a_model_without_a_class_and_missing_tensors():
    with pytest.raises(UserError, match="ffn squared_relu, qk_norm True"):
        huggingface.description(dataclasses.replace(MODELS["arcee"], qk_norm=True), ROWS, 32, 0)
    like = flat(built(MODELS["arcee"]))
    tensors = huggingface.tensors_of(MODELS["arcee"], like)
    read = lambda tensors: huggingface.params_of(MODELS["arcee"], tensors, like)  # noqa: E731
    gone = {name: value for name, value in tensors.items() if "layers.1.mlp" not in name}
    with pytest.raises(UserError, match=r"lacks 2 tensors; the first is model.layers.1.mlp.down_proj.weight"):
        read(gone)
    with pytest.raises(UserError, match=r"has not, 1 tensors; the first is more"):
        read(tensors | {"more": np.zeros(1)})
    query = "model.layers.0.self_attn.q_proj.weight"
    for wrong in (np.zeros(16), np.zeros((8, 16))):
        with pytest.raises(UserError, match=r"q_proj.weight is .*, but by config.json .* \(16, 16\)"):
            read(tensors | {query: wrong})
    table = tensors["model.embed_tokens.weight"]
    for key, value in read(tensors | {"lm_head.weight": table}).items():  # some writers store it twice
        np.testing.assert_array_equal(value, like[key])
    with pytest.raises(UserError, match=r"lm_head.weight is not model.embed_tokens.weight"):
        read(tensors | {"lm_head.weight": table + 1})
    for number in (np.nan, np.inf):
        with pytest.raises(UserError, match=r"embed_tokens.weight has numbers that are not finite"):
            read(tensors | {"model.embed_tokens.weight": np.where(table == table[3, 3], number, table)})


def test_a_disk_without_room_is_told_of_as_for_any_file(tmp_path):
    """safetensors raised an error of its own, which commands showed as a traceback."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match=r"\.out\.partial/model\.safetensors") as raised:
            s24.export(built(MODELS["arcee"]), tmp_path / "out", config={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert raised.value.errno == errno.EFBIG and not list(tmp_path.iterdir())


def test_numbers_that_a_dtype_has_no_room_for(tmp_path):
    model = built(MODELS["arcee"])
    scale = model.norm.scale
    scale[...] = scale[...].at[2].set(7e4)
    with pytest.raises(ValueError, match=r"model\.norm\.weight has 1 numbers, such as 70000, .* float16"):
        written(model, tmp_path / "out", dtype="float16")
    assert not list(tmp_path.iterdir())
    written(model, tmp_path / "out", dtype="bfloat16")
    assert np.isfinite(read_tensors(tmp_path / "out")["model.norm.weight"].astype(np.float32)).all()


def test_two_exports_at_once_do_not_become_one(tmp_path, monkeypatch, finished, capsys):
    """The first one's config.json came beside the second one's tensors."""
    one, other = (decoder.unrolled(built(MODELS["arcee"])) for _ in range(2))
    other.norm.scale[...] = other.norm.scale[...] + 1
    whole, calls = huggingface_of_s24._write, []

    def write(*arguments):
        whole(*arguments)
        if not calls.append(1) and len(calls) == 1:
            with pytest.raises(
                FileExistsError, match=r"\.out\.partial is of another export into .*/out, which"
            ):
                written(other, tmp_path / "out")

    monkeypatch.setattr(huggingface_of_s24, "_write", write)
    written(one, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    np.testing.assert_array_equal(read_tensors(tmp_path / "out")["model.norm.weight"], one.norm.scale[...])
    (tmp_path / ".exported.partial").mkdir()
    with locked(tmp_path / ".exported.partial"), pytest.raises(SystemExit, match="2"):
        exporting.main([str(finished), "--out", str(tmp_path / "exported")])
    assert "error: export: " in capsys.readouterr().err and (tmp_path / ".exported.partial").exists()


@contextlib.contextmanager
def locked(folder):
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


@pytest.mark.slow
def test_what_a_killed_export_left_is_deleted_by_the_next(tmp_path):
    """It refused every later export into this folder."""
    code = f"""
import os, signal, sys
from flax import nnx
import jax_sparse24 as s24
from jax_sparse24 import huggingface
huggingface._write = lambda tensors, dtype, folder: (
    (folder / "of_the_killed.safetensors").write_text("part"), os.kill(os.getpid(), signal.SIGKILL)
)
s24.export(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), {str(tmp_path / "out")!r}, config={{}})
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == [".out.partial"]
    written(built(MODELS["arcee"]), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}


def test_without_locks_of_folders_the_first_that_makes_one_exports(tmp_path, monkeypatch):
    """As over NFS. What a killed one left is then to be deleted by hand."""

    def refuses(*_):
        raise OSError(errno.EBADF, "no lock of a folder")

    monkeypatch.setattr(huggingface_of_s24.fcntl, "flock", refuses)
    written(built(MODELS["arcee"]), tmp_path / "out")
    (tmp_path / ".again.partial").mkdir()
    with pytest.raises(FileExistsError, match="or delete that one"):
        written(built(MODELS["arcee"]), tmp_path / "again")
    assert (tmp_path / ".again.partial").exists()


def test_what_export_refuses(tmp_path):
    model = built(MODELS["arcee"])
    with pytest.raises(ValueError, match='"dense" or "sparse", got \'masked\''):
        s24.export(model, tmp_path / "out", config={}, weights="masked")
    with pytest.raises(ValueError, match="one of float32, float16, bfloat16"):
        s24.export(model, tmp_path / "out", config={}, dtype="int8")
    with pytest.raises(TypeError, match="must be an NNX module"):
        s24.export({}, tmp_path / "out", config={})
    with pytest.raises(FileExistsError, match="Name a folder that does not"):
        s24.export(model, tmp_path, config={})
    with pytest.raises(KeyError):
        s24.export(model, tmp_path / "out", config={}, rename=lambda params: params["none"])
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileNotFoundError, match=r"no \*.safetensors"):
        read_tensors(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"12345678 no")
    with pytest.raises(ValueError, match="cannot be read"):
        read_tensors(tmp_path)
