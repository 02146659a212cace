"""The script that shows what PyTorch's kernel for training gets wrong: its verdicts, without its kernel."""

import sys

import pytest

from experiments.benchmarks import pytorch_defect

RIGHT = {
    **{"unpacked": 0.0, "two of four": (2, 2), "transposed": 0.0},
    **{"forward": 0.004, "dX": 0.004, "dW1": 0.004, "dW2": 0.004},
}


def test_what_is_right_and_what_is_wrong():
    assert pytorch_defect.wrong(RIGHT) == []
    found = RIGHT | {"unpacked": 0.4, "two of four": (4, 3), "dW1": 1.06, "dW2": float("nan")}
    assert pytorch_defect.wrong(found) == ["unpacked", "two of four", "dW1", "dW2"]
    text = pytorch_defect.line(["cuSPARSELt", "256 x 512", *pytorch_defect.cells(found)])
    assert "40.00% WRONG" in text and "4 and 3 WRONG" in text and "106.00% WRONG" in text and "0.40% " in text


def test_without_pytorch_it_says_so(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert pytorch_defect.main([]) == 2
    assert "PyTorch is not installed" in capsys.readouterr().err


def test_the_block_and_its_gradients(torch):
    """Of dense matrices: those of autograd."""
    x, w1, w2, dy = (torch.randn(*shape) for shape in ((8, 4), (4, 16), (16, 4), (8, 4)))
    leaves = [v.requires_grad_() for v in (x, w1, w2)]
    y = (x @ w1).relu().square() @ w2
    truth = dict(zip(("forward", "dX", "dW1", "dW2"), (y, *torch.autograd.grad(y, leaves, dy)), strict=True))
    found = pytorch_defect.block(x, w1, w2, dy)
    assert all(pytorch_defect.error(found[name].detach(), truth[name].detach()) < 1e-5 for name in truth)
    assert pytorch_defect.most_of_four(torch.tensor([[0.0, 1, 2, 0], [0, 0, 0, 1]])) == 2


@pytest.fixture
def torch():
    return pytest.importorskip("torch")
