"""What is shown of each hardware, and in which order."""

from experiments.benchmarks import lead, select
from experiments.benchmarks.suites import ladder

# By the end of a plot's file name.
CAPTIONS = {
    "lead": "How many times as fast as the dense program each method is: on the left a feed-forward block, "
    "forward and backward, on the right a whole training step.",
    "width": "The same blocks at several widths (solid), and beside them single products whose operand was "
    "packed before (dashed).",
    "tokens": "The same blocks and products for several numbers of tokens.",
    "ladder": "The training step of the evidence's model from a plain program on: tokens per second, and how "
    "many times as fast each change makes the step before it.",
    "cost": "Where a block's time goes, as a share of the dense block's: *producers* cut, draw and pack "
    "operands, *products* multiply them, the *rest* is what these two leave of the whole.",
}


def caption(name: str) -> str:
    """What is seen in the plot of this file name, as Markdown."""
    return CAPTIONS[name.removesuffix(".png").rpartition("-")[2]]


def hardware(suites: dict) -> dict:
    """The hardware that the results of some suites are of."""
    return next(iter(suites.values()))["hardware"]


def gpus_first(results: dict) -> list[dict]:
    """The suites of each hardware."""
    return sorted(results.values(), key=lambda suites: hardware(suites).get("platform") != "gpu")


def images(suites: dict) -> dict[str, str]:
    """File name -> what the plot shows, of the plots that these results make."""
    name, found = hardware(suites)["name"], {}
    if lead.places(suites):
        found[f"bench-{name}-lead.png"] = "Speed-up of methods"
    if len(select.widths(suites)) > 1:
        found[f"bench-{name}-width.png"] = "Speed-up against model width"
    if len(select.tokens(suites)) > 1:
        found[f"bench-{name}-tokens.png"] = "Speed-up against tokens"
    if select.with_parts(suites):
        found[f"bench-{name}-cost.png"] = "Cost of producers, products and the rest"
    if ladder.longest(select.rows_of(suites, "ladder")):
        found[f"bench-{name}-ladder.png"] = "Speed of training steps, one change at a time"
    return found
