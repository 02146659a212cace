"""A result in words: verdict, comparisons, arms; for report.md and for docs/reproduction.md."""

from experiments.ablate.result import difference, spread
from experiments.outcome import LOSSES, METRICS
from experiments.report import markdown

RULE = """\
A comparison is a number per seed: a metric of an arm, or its difference from, or ratio to, another arm with
the same seed, which has the same initial parameters and sees the same batches. Its interval is the mean over
seeds ± t sd / sqrt(n), with Student's t at 95 %. It is **confirmed** if the interval lies inside the stated
range, **refuted** if it has no point of it, else **inconclusive**; with one seed, or where a run diverged, it
is inconclusive. The comparisons are not corrected for their number. A claim is confirmed if all its
comparisons are, and refuted if one is."""
# Shown for every arm; others where a comparison names them.
ALWAYS = (
    "val_dense",
    "val_sparse",
    "flip_mid",
    "flip_late",
    "kept_share",
    "rising",
    "cosine",
    "monitor_cost",
)


def body(result: dict, image: str | None, found: str) -> str:
    """Everything about a result but its title, as Markdown. found: what its author found, "" for nothing."""
    parts = [f"{result['claim']} ({result['source']}.)", f"**{verdict(result)}**", findings(result)]
    if result["diverged"]:
        parts.append(f"Diverged, and stopped there: {', '.join(result['diverged'])}.")
    if image:
        parts.append(f"![{result['name']}: curves of every arm]({image})")
    parts += [
        arms(result),
        f"Expected before the run: {result['expects']}",
        *([f"Found: {found}"] if found else []),
        f"What differs from the paper, and why: {result['differs']}",
        provenance(result),
    ]
    return "\n\n".join(parts)


def verdict(result: dict) -> str:
    """`Refuted (on the mechanism: confirmed; on loss: refuted)`."""
    names = ("on the mechanism", "on loss")
    parts = "; ".join(f"{name}: {result[name]}" for name in names if result[name])
    return f"{result['verdict'].capitalize()} ({parts})"


def findings(result: dict) -> str:
    """The comparisons as a table."""
    lines = [["comparison", "mean", "95 % interval", "verdict"]]
    for f in result["findings"]:
        interval = f["note"] if f["low"] is None or f["note"] else f"{f['low']:.4g} to {f['high']:.4g}"
        lines.append([f["claim"], _show(f["mean"]), interval, f["verdict"]])
    return markdown(lines)


def arms(result: dict) -> str:
    """Mean and sample standard deviation per arm, and what the metrics are."""
    named = {f["metric"] for f in result["findings"]}
    shown = [
        m
        for m in METRICS
        if (m in ALWAYS or m in named) and any(spread(result, arm, m).n for arm in result["metrics"])
    ]
    first = next(iter(result["metrics"]))
    lines = [["", *result["metrics"]]]
    for metric in shown:
        values = [spread(result, arm, metric) for arm in result["metrics"]]
        lines.append([metric, *(_cell(value) for value in values)])
        if metric in named and metric in LOSSES:
            paired = [difference(result, arm, metric) for arm in result["metrics"]]
            lines.append([f"{metric} minus {first}", *(_cell(value) for value in paired)])
    words = "; ".join(f"*{metric}*: {METRICS[metric]}" for metric in shown)
    return (
        f"{markdown(lines)}\n\nMeans over seeds {', '.join(map(str, result['seeds']))}, ± sample standard "
        f"deviation. {words}."
    )


def _show(value) -> str:
    return "-" if value is None else f"{value:.4g}"


def _cell(interval) -> str:
    if interval.sd is None:
        return _show(interval.mean)
    return f"{interval.mean:.4g} ± {interval.sd:.2g}"


def provenance(result: dict) -> str:
    """When, on what, from which commit and at which size."""
    model, data, train = (result["config"][key] for key in ("model", "data", "train"))
    packages = ", ".join(
        f"{name} {result['packages'][name]}" for name in ("jax", "flax") if result["packages"].get(name)
    )
    known = result["commits"] or ["unknown"]
    commit = f"commit{'s' * (len(known) > 1)} {', '.join(known)}"
    return (
        f"Size {result['size']}: {model['layers']} layers, d={model['d']}, f={model['f']}, {model['ffn']}, "
        f"{train['steps']} steps of {data['batch']} x {data['seq']} bytes of {data['corpus']}. "
        f"{result['date']}, {result['hardware']['description']}, {packages}; {commit}."
    )
