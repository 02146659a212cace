"""What an ablation is: rules, files, and the claims of this repository."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest

import jax_sparse24 as s24
from configs.fst import equal_time
from experiments.ablations import ablation as ablations
from experiments.ablations import evidence
from experiments.ablations.ablation import SIZES, Ablation
from experiments.ablations.verdicts import all_of, less
from experiments.analysis.outcome import LIMITS, METRICS, outcome
from experiments.analysis.runs import Run
from experiments.benchmarks import rows
from experiments.config import REPOSITORY
from experiments.data import text
from experiments.errors import UserError
from experiments.training.step import Program

SIZE = SIZES["smoke"]
RESULTS = REPOSITORY / "experiments/benchmarks/results"
ARMS = {"dense": SIZE.arm(s24.methods.Dense()), "fst": SIZE.arm(s24.methods.FST())}
LONG = ("pilot", "124m", "widepilot", "wide", "wide4096")  # whose runs take long: some have fewer seeds
SPECS = [f"{file}:{size}" for file in ablations.listing() for size in SIZES]


def make(**fields):
    words = dict.fromkeys(("claim", "source", "expects", "differs"), "words")
    return Ablation(**{**words, "arms": ARMS, "verdict": less("dense", "fst"), **fields})


def test_there_are_claims():
    assert {"configs/fst/decay_grid.py:cpu", "configs/fst/ste_flip_rate.py:smoke"} <= set(SPECS)


@pytest.mark.parametrize("spec", SPECS)
def test_every_claim_says_what_it_must(spec):
    named = ablations.load(spec)
    ablation = named.ablation
    assert f"configs/{named.paper}/{named.claim}.py:{named.size}" == spec
    few = (1, 2) if named.size in LONG else ()
    assert len(ablation.arms) > 1 and len(ablation.seeds) in (*few, 3, 8)
    assert all(len(text) > 40 for text in (ablation.claim, ablation.expects, ablation.differs))
    assert "arXiv" in ablation.source
    assert not any(text.endswith(".") for text in (ablation.source,))
    compared = {arm for comparison in ablation.verdict.comparisons() for arm in comparison.arms}
    assert compared <= set(ablation.arms)
    for name, arm in ablation.arms.items():
        if isinstance(arm.method, s24.methods.Venom):
            tokens = arm.data.seq * arm.data.batch // arm.train.accumulate
            assert tokens % arm.method.v == arm.model.f % arm.method.v == 0, name


@pytest.mark.slow
def test_arms_of_a_seed_start_equal_and_others_do_not():
    ablation = ablations.load("configs/fst/decay_grid.py:smoke").ablation
    kept = {"dense", "decay usual"}
    states = {
        (arm, seed): jax.tree.leaves(Program(config).initial_state()["params"])
        for arm, seed, config in ablation.runs((0, 1))
        if arm in kept
    }
    for one, other in zip(states["dense", 0], states["decay usual", 0], strict=True):
        np.testing.assert_array_equal(one, other)
    assert any(
        (a != b).any() for a, b in zip(states["dense", 0], states["dense", 1], strict=True) if a.ndim > 1
    )


def test_runs_set_the_seed_and_nothing_else():
    arms = make().all_arms
    for arm, seed, config in make().runs((5, 3)):
        assert dataclasses.replace(config, seed=0, name=arms[arm].name) == arms[arm]
        assert config.seed == seed
    assert [(arm, seed) for arm, seed, _ in make().runs((5, 3))] == [
        ("dense", 5),
        ("fst", 5),
        ("replicate", 5),
        ("dense", 3),
        ("fst", 3),
        ("replicate", 3),
    ]


WIDE = {"wide": SIZE.arm(s24.methods.Dense(), {"f": 64})}


@pytest.mark.parametrize(
    ("arms", "start", "base"),
    [
        (ARMS, "", "fst"),
        (ARMS, "dense", "fst"),
        (dict(reversed(ARMS.items())), "fst", "dense"),
        ({"dense": ARMS["dense"], **WIDE}, "", "dense"),
        ({**WIDE, "dense": ARMS["dense"]}, "wide", "dense"),
    ],
)
def test_the_replicate_is_a_sparse_arm_off_by_rounding(arms, start, base):
    ablation = make(arms=arms, start=start, verdict=less("dense", next(a for a in arms if a != "dense")))
    train = dataclasses.replace(arms[base].train, perturb=1e-6)
    assert ablation.replicated == base
    assert ablation.all_arms == {**arms, "replicate": dataclasses.replace(arms[base], train=train)}


def test_seeds_by_size():
    assert SIZE.seeds(cpu=8) == range(3) and SIZES["cpu"].seeds(cpu=8) == range(8)


def test_a_statement_changes_with_the_predicate_and_the_expectation_only():
    known = make().statement
    assert known["comparisons"] == ["val_loss of dense minus fst < 0"]
    assert make(found={"cpu": "Much."}, seeds=range(8)).statement == known
    for fields in (
        {"verdict": less("dense", "fst", effect=0.02)},
        {"verdict": less("dense", "fst", by=0.01)},
        {"expects": "Other words."},
        {"claim": "Other words."},
    ):
        assert make(**fields).statement["hash"] != known["hash"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"arms": {}}, "no arms"),
        ({"arms": {**ARMS, "replicate": ARMS["fst"]}}, "No arm may be called 'replicate'"),
        ({"verdict": less("dense", "fts")}, r"arm 'fts'; there are: dense, fst\. Did you mean 'fst'\?"),
        (
            {"verdict": less("dense", "fst", "flip_rat")},
            r"metric 'flip_rat'; there are: val_loss.*'flip_late'",
        ),
        ({"verdict": all_of()}, "compares nothing"),
        ({"seeds": ()}, "list of seeds is empty"),
        ({"seeds": (0, 0)}, "given twice"),
        ({"seeds": (0, -1)}, "must not be negative, got -1"),
        (
            {"found": {"gpus": "Little."}},
            "by size: smoke, cpu, mid, gpu, pilot, 124m, widepilot, wide, wide4096; got 'gpus'",
        ),
        (
            {"arms": {**ARMS, "fst": dataclasses.replace(ARMS["fst"], data=text.Config(seq=16))}},
            "'fst' has other data .* than 'dense'",
        ),
        ({"arms": {**ARMS, "fst": SIZE.arm(s24.methods.FST(), steps=13)}}, "another number of steps"),
        ({"arms": {"a b": ARMS["dense"], "a/b": ARMS["fst"]}, "verdict": less("a b", "a/b")}, "same folder"),
    ],
)
def test_rules(fields, message):
    with pytest.raises(UserError, match=message):
        make(**fields)


def test_arms_at_equal_time_may_differ_in_steps():
    longer = SIZE.arm(s24.methods.FST(), steps=13)
    assert make(arms={**ARMS, "fst": longer}, equal="time").arms["fst"] == longer
    with pytest.raises(UserError, match="equal='loss' must be 'steps' or 'time'"):
        make(equal="loss")


@pytest.mark.parametrize(
    ("size", "shape", "files"),
    [
        ("", (4096, 14336), ["2026-11-22-d"] * 3),
        ("widepilot", (2048, 8192), ["20261126T135922Z", "20261123T171607Z", "20261126T135922Z"]),
    ],
)
@pytest.mark.parametrize("name", ["FST", "Activation24", "Venom"])
def test_steps_at_equal_time_follow_from_the_measured_speed(name, size, shape, files):
    """The speeds that the config names are those of the stored results."""
    place, speeds = equal_time.SPEEDS[size]
    file = f"nvidia-h200_train-step_{files[list(speeds).index(name)]}.json"
    results = json.loads((RESULTS / file).read_text())["rows"]
    (row,) = [r for r in results if (r["method"], r["d"], r["f"]) == (name, *shape)]
    assert place == ", ".join(map(str, shape))
    assert speeds[name] == round(rows.ratio(row, "dense step", "step"), 2)
    check_steps(name, size or "cpu", speeds[name])


@pytest.mark.parametrize("name", ["FST", "Activation24"])
def test_steps_of_wide_models_follow_from_their_own_runs(name):
    place, speeds = equal_time.SPEEDS["wide"]
    speed, pilot = speeds[name], evidence.read(REPOSITORY / "docs/evidence/widepilot")
    model = pilot.arms[name][0].config.model
    assert place == f"{model.d}, {model.f}" and model == SIZES["wide"].base.model
    assert [speed] == [round(found, 2) for found in pilot.step_speeds(name)]
    check_steps(name, "wide", speed)


@pytest.mark.parametrize("name", ["FST", "Activation24", "Venom"])
def test_steps_of_the_widest_models_follow_from_about_their_speed(name):
    """They were chosen by the speed of earlier runs."""
    place, speeds = equal_time.SPEEDS["wide4096"]
    study = evidence.read(REPOSITORY / "docs/evidence/wide4096")
    model = study.arms[name][0].config.model
    assert place == f"{model.d}, {model.f}" and model == SIZES["wide4096"].base.model
    assert all(abs(found - speeds[name]) < 0.1 for found in study.step_speeds(name))
    check_steps(name, "wide4096", speeds[name])


def test_wide_venom_with_small_blocks_has_the_speed_of_its_products():
    """No whole model was timed with them. The table has the products of both layers at this width."""
    path = REPOSITORY / "jax_sparse24/tuning/nvidia-h200.json"
    width = {SIZES["wide"].base.model.d, SIZES["wide"].base.model.f}
    entries = [
        entry
        for entry in json.loads(path.read_text())["products"]
        if entry["pattern"] == "64:2:8" and width < set(entry["shape"])
    ]
    assert len({(entry["product"], entry["sparse"]) for entry in entries}) >= 5
    ratio = sum(e["dense_us"] for e in entries) / sum(e["packed_us"] for e in entries)
    assert equal_time.SPEEDS["wide"][1]["Venom"] == 1.0 and ratio == pytest.approx(1, abs=0.05)
    check_steps("Venom", "wide", 1.0)


def check_steps(name, size, speed):
    """One more step would take longer than dense training."""
    arms = ablations.load(f"configs/fst/equal_time.py:{size}").ablation.arms
    config, dense = arms[name], arms["dense"].train.steps

    def time(steps):
        phases = config.method.schedule(steps).phases
        return sum(p.steps / speed if p.sparse else p.steps for p in phases)

    assert time(config.train.steps) <= dense < time(config.train.steps + 1)


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("configs/fst/decay_gird.py", ["Did you mean configs/fst/decay_grid.py?"]),
        (
            "configs/fst/decay_grid.py:cpus",
            ["'cpus'", "smoke, cpu, mid, gpu, pilot, 124m, widepilot, wide, wide4096", "decay_grid.py:cpu?"],
        ),
        ("configs/demo.py", ["defines no ablation(size)", "configs/fst/decay_grid.py"]),
    ],
)
def test_load_names_the_nearest(spec, parts):
    with pytest.raises(UserError) as error:
        ablations.load(spec)
    assert all(part in str(error.value) for part in parts)


def test_load_wants_an_ablation(tmp_path):
    (tmp_path / "bad.py").write_text("def ablation(size):\n    return 3\n")
    with pytest.raises(UserError, match=r"must return an experiments\.ablations\.\S+Ablation, not int"):
        ablations.load(str(tmp_path / "bad.py"))


def run_of(config, monitor=(), probe=(), evaluated=(), train=()):
    kinds = {"monitor": monitor, "probe": probe, "eval": evaluated, "train": train}
    rows = {kind: [{**row, "kind": kind} for row in own] for kind, own in kinds.items()}
    return Run("run", None, config, rows)


def test_outcome_by_hand():
    config = SIZE.arm(s24.methods.FST(dense_fraction=0))  # 12 steps: quarters are 0-2, 3-8, 9-11
    flips = {0: 0.4, 2: 0.2, 4: 0.1, 6: 0.2, 8: 0.3, 10: 0.06}
    monitor = [
        {"step": step, "flip_rate": r, "flipped_since_start": r + 0.5, "kept_share": 0.7}
        | {
            "predicted_change": -2.0,
            "loss_change": -1.0 if step else 3.0,
            "rising": float(step == 0),
            "seconds": 0.02,
        }
        for step, r in flips.items()
    ]
    evaluated = [{"step": 6, "dense": 9.0, "sparse": 9.0}, {"step": 12, "dense": 2.0, "sparse": 3.0}]
    probe = [
        {"step": 0, "cosine": 0.8, "noise": 0.1, "density": 0.5, "F2_lost_energy": 0.9},
        {"step": 3, "cosine": 0.8, "noise": 0.1, "density": 0.5, "F2_lost_energy": 0.9},
        {"step": 6, "cosine": 0.6, "noise": 0.3, "density": 0.1, "F2_lost_energy": 0.4},
        {"step": 9, "cosine": 0.6, "noise": 0.3, "density": 0.1, "F2_lost_energy": 0.4},
    ]
    for row in probe:
        row |= {"B2_lost_energy": row["density"] / 2, "B2_lost": row["density"] / 4, "seconds": 0.06}
    train = [{"step": step, "loss": float(step), "steps_per_s": 10.0} for step in range(12)]
    found = outcome(run_of(config, monitor, probe, evaluated, train))
    assert set(found) == set(METRICS)
    expected = {
        "val_loss": 3.0,
        "val_dense": 2.0,
        "val_sparse": 3.0,
        "sparse_gap": 1.0,
        "leak": 0.0,
        "val_causal": 3.0,
        "early_loss": 1.0,
        "train_loss": 11.0,
        "flip_early": 0.3,
        "flip_mid": 0.2,
        "flip_late": 0.06,
        "flip_fade": 0.2,
        "flipped_since_start": 0.56,
        "kept_share": 0.7,
        "rising": 1 / 6,
        "descent": 1 / 6,
        "cosine": 0.7,
        "noise": 0.2,
        "density_start": 0.5,
        "density": 0.1,
        "cut_f": 0.4,  # of steps 6 to 12
        "cut_T": 0.05,
        "overflow_T": 0.025,
        "monitor_cost": 0.3,
        "steps_per_s": 10.0,
    }
    assert found == {name: pytest.approx(value) for name, value in expected.items()}
    for method in (s24.methods.SSTE(fp8="tensor"), s24.methods.FST(fp8="delayed")):
        leaking = dataclasses.replace(config, method=method)
        found = outcome(run_of(leaking, monitor, probe, evaluated, train))
        assert (found["leak"], found["val_causal"]) == (None, None)  # not measured
    evaluated[-1]["leak"] = 0.25
    found = outcome(run_of(leaking, monitor, probe, evaluated, train))
    assert (found["leak"], found["val_causal"]) == (0.25, 3.25)
    dense_at_end = dataclasses.replace(config, method=s24.methods.FST(dense_fraction=1 / 6))
    assert outcome(run_of(dense_at_end, monitor, probe, evaluated, train))["val_loss"] == 2.0
    config = without_measurements(config)
    bare = outcome(run_of(config, evaluated=evaluated, train=[{"step": s, "loss": 1.0} for s in range(12)]))
    assert {name for name, value in bare.items() if value is not None} == {
        "val_loss",
        "val_dense",
        "sparse_gap",
        "leak",
        "val_causal",
        "val_sparse",
        "early_loss",
        "train_loss",
    }


def without_measurements(config):
    train = dataclasses.replace(config.train, monitor_every=0, probe_every=0)
    return dataclasses.replace(config, train=train)


@pytest.mark.parametrize(("kind", "step"), [("train", 4), ("train", 11), ("evaluated", 12)])
def test_rows_that_do_not_cover_the_steps_give_no_outcome(kind, step):
    config = without_measurements(SIZE.arm(s24.methods.Dense()))
    steps = {"train": range(12), "evaluated": (6, 12)}
    filled = {"loss": 1.0, "dense": 2.0, "sparse": 2.0}
    rows = {name: [{"step": s, **filled} for s in own] for name, own in steps.items()}
    assert outcome(run_of(config, **rows))["val_loss"] == 2.0
    rows[kind] = [row for row in rows[kind] if row["step"] != step]
    assert set(outcome(run_of(config, **rows)).values()) == {None}


def test_a_last_evaluation_that_is_not_finite_is_not_replaced_by_an_earlier_one():
    config = without_measurements(SIZE.arm(s24.methods.FST(dense_fraction=0)))
    evaluated = [{"step": 6, "dense": 2.0, "sparse": 2.0}, {"step": 12, "dense": 2.0, "sparse": None}]
    train = [{"step": step, "loss": 1.0} for step in range(12)]
    found = outcome(run_of(config, evaluated=evaluated, train=train))
    assert (found["val_loss"], found["val_dense"]) == (None, 2.0)


@pytest.mark.parametrize("evaluated", [[], [{"step": 6, "dense": 2.0, "sparse": 2.0}]])
def test_an_unfinished_run_has_no_outcome(evaluated):
    config = SIZE.arm(s24.methods.Dense())
    found = outcome(run_of(config, evaluated=evaluated, train=[{"step": 0, "loss": math.inf}]))
    assert set(found.values()) == {None}


def test_limits_are_of_metrics():
    assert set(LIMITS) <= set(METRICS)


def test_the_evidence_has_the_recipe_of_venom_that_the_pilot_has_beside_it():
    """At the size pilot Venom is as it was; larger sizes have what was ahead there."""

    def method(spec, arm):
        return ablations.load(f"configs/{spec}").ablation.arms[arm].method

    recipes = "evidence/venom_recipe.py:pilot"
    before, ahead = (method(recipes, arm) for arm in ("as it is", "smaller M, shorter"))
    assert method("evidence/methods.py:pilot", "Venom") == before != ahead
    equal_steps = [f"evidence/methods.py:{size}" for size in ("124m", "wide", "wide4096")]
    for spec in (*equal_steps, "fst/equal_time.py:wide"):
        found = method(spec, "Venom")
        assert dataclasses.replace(found, dense_warmup=ahead.dense_warmup) == ahead
