"""What the demo's stored result says, in its report and in the README: no number is written there by hand."""

import re

from experiments import config as configs
from experiments.analysis.tables import loose
from experiments.benchmarks import rows
from experiments.benchmarks.suites import train_step

FOLDER = "docs/demo"
BEGIN = "<!-- Written by `python -m experiments.demo --record` from {file}; do not edit. -->"
END = "<!-- End of what is written. -->"
BLOCK = re.compile(
    re.escape(BEGIN).replace(r"\{file\}", r"docs/demo/([\w.-]+)") + r"\n.*?" + re.escape(END), re.S
)
HEADER = (
    "arm",
    "validation loss, dense weights (nats per byte)",
    "sparse weights",
    "steps per second of the run",
    "a sparse step, in turn: dense time / time",
)


def block(file: str, result: dict) -> str:
    """The README's paragraph and table, from the stored result in docs/demo/`file`."""
    arms, speed = result["arms"], {row["method"]: row for row in result["speed"]}
    dense = configs.from_dict(arms["dense"]["config"])
    lines = [HEADER]
    for arm, found in arms.items():
        method = configs.from_dict(found["config"]).method
        sparse = bool(method.ffn_plan().rows)
        name = type(method).__name__
        leaks = "" if method.causal else " (no language-model loss: its mask sees later tokens)"
        lines.append(
            (
                "dense" if not sparse else name,
                f"{found['dense']:.3f}",
                f"{found['sparse']:.3f}{leaks}" if sparse else "-",
                f"{found['steps_per_s']:.1f}",
                rows.show_ratio(speed[arm], "dense step", "step") if sparse else "-",
            )
        )
    part = train_step.share(result["speed"][0])
    where = f"{result['hardware']['description']}, {result['date']}, {result['seconds']} s after installation"
    corpus = result["corpus"]
    model = f"a {result['parameters'] / 1e6:.1f}M-parameter byte-level language model"
    text = f"{corpus['bytes'] / 1e6:.1f} MB, order-1 byte entropy {corpus['order1_nats']:.3f} nats"
    busy = (result["load_before"] or 0) > 2 * result["hardware"]["cores"]
    note = " Other programs ran at the same time: the losses hold, the times say little." if busy else ""
    return f"""{BEGIN.format(file=f"{FOLDER}/{file}")}
What `make demo` drew on {where}:
{model} on the Python standard library ({text}),
{dense.train.steps} steps dense, with FST (2:4 weights from step 0, dense in the last sixth) and with Venom
(2:4 weights and V:N:M activations in the middle, dense before and after), one seed.
The three runs (arms) share start and data.

{loose(lines)}

At this width the FFNs are {part:.0%} of a dense step, and only they become sparse. The last column compares
speeds. Steps per second do not: the runs followed each other, minutes apart, and have dense steps, too.{note}
{END}"""


def replaced(readme: str, file: str, result: dict) -> str:
    """The README with the block of this result in place of the one it has."""
    return BLOCK.sub(lambda _: block(file, result), readme, count=1)


def speed(result: dict) -> str:
    """How fast a step of each arm is and what to expect of it, as Markdown."""
    found = result["speed"]
    header = ["arm, sparse phase", "steps/s", "step", "its FFNs alone", "expected of the step"]
    lines = [
        [
            row["method"],
            f"{1e3 / row['ms']['step']['median']:.1f}" if "step" in row["ms"] else "-",
            rows.show_ratio(row, "dense step", "step"),
            rows.show_ratio(row, "dense ffn", "ffn"),
            "-" if (gain := train_step.expected(row)) is None else f"{gain:.2f}x",
        ]
        for row in found
    ]
    dense, part, why = found[0], train_step.share(found[0]), ""
    if part is not None:
        why = (
            f"At this width, d = {dense['d']}, the FFNs are {part:.0%} of a dense step, and only they become "
            f"sparse: infinitely fast ones would give {1 / (1 - part):.2f}x. Their share and their gain grow "
            "with the width; docs/benchmarks.md has wider models."
        )
    products = "\n".join(f"- {found['products']}" for found in result["arms"].values())
    return f"""
## Speed of the arms

Whole optimiser steps in one process, in turn, medians; dense time / time, above 1 is faster than dense.

{rows.table(header, lines)}

{why}

{products}
"""
