"""The throughput ladder: which steps its rungs are, and what is kept of one that cannot be run."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.ablations.ablation import SIZES
from experiments.bench import main
from experiments.benchmarks import pages, rows, shown, stored
from experiments.benchmarks.settings import RUNGS, Case, Settings
from experiments.benchmarks.suites import ladder, train_step
from experiments.errors import UserError
from experiments.models import parts
from experiments.training.step import loss_of
from jax_sparse24.measure import timing

SMALL = ["ladder", "--shape", "16,32", "--tokens", "64", "--layers", "1", "--repeats", "1"]
SMALL += ["--seconds", "1e-6", "--no-torch"]


@pytest.fixture
def small(monkeypatch):
    """A vocabulary whose logits are few."""
    monkeypatch.setattr(ladder, "VOCABULARY", 272)


@pytest.fixture
def on_gpu(monkeypatch):
    """Configs as on an NVIDIA GPU; they are not run."""
    for module in (ladder, train_step):
        monkeypatch.setattr(module, "platform", lambda: "cuda")


def test_the_last_dense_rung_is_the_step_of_the_evidence(on_gpu):
    (case,) = Settings(suites=("ladder",), shape=("gpt2-124m",), tokens=(65536,)).cases("ladder")
    settings = Settings(suites=("ladder",))
    config = ladder.config_at("one-batch", case, settings.blocks("ladder"))
    study = SIZES["124m"].base
    assert config.model == dataclasses.replace(study.model, vocabulary=32768)
    assert (config.data.seq, config.data.batch) == (study.data.seq, study.data.batch)
    assert config.train.accumulate == study.train.accumulate == 1
    assert settings.blocks("train-step") == 2


def test_each_rung_changes_what_it_says(on_gpu):
    assert tuple(ladder.LADDER) == RUNGS == tuple(ladder.names(Settings(suites=("ladder",))))
    fields = []
    for below, name in itertools.pairwise(RUNGS):
        old, new = (ladder.config_at(rung, Case(128, 16, 32), 2) for rung in (below, name))
        models = [vars(c.model) | {"scattered": False, "at_once": False} | vars(c.model) for c in (old, new)]
        changed = {key for key in models[0] if models[0][key] != models[1][key]}
        changed |= {"parts"} if old.train != new.train else set()
        fields.append(changed | ({"method"} if old.method != new.method else set()))
    assert fields == [
        *({"dtype"}, {"attention"}, {"scattered"}, {"at_once"}, {"scan"}, {"remat"}, {"parts"}, {"method"}),
    ]


def test_rungs_that_are_named_have_the_changes_below_them():
    settings = Settings(suites=("ladder",), rungs=("FST", "embedding", "cudnn"))
    assert ladder.names(settings) == ["embedding", "FST"], "in their order, and cuDNN is not for a CPU"
    config = ladder.config_at("embedding", Case(128, 16, 32), 2)
    assert config.model.dtype == "bfloat16" and config.model.attention == "xla"
    assert config.model.scan and not config.model.scattered and config.train.accumulate == 8


def test_plain_models_add_where_tokens_are_and_make_all_logits(small, monkeypatch):
    """The same loss and gradients as the decoder's, by other operations."""
    monkeypatch.setattr(parts, "ROWS_BY_PRODUCT", 271)
    case, found = Case(64, 16, 32), {}
    for name in ("plain", "bfloat16", "embedding", "logits"):
        config = ladder.config_at(name, case, 1)
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype="float32"))
        model = config.create_model()
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        tokens = jnp.asarray(train_step.drawn(config))
        run = jax.value_and_grad(
            lambda p, graphdef=graphdef, rest=rest, tokens=tokens: loss_of(
                nnx.merge(graphdef, p, rest), tokens
            )
        )
        loss, grads = jax.jit(run)(params)
        leaves = sorted(float(jnp.linalg.norm(g)) for g in jax.tree.leaves(grads))
        found[name] = loss, leaves, str(jax.make_jaxpr(run)(params))
    for loss, leaves, _ in found.values():
        np.testing.assert_allclose(loss, found["plain"][0], rtol=1e-5)
        np.testing.assert_allclose(leaves, found["plain"][1], rtol=1e-4)
    sorts = {name: " sort[" in text for name, (_, _, text) in found.items()}
    assert sorts == {"plain": False, "bfloat16": False, "embedding": True, "logits": True}
    assert isinstance(ladder.config_at("embedding", case, 1).create_model(), ladder.AtOnce)
    assert not isinstance(ladder.config_at("logits", case, 1).create_model(), ladder.AtOnce)


def test_tokens_of_a_vocabulary_are_drawn_by_zipfs_law(small):
    config = ladder.config_at("plain", Case(4096, 16, 32), 1)
    counts = np.bincount(train_step.drawn(config).reshape(-1), minlength=272)
    assert counts.argmax() == 0 and 1.5 < counts[0] / counts[1] < 2.5 and counts.sum() == 8 * 513
    plain = dataclasses.replace(config, model=dataclasses.replace(config.model, vocabulary=0))
    counts = np.bincount(train_step.drawn(plain).reshape(-1))
    assert counts[:256].max() < 3 * counts[:256].mean(), "bytes are all alike"


def kept(config):
    """The config of a rung of which this is the reference's."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, remat=False, scan=False))


def fake_steps(monkeypatch, failures=(), wrong=()):
    """Steps that take no time; those of a rung may fail, with an error that is raised as they are made."""
    made = []

    class Fake:
        temp_bytes = 2**20

        def __init__(self, config, named, options=None):
            config = config if named is None else kept(config)
            self.rung = next(r for r in RUNGS if ladder.config_at(r, CASE, 1) == config)
            if self.rung in failures:
                raise failures[self.rung]
            made.append(self.rung)

        @property
        def metrics(self):
            loss = 7.0 if self.rung in wrong else 5.0
            return [{"loss": loss, "grad_norm": 1.0}, {"loss": loss - 0.1, "grad_norm": 1.0}]

        def first_two(self):
            return self.metrics

        def refreshing(self):
            return np.zeros(1)

        def __call__(self):
            return np.zeros(1)

    monkeypatch.setattr(ladder, "Steps", Fake)
    monkeypatch.setattr(train_step, "Steps", Fake)  # of references
    near = lambda steps, config: train_step.up_to_rounding(steps.metrics, "bfloat16", CASE)  # noqa: E731
    monkeypatch.setattr(ladder, "up_to_choices", near)
    return made


CASE = Case(64, 16, 32)


def run(tmp_path, capsys, *argv):
    status = main([*SMALL, *argv, "--out", str(tmp_path)])
    (result,) = stored.files(tmp_path)
    return status, result, capsys.readouterr()


def test_too_little_memory_is_a_result(monkeypatch, tmp_path, capsys, small):
    """The rung is a row of its own, and the next one is compared with the last that could be run."""
    full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.")
    made = fake_steps(monkeypatch, {"no-scan": full})
    status, result, out = run(tmp_path, capsys)
    assert status == 0 and result["complete"] and not result["failed"]
    assert made.count("FST") == 2, "its reference, too"
    said = [line.partition(" s  T=64 d=16 f=32")[2] for line in out.err.splitlines()]
    assert said.index(": 9 programs of steps are compiled") < said.index(" plain is checked")
    assert said.index(" FST runs with masked-dense products, 9 times") < said.index(" FST is checked")
    found = {row["rung"]: row for row in result["rows"]}
    assert [*found] == [name for name in RUNGS if name != "cudnn"]
    assert found["no-scan"]["status"] == {"step": rows.OUT_OF_MEMORY} and found["no-scan"]["ms"] == {}
    assert found["no-remat"]["before"] == "logits" and found["plain"]["before"] is None
    assert {"step", "step before"} == set(found["FST"]["ms"])
    assert "OUT OF MEMORY" in out.out and found["FST"]["method"] == "FST"
    (line,) = [line for line in ladder.table(result["rows"]).splitlines() if line.startswith("| no-remat")]
    assert "x, logits " in line, "the page says with what it is compared"
    page = pages.page(stored.load(tmp_path), stored.files(tmp_path))
    assert "### The throughput ladder" in page and "| no-scan " in page and "wrong result" not in page


def test_a_rung_that_fails_does_not_stop_the_others(monkeypatch, tmp_path, capsys, small):
    fake_steps(monkeypatch, {"no-scan": UserError("cuDNN has no such attention"), "FST": ValueError("bad")})
    status, result, out = run(tmp_path, capsys, "--rungs", "logits", "--rungs", "no-scan", "--rungs", "FST")
    assert status == 1 and [row["rung"] for row in result["rows"]] == ["logits"]
    assert "no-scan could not be measured: RuntimeError: cuDNN has no such attention" in out.err
    assert "FST could not be measured: ValueError: bad" in out.err
    assert result["settings"]["rungs"] == ["logits", "no-scan", "FST"]


def test_a_rung_that_is_interrupted_leaves_what_was_measured(monkeypatch, tmp_path, capsys, small):
    fake_steps(monkeypatch)
    measure = ladder.interleaved

    def interrupted(programs, *args):
        times = measure(programs, *args)
        if "step before" in times:
            raise timing.Interrupted(times)
        return times

    monkeypatch.setattr(ladder, "interleaved", interrupted)
    with pytest.raises(SystemExit):
        run(tmp_path, capsys, "--rungs", "logits", "--rungs", "no-scan", "--rungs", "FST")
    (result,) = stored.files(tmp_path)
    assert [row["rung"] for row in result["rows"]] == ["logits", "no-scan"] and not result["complete"]
    assert {"step", "step before"} == set(result["rows"][1]["ms"])


def test_a_wrong_rung_is_no_baseline(monkeypatch, tmp_path, capsys, small):
    fake_steps(monkeypatch, wrong=("embedding",))
    status, result, out = run(
        tmp_path, capsys, "--rungs", "bfloat16", "--rungs", "embedding", "--rungs", "FST"
    )
    assert status == 1 and "step was wrong" in out.err
    _, embedding, fst = result["rows"]
    assert embedding["status"] == {"step": "wrong"} and fst["before"] == "embedding"
    assert "step before" not in fst["ms"]
    assert ladder.so_far(result["rows"]) == [1.0, None, None] and ladder.tokens_per_second(embedding) is None


def test_speed_and_share_of_the_peak():
    def row(rung, before, ms, others=None, **more):
        times = {"step": {"median": ms, "low": ms, "high": ms, "rounds": [ms] * 3, **more}}
        if others:
            times["step before"] = {"median": others, "low": others, "high": others, "rounds": [others] * 3}
        place = {"T": 1000, "d": 16, "f": 32, "layers": 1, "dtype": "bfloat16", "implementation": "auto"}
        own = {"flops_per_token": 2e9, "peak": 8e15, "status": {"step": "ok"}, "temp_bytes": 10**6}
        return place | own | {"rung": rung, "before": before, "ms": times}

    found = [
        row("plain", None, 4.0),
        row("bfloat16", "plain", 2.0, 4.0),
        row("cudnn", "bfloat16", 1.0, 2.5, joules=0.5, watts=600.0, mhz=1700.0),
    ]
    assert ladder.tokens_per_second(found[0]) == 250_000 and ladder.mfu(found[2]) == pytest.approx(0.25)
    assert ladder.so_far(found) == [1.0, 2.0, 5.0]
    *_, last = ladder.table(found[::-1]).splitlines()
    cells = [cell.strip() for cell in last.strip("|").split("|")]
    assert cells[0] == "cudnn" and cells[6:] == [
        *("2.50x", "5.00x", "1,000,000", "25%", "1 (1-1)", "0.5", "600, 1700", "1")
    ]
    assert ladder.mfu(found[0] | {"peak": None}) is None


def test_the_plot_has_a_bar_for_each_rung_with_a_speed(monkeypatch, tmp_path, capsys, small):
    plots = pytest.importorskip("experiments.benchmarks.plots")
    figures = []
    monkeypatch.setattr(plots, "save", lambda figure, path: figures.append(figure))
    full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
    fake_steps(monkeypatch, {"no-scan": full})
    run(tmp_path, capsys)
    (suites,) = stored.load(tmp_path).values()
    (name,) = shown.images(suites)
    assert name.endswith("-ladder.png") and "tokens per second" in shown.caption(name)
    plots.write(suites, tmp_path / name)
    (axes,) = figures[0].axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == [rung for rung in RUNGS if rung not in ("cudnn", "no-scan")]
    texts = [text.get_text() for text in axes.texts]
    assert len(axes.patches) == len(names) == len(texts) and "x logits" in texts[names.index("no-remat")]
    assert axes.patches[-1].get_facecolor() != axes.patches[0].get_facecolor()
    only = {"ladder": suites["ladder"] | {"rows": suites["ladder"]["rows"][:1]}}
    assert shown.images(only) == {}, "one rung is no ladder"
    plots.plt.close(figures[0])


def test_rows_of_different_rungs_stand_side_by_side(monkeypatch, tmp_path, capsys, small):
    fake_steps(monkeypatch)
    for names in (("plain", "bfloat16"), ("plain", "logits")):
        main([*SMALL, *(word for name in names for word in ("--rungs", name)), "--out", str(tmp_path)])
    capsys.readouterr()
    ((suites),) = stored.load(tmp_path).values()
    assert [row["rung"] for row in suites["ladder"]["rows"]] == ["plain", "bfloat16", "logits"]


@pytest.mark.slow
def test_rungs_are_measured(tmp_path, capsys, small):
    """Truly run: steps of float32 and bfloat16 and FST's, whose losses are right."""
    names = ("plain", "one-batch", "FST")
    argv = [word for name in names for word in ("--rungs", name)]
    status, result, out = run(tmp_path, capsys, *argv)
    assert status == 0, out.err
    plain, dense, fst = result["rows"]
    assert plain["dtype"] == "float32" and plain["peak"] is None and fst["method"] == "FST"
    assert all(len(row["loss"]) == 2 and row["temp_bytes"] > 0 for row in result["rows"])
    assert plain["flops_per_token"] == fst["flops_per_token"]
    assert abs(plain["loss"][0] - dense["loss"][0]) < 0.01 * plain["loss"][0] != fst["loss"][0]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["ladder", "--rungs", "bf16"], "Did you mean bfloat16?"),
        (["gemm", "--rungs", "plain"], "--rungs is for the suite ladder"),
        (["ladder", "--rungs", "cudnn"], "--rungs cudnn needs an NVIDIA GPU"),
        (["ladder", "--dtype", "float32"], "--dtype is not for the suite ladder"),
        (["ladder", "--method", "FST"], "--method is not for the suite ladder"),
        (["ladder", "--shape", "16,32", "--tokens", "9216"], "give a multiple of 8192"),
        # 16 sequences: speeds by 16392 tokens would count 8 that no step has.
        (["ladder", "--shape", "16,32", "--tokens", "16392"], "give a multiple of 8192"),
        (["ladder", "--shape", "16,32", "--tokens", "252"], "give a multiple of 8."),
        (["ladder", "--shape", "16,32", "--tokens", "4"], "give a multiple of 8."),
    ],
)
def test_mistakes_are_one_message(argv, message, capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        main([*argv, "--out", str(tmp_path)])
    assert stop.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())
