"""The launcher's words: help, typing mistakes, folders. Nothing here trains."""

import dataclasses
import shlex

import pytest

import jax_sparse24 as s24
from experiments import config as configs
from experiments import launch
from experiments.ablations import ablation as ablations
from experiments.errors import UserError
from experiments.training import opening as openings
from experiments.training.step import Program
from jax_sparse24.dispatch.decision import Decision
from tests.experiments.conftest import python


def run(capsys, *arguments):
    """(status, everything printed) of the launcher, in this process."""
    try:
        launch.main([str(argument) for argument in arguments])
        status = 0
    except SystemExit as stop:
        status = stop.code
    printed = capsys.readouterr()
    return status, " ".join((printed.out + printed.err).replace("│", " ").split())


@pytest.mark.slow
def test_help_lists_the_configs(capsys):
    status, text = run(capsys, "--help")
    assert status == 0
    for part in ("CONFIG", "configs/fst/masked_decay.py", "configs/demo.py:fst", "--resume"):
        assert part in text
    assert run(capsys) == (0, text)
    # Grouped by paper; parameters and devices come from the configs.
    fst = text.split("FST (arXiv 2404.01847) ")[1].split("SLoPe (arXiv")[0]
    assert "configs/fst/masked_decay.py 85M GPU GPT-2 size, the paper" in fst
    assert "configs/fst/decay_grid.py:cpu 0.1M CPU claim: Masked decay holds" in fst
    assert "configs/sizes.py:b7 6.7B 2+ GPUs 7B" in text
    small = configs.load("configs/demo.py:dense")
    count = launch.parameters(small.model, small.data.tokenizer)
    assert count == openings.parameters(small)
    assert f"configs/demo.py:dense {launch.rounded(count)} CPU The demo's dense arm" in text
    listed = [word for word in text.split("Configs in this")[1].split() if word.startswith("configs/")]
    offered = [len(configs.functions_of(configs.REPOSITORY / file)) for file in configs.listing()]
    assert len(set(listed)) == len(listed) == sum(offered) + len(ablations.listing())


@pytest.mark.parametrize(
    ("attention", "accumulate", "count", "device"),
    [
        ("xla", 1, 1e9, "CPU"),
        ("cudnn", 1, 5e9, "GPU"),
        ("cudnn", 2, 5e9, "2+ GPUs"),
        ("xla", 1, 2e10, "4+ GPUs"),
    ],
)
def test_what_a_config_needs(attention, accumulate, count, device):
    config = configs.load("configs/demo.py:dense")
    model = dataclasses.replace(config.model, attention=attention, dtype="bfloat16")
    train = dataclasses.replace(config.train, accumulate=accumulate)
    assert launch.needs(dataclasses.replace(config, model=model, train=train), int(count)) == device


def test_help_of_a_config_lists_its_fields(capsys):
    status, text = run(capsys, "configs/demo.py:fst", "--help")
    assert status == 0
    for part in ("--optim.lr", "(default: 0.003)", "--method.decay", "--out", "peak learning rate"):
        assert part in text


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--optim.lrr", "1"], ["--optim.lrr", "--optim.lr FLOAT"]),
        (["--method.decya", "1"], ["--method.decya", "--method.decay FLOAT"]),
        (["--optim.schedule", "cosin"], ["'cosin'", "'cosine', 'wsd'"]),
        (["--optim.lr", "fast"], ["--optim.lr", "'fast'"]),
        (["--method.mvue", "exat"], ["mvue", "exat", "exact"]),
        (["--model.heads", "3"], ["heads=3", "multiple of 2"]),
        (["--train.accumulate", "5"], ["accumulate=5"]),
        (["--process", "1"], ["--coordinator, --processes and --process belong together"]),
    ],
)
def test_mistakes_name_the_right_thing(capsys, tmp_path, arguments, parts):
    status, text = run(capsys, "configs/demo.py:fst", *arguments, "--out", tmp_path / "run")
    assert status == 2
    assert all(part in text for part in parts), text
    assert not (tmp_path / "run").exists()


def test_config_first(capsys):
    status, text = run(capsys, "--optim.lr", "1")
    assert status == 2
    assert "first argument must be a CONFIG" in text


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--model.f", "30"], ["cannot be built", "30", "multiple of 4", "28 or 32"]),
        (["--model.f", "30", "--method", "Dense"], ["cannot be built", "30", "of 4", "run cut its weights"]),
        (["--data.seq", "15", "--data.batch", "3"], ["cannot be built", "45", "multiple of 4"]),
        (["--data.corpus", "/nowhere"], ["/nowhere", "not a folder"]),
        (["--data.seq", "10000"], ["validation split", "less than one batch"]),
    ],
)
def test_what_cannot_run_leaves_no_folder(capsys, shared, tmp_path, arguments, parts):
    status, text = run(capsys, shared / "tiny.py", *arguments, "--out", tmp_path / "run")
    assert status == 2
    assert all(part in text for part in parts), text
    assert not (tmp_path / "run").exists()


def test_array(capsys, shared):
    """A command for each combination, into a folder of its own; mistakes before the first one."""
    words = [str(shared / "tiny.py"), "--out", "sweep", "--optim.warmup", "1"]
    choices = ["--array", "method=Dense,FST", "seed=0,1", "optim.lr=1e-3"]
    launch.main([*words, *choices])
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert [line[:3] for line in lines] == [["python", "-m", "experiments.launch"]] * 4
    assert all(line.count("--out") == 1 for line in lines)
    parsed = [launch.parse(line[3:]) for line in lines]
    found = [(type(one.config.method).__name__, one.config.seed, str(one.out)) for one in parsed]
    assert found[1] == ("Dense", 1, "sweep/method=Dense,seed=1,lr=1e-3")
    assert len(set(found)) == 4 and found[2][:2] == ("FST", 0)
    assert all(one.config.optim.warmup == 1 and one.config.optim.lr == 1e-3 for one in parsed)
    for wrong, part in (
        (["--array"], "such as --array method=Dense,FST seed=0,1,2"),
        (["--array", "seed"], "--array comes last"),
        (["--array", "method=Dens"], "Did you mean Dense?"),
        (["--array", "seed=0,x"], "--seed"),
        (["--array", "seed=0,1,0"], "names the folder sweep/seed=0 twice. Give each value once"),
    ):
        status, text = run(capsys, *words, *wrong)
        assert status == 2 and part in text


@pytest.mark.slow
def test_folders(capsys, shared, finished, tmp_path):
    tiny = shared / "tiny.py"
    before = sorted(str(path) for path in finished.rglob("*"))
    status, text = run(capsys, tiny, "--out", finished)
    assert status == 2
    assert "--resume" in text and "--out" in text
    status, text = run(capsys, tiny, "--out", finished, "--resume", "--optim.lr", "1", "--method.decay", "0")
    assert status == 2
    assert "optim.lr: 0.001 -> 1.0" in text and "method.decay: 0.001 -> 0.0" in text
    status, text = run(capsys, "--resume", tmp_path / "new")
    assert status == 2
    assert "There is no folder" in text
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    status, text = run(capsys, tiny, "--out", tmp_path / "other")
    assert status == 2
    assert "not an empty folder" in text
    assert sorted(str(path) for path in finished.rglob("*")) == before


@pytest.mark.slow
def test_as_a_module():
    result = python("experiments.launch", "configs/demo.py:fst", "--optim.lrr", "1")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "--optim.lr" in result.stderr


# ---- methods by name


@pytest.mark.slow
@pytest.mark.parametrize("name", [entry.name for entry in s24.methods.list()])
def test_a_configuration_for_every_method(name):
    """The first step of the launcher's configuration is traced, at a small size."""
    small = [
        "--model.layers",
        "1",
        "--model.d",
        "32",
        "--model.f",
        "64",
        "--data.seq",
        "64",
        "--data.batch",
        "4",
    ]
    config = launch.parse(["configs/dense.py:cpu", "--method", name, *small]).config
    assert type(config.method).__name__ == name and config.name == f"{name.lower()}-cpu"
    program = Program(config)
    for sparse, adapters in {(phase.sparse, phase.adapters) for phase in config.schedule.phases}:
        program.check(sparse, adapters)


def test_a_method_by_name_has_its_options(capsys):
    config = launch.parse(["configs/demo.py:fst", "--method=SLoPe", "--method.rank", "0.25"]).config
    assert config == dataclasses.replace(
        configs.load("configs/demo.py:fst"), name="demo-slope", method=s24.methods.SLoPe(rank=0.25)
    )
    venom = launch.parse(["configs/dense.py:cpu", "--method", "Venom"]).config
    assert venom.method.dense_warmup == venom.train.steps // 4
    for arguments, parts in [
        (["--method", "slop"], ["no method 'slop'", "Did you mean SLoPe?"]),
        (["--method", "Adam"], ["no method 'Adam'", "Activation24, BiMask"]),
        (["--method"], ["--method needs the name"]),
        (["--method", "Venom", "--train.steps", "120"], ["does not suit 120 steps", "dense_warmup=150"]),
    ]:
        status, text = run(capsys, "configs/dense.py:cpu", *arguments)
        assert status == 2 and all(part in text for part in parts), text


# ---- what a launch says, and measures, before its first step


@pytest.fixture
def measured(monkeypatch):
    """The calls of `ensure`, which measures nothing here."""
    calls = []
    monkeypatch.setattr(openings, "ensure", lambda *args, **kwargs: calls.append((args, kwargs)))
    return calls


def test_the_shapes_of_a_run_are_measured_where_that_helps(config, measured):
    openings.ensure_measured(config, show=None)
    assert measured == [(([(4 * 32, 16, 32)], ["float32"], [config.method]), {"linear": False, "show": None})]
    half = dataclasses.replace(config, train=dataclasses.replace(config.train, accumulate=2))
    assert [block.shape for block in openings.blocks_of(half)] == [(64, 16, 32)]
    for model in ({"implementation": "reference"}, {"rank": 4}, {"f": 30}):
        openings.ensure_measured(
            dataclasses.replace(config, model=dataclasses.replace(config.model, **model))
        )
    assert len(measured) == 1
    with_attention = dataclasses.replace(config.model, attention_method="STE")
    openings.ensure_measured(dataclasses.replace(config, model=with_attention))
    assert [call[0][0] for call in measured[2:]] == [[(4 * 32, 16, 16)], [(4 * 32, 16, 48)]]
    assert [call[1]["linear"] for call in measured[1:]] == [False, True, True]
    said = openings.products(dataclasses.replace(config, model=with_attention))
    assert said.endswith("; STE in the projections of attention")


@pytest.mark.parametrize("flag", [(), ("--no-tune",)])
def test_the_launcher_measures_and_says_before_it_compiles(
    shared, tmp_path, capsys, measured, monkeypatch, flag
):
    def compiling(*_):
        raise UserError("compiling")

    monkeypatch.setattr(Program, "check", compiling)
    status, text = run(capsys, shared / "tiny.py", "--out", tmp_path / "run", *flag)
    assert status == 2 and "compiling" in text and len(measured) == (not flag)
    assert "FST, sparse in steps 0 to 8 of 12: F1, F2, B1, B2, B3, B4 masked dense (" in text
    assert "s24.tune(" in text
    assert "8 files" in text and "the run reads 1,536" in text and "parameters" in text


def test_what_is_measured_is_said_in_ratios(config):
    def choice(product, dense, packed):
        entry = {"status": "ok", "dense_us": dense, "packed_us": packed}
        return openings.Choice(
            product, "packed", "a long reason", Decision("auto", "a long reason", "packed", entry=entry)
        )

    assert openings._why([choice("F1", 3, 2), choice("F2", 5, 4)]) == "packed is 1.25x to 1.50x dense"
    assert openings.products(dataclasses.replace(config, method=s24.methods.Dense())) == (
        "Dense: every product is dense"
    )
