"""Runs side by side: a table, curves, and what they mean."""

from pathlib import Path

import numpy as np

from experiments import files
from experiments.analysis.runs import Run, descent, mean, monitor_cost, percent, read_runs
from experiments.analysis.tables import markdown
from experiments.data.vocabulary import bits_per_byte
from experiments.errors import installed, require

LEAKS = " *"  # beside a loss that is no language model's
NOTE = f"Marked{LEAKS}: no language-model loss; it may depend on later tokens."
PICTURES = {"loss.png": "Losses by optimiser step", "flip_rate.png": "Flip rates by optimiser step"}
EARLY = 0.25  # the flip rate's "early" is its mean over the first quarter of the steps, "late" over the last


def summary(run: Run) -> dict:
    """The numbers of one run for the table; None where they were not measured."""
    steps, flips = run.column("monitor", "flip_rate")
    total = run.config.train.steps
    _, speed = run.column("train", "steps_per_s")
    dense, sparse = run.last("eval", "dense"), run.last("eval", "sparse")
    leaks, bits = "" if run.config.method.causal else LEAKS, lambda x: bits_per_byte(x, run.bytes_per_token)
    return {
        "method": type(run.config.method).__name__,
        "steps": f"{max((row['step'] for row in run.rows.get('train', [])), default=-1) + 1}/{total}",
        "val. loss, dense (nats)": dense,
        "val. loss, sparse (nats)": sparse and show(sparse) + leaks,
        "leak of later tokens (nats)": run.last("eval", "leak"),
        "bits per byte, dense": dense and bits(dense),
        "bits per byte, sparse": sparse and show(bits(sparse)) + leaks,
        "flip rate early (%)": percent(flips[steps < EARLY * total]) if len(flips) else None,
        "flip rate peak (%)": percent([flips.max()]) if len(flips) else None,
        "flip rate late (%)": percent(flips[steps >= (1 - EARLY) * total]) if len(flips) else None,
        "flipped since start (%)": percent(run.column("monitor", "flipped_since_start")[1][-1:]),
        "kept share of abs(w)": run.last("monitor", "kept_share"),
        "steps with rising loss (%)": percent(run.column("monitor", "rising")[1]),
        "actual / predicted loss change": descent(run),
        "gradient cosine, sparse and dense": mean(run.column("probe", "cosine")[1]),
        "monitors (% of step time)": percent([cost]) if (cost := monitor_cost(run)) else None,
        "steps/s": float(np.median(speed)) if len(speed) else None,
    }


def show(value) -> str:
    """One cell of the table."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return f"{value:.3f}"


def table(runs) -> str:
    """A Markdown table, one column per run, aligned so that it also reads well as plain text."""
    columns = [summary(run) for run in runs]
    lines = [["", *(run.label for run in runs)]]
    lines += [[name, *(show(column[name]) for column in columns)] for name in columns[0]]
    return markdown(lines)


def text(runs) -> str:
    """The table and, below it, what to compare the losses with."""
    lines = [table(runs), ""]
    lines += [f"{run.label} is not a whole run: {run.gap}.\n" for run in runs if run.gap]
    if not all(run.config.method.causal for run in runs):
        lines.append(f"{NOTE}\n")
    for corpus in {run.order1: run.corpus for run in runs if run.order1}.values():
        order0, order1 = (corpus[f"order{n}_nats"] for n in (0, 1))
        lines.append(
            f"Byte entropy of the training text ({corpus['bytes'] / 1e6:.1f} MB): order 0, knowing nothing, "
            f"{order0:.3f} nats = {bits_per_byte(order0):.3f} bits; order 1, knowing the byte before, "
            f"{order1:.3f} nats = {bits_per_byte(order1):.3f} bits."
            + (f" xz compresses it to {corpus['xz_bits']:.3f} bits per byte." if "xz_bits" in corpus else "")
        )
    return "\n".join(lines)


NOTES = f"""\
## What the rows mean

- **val. loss**: mean over the same validation text, in nats per token. *Dense* evaluates every product dense.
  *Sparse* uses the method's sparse products, with masks computed freshly from the weights; for a run without
  sparsity, its dense weights cut once by FST's transposable mask. What is marked may depend on later tokens.
- **leak of later tokens**: how much lower that loss is than where later tokens are foreign text.
- **flip rate**: share of the mask entries of all FFN kernels that one optimiser step changes; *early*: mean
  over the first {EARLY:.0%} of the steps, *late*: over the last {EARLY:.0%}.
- **flipped since start**: share of the mask entries that differ from the initial ones at the end.
- **kept share of abs(w)**: what the mask keeps of the summed magnitudes at the last measurement.
- **steps with rising loss**: those after which the loss of their own batch is higher, with the masks that the
  next step uses.
- **actual / predicted loss change**: that change over the inner product of gradient and update.
- **gradient cosine**: of the sparse and the dense gradient of the FFN kernels on a fixed batch, in sparse
  phases.
- **monitors**: the median time of a measurement over its interval, against the median step.
- **steps/s**: median, without evaluation, measurement and checkpoints.
"""


def write_report(folders, out: Path, *, title: str = "Report", extra: str = "") -> str:
    """Write report.md, plots, and report.html that holds all, for these run folders; return the table.

    Raises UserError after writing report.md when what draws is missing (the extra plots).
    """
    runs = read_runs(folders)
    out.mkdir(parents=True, exist_ok=True)
    images, drawn = [], installed("matplotlib", "markdown_it")
    if drawn:
        from experiments.analysis import curves, html

        images = curves.write(runs, out)
    pictures = "".join(f"\n![{PICTURES[name]}]({name})\n" for name in images)
    files.write(out / "report.md", f"# {title}\n\n{text(runs)}\n{pictures}\n{NOTES}\n{extra}")
    require(
        drawn,
        f"{text(runs)}\n\n{out / 'report.md'} holds this table. The plots need matplotlib: pip install -e "
        "'.[plots]' and run the report again.",
    )
    html.write(out / "report.md")
    return text(runs)
