"""Runs side by side: a table, curves, and what they mean."""

from pathlib import Path

from experiments import files
from experiments.analysis.outcome import EARLY, measured
from experiments.analysis.runs import Run, read_runs
from experiments.analysis.tables import markdown
from experiments.data.vocabulary import bits_per_byte
from experiments.errors import installed, require

LEAKS = " *"  # beside a loss that is no language model's
NOTE = f"Marked{LEAKS}: no language-model loss; it may depend on later tokens."
PICTURES = {"loss.png": "Losses by optimiser step", "flip_rate.png": "Flip rates by optimiser step"}


def summary(run: Run) -> dict:
    """The numbers of one run for the table; None where they were not measured."""
    known, flips = measured(run), run.column("monitor", "flip_rate")[1]
    dense, sparse = run.last("eval", "dense"), run.last("eval", "sparse")
    leaks, bits = "" if run.config.method.causal else LEAKS, lambda x: bits_per_byte(x, run.bytes_per_token)
    done = max((row["step"] for row in run.rows.get("train", [])), default=-1) + 1
    return {
        "method": type(run.config.method).__name__,
        "steps": f"{done}/{run.config.train.steps}",
        "val. loss, dense (nats)": dense,
        "val. loss, sparse (nats)": sparse and show(sparse) + leaks,
        "leak of later tokens (nats)": run.last("eval", "leak"),
        "bits per byte, dense": dense and bits(dense),
        "bits per byte, sparse": sparse and show(bits(sparse)) + leaks,
        "flip rate early (%)": percent(known["flip_early"]),
        "flip rate peak (%)": percent(max(flips, default=None)),
        "flip rate late (%)": percent(known["flip_late"]),
        "flipped since start (%)": percent(known["flipped_since_start"]),
        "kept share of abs(w)": known["kept_share"],
        "steps with rising loss (%)": percent(known["rising"]),
        "actual / predicted loss change": known["descent"],
        "gradient cosine, sparse and dense": known["cosine"],
        "monitors (% of step time)": percent(known["monitor_cost"]),
        "steps/s": known["steps_per_s"],
    }


def percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


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
