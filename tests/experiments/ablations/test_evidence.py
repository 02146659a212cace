"""What a study says of records that are not as those in docs/evidence."""

import dataclasses

import pytest

import jax_sparse24 as s24
from experiments import study
from experiments.ablations import ablation, evidence
from experiments.config import REPOSITORY
from experiments.errors import UserError
from tests.experiments.conftest import as_it_is, changed

STORED = REPOSITORY / "docs/evidence"
ENDS_AHEAD = {"dense": 1.0, "sparse": 1.0}
ALIKE = ("dense", "half-width", "FST", "Activation24")  # whose runs with the seed 0 have one commit


@pytest.fixture(scope="module")
def pilot():
    return evidence.read(STORED / "pilot")


def stored_in(folder, arm="", change=as_it_is):
    """The records of 124m with the seed 0, one of an arm after a change of its JSON data, in a folder."""
    for name in ALIKE:
        changed(STORED / "124m" / name / "seed0.json", folder, change if name == arm else as_it_is)
    return folder


def with_last_losses(run, **losses):
    *before, last = run.rows["eval"]
    return dataclasses.replace(run, rows=run.rows | {"eval": [*before, {**last, **losses}]})


def test_a_last_loss_that_is_no_number_is_refused(tmp_path):
    """And not replaced by that of an earlier evaluation."""

    def lose(content):
        content["rows"]["eval"]["dense"][-1] = None

    with pytest.raises(UserError, match=r"FST/seed0\.json cannot be shown: .*no number"):
        evidence.read(stored_in(tmp_path, "FST", lose))


def test_a_record_without_times_is_refused(tmp_path):
    def lose(content):
        content["rows"]["train"]["steps_per_s"] = [None] * len(content["rows"]["train"]["step"])

    with pytest.raises(UserError, match=r"FST/seed0\.json cannot be shown: .*times"):
        evidence.read(stored_in(tmp_path, "FST", lose))


def test_a_record_under_the_name_of_another_seed_is_refused(tmp_path):
    def other(content):
        content["config"]["seed"] = 3

    with pytest.raises(UserError, match=r"FST/seed0\.json is of a run with the seed 3"):
        evidence.read(stored_in(tmp_path, "FST", other))


def test_tokens_of_two_tokenizers_are_two_texts(tmp_path):
    def other(content):
        content["rows"]["event"]["corpus"][0]["tokenizer"] = "0"

    with pytest.raises(UserError, match=r"different texts: .*in tokens of 0 "):
        evidence.read(stored_in(tmp_path, "FST", other))


def with_built(study, run, **fields):
    """The study, of whose runs one was built in another way."""
    other = dataclasses.replace(study.built[run.out], **fields)
    return dataclasses.replace(study, built=study.built | {run.out: other})


def test_whether_sparsity_pays_is_said_only_where_all_sparse_arms_are_known(tmp_path, pilot):
    """Of an arm ahead in one seed nothing is, nor of one that is ahead in each of two by much more than they
    differ by; and not where no dense run has the times of an arm."""
    study = evidence.read(stored_in(tmp_path))
    (words,) = evidence.losing([study])
    assert words.startswith("**Sparsity loses at the size ") and "each sparse arm ends behind" in words
    assert not evidence.losing([pilot])
    behind = study.arms["Activation24"][0]
    ahead = with_last_losses(behind, **ENDS_AHEAD)
    assert not evidence.losing([dataclasses.replace(study, arms=study.arms | {"Activation24": {0: ahead}})])
    assert not evidence.losing([with_built(study, behind, commit="another")])

    whole = evidence.read(STORED / "124m")
    (words,) = evidence.losing([whole])
    assert words.startswith("**Sparsity shows no gain at the size ") and "clearly ahead of" in words
    assert whole.gap("Activation24").mean < 0 < whole.gap("Activation24").high
    ahead = {seed: with_last_losses(run, **ENDS_AHEAD) for seed, run in whole.arms["Activation24"].items()}
    assert not evidence.losing([dataclasses.replace(whole, arms=whole.arms | {"Activation24": ahead})])


def of_another_jax(environment):
    environment["packages"]["jax"] = "0.10.2"


def of_another_library(environment):
    environment["packages"]["nvidia-cusparselt-cu12"] = "0.8.1"


def with_other_flags(environment):
    environment["flags"] = {"XLA_FLAGS": "--xla_gpu_autotune_level=0"}


def of_another_commit(environment):
    environment["commit"] = "0" * 40
    of_another_jax(environment)


def of_changed_files(environment):
    environment["tree"] = "with uncommitted changes"


def test_sparse_steps_are_compared_with_the_dense_ones_of_their_run(tmp_path):
    """Whatever else differs between runs."""

    def change(content):
        of_another_commit(content["environment"])
        rows = content["rows"]["train"]
        rows["steps_per_s"] = [3.0 if phase == "sparse" else 2.0 for phase in rows["phase"]]

    study = evidence.read(stored_in(tmp_path, "FST", change))
    assert study.step_speeds("FST") == [1.5] and study.step_speeds("dense") == []
    assert "1.50x" in evidence.table(study)


def test_an_arm_whose_weights_are_sparse_to_the_end_is_compared_by_sparse_products(pilot):
    """Dense products of its kernels were never trained."""
    run = next(iter(pilot.arms["FST"].values()))
    last = {name: run.last("eval", name) for name in ("dense", "sparse")}
    assert last["sparse"] > last["dense"] and evidence.last_loss(run) == last["dense"]
    ste = dataclasses.replace(run, config=dataclasses.replace(run.config, method=s24.methods.STE()))
    assert evidence.last_loss(ste) == last["sparse"] and evidence.second_bits(ste) > evidence.second_bits(run)
    with_ste = dataclasses.replace(pilot, arms=pilot.arms | {"FST": {run.config.seed: ste}})
    moved = with_ste.gap("FST").mean - pilot.gap("FST").mean
    assert moved == pytest.approx(last["sparse"] - last["dense"])


@pytest.mark.parametrize(("arm", "corrected"), [("FST", True), ("half-width", False)])
def test_a_slower_gpu_makes_no_run_slower_that_has_dense_steps_of_the_model(tmp_path, arm, corrected):
    def slow(content):
        train = content["rows"]["train"]
        train["steps_per_s"] = [value and value / 2 for value in train["steps_per_s"]]

    before = evidence.read(stored_in(tmp_path / "before")).run_speed(arm).mean
    after = evidence.read(stored_in(tmp_path / "after", arm, slow)).run_speed(arm).mean
    assert after == pytest.approx(before if corrected else before / 2)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (of_another_jax, "of another version of jax than the runs beside"),
        (of_another_library, "of another version of nvidia-cusparselt-cu12 than the runs beside"),
        (with_other_flags, "of other XLA flags than the runs beside"),
        (of_another_commit, "of another commit and another version of jax than the runs beside"),
        (of_changed_files, "whose files differed from the commit"),
    ],
)
def test_times_of_what_was_built_in_another_way_are_not_compared(change, why, tmp_path):
    """Losses are. The page says which run it is, and why; what all have in common is no matter."""
    whole = evidence.read(stored_in(tmp_path / "whole"))
    folder = stored_in(tmp_path, "FST", lambda content: change(content["environment"]))
    study = evidence.read(folder)
    assert study.run_speed("FST").mean is None
    assert study.gap("FST") == whole.gap("FST") and study.run_speed("half-width").mean
    assert study.alike("FST") == [] and len(study.alike("dense")) == 1
    words = evidence.about(study)
    assert f"Left out is FST/0, {why}." in words and "The figure over minutes lacks FST." in words
    assert "Left out" not in evidence.about(whole)
    for path in folder.glob("*/seed*.json"):
        changed(path, folder, lambda content: change(content["environment"]))
    again = evidence.read(folder)
    alike = change is not of_changed_files
    assert (again.run_speed("FST") == whole.run_speed("FST")) == alike
    assert ("Left out" not in evidence.about(again)) == alike


def test_a_run_beside_changed_ones_alone_is_left_out(tmp_path):
    folder = stored_in(tmp_path, "dense", lambda content: of_changed_files(content["environment"]))
    words = evidence.about(evidence.read(folder))
    assert (
        "Left out are dense/0, whose files differed from the commit, and Activation24/0, FST/0 and" in words
    )
    assert "half-width/0, as all runs beside had files that differed from the commit." in words


def test_the_dense_arms_are_those_without_sparse_steps(pilot):
    assert [arm for arm in pilot.others if not pilot.is_sparse(arm)] == ["half-width"]
    said = evidence.summary(pilot)
    assert "half-width, which is dense, is lower and faster than Venom." in said
    assert said.count("which is dense") == 1


def test_runs_whose_times_are_left_out_are_said(pilot):
    assert pilot.run_speed("FST").mean is pilot.run_speed("Activation24").mean is None
    assert (
        "Left out are dense/0, of another commit than the runs beside, and Activation24/0 and "
        "FST/0, whose files differed from the commit." in evidence.about(pilot)
    )


def test_energy_is_told_of_what_compares_as_speed_is(pilot):
    """Else an arm at one commit would be beside the mean of dense runs at two."""
    out, told = set().union(*pilot.left_out.values()), {}
    for seed, run in pilot.arms["dense"].items():
        told.setdefault(f"dense/{seed}" in out, []).append(f" {1e3 * evidence.joules_per_token(run):.2f} |")
    (shown,), (other,) = told[False], told[True]
    (line,) = [line for line in evidence.table(pilot).splitlines() if line.startswith("| dense")]
    assert shown in line and other not in line


def test_the_size_of_the_model_is_that_of_the_records(pilot):
    assert "of a model of 110.1M parameters" in evidence.about(pilot)


PAGES = [
    *("README.md", "configs/sizes.py", "configs/fst/masked_decay.py", "experiments/ablations/ablation.py"),
    *(
        f"docs/{name}.md"
        for name in ("index", "benchmarks", "gpu", "gpu-log", "memory", "methods", "scaling")
    ),
]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_that_124m_is_a_name(page, pilot):
    """With how many parameters the records have, and the vocabulary by which the name would be true."""
    run = pilot.arms["dense"][0]
    of_gpt2 = evidence.parameters(run) + (50257 - 32768) * run.config.model.d
    assert of_gpt2 == pytest.approx(124e6, rel=0.005)
    words = " ".join((REPOSITORY / page).read_text().split())
    assert f"{evidence.parameters(run) / 1e6:.1f}M" in words and "50257" in words


def test_a_claim_is_shown_for_its_own_arms_only(pilot):
    """Of a study whose statement is not known, or is that of another claim."""
    unknown = dataclasses.replace(pilot, registered=None)
    assert "At equal steps FST ends" in evidence.claim(unknown)
    other = dataclasses.replace(unknown, arms=pilot.arms | {"warm-up 0": pilot.arms["FST"]})
    assert evidence.claim(other) == ""


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("configs/evidence/tokens.py:124m", "124m-tokens"),
        ("configs/evidence/controls.py:124m", "124m-controls"),
        ("configs/fst/equal_time.py:widepilot", "widepilot"),
        ("configs/fst/equal_time.py:wide4096", "wide4096"),
    ],
)
def test_a_study_has_the_claim_that_was_stated_before_it(spec, name, pilot):
    """Where nothing was stated, that of its arms: of those which have them the one with the fewest others."""
    named = ablation.load(spec)
    stated = dataclasses.replace(pilot, name=name, registered=named.ablation.statement)
    assert evidence._claim_of(stated) == named
    some = next(iter(pilot.arms.values()))
    steps = {arm: config.train.steps for arm, config in named.ablation.arms.items()}
    runs = {
        ablation.folder_of(arm): {
            0: dataclasses.replace(
                run,
                config=dataclasses.replace(run.config, train=dataclasses.replace(run.config.train, steps=n)),
            )
        }
        for run in some.values()
        for arm, n in steps.items()
    }
    assert evidence._claim_of(dataclasses.replace(pilot, name=name, arms=runs, registered=None)) == named


def test_gaps_of_one_model_and_method_stand_beside_each_other_by_tokens(tmp_path, pilot):
    longer = evidence.read(stored_in(tmp_path / "124m"))
    said = evidence.over_tokens([longer, pilot])
    fst = [
        f"{study.gap('FST').mean:+.3f} after {tokens}M (1 seed)"
        for study, tokens in ((pilot, 57), (longer, 459))
    ]
    assert f"FST {', '.join(fst)}" in said and "half-width" in said
    assert "Venom" not in said, "it has another recipe, and no run here"
    assert evidence.over_tokens([longer]) == evidence.over_tokens([]) == ""
    run = longer.arms["FST"][0]
    for part, fields in (("model", {"f": 4096}), ("optim", {"lr": 9e-3}), ("data", {"seq": 512})):
        config = dataclasses.replace(
            run.config, **{part: dataclasses.replace(getattr(run.config, part), **fields)}
        )
        other = longer.arms | {"FST": {0: dataclasses.replace(run, config=config)}}
        assert "FST" not in evidence.over_tokens([dataclasses.replace(longer, arms=other), pilot]), part


def test_a_study_is_named_by_its_folder_wherever_one_stands(monkeypatch):
    monkeypatch.chdir(STORED / "pilot")
    assert evidence.read(type(STORED)(".")).name == "pilot"


def test_a_time_that_was_not_that_of_dense_training_is_said():
    """By the records: of the arms at the size wide, and of no pilot, the first sentences say it, too."""
    small, wide = (evidence.read(STORED / name) for name in ("widepilot", "wide"))
    taken = {arm: f"{small.time_taken(arm)[-1]:.2f}" for arm in small.others}
    assert all(float(ratio) > evidence.CLEARLY for ratio in taken.values())
    longer = f"Activation24 took {taken['Activation24']} times that long, FST {taken['FST']} and Venom"
    assert f"time of dense training: as timed, {longer} {taken['Venom']}." in evidence.summary(small)
    low, high = wide.time_taken("FST")
    (said,) = evidence.at_equal_time([small, wide])
    assert f"(as timed, FST took {low:.2f} to {high:.2f} times that long)" in said
    level = dataclasses.replace(wide, arms={arm: {0: runs[0]} for arm, runs in wide.arms.items()})
    assert "where each method has the time of dense training, arms" in evidence.at_equal_time([level])[0]


def test_an_arm_that_no_claim_compares_has_its_interval():
    """It is not undecided, which is said of an arm whose claim was tested."""
    study = evidence.read(STORED / "wide4096")
    gap = study.gap("half-width")
    (said,) = evidence.at_equal_time([study])
    assert f"compared by no claim: half-width {gap.mean:+.3f} ({gap.low:+.3f} to {gap.high:+.3f})" in said
    alone = dataclasses.replace(study, arms={arm: {0: runs[0]} for arm, runs in study.arms.items()})
    (said,) = evidence.at_equal_time([alone])
    assert "compared by no claim" not in said and "of one seed: " in said


def test_samples_say_their_products_where_these_are_known(pilot):
    """Earlier runs did not write them down."""
    assert "\nFST:\n" in evidence.samples(pilot) and ", by " not in evidence.samples(pilot)
    run = pilot.arms["FST"][0]
    rows = [row | {"products": "sparse"} for row in run.rows["sample"]]
    run = dataclasses.replace(run, rows=run.rows | {"sample": rows})
    said = evidence.samples(dataclasses.replace(pilot, arms=pilot.arms | {"FST": {0: run}}))
    assert said.count("FST, by sparse products:") == len(rows) and said.count(", by ") == len(rows)


def test_a_figure_says_which_arms_it_lacks(pilot):
    assert "The figure over minutes lacks Activation24 and FST." in evidence.about(pilot)


def test_a_figure_without_the_dense_runs_shows_all_others(tmp_path, monkeypatch):
    """Where they alone were of changed files; of the arms behind them the first was beyond the axis."""
    plots = pytest.importorskip("experiments.ablations.evidence_plots")
    folder = stored_in(tmp_path, "dense", lambda content: of_changed_files(content["environment"]))
    found, names = evidence.read(folder), ["Activation24", "FST", "half-width"]
    assert "The figure over minutes lacks dense." in evidence.about(found)
    panels = []
    monkeypatch.setattr(plots, "save", lambda figure, path: panels.append(figure.axes) or path.name)
    plots.write(found, tmp_path)
    for axes in panels:
        (behind,) = (one for one in axes if one.get_title(loc="left") == "behind dense")
        low, high = sorted(behind.get_ylim())
        shown = {
            label.get_text(): at
            for label, at in zip(behind.get_yticklabels(), behind.get_yticks(), strict=True)
        }
        assert list(shown) == names and all(low < at < high for at in shown.values())
        marks = {line.get_ydata()[0] for line in behind.get_lines() if line.get_marker() == "o"}
        assert marks == set(shown.values())


def test_a_band_is_told_of_where_it_is_drawn(pilot, tmp_path):
    (small,) = [study for study in evidence.studies() if study.name == "124m"]
    assert (
        "The dashed band is the speed that the abstract of `Venom` states."
        in study.trade([pilot], tmp_path)[1]
    )
    without = dataclasses.replace(small, arms={a: runs for a, runs in small.arms.items() if a != "Venom"})
    assert "dashed" not in study.trade([without], tmp_path)[1]


def test_a_replicate_without_the_arm_that_it_repeats(pilot):
    """Gives no noise floor, and no error."""
    run = dataclasses.replace(pilot.arms["FST"][0])
    arms = {name: runs for name, runs in pilot.arms.items() if name != "FST"} | {"replicate": {0: run}}
    assert "FST was not run" in evidence.claim(dataclasses.replace(pilot, arms=arms))


def test_what_the_page_says_of_text_and_time_is_recorded():
    digests = {
        run.corpus["digest"]
        for one in evidence.studies()
        for runs in one.arms.values()
        for run in runs.values()
    }
    assert len(digests) == 1 and f"digest {digests.pop()} in every record" in " ".join(study.HOW.split())
    log = (REPOSITORY / "docs" / study.LOG).read_text()
    for words, seconds in zip(("dense/0", "FST/0"), study.WHOLE, strict=True):
        assert any(
            line.startswith(f"| {words}") and line.endswith(f"| {seconds} |") for line in log.splitlines()
        )
    assert f"| {study.TEXT} |" in log


@pytest.mark.parametrize("words", ["", "[]", '{"hash": "0"}'])
def test_a_damaged_statement_is_refused(tmp_path, words):
    folder = stored_in(tmp_path)
    (folder / "statement.json").write_text(words)
    with pytest.raises(UserError, match=r"statement\.json does not say what was stated"):
        evidence.read(folder)
