"""What runs must have in common where times are compared is what a run writes down."""

from pathlib import Path

import pytest

from experiments.ablations.built import Built
from experiments.ablations.together import Member
from experiments.config import Config
from experiments.training import rundir


@pytest.fixture
def built(monkeypatch):
    """Of a run that would begin now, by its flags and its versions of packages."""

    def make(flags, **versions):
        monkeypatch.setattr(rundir, "version", lambda name: versions.get(name.replace("-", "_"), "1"))
        for name in ("XLA_FLAGS", "NCCL_DEBUG"):
            monkeypatch.delenv(name, raising=False)
        for name, value in flags.items():
            monkeypatch.setenv(name, value)
        return Built.of(Member(Path("dense/seed0.json"), Config(), (), environment=rundir.environment()))

    return make


@pytest.mark.parametrize("version", ["jax", "jaxlib", "nvidia_cusparselt_cu12", "nvidia_cusparselt_cu13"])
def test_a_run_writes_the_versions_by_which_times_compare(version, built):
    words = built({}).unlike(built({}, **{version: "2"}))
    assert words == [f"another version of {version.replace('_', '-')}"]


def test_a_run_writes_the_flags_by_which_times_compare(built):
    fast = {"XLA_FLAGS": "--xla_gpu_autotune_level=4"}
    assert built(fast) == built(fast) != built({})
    assert built(fast).unlike(built({})) == ["other XLA flags"]
    assert built(fast) == built({**fast, "NCCL_DEBUG": "INFO"}), "which is no flag of XLA"


def test_two_runs_whose_commits_are_unknown_are_not_of_one():
    one, other = (Built.of(Member(Path(f"dense/seed{n}.json"), Config(), ())) for n in range(2))
    assert one.unlike(other) == ["another commit"]
