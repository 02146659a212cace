"""`python -m experiments.benchmarks.kernels` runs; where there is no GPU it names no kernels."""

import pytest

from experiments.benchmarks import kernels


def test_kernels_of_a_block(capsys):
    arguments = ["--shape", "16,32", "--tokens", "64", "--dtype", "float32", "--method", "STE"]
    assert not kernels.main(arguments)
    text = capsys.readouterr().out
    assert "Dense, T=64 d=16 f=32 float32" in text
    assert "1.00x dense" in text
    assert "STE, T=64" in text


def test_wrong_method(capsys):
    with pytest.raises(SystemExit, match="2"):
        kernels.main(["--method", "FTS"])
    assert "Did you mean" in capsys.readouterr().err


@pytest.mark.slow
def test_whole_steps(capsys):
    assert kernels.main(["--shape", "64,128", "--tokens", "256", "--step", "--layers", "1"]) in (None, 0)
    lines = [line for line in capsys.readouterr().out.splitlines() if "dense" in line]
    assert [line.split(",")[0] for line in lines] == ["Dense", "FST"]


def test_times_without_a_kernel():
    events = [
        kernels.Event(*row) for row in (("a", 0, 2), ("b", 1, 1.5), ("c", 3, 4), ("a", 4, 5), ("c", 9, 10))
    ]
    per_call = kernels.TRACED
    assert kernels.idle(events) == [("a ... c", 2 / per_call, 5 / per_call)]
    assert kernels.kernels(events)[0] == ("a", 2 / per_call, 3 / per_call)


def test_communication_beside_kernels_and_alone():
    rows = (("product", 0, 4), ("ncclDevKernel_AllReduce_Sum_f32", 3, 7), ("loop_fusion", 5, 6))
    sent, alone = kernels.communication([kernels.Event(*row) for row in rows])
    assert (sent, alone) == (4 / kernels.TRACED, 2 / kernels.TRACED)


@pytest.mark.parametrize("arguments", [["--mesh", "dp=2"], ["--method", "FST-projections"]])
def test_what_is_for_whole_steps_alone(capsys, arguments):
    with pytest.raises(SystemExit, match="2"):
        kernels.main(arguments)
    assert "add --step" in capsys.readouterr().err
