"""What PyTorch's kernel that prunes and packs both ways for training gets wrong:
`python -m experiments.benchmarks.pytorch_defect` (needs PyTorch and a CUDA GPU, and not JAX).

`SparseSemiStructuredTensor{CUSPARSELT,CUTLASS}.prune_dense_static_sort(w)` prunes every 4x4 tile to 2:4 along
both axes and packs the matrix and its transpose. Each row of the table takes one matrix of normal numbers and
asks what any caller may expect:

  unpacked     share of entries of `to_dense()` that are neither those of w nor zero: must be 0
  two of four  most entries that are not zero in a group of four along rows and along columns: must be 2 and 2
  transposed   share of entries in which `.t().to_dense()` is not the transpose of `to_dense()`: must be 0
  forward, dX, dW  error of `relu(x w1)² w2` and its gradients for pruned w1 and w2, of PyTorch's sparse
               products against dense ones of the pruned matrices, as a share of the dense result's norm:
               rounding alone gives about 0.01

The pruned matrices of the dense products are w where the kernel's own mask kept it, that is, where
`to_dense()` is not zero. Exit status: 0 all right, 1 something is wrong, 2 nothing could be run."""

import argparse
import sys

SHAPES = ((256, 512), (2048, 8192), (4096, 14336))
TOKENS = 2048
ALLOWED = 0.05  # of the norm; bfloat16 rounds to 0.004
HEADER = ("backend", "rows x columns", "unpacked", "two of four", "transposed", "forward", "dX", "dW1", "dW2")


def backends(torch) -> dict:
    """Name -> class of packed matrices."""
    names = {"cuSPARSELt": "CUSPARSELT", "CUTLASS": "CUTLASS"}
    found = {name: f"SparseSemiStructuredTensor{suffix}" for name, suffix in names.items()}
    return {name: getattr(torch.sparse, kind) for name, kind in found.items() if hasattr(torch.sparse, kind)}


def most_of_four(matrix) -> int:
    """Most entries that are not zero in a group of four along rows."""
    return int((matrix != 0).view(-1, 4).sum(1).max())


def error(found, truth) -> float:
    """Norm of the difference as a share of the norm of the truth."""
    found, truth = found.float(), truth.float()
    return float((found - truth).norm() / truth.norm())


def block(x, w1, w2, dy):
    """`relu(x w1)² w2` and its gradients, by whatever products w1 and w2 have."""
    y1 = x @ w1
    relu = y1.relu()
    y2 = relu.square()
    dy1 = (dy @ w2.t()) * (2 * relu)
    return {"forward": y2 @ w2, "dX": dy1 @ w1.t(), "dW1": x.t() @ dy1, "dW2": y2.t() @ dy}


def examine(torch, kind, rows: int, columns: int) -> dict:
    """The cells of one row of the table, as numbers."""
    make = torch.Generator("cuda").manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, device="cuda", generator=make)  # noqa: E731
    w1, w2 = (normal(*s) * s[0] ** -0.5 for s in ((rows, columns), (columns, rows)))
    x, dy = normal(TOKENS, rows), normal(TOKENS, rows)
    x, w1, w2, dy = (v.bfloat16() for v in (x, w1, w2, dy))
    packed = [kind.prune_dense_static_sort(w) for w in (w1, w2)]
    dense, turned = packed[0].to_dense(), packed[0].t().to_dense()
    kept = [torch.where(p.to_dense() != 0, w, 0) for p, w in zip(packed, (w1, w2), strict=True)]
    found = {
        "unpacked": float((dense != kept[0]).float().mean()),
        "two of four": (most_of_four(dense), most_of_four(dense.t().contiguous())),
        "transposed": float((turned.t() != dense).float().mean()),
    }
    sparse, truth = block(x, *packed, dy), block(x, *kept, dy)
    return found | {name: error(sparse[name], truth[name]) for name in truth}


def wrong(found: dict) -> list[str]:
    """Names of the cells that must not be so."""
    bad = [name for name in ("unpacked", "transposed") if found[name] > 0]
    bad += ["two of four"] if max(found["two of four"]) > 2 else []
    return bad + [name for name in ("forward", "dX", "dW1", "dW2") if not found[name] <= ALLOWED]


def line(cells) -> str:
    return (
        "| " + " | ".join(str(cell).ljust(len(name)) for cell, name in zip(cells, HEADER, strict=True)) + " |"
    )


def cells(found: dict) -> list[str]:
    """As text, in the order of the header; what is wrong is marked."""
    bad, out = wrong(found), []
    for name in HEADER[2:]:
        value = found[name]
        text = f"{value[0]} and {value[1]}" if isinstance(value, tuple) else f"{value:.2%}"
        out.append(text + (" WRONG" if name in bad else ""))
    return out


def main(argv=None) -> int:
    """Prints the table; returns the exit status."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m experiments.benchmarks.pytorch_defect", None, __doc__, formatter_class=form
    )
    parser.parse_args(argv)
    try:
        import torch
    except ImportError:
        print(
            "error: PyTorch is not installed: pip install torch, on a machine with a CUDA GPU.",
            file=sys.stderr,
        )
        return 2
    if not torch.cuda.is_available():
        print(
            "error: PyTorch finds no CUDA GPU here, and its 2:4 kernels run on no other device.",
            file=sys.stderr,
        )
        return 2
    device = torch.cuda.get_device_name()
    print(f"PyTorch {torch.__version__}, {device}, bfloat16, {TOKENS} tokens; entries and shares of norms\n")
    print(line(HEADER))
    print(line("-" * len(name) for name in HEADER))
    ran, bad = 0, []
    for name, kind in backends(torch).items():
        for rows, columns in SHAPES:
            try:
                found = examine(torch, kind, rows, columns)
            except (RuntimeError, NotImplementedError, AttributeError) as problem:
                first = str(problem).strip().partition("\n")[0]
                print(f"| {name} | {rows} x {columns} | cannot run: {first}")
                continue
            ran += 1
            print(line([name, f"{rows} x {columns}", *cells(found)]), flush=True)
            bad += [f"{name}, {rows} x {columns}: {', '.join(own)}"] if (own := wrong(found)) else []
    for text in bad:
        print(f"wrong: {text}", file=sys.stderr)
    if not ran:
        print("error: no kernel of PyTorch could be run here.", file=sys.stderr)
        return 2
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
