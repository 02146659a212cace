"""Numbers and plots in README.md and the pages of docs/, from stored results and nothing else.

They stand between the markers `<!-- bench: NAME -->` and `<!-- end of bench: NAME -->`; `write` replaces what
is between these."""

import re
import statistics
from pathlib import Path
from typing import NamedTuple

from experiments import files
from experiments.ablations import evidence
from experiments.ablations.ablation import SIZES
from experiments.benchmarks import rows, select, stored
from experiments.benchmarks.lead import PROGRAMS, cell
from experiments.benchmarks.shown import caption, gpus_first, hardware, images
from experiments.benchmarks.suites import mesh, producers
from experiments.config import REPOSITORY
from experiments.errors import UserError

PAGES = (
    "README.md",
    "docs/index.md",
    "docs/gallery.md",
    "docs/gpu.md",
    "docs/gpu-log.md",
    "docs/cpu-kernels.md",
    "docs/scaling.md",
)
METHODS = ("FST", "Activation24", "Venom")
DTYPE = "bfloat16"
# Paper, claim and arm whose loss is compared with the dense arm's of the same claim, by method.
LOSSES = {
    "FST": ("fst", "baselines", "FST"),
    "Activation24": ("activation24", "warmup", "warm-up"),
    "Venom": ("venom", "weights", "both"),
}
EQUAL_TIME = "fst", "equal_time"  # the claim whose arms have the time of its dense arm
NAME = "`124m` has the name of GPT-2's shape: that is 124M with GPT-2's vocabulary of 50257, and not 32768."
PAYS = 1.05  # a step that is no faster than this is not worth another loss
RESULTS_FROM_DOCS = "../experiments/benchmarks/results"
BLOCK = re.compile(r"(<!-- bench: (\w+) -->\n).*?(<!-- end of bench: \2 -->)", re.S)


def write(results: dict, recorded: list) -> list[Path]:
    """Renews the blocks of all pages; returns the pages."""
    for name in PAGES:
        files.write(REPOSITORY / name, renewed(name, results, recorded))
    return [REPOSITORY / name for name in PAGES]


def renewed(name: str, results: dict, recorded: list) -> str:
    """A page with its blocks as these results give them. Raises UserError for a block that is unknown."""
    here = "docs/" if not name.startswith("docs/") else ""

    def block(match) -> str:
        if match[2] not in BLOCKS:
            raise UserError(f"{name} has a block bench: {match[2]}; there are {', '.join(BLOCKS)}.")
        return f"{match[1]}{BLOCKS[match[2]](results, recorded, here)}\n{match[3]}"

    return BLOCK.sub(block, (REPOSITORY / name).read_text())


# ---- what is quoted


def gpus(results: dict) -> dict:
    """Description -> suites, of the GPUs."""
    found = {}
    for suites in results.values():
        if hardware(suites)["platform"] == "gpu":
            found[hardware(suites)["description"]] = suites
    return found


def of_methods(suites: dict, suite: str) -> dict:
    """Place (blocks, T, d, f) -> method -> row, in bfloat16, where any of `METHODS` was measured, the
    narrowest first."""
    found = {}
    for row in select.rows_of(suites, suite):
        if row["dtype"] == DTYPE:
            place = row.get("layers"), row["T"], row["d"], row["f"]
            found.setdefault(place, {})[row["method"]] = row
    told = {place: there for place, there in found.items() if not there.keys().isdisjoint(METHODS)}
    return dict(sorted(told.items(), key=lambda item: item[0][2:]))


def energy(row: dict | None, base: str, name: str) -> str:
    """Joules of a call over those of the dense one."""
    times = [] if row is None else [row["ms"].get(program, {}) for program in (rows.base_of(row, base), name)]
    known = times and all("joules" in t for t in times)
    return f"{times[1]['joules'] / times[0]['joules']:.2f}" if known else "-"


class Change(NamedTuple):
    """Validation loss of an arm minus that of dense training with the same seed, over seeds; its source."""

    mean: float
    least: float
    most: float
    arm: str
    file: Path
    result: dict

    def __str__(self):
        return f"{self.mean:+.3f} ({self.range})"

    @property
    def range(self) -> str:
        return f"{self.least:+.3f} to {self.most:+.3f}"


def loss_of(recorded: list, paper: str, claim: str, arm: str) -> Change | None:
    """The change of loss in the newest result of a claim, of the largest size that was run."""
    own = [(path, r) for path, r in recorded if (r["paper"], r["name"]) == (paper, claim)]
    own = [(path, r) for path, r in own if {arm, "dense"} <= set(r["metrics"])]
    if not own:
        return None
    path, result = max(own, key=lambda item: (list(SIZES).index(item[1]["size"]), item[1]["date"]))
    metrics = result["metrics"]
    changes = [
        metrics[arm][seed]["val_dense"] - metrics["dense"][seed]["val_dense"] for seed in metrics["dense"]
    ]
    return Change(statistics.mean(changes), min(changes), max(changes), arm, path, result)


# ---- blocks


def first(results: dict, recorded: list, here: str) -> str:
    """README's first screen: what three methods give and cost, and the plot, on the GPU where all three were
    measured in most places; of several such GPUs on the one measured last."""

    def whole(suites):
        return {
            place: there
            for place, there in of_methods(suites, "train-step").items()
            if all(m in there and not stored.is_old(there[m]) for m in METHODS)
        }

    measured = [
        (len(whole(suites)), max(source["began"] for source in suites["train-step"]["sources"]), name)
        for name, suites in gpus(results).items()
        if "train-step" in suites
    ]
    if not measured:
        return "Nothing was measured on a GPU."
    _, _, name = max(measured)
    suites = gpus(results)[name]
    places = whole(suites) or of_methods(suites, "train-step")
    header = ["method", "what it makes sparse", *(f"step, d = {d}, f = {f}" for _, _, d, f in places)]
    lines = []
    for method, sparse in SPARSE.items():
        cells = [cell(there.get(method), *PROGRAMS["train-step"]) for there in places.values()]
        loss = loss_of(recorded, *LOSSES[method])
        lines.append([f"`{method}`", sparse, *cells, "not measured" if loss is None else str(loss)])
    old = any(stored.is_old(there[m]) for there in places.values() for m in METHODS if m in there)
    blocks = " or ".join(map(str, sorted({layers for layers, *_ in places})))
    plot = f"bench-{hardware(suites)['name']}-lead.png"
    models = loss_models(recorded)
    table, older = rows.table([*header, "loss at equal steps"], lines), " (* older)" if old else ""
    return f"""{table}

Whole training steps of {blocks} blocks on an {name} in {DTYPE}, everything counted: time of the fastest dense
program over the method's, with the 95 % interval{older}. These models read bytes: with
a vocabulary of tens of thousands more of a step lies outside of the FFNs, and steps gain less
([evidence]({here}evidence.md)). Loss: nats per byte above dense training, mean
and range of seeds, of small models in short runs.{models}{equal_time(recorded, here)}

{of_whole_runs(here)}![Speed-up of blocks and of whole steps on an {name}]({here}images/{plot})"""


def of_whole_runs(here: str) -> str:
    """The plot of what whole runs lose and gain, with its sentences; nothing without their records."""
    shown = evidence.of_whole_runs(evidence.studies())
    if not shown:
        return ""
    shown.sort(key=evidence.tokens_of_a_run, reverse=True)
    said = "; ".join(evidence.brief(study) for study in shown)
    alt = f"Whole runs: nats per token behind dense training against the speed of the run. {said}"
    devices = " and ".join(sorted({one for study in shown for one in study.devices.split(" or ")}))
    models = "; ".join(_model_of(study) for study in shown)
    fewer = [
        f"{speed.n} of {study.gap(arm).n} of `{arm}` at `{study.name}`"
        for study in shown
        for arm, speed in ((arm, study.run_speed(arm)) for arm in study.others)
        if speed.n < study.gap(arm).n
    ]
    speeds = (
        " A run's speed needs a dense run of the same commit and versions; those that have one are "
        f"{', '.join(fewer)}, and all others."
        if fewer
        else ""
    )
    named = f" {NAME}" if any(study.name == "124m" for study in shown) else ""
    return f"""![{alt}]({here}evidence/trade.png)

Whole runs beside dense training, on {devices} ([evidence]({here}evidence.md)): {models}.{named}{speeds}
Below 0 and right of 1 sparsity would win. Dashed: a speed that a paper states of whole runs, without a loss
beside it.

"""


def studies_at_equal_steps() -> list[evidence.Study]:
    return evidence.unrepeated([study for study in evidence.studies() if not study.equal_time])


def _model_of(study: evidence.Study) -> str:
    """`124m` has 110.1M parameters, d = 768, 12 blocks, 459M tokens and 1 to 2 seeds."""
    run = next(iter(study.arms["dense"].values()))
    model, size = run.config.model, evidence.parameters(run)
    counts = [len(study.arms[arm]) for arm in study.others]
    seeds = " to ".join(map(str, sorted({min(counts), max(counts)})))
    tokens = evidence.tokens_of_a_run(study) / 1e6
    return (
        f"`{study.name}` has {f'{size / 1e6:.1f}M parameters, ' if size else ''}d = {model.d}, "
        f"{model.layers} blocks, {tokens:.0f}M tokens and {seeds} seed{'s' * (max(counts) > 1)}"
    )


def equal_time(recorded: list, here: str) -> str:
    """Sentences on what is left of the gain where dense training gets as much time, and on the verdict."""
    found = {method: loss_of(recorded, *EQUAL_TIME, method) for method in METHODS}
    found = {method: change for method, change in found.items() if change is not None}
    if not found:
        return ""
    result = next(iter(found.values())).result
    width = result["config"]["model"]["d"]
    losses = ", ".join(f"`{method}` {change.mean:+.3f}" for method, change in found.items())
    return (
        f"\n\nWith as many steps as would fit into the time of dense training if steps were as fast as at d "
        f"= 4096, small models (d = {width}) end at: {losses}."
        f"\nThe claim that each ends at the loss of dense training or below: "
        f"[{result['verdict']}]({here}reproduction.md)."
        + "".join(
            f"\n{_at_equal_time(study, here)}"
            for study in evidence.studies()
            if study.equal_time and not study.decides_nothing
        )
    )


def _at_equal_time(study: evidence.Study, here: str) -> str:
    """A sentence on the arms of a study that have the time of dense training."""
    gaps = {arm: study.gap(arm) for arm in study.others}
    seeds = " to ".join(map(str, sorted({gap.n for gap in gaps.values()})))
    losses = ", ".join(f"`{arm}` {evidence.interval(gap, '+.3f')}" for arm, gap in gaps.items())
    run = next(iter(study.arms[study.reference].values()))
    longer = evidence.unequal_times(study)
    return (
        f"With the time in which dense training takes {evidence.tokens_of_a_run(study) / 1e6:.0f}M tokens"
        f"{f' (as timed, {longer})' * bool(longer)} a model of {evidence.parameters(run) / 1e6:.0f}M "
        f"parameters (d = {run.config.model.d}, {seeds} seed{'s' * (seeds != '1')}) ends at, in nats per "
        f"token, with 95 % intervals: {losses} ([evidence]({here}evidence.md))."
    )


def loss_models(recorded: list) -> str:
    """A sentence on a line of its own that names the model of each loss, where they are not one."""
    found = {method: loss_of(recorded, *LOSSES[method]) for method in METHODS}
    widths = {
        method: f"d = {model['d']} with {model['layers']} blocks"
        for method, change in found.items()
        if change is not None
        for model in [change.result["config"]["model"]]
    }
    if len(set(widths.values())) < 2:
        return ""
    named = [
        " and ".join(f"`{method}`" for method, own in widths.items() if own == width) + f" at {width}"
        for width in dict.fromkeys(widths.values())
    ]
    return f"\nThe rows are of different models, so their losses do not compare: {', '.join(named)}."


SPARSE = {
    "FST": "weights, and gradients of outputs",
    "Activation24": "activations of squared ReLU",
    "Venom": "weights, and activations of squared ReLU",
}


def speed(results: dict, recorded: list, here: str) -> str:
    """README: where it pays, where not, and what it costs in loss."""
    loss = at_what_loss(results, recorded, here)
    parts = where_it_pays(results), loss, table(results, ("train-step",), here)
    return "\n\n".join(part for part in parts if part)


def where_it_pays(results: dict) -> str:
    """Whole steps of each GPU, the widths where they are faster first. Older measurements only of what there
    is nothing newer of."""
    wide, narrow = [], []  # (GPU, its places, whether they are older measurements)
    for name, suites in gpus(results).items():
        for old in (False, True):
            found = {True: [], False: []}
            for (layers, _, d, f), by_method in of_methods(suites, "train-step").items():
                own = {m: by_method[m] for m in METHODS if m in by_method}
                own = {m: row for m, row in own.items() if stored.is_old(row) == old}
                gains = {m: rows.ratio(row, *PROGRAMS["train-step"]) for m, row in own.items()}
                gains = {m: gain for m, gain in gains.items() if gain is not None}
                if gains:
                    listed = ", ".join(f"`{m}` {gain:.2f}x" for m, gain in gains.items())
                    pays = gains.get("FST", max(gains.values())) >= PAYS
                    found[pays].append(f"{listed} at d, f = {d}, {f} ({layers} blocks)")
            wide += [(name, found[True], old)] if found[True] else []
            narrow += [(name, found[False], old)] if found[False] else []
    parts = []
    for begin, places in (("Whole training steps, dense time / time", wide), (NARROW, narrow)):
        newest = [place for place in places if not place[2]] or places
        if newest:
            parts.append(f"{begin}, {'; '.join(_said(*place) for place in newest)}.")
    return " ".join(parts)


NARROW = "Sparsity does not pay where layers are narrow"


def _said(name: str, places: list[str], old: bool) -> str:
    return f"on an {name}{' (older, in a fixed cyclic order)' if old else ''}: {'; '.join(places)}"


def at_what_loss(results: dict, recorded: list, here: str) -> str:
    """What methods cost in loss, from the recorded ablations and the studies of larger models."""
    parts = []
    for method in METHODS:
        found = loss_of(recorded, *LOSSES[method])
        if found is not None:
            config, seeds = found.result["config"], len(found.result["seeds"])
            model, steps = config["model"], config["train"]["steps"]
            parts.append(
                f"`{method}` {found.mean:+.3f} ({found.range}, {seeds} seeds, d = "
                f"{model['d']}, {model['layers']} blocks, {steps} steps: "
                f"[file]({here}{found.file.relative_to(REPOSITORY / 'docs')}))"
            )
    return (
        "At equal steps the loss is not that of dense training. Validation loss minus the dense one's, both "
        "evaluated with dense weights and products, in nats "
        f"per byte: {'; '.join(parts)}. Those are small models in short runs "
        f"([verdicts]({here}reproduction.md)). {of_studies(here)} {without_loss(results, recorded)}"
        if parts
        else ""
    )


def of_studies(here: str) -> str:
    """What methods cost in loss in larger models, by study; "" where there is none."""
    parts = []
    for study in studies_at_equal_steps():
        config = next(iter(study.arms[study.reference].values())).config
        gaps = {arm: study.gap(arm) for arm in study.others if study.is_sparse(arm)}
        if not gaps:
            continue
        losses = (f"`{m}` {gap.mean:+.3f} ({gap.n} seed{'s' * (gap.n != 1)})" for m, gap in gaps.items())
        parts.append(
            f"{', '.join(losses)} in `{study.name}` (d = {config.model.d}, {config.model.layers} blocks, "
            f"{evidence.tokens_of_a_run(study) / 1e6:.0f}M tokens)"
        )
    words = f"In nats per token, by the products of the last step ([evidence]({here}evidence.md)): "
    return f"{words}{'; '.join(parts)}." if parts else ""


def without_loss(results: dict, recorded: list) -> str:
    """A sentence that names the widths of whole steps at which no loss was measured."""
    widths = {d for suites in gpus(results).values() for _, _, d, _ in of_methods(suites, "train-step")}
    widths -= {result["config"]["model"]["d"] for _, result in recorded}
    studied = {True: set(), False: set()}
    for study in evidence.studies():
        runs = [run for seeds in study.arms.values() for run in seeds.values()]
        studied[study.equal_time] |= {run.config.model.d for run in runs}
    sentences = {
        "At d = {} losses were measured at equal time.": widths & studied[True] - studied[False],
        "No loss was measured at d = {}.": widths - studied[True] - studied[False],
    }
    return " ".join(
        words.format(" or ".join(map(str, sorted(found)))) for words, found in sentences.items() if found
    )


def blocks(results: dict, recorded: list, here: str) -> str:
    """docs/gpu.md: feed-forward blocks and steps."""
    return table(results, ("ffn", "train-step"), here)


def table(results: dict, suites: tuple[str, ...], here: str) -> str:
    """Ratios of the methods by width, and their energy: a table for each GPU."""
    words = {"ffn": "block", "train-step": "step"}
    folder = "experiments/benchmarks/results" if here else RESULTS_FROM_DOCS
    parts, used, sources = [], [], []
    for name, own in gpus(results).items():
        lines, there_from = [], []
        for suite in suites:
            what, programs = words[suite], PROGRAMS[suite]
            there_from += own[suite]["sources"] if suite in own else []
            for (layers, tokens, d, f), by_method in of_methods(own, suite).items():
                there = [by_method.get(m) for m in METHODS]
                rows_there = [row for row in there if row]
                if rows_there:
                    used += rows_there
                    place = [what if layers is None else f"{what}, {layers} blocks", tokens, f"{d}, {f}"]
                    cells = [timed(row, *programs) for row in there]
                    lines.append([*place, *cells, rows.against(rows_there[0], programs[0])])
        if lines:
            shown = rows.table(["what", "T", "d, f", *METHODS, "against"], lines)
            files = [f for f in there_from if any(row is own for row in used for own in f["rows"])]
            links = (f"[{'_'.join(f['file'][:-5].split('_')[1:])}]({folder}/{f['file']})" for f in files)
            parts.append(f"**{name}**\n\n{shown}\n\nFrom {', '.join(links)}.")
            sources += files
    if not parts:
        return "Nothing was measured on a GPU."
    old = " * An older measurement, whose programs took turns in one fixed cyclic order: biased"
    old += f" ([how]({here}benchmarks.md#how-it-is-measured))."
    return "\n\n".join(
        [
            f"Time of the fastest dense program over that of the method, in {DTYPE}, everything counted, "
            "with the 95 % interval of six or more rounds; J: energy over the dense program's."
            + (old if any(map(stored.is_old, used)) else ""),
            *parts,
            uncommitted(sources),
        ]
    ).rstrip()


def timed(row: dict | None, base: str, name: str) -> str:
    """`1.31x (1.30-1.33), J 0.74`."""
    joules = energy(row, base, name)
    return cell(row, base, name) + (f", J {joules}" if joules != "-" else "")


def over_meshes(results: dict, recorded: list, here: str) -> str:
    """docs/scaling.md: whole steps over several GPUs of one host, a table for each model."""
    parts = []
    for name, own in gpus(results).items():
        models = {}
        for row in select.rows_of(own, "mesh"):
            if row["mesh"] != mesh.ONE and row["dtype"] == DTYPE:
                models.setdefault((row["d"], row["f"], row["layers"], row["T"]), []).append(row)
        for (d, f, layers, tokens), found in sorted(models.items(), reverse=True):
            header = ["mesh", "method", "of one device", "of the slowest", "against dense", "on one device"]
            header += ["state, MB", "of one device's"]
            lines = [
                [
                    *(row["mesh"], f"`{row['method']}`", *_over_a_mesh(row)),
                    mesh.show_share(row, select.rows_of(own, "mesh")),
                ]
                for row in found
            ]
            parts.append(
                f"{layers} blocks with d, f = {d}, {f}, {tokens} tokens on each {name}, {DTYPE}:\n\n"
                f"{rows.table(header, lines)}"
            )
        if models:
            files = own["mesh"]["sources"]
            links = (f"[{f['file'].split('_')[-1][:-5]}]({RESULTS_FROM_DOCS}/{f['file']})" for f in files)
            flags = {}
            for file in files:
                flags.setdefault(rows.show_flags(file), []).append(f"`{file['file'].removesuffix('.json')}`")
            under = "".join(f" Measured with `{own}`: {', '.join(of)}." for own, of in flags.items() if own)
            parts.append(f"From {', '.join(links)}.{under} {uncommitted(files)}".rstrip())
    return "\n\n".join(parts) or "No steps were measured over several GPUs."


def _over_a_mesh(row: dict) -> list[str]:
    """Ratios to one device, to the slowest and to the dense step, there and on one device; the size of the
    state."""
    alone = (mesh.ONE, mesh.SLOWEST)
    ratios = [*(rows.show_ratio(row, f"{device} step", "step") for device in alone), "", ""]
    if not select.is_dense(row["method"]):
        ratios[2] = rows.show_ratio(row, "dense step", "step")
        ratios[3] = rows.show_ratio(row, f"{mesh.ONE} dense step", f"{mesh.ONE} step")
    return [*ratios, rows.show_mb(row["state_bytes"])]


def uncommitted(results) -> str:
    """Which of some results ran code that differed from the commit that they name; "" if none did."""
    names = sorted({result["file"] for result in results if result["tree"] not in ("clean", None)})
    if not names:
        return ""
    listed = ", ".join(f"`{name.removesuffix('.json')}`" for name in names)
    return f"Measured with changes that were not committed, and not kept: {listed}."


def torch(results: dict, recorded: list, here: str) -> str:
    """docs/gpu.md: beside PyTorch."""
    parts = []
    for name, all_suites in gpus(results).items():
        suites = {suite: own | {"rows": own["beside_torch"]} for suite, own in all_suites.items()}
        shapes, lines = set(), {}

        def add(what, place, found, lines=lines, shapes=shapes):
            if found:
                shapes.add(place)
                ends = [f"{end(found):.2f}x" for end in (min, max)]
                lines.setdefault(what, {})[place] = ends[0] if ends[0] == ends[1] else " to ".join(ends)

        gemm = [
            row for row in select.rows_of(suites, "gemm") if row["dtype"] == DTYPE and row["format"] == "2:4"
        ]
        for place in {(row["d"], row["f"]) for row in gemm}:
            own = [row for row in gemm if (row["d"], row["f"]) == place]
            for what, program in PRODUCTS.items():
                gains = [gain for row in own if (gain := rows.ratio(row, "dense", program)) is not None]
                add(what, place, gains if any("torch dense" in row["ms"] for row in own) else [])
        for suite, wanted in (("ffn", BLOCKS_BESIDE), ("train-step", STEPS_BESIDE)):
            for (layers, _, *place), by_method in of_methods(suites, suite).items():
                if "torch dense" not in by_method or layers not in (None, 2):
                    continue
                for method, what in wanted.items():
                    gain = rows.ratio(by_method[method], *PROGRAMS[suite]) if method in by_method else None
                    add(what, tuple(place), [] if gain is None else [gain])
        if lines:
            order = [*PRODUCTS, *BLOCKS_BESIDE.values(), *STEPS_BESIDE.values()]
            header = [f"{name}: d, f", *(f"{d}, {f}" for d, f in sorted(shapes))]
            cells = [
                [what, *(lines[what].get(place, "-") for place in sorted(shapes))]
                for what in order
                if what in lines
            ]
            parts.append(rows.table(header, cells))
    return "\n\n".join(parts) or "PyTorch was not measured."


def of_a_copy(results: dict, recorded: list, here: str) -> str:
    """docs/cpu-kernels.md: the share of a copy's speed that producers reach."""
    parts = []
    for suites in results.values():
        found = [row for row in select.rows_of(suites, "producers") if "copy" in row["ms"]]
        if hardware(suites)["platform"] != "cpu" or not found:
            continue
        places = sorted(
            {(row["dtype"], row["T"], row["f"]) for row in found}, key=lambda p: (p[0] != "float32", p)
        )
        lines = {}
        for row in found:
            cells = lines.setdefault((row["producer"], producers.AXES[row["axis"]]), {})
            cells[row["dtype"], row["T"], row["f"]] = producers.share_of_copy(row)
        header = ["kernel", "groups along", *(f"{dtype}, {T} x {f}" for dtype, T, f in places)]
        cells = [[*name, *(own.get(place, "-") for place in places)] for name, own in lines.items()]
        files_of = ", ".join(f"`{source['file']}`" for source in suites["producers"]["sources"])
        old = "; in rotating order" if any(map(stored.is_old, found)) else ""
        parts.append(
            f"Speed as a share of a copy's of the same bytes, {hardware(suites)['description']} "
            f"({files_of}{old}):\n\n{rows.table(header, cells)}"
        )
    return "\n\n".join(parts) or "Nothing was measured on a CPU."


def gallery(results: dict, recorded: list, here: str) -> str:
    """docs/gallery.md: every plot, GPUs first."""
    parts = []
    for suites in gpus_first(results):
        parts.append(f"## {hardware(suites)['description']}")
        parts += [
            f"### {alt}\n\n{caption(name)}\n\n![{alt}]({here}images/{name})"
            for name, alt in images(suites).items()
        ]
    return "\n\n".join(parts) or "Nothing was measured."


PRODUCTS = {
    "dense products": "torch dense",
    "2:4 products, packed before": "torch 2:4",
    "the same products here": "2:4",
}
BLOCKS_BESIDE = {
    "torch dense": "dense block, forward and backward",
    "torch 2:4": "block with 2:4 weights, compressed in every step",
    "torch 2:4, compressed once in 40": "the same, compressed once in 40 steps",
    "FST-dense-wgrad": "the same products here (`FST-dense-wgrad`)",
}
STEPS_BESIDE = {"torch dense": "dense optimiser step, two blocks", "FST": "the step with `FST` here"}
BLOCKS = {
    "first": first,
    "speed": speed,
    "blocks": blocks,
    "torch": torch,
    "producers": of_a_copy,
    "gallery": gallery,
    "mesh": over_meshes,
}
