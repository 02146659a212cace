"""A result in words: verdict, comparisons, arms; for report.md and for docs/reproduction.md."""

import re

from experiments.ablations.ablation import REPLICATE
from experiments.ablations.leaks import leaking, marked
from experiments.ablations.result import difference, spread
from experiments.ablations.verdicts import MOST_SEEDS
from experiments.analysis.comparison import NOTE
from experiments.analysis.outcome import LOSSES, METRICS
from experiments.analysis.tables import markdown

RULE = """\
A comparison is a number per seed: a metric of an arm, or its difference from, or ratio to, another arm with
the same seed, which has the same initial parameters and sees the same batches. Its interval is the mean
over seeds ± t sd / sqrt(n), with Student's t at 95 %.

**Noise floor.** Training amplifies rounding, so that the same run made again by another compiler, thread
count or commit ends elsewhere. Every ablation has an arm `replicate`: one of its arms with the same seed
and text, from parameters that are off by 1e-6 of their size, as reordered float32 sums are. The root mean
square of the differences from its base is the standard deviation of a paired difference that has no cause,
and the noise floor of a comparison is t times that over sqrt(n). An interval is at least that wide on
either side. The replicate was added after most results were recorded; where none was run, the floor was
not measured, and the page says so.

**Verdicts.** The p-values are of Student's t test against the bound of the range, the larger of the one
from the spread over seeds and the one from the replicate, corrected by Holm and Bonferroni for the number
of comparisons of the claim: the chance that any of them is decided wrongly is below 5 %, for the claim, not
for the page. A comparison with p <= 0.05 is **confirmed** if the mean lies in the stated range, else
**refuted**; the interval beside it is not corrected. **Not exercised**: the number is the same for every
seed, or an arm stays at the floor or ceiling of a share, so that nothing was tested. **Cannot be decided**
at this size: not decided, and the effect that the claim states, or its margin, is smaller than what these
seeds *resolve*, the effect that they would find in 80 % of repetitions. **No verdict**: a run diverged, is
not complete, or did not measure the metric. **Inconclusive**: the rest. *Needs* is the number of seeds
that would decide such a comparison, either way, in 80 % of repetitions, if the spread over seeds stayed what
it is and the true mean lay where the stated effect places it or, without one, where it was measured. A claim
is confirmed if all its comparisons are, and refuted if one is; else it has the verdict that stands most in
its way."""
PRETRAINED = "All arms start from {pretrained}; the first arm is that model as it is, for every seed."
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


def body(result: dict, image: str | None, found: str, shared: str = "") -> str:
    """Everything about a result but its title, as Markdown. found: what its author found, "" for nothing;
    shared: what other results have the same runs."""
    parts = [
        f"{result['claim']} ({result['source']}.)",
        headline(result),
        findings(result),
        noise(result),
        statement(result),
    ]
    if result["diverged"]:
        parts.append(f"Diverged, and stopped there: {', '.join(result['diverged'])}.")
    if result.get("incomplete"):
        lacking = "; ".join(f"{label}: {rows}" for label, rows in result["incomplete"].items())
        parts.append(f"Rows are missing, so that these runs count for nothing: {lacking}.")
    if image:
        parts.append(f"![{result['name']}: every arm]({image})")
    parts += [
        *([PRETRAINED.format(**result)] if "pretrained" in result else []),
        arms(result),
        f"Expected before the run: {result['expects']}",
        *([f"Found: {found}"] if found else []),
        f"What differs from the paper, and why: {result['differs']}",
        *([shared] if shared else []),
        provenance(result),
    ]
    return "\n\n".join(part for part in parts if part)


def verdict(result: dict) -> str:
    """`Refuted (on the mechanism: confirmed; on loss: refuted)`, or `Refuted (on loss)` where that is all."""
    parts = {name: long(result[name]) for name in ("on the mechanism", "on loss") if result[name]}
    said = parts if len(parts) == 1 else [f"{name}: {part}" for name, part in parts.items()]
    return f"{long(result['verdict']).capitalize()} ({'; '.join(said)})"


def long(verdict: str) -> str:
    """A verdict as it is read."""
    return {"cannot be decided": "cannot be decided at this size"}.get(verdict, verdict)


def findings(result: dict) -> str:
    """The comparisons as a table."""
    lines = [
        ["comparison", "mean", "95 % interval", "p, corrected", "states", "resolves", "needs", "verdict"]
    ]
    leaks = leaking(result)
    if measured := result.get("noise"):
        lines[0].insert(3, "noise floor")
    for f in result["findings"]:
        interval = f["note"] if f["low"] is None or f["note"] else f"{f['low']:.4g} to {f['high']:.4g}"
        seeds = f["seeds_needed"]
        needs = "-" if seeds is None else str(seeds) if seeds <= MOST_SEEDS else f"> {MOST_SEEDS}"
        cells = [f["p"], f["states"], f["resolves"]]
        line = [
            f["claim"],
            _show(f["mean"]) + ("" if f["mean"] is None else _mark(f, leaks)),
            interval,
            *(_short(cell) for cell in cells),
            needs,
            f["verdict"],
        ]
        if measured:
            line.insert(3, _short(f["floor"]))
        lines.append(line)
    count = len(result["findings"])
    corrected = f"p is corrected for {count} comparisons." if count > 1 else "One comparison: no correction."
    note = f" {NOTE}" if any(_mark(f, leaks) for f in result["findings"]) else ""
    return f"{markdown(lines)}\n\n{corrected}{note}"


def _mark(finding: dict, leaks: dict) -> str:
    """The mark of a comparison: that of any arm that it names."""
    named = [arm for arm in leaks if re.search(rf" {re.escape(arm)} (minus|/|and|<|>|in) ", finding["claim"])]
    return next(filter(None, (marked(arm, finding["metric"], leaks) for arm in named)), "")


def noise(result: dict) -> str:
    """What the replicate says."""
    if not result.get("noise"):
        ended = "the replicate did not reach its end" if REPLICATE in result["metrics"] else "none was run"
        return f"Noise floor: not measured, for lack of a replicate: {ended}."
    runs = len(result["metrics"][REPLICATE])
    named = [m for m in dict.fromkeys(f["metric"] for f in result["findings"]) if m in result["noise"]]
    words = ", ".join(f"{m} {result['noise'][m]:.2g}" for m in named)
    return (
        f"Replicate of {result['replicates']}, {runs} seed{'s' * (runs != 1)}: paired differences that "
        f"rounding alone makes have a standard deviation of: {words}."
    )


def headline(result: dict) -> str:
    """The verdict, with a mark where its predicate was written after results were known."""
    later = {
        "comparisons": "by comparisons that were rewritten after results were known",
        "effects": "by effects that were stated after results were known",
    }
    mark = later.get(rewritten(result))
    return f"**{verdict(result)}**{f', {mark}' if mark else ''}"


def rewritten(result: dict) -> str:
    """What of a predicate was written after results were known: "comparisons", or "effects" alone; "" for
    nothing, and where that is not known."""
    before, now = _before(result), result["statement"]["comparisons"]
    if before is None or sorted(before) == sorted(now):
        return ""
    return "effects" if sorted(map(_plain, before)) == sorted(map(_plain, now)) else "comparisons"


def _before(result: dict) -> list[str] | None:
    """The comparisons that were stated before the first run, else those that the result was recorded with,
    which knew no effects."""
    return (result.get("registered") or {}).get("comparisons", result.get("recorded with"))


def _plain(comparison: str) -> str:
    """A comparison of a statement without its effect."""
    return re.sub(r" by \S+$", "", comparison)


def statement(result: dict) -> str:
    """When claim, expectation and comparisons were written down, and whether they have changed since."""
    judged, written = result["statement"], result.get("registered")
    if not written:
        since = f" Recorded under an earlier predicate; {_changed(result)}." if rewritten(result) else ""
        return f"Predicate {judged['hash']}: it was not stored before the first run.{since}"
    when = f"written {written['written']}, before the first run"
    if written["runs before"]:
        when = f"written {written['written']}, after {written['runs before']} runs had begun"
    if written["hash"] == judged["hash"]:
        return f"Predicate {judged['hash']}, {when}."
    changed = _changed(result) if rewritten(result) else "only words differ, not the comparisons"
    return (
        f"Recorded under an earlier predicate, {written['hash']}, {when}; judged by {judged['hash']}: "
        f"{changed}."
    )


def _changed(result: dict) -> str:
    """How the comparisons differ from those of before."""
    before, now = (list(map(_plain, c)) for c in (_before(result), result["statement"]["comparisons"]))
    gone, new = [c for c in before if c not in now], [c for c in now if c not in before]
    parts = [f"{what}: {'; '.join(own)}" for what, own in (("no longer compared", gone), ("new", new)) if own]
    if not parts:
        return (
            "its comparisons are the same, and the effects that they state were written down after the runs, "
            "from the expectation"
        )
    return "; ".join(parts)


def arms(result: dict) -> str:
    """Mean and sample standard deviation per arm, and what the metrics are."""
    named = {f["metric"] for f in result["findings"]}
    shown = [
        m
        for m in METRICS
        if (m in ALWAYS or m in named) and any(spread(result, arm, m).n for arm in result["metrics"])
    ]
    first, leaks = next(iter(result["metrics"])), leaking(result)
    lines = [["", *result["metrics"]]]
    for metric in shown:
        marks = {arm: marked(arm, metric, leaks) for arm in result["metrics"]}
        lines.append([metric, *(_cell(spread(result, arm, metric), marks[arm]) for arm in marks)])
        if metric in named and metric in LOSSES:
            paired = [_cell(difference(result, arm, metric), marks[arm] or marks[first]) for arm in marks]
            lines.append([f"{metric} minus {first}", *paired])
    words = "; ".join(f"*{metric}*: {METRICS[metric]}" for metric in shown)
    return (
        f"{markdown(lines)}\n\nMeans over seeds {', '.join(map(str, result['seeds']))}, ± sample standard "
        f"deviation. {words}.{f' {NOTE}' if any(leaks.values()) else ''}"
    )


def _short(value) -> str:
    return "-" if value is None else f"{value:.2g}"


def _show(value) -> str:
    return "-" if value is None else f"{value:.4g}"


def _cell(interval, mark: str = "") -> str:
    if interval.sd is None:
        return _show(interval.mean) + (mark if interval.n else "")
    return f"{interval.mean:.4g} ± {interval.sd:.2g}{mark}"


def provenance(result: dict) -> str:
    """When, on what, from which commit and at which size."""
    model, data, train = (result["config"][key] for key in ("model", "data", "train"))
    packages = ", ".join(
        f"{name} {result['packages'][name]}" for name in ("jax", "flax") if result["packages"].get(name)
    )
    known = result["commits"]
    commit = f"commit{'s' * (len(known) > 1)} {', '.join(known)}"
    if len(known) > 1:
        commit += " (combined before one result had to be of one commit)"
    cores = " and ".join(map(str, result.get("cores per run", [])))
    cores = f" ({cores} for each run)" if result["hardware"]["platform"] == "cpu" and cores else ""
    text = result.get("corpus")
    fingerprint = f"fingerprint {text['digest'][:12]}" if text else "its fingerprint was not stored"
    kind, source = model.get("ffn") or model["class"], data.get("corpus") or data["class"]
    unit = "byte" if data.get("tokenizer", "bytes") == "bytes" else "token"
    return (
        f"Size {result['size']}: {model['layers']} layers, d={model['d']}, f={model['f']}, {kind}, "
        f"{train['steps']} steps of {data['batch']} x {data['seq']} {unit}s of {source} "
        f"({fingerprint}). {result['date']}, {result['hardware']['description']}{cores}, {packages}; "
        f"{commit}."
    )
