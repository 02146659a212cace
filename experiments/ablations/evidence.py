"""What the runs of a study show: loss over tokens and over time, and what an arm's speed costs in loss.

A study is a folder with the records of an ablation's runs, ARM/seedN.json (record.py), or several folders of
one name.
"""

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments import config as configs
from experiments.ablations import ablation, text, together
from experiments.ablations.ablation import REPLICATE, Named
from experiments.ablations.built import Built
from experiments.ablations.result import judged
from experiments.ablations.verdicts import CONFIDENCE, Interval, resolvable
from experiments.analysis.outcome import outcome
from experiments.analysis.runs import Run
from experiments.analysis.tables import markdown
from experiments.config import REPOSITORY
from experiments.data.vocabulary import bits_per_byte


@dataclass(frozen=True)
class Paper:
    """A speed that a paper states of whole runs by a method, without a loss in nats per token beside it.

    arm: of a study that is trained by it.
    source: which says so in its abstract.
    speed: dense time / time, lowest and highest."""

    arm: str
    source: str
    speed: tuple[float, float]


CLAIMS = (  # of which runs are shown as studies
    "configs/evidence/methods.py",
    "configs/evidence/tokens.py",
    "configs/evidence/controls.py",
    "configs/fst/equal_time.py",
)
DECIDE_NOTHING = ("pilot", "widepilot")  # sizes for recipes
ONE_SEED = (
    "One seed decides nothing. Three would find, in 80 % of repetitions, an effect {three:.1f} times as "
    "large as the standard deviation of its paired difference, which one seed does not show. "
)
ROWS = 10  # of dense steps, at least, by which a run's speed is corrected
CLEARLY = 1.02  # times as fast: what two runs of one arm may differ by on one GPU
PAPERS = (Paper("Venom", "arXiv 2602.06183", (1.4, 1.7)),)


@dataclass(frozen=True)
class Study:
    """The runs of a folder.

    name: of the folder.
    arms: arm -> seed -> run; the first arm is what the others are compared with.
    devices: what runs had, each kind once, as `NVIDIA H100 or 2 x NVIDIA H200`.
    built: of each run, by its path. Times are compared between runs that were built alike, and whose files
        were those of their commit.
    registered: what was stated before the first run; None where that is not known."""

    name: str
    arms: dict[str, dict[int, Run]]
    devices: str
    built: dict[Path, Built]
    registered: dict | None = None

    @property
    def decides_nothing(self) -> bool:
        return self.name in DECIDE_NOTHING

    @property
    def equal_time(self) -> bool:
        """Whether arms have the time of dense training, and not its steps."""
        steps = {run.config.train.steps for runs in self.arms.values() for run in runs.values()}
        return len(steps) > 1

    @property
    def reference(self) -> str:
        return next(iter(self.arms))

    @property
    def others(self) -> list[str]:
        return [name for name in self.arms if name not in (self.reference, REPLICATE)]

    def is_sparse(self, arm: str) -> bool:
        """Whether an arm has sparse steps."""
        return any(phase.sparse for run in self.arms[arm].values() for _, _, phase in run.phases)

    def is_longer(self, arm: str) -> bool:
        """Whether an arm has more steps than the reference."""
        first, own = (next(iter(self.arms[name].values())) for name in (self.reference, arm))
        return own.config.train.steps > first.config.train.steps

    def gaps(self, arm: str) -> dict[int, float]:
        """Loss of an arm's trained model, less that of the reference, nats per token, by seed."""
        first, own = self.arms[self.reference], self.arms[arm]
        return {seed: last_loss(own[seed]) - last_loss(first[seed]) for seed in own if seed in first}

    def gap(self, arm: str) -> Interval:
        """The mean of `gaps`, with its interval."""
        return Interval.of([*self.gaps(arm).values()])

    def run_speed(self, arm: str, corrected: bool = True) -> Interval:
        """Seconds per step of the reference's run over those of the arm's, everything but measurements.

        corrected: whether each is divided by the time of its own dense steps, where both have enough rows of
            them and one model: those with numbers that both have and at which the arm is dense. GPUs of one
            host differ by up to 8 %."""

        def ratio(first, run):
            end = min(first.config.train.steps, run.config.train.steps)
            dense = [speeds(r, False, run, end) for r in (first, run)]
            if not corrected or run.config.model != first.config.model or min(map(len, dense)) < ROWS:
                return pace(first) / pace(run)
            return float(pace(first) / pace(run) * np.median(dense[0]) / np.median(dense[1]))

        return Interval.of([ratio(first, run) for first, run in self._timed(arm)])

    def time_taken(self, arm: str) -> list[float]:
        """Seconds of all steps of an arm's run over those of the reference's, as timed: the lowest and the
        highest of its runs."""
        ratios = [
            pace(run) * run.config.train.steps / (pace(first) * first.config.train.steps)
            for first, run in self._timed(arm)
        ]
        return sorted({min(ratios), max(ratios)}) if ratios else []

    def step_speeds(self, arm: str) -> list[float]:
        """Seconds of a dense step over those of a sparse one of the same run, medians: the lowest and the
        highest of an arm's runs. Those without dense steps are compared with runs of the reference."""
        pairs = [(run, run) for run in self.arms[arm].values() if len(speeds(run, sparse=False))]
        ratios = [
            float(np.median(speeds(run, sparse=True)) / np.median(speeds(first, sparse=False)))
            for first, run in pairs or self._timed(arm)
            if len(speeds(run, sparse=True))
        ]
        return sorted({min(ratios), max(ratios)}) if ratios else []

    def alike(self, arm: str) -> list[Run]:
        """The runs of an arm whose times are shown beside each other: those that compare with a run of the
        reference and with one of another arm, or where no runs do, those that compare with the most."""
        of = {name: [self._comparing(run) for run in runs.values()] for name, runs in self.arms.items()}
        others = [own for name, each in of.items() if name != self.reference for own in each]
        shown = {*of[self.reference]} & {*others}
        shown = shown or {Counter([*of[self.reference], *others]).most_common(1)[0][0]}
        return [run for run in self.arms[arm].values() if self._comparing(run) in shown]

    def apart(self, arm: str, value) -> list[float]:
        """The means of those runs of an arm whose times compare: the lowest, and the highest if there are
        several; [] where a run has no such number. Runs that are left out count where there are no others.

        value: what makes the number of a Run, or None."""
        found = {}
        for run in self.alike(arm) or self.arms[arm].values():
            found.setdefault(self._comparing(run), []).append(value(run))
        if any(None in values for values in found.values()):
            return []
        means = [float(np.mean(values)) for values in found.values()]
        return sorted({min(means), max(means)})

    def tokens_per_second(self, arm: str) -> list[float]:
        """See `apart`."""
        return self.apart(arm, lambda run: tokens_per_step(run) / pace(run))

    @property
    def left_out(self) -> dict[str, list[str]]:
        """The runs, ARM/SEED, whose times are compared with those of no run of the reference, or of no other
        arm, by why that is so."""
        found = {}
        for arm, runs in self.arms.items():
            others = [other for other in self.arms if (other == self.reference) != (arm == self.reference)]
            beside = [run for other in others for run in self.arms[other].values()]
            for seed, run in runs.items():
                if why := self._why_left_out(run, beside):
                    found.setdefault(why, []).append(f"{arm}/{seed}")
        return found

    def mfu(self, arm: str) -> list[float]:
        """See `apart`, of `share_of_peak`."""
        return self.apart(arm, share_of_peak)

    def _timed(self, arm: str) -> list[tuple[Run, Run]]:
        """Each run of an arm after one of the reference whose time compares: of its seed, if there is one."""
        found = []
        for seed, run in self.arms[arm].items():
            own = self._comparing(run)
            first = {s: one for s, one in self.arms[self.reference].items() if self._comparing(one) == own}
            if first:
                found.append((first.get(seed, next(iter(first.values()))), run))
        return found

    def _comparing(self, run: Run) -> tuple:
        """What is equal in runs whose times are compared; of one with changed files, which are not known, its
        own."""
        own = self.built[run.out]
        return own, run.out if own.changed else None

    def _why_left_out(self, run: Run, beside: list[Run]) -> str:
        """Why the time of a run is compared with none of those beside it; "" where it is."""
        own, others = self.built[run.out], [self.built[one.out] for one in beside]
        if own.changed:
            return "whose files differed from the commit"
        if not others or own in others:
            return ""
        unchanged = [other for other in others if not other.changed]
        if not unchanged:
            return "as all runs beside had files that differed from the commit"
        nearest = min((own.unlike(other) for other in unchanged), key=len)
        return f"of {' and '.join(nearest)} than the runs beside"


def read(*folders: Path) -> Study:
    """The study in folders of one name, such as those of several machines; its reference first.

    folders: with ARM/seedN.json.

    Raises: UserError if a folder has none, if no folder has the arm "dense", or for runs that do not fit
    together (together.py)."""
    for folder in folders:
        together.check_records(folder)
    members = together.check(folders[0], together.records(folders), together.statements(folders))
    together.check_dense(folders[0], {member.arm for member in members})
    arms, stated = {"dense": {}}, filter(None, map(together.registered, folders))
    for member in members:
        arms.setdefault(member.arm, {})[member.config.seed] = member.run
    return Study(
        folders[0].resolve().name,
        arms,
        " or ".join(sorted({together.named(member.devices) for member in members})),
        {member.path: Built.of(member) for member in members},
        # Of several machines, what is true of all: that before which most runs were made.
        max(stated, key=lambda words: (words["runs before"], words["written"]), default=None),
    )


def studies() -> list[Study]:
    """Those whose records are in the repository, docs/evidence/SIZE."""
    return [read(folder) for folder in sorted((REPOSITORY / "docs/evidence").iterdir()) if folder.is_dir()]


def unrepeated(studies: list[Study]) -> list[Study]:
    """Each study without the arms whose runs an earlier one has, too, but with its reference."""
    known, found = [], []
    for study in studies:
        own = {
            arm: runs
            for arm, runs in study.arms.items()
            if arm == study.reference or any(run.rows not in known for run in runs.values())
        }
        known += [run.rows for runs in own.values() for run in runs.values()]
        found.append(dataclasses.replace(study, arms=own))
    return found


def of_whole_runs(studies: list[Study]) -> list[Study]:
    """The studies at equal steps of which an arm's loss and speed, both beside dense training, are known."""
    equal = unrepeated([study for study in studies if not study.equal_time])
    return [study for study in equal if any(study.run_speed(arm).n for arm in study.others)]


def tokens_per_step(run: Run) -> int:
    return run.config.data.batch * run.config.data.seq


def tokens_of_a_run(study: Study) -> int:
    """Those that a run of the reference sees."""
    run = next(iter(study.arms[study.reference].values()))
    return run.config.train.steps * tokens_per_step(run)


def parameters(run: Run) -> int | None:
    """How many its model has; None where that was not written down."""
    return next((row["first"]["parameters"] for row in run.rows["event"] if "first" in row), None)


def speeds(run: Run, sparse: bool, of: Run | None = None, end: float = math.inf) -> np.ndarray:
    """Steps per second of the rows that have them, of sparse phases or of dense ones.

    of: the run whose phases these are; None for `run`. end: the steps before it count."""
    at, values = run.column("train", "steps_per_s")
    phases = (of or run).phases
    inside = [
        any(b <= step < min(e, end) and phase.sparse == sparse for b, e, phase in phases) for step in at
    ]
    return np.asarray(values)[np.asarray(inside, bool)]


def seconds_at(run: Run, steps) -> np.ndarray:
    """Seconds of training until each of some numbers of steps, measurements left out."""
    at, values = run.column("train", "steps_per_s")
    per_step = 1 / np.asarray(values)
    taken = np.concatenate([[at[0] * per_step[0]], np.diff(at) * per_step[1:]])
    ends, total = np.concatenate([[0], at]), np.concatenate([[0], np.cumsum(taken)])
    beyond = np.maximum(np.asarray(steps) - at[-1], 0) * per_step[-1]
    return np.interp(steps, ends, total) + beyond


def pace(run: Run) -> float:
    """Seconds per step of a whole run."""
    steps = run.config.train.steps
    return float(seconds_at(run, [steps])[0]) / steps


def trained_products(run: Run) -> str:
    """The products of the trained model: sparse where its weights are sparse to the end, else dense."""
    return "sparse" if run.config.ends_sparse else "dense"


def last_loss(run: Run) -> float:
    """The last loss of the trained model, nats per token."""
    return run.last("eval", trained_products(run))


def second_bits(run: Run) -> float | None:
    """Bits per byte of the second text by the trained model; None where there is none."""
    loss, size = (run.last("second", name) for name in (trained_products(run), "bytes_per_token"))
    return None if loss is None else bits_per_byte(loss, size)


def samples(study: Study) -> str:
    """What the trained model of each arm makes of the prompts, with the lowest seed, as Markdown; of an arm
    with sparse steps by which products, where its rows say it, as those of earlier runs do not."""
    parts = []
    for arm, runs in study.arms.items():
        for row in runs[min(runs)].rows.get("sample", []) if arm != REPLICATE else ():
            text = (row["prompt"] + row["text"]).expandtabs(4).replace("```", "~~~").rstrip()
            by = f", by {row['products']} products" if "products" in row and study.is_sparse(arm) else ""
            parts.append((row["prompt"], f"{arm}{by}:\n\n```text\n{text}\n```"))
    prompts = list(dict.fromkeys(prompt for prompt, _ in parts))
    return "\n\n".join(text for prompt in prompts for own, text in parts if own == prompt)


def curve(run: Run, over: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Evaluations by the products with which a run trained then: in its sparse phases those of the method.

    over: "tokens" (millions) or "minutes".

    Returns: their places; bits per byte; and whether each is causal, which it is not where sparse products
        let a token depend on later ones."""
    spans = [(first, after) for first, after, phase in run.phases if phase.sparse]
    found = []
    for row in run.rows["eval"]:
        products = "sparse" if any(first < row["step"] <= after for first, after in spans) else "dense"
        if row.get(products) is not None:
            bits = bits_per_byte(row[products], run.bytes_per_token)
            found.append((row["step"], bits, products not in row.get("no_language_model_loss", ())))
    steps, values, causal = map(np.array, zip(*found, strict=True))
    return places(run, over, steps), values, causal


def places(run: Run, over: str, steps) -> np.ndarray:
    """Where numbers of steps lie on an axis of `curve`."""
    return np.asarray(steps) * tokens_per_step(run) / 1e6 if over == "tokens" else seconds_at(run, steps) / 60


def joules_per_token(run: Run) -> float | None:
    """Of a whole run, from the energy of its GPU; None where that was not measured."""
    values = run.column("train", "joules_per_step")[1]
    return float(np.mean(values)) / tokens_per_step(run) if len(values) else None


def share_of_peak(run: Run) -> float | None:
    """The share of the peak of its devices that the products of a run's model took, all of them counted as
    dense; None where the peak was not known."""
    for row in run.rows["train"]:
        if row.get("mfu"):
            return row["mfu"] / row["tokens_per_s"] * tokens_per_step(run) / pace(run)
    return None


def table(study: Study) -> str:
    """A line per arm."""
    header = ["arm", "seeds", "steps", "loss, dense", "bits per byte", "of the second text"]
    header += ["loss, sparse", "behind dense"]
    header += ["sparse step", "whole run", "as timed", "tokens/s", "MFU", "mJ per token", "memory, GB"]
    lines = [header]
    for arm, runs in study.arms.items():
        some = next(iter(runs.values()))
        mean = lambda value, runs=runs: float(np.mean([value(run) for run in runs.values()]))  # noqa: E731
        memory = [peak for run in runs.values() if (peak := run.last("eval", "peak_bytes"))]
        second = [second_bits(run) for run in runs.values()]
        energy = study.apart(arm, joules_per_token)
        behind, whole_run = "-", ["-", "-"]
        if arm != study.reference:
            speeds = (study.run_speed(arm), study.run_speed(arm, corrected=False))
            behind = interval(study.gap(arm), "+.4f")
            whole_run = [interval(speed, ".2f", "x") for speed in speeds]
        lines.append(
            [
                arm,
                str(len(runs)),
                str(some.config.train.steps),
                f"{mean(lambda run: run.last('eval', 'dense')):.4f}",
                f"{mean(lambda run: bits_per_byte(last_loss(run), run.bytes_per_token)):.4f}",
                "-" if None in second else f"{np.mean(second):.4f}",
                f"{mean(lambda run: run.last('eval', 'sparse')):.4f}",
                behind,
                " to ".join(dict.fromkeys(f"{step:.2f}x" for step in study.step_speeds(arm))) or "-",
                *whole_run,
                " to ".join(f"{one:,.0f}" for one in study.tokens_per_second(arm)),
                " to ".join(f"{share:.1%}" for share in study.mfu(arm)) or "-",
                " to ".join(f"{1e3 * one:.2f}" for one in energy) or "not measured",
                f"{max(memory) / 1e9:.1f}" if memory else "not measured",
            ]
        )
    return markdown(lines)


def interval(found: Interval, form: str, unit: str = "") -> str:
    """A mean with its interval, if it has one."""
    if found.mean is None:
        return "-"
    text = f"{found.mean:{form}}{unit}"
    return text if found.low is None else f"{text} ({found.low:{form}} to {found.high:{form}})"


def about(study: Study) -> str:
    """What the runs of dense training are."""
    run = next(iter(study.arms[study.reference].values()))
    config, size = run.config, parameters(run)
    model = f"of a model of {size / 1e6:.1f}M parameters, " if size else ""
    said = [
        f"Dense runs are {config.train.steps} steps of {tokens_per_step(run)} tokens, "
        f"{tokens_of_a_run(study) / 1e6:.0f}M, {model}at a peak learning rate of "
        f"{config.optim.lr:g}, on {study.devices}."
    ]
    if left_out := study.left_out:
        names = ", and ".join(f"{_listed(runs)}, {why}" for why, runs in left_out.items())
        said.append(f"Left out {'are' if sum(map(len, left_out.values())) > 1 else 'is'} {names}.")
    if lacking := [arm for arm in study.arms if arm != REPLICATE and not study.alike(arm)]:
        said.append(f"The figure over minutes lacks {_listed(lacking)}.")
    return " ".join(said)


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def _seeds(count: int) -> str:
    return f"{count} seed{'s' * (count != 1)}"


def summary(study: Study) -> str:
    """The first sentences of a page: who is behind dense training, and by how much."""
    said, what = [], "steps" if study.equal_time else "run"
    for arm in study.others:
        gap, speed = study.gap(arm), study.run_speed(arm)
        if gap.mean is None:
            continue
        side = "behind" if gap.mean > 0 else "ahead of"
        seeds = _seeds(gap.n)
        sure = "" if gap.low is None else f", {gap.low:+.3f} to {gap.high:+.3f}"
        fewer = f" (of {_seeds(speed.n)})" if 0 < speed.n < gap.n else ""
        said.append(
            f"{arm} ends {abs(gap.mean):.3f} nats per token {side} dense training ({seeds}{sure})"
            + (
                ""
                if speed.mean is None
                else f", its {what} {speed.mean:.2f} times as fast{_as_timed(study, arm)}{fewer}"
            )
        )
    if not said:
        return "No arm can be compared with dense training yet."
    parts = ["; ".join(said) + ".", *_beaten(study)]
    if study.equal_time and (longer := unequal_times(study)):
        parts.append(f"Runs were to take the time of dense training: as timed, {longer}.")
    return " ".join(parts)


def unequal_times(study: Study) -> str:
    """`FST took 1.01 to 1.03 times that long, Venom 1.04`, of arms with a run whose time was clearly not that
    of dense training; "" for none."""
    found = []
    for arm in study.others:
        taken = study.time_taken(arm)
        if any(abs(ratio - 1) > CLEARLY - 1 for ratio in taken):
            ends = " to ".join(dict.fromkeys(f"{ratio:.2f}" for ratio in taken))
            found.append(f"{arm} {ends}" if found else f"{arm} took {ends} times that long")
    return _listed(found)


def over_tokens(studies: list[Study]) -> str:
    """How far each arm ends from dense training after so many tokens, as one recipe on one text; "" where no
    arm was trained with several numbers of them. Where seeds differ, those in common are said alone, too."""
    found: dict[tuple[str, ...], dict[int, dict[int, float]]] = {}
    for study in studies:
        for arm in () if study.equal_time else study.others:
            config = next(iter(study.arms[arm].values())).config
            method, optim = config.method, dataclasses.replace(config.optim, warmup=0)
            if hasattr(method, "dense_warmup"):  # a share of the steps
                method = dataclasses.replace(method, dense_warmup=0)
            at = found.setdefault((arm, *map(repr, (config.model, method, optim, config.data))), {})
            tokens, gaps = tokens_of_a_run(study), study.gaps(arm)
            at[tokens] = max(gaps, at.get(tokens, gaps), key=len)
    said = []
    for (arm, *_), at in found.items():
        gaps = {tokens: at[tokens] for tokens in sorted(at) if at[tokens]}
        if len(gaps) > 1:
            each = [
                f"{np.mean([*own.values()]):+.3f} after {tokens / 1e6:.0f}M ({_seeds(len(own))})"
                for tokens, own in gaps.items()
            ]
            common = sorted(set.intersection(*map(set, gaps.values())))
            means = [f"{np.mean([own[seed] for seed in common]):+.3f}" for own in gaps.values() if common]
            alone = f"seed{'s' * (len(common) > 1)} {_listed(list(map(str, common)))} alone"
            differ = common and any(len(own) > len(common) for own in gaps.values())
            said.append(f"{arm} {', '.join(each)}" + f"; of {alone} {', '.join(means)}" * bool(differ))
    if not said:
        return ""
    return f"Nats per token behind dense training, by tokens: {'. '.join(said)}."


def brief(study: Study) -> str:
    """The numbers of the last figure in words: `124m: FST +0.023 at 1.00x`."""
    at = [(arm, study.gap(arm).mean, study.run_speed(arm)) for arm in study.others]
    said = [
        f"{arm} {gap:+.3f} at {speed.mean:.2f}x{_as_timed(study, arm)}"
        for arm, gap, speed in at
        if None not in (gap, speed.mean)
    ]
    return f"{study.name}: {', '.join(said)}"


def _as_timed(study: Study, arm: str) -> str:
    """In brackets, the speed of an arm's runs without the correction, where that changes it clearly."""
    corrected, timed = study.run_speed(arm).mean, study.run_speed(arm, corrected=False).mean
    return f" ({timed:.2f}x as timed)" if abs(corrected - timed) >= CLEARLY - 1 else ""


def judged_claim(study: Study) -> tuple[Named, dict] | None:
    """What was claimed of the study before its runs, and the verdict with its findings; None for no claim."""
    named = _claim_of(study)
    if named is None:
        return None
    first = next(iter(study.arms[study.reference].values())).config
    result = {
        "metrics": {
            arm: {str(seed): outcome(run) for seed, run in runs.items()} for arm, runs in study.arms.items()
        },
        "arms": {
            arm: configs.differences(first, next(iter(runs.values())).config)
            for arm, runs in study.arms.items()
        },
        "config": configs.to_dict(first),
        "replicates": named.ablation.replicated,
        "registered": study.registered,
    }
    return named, judged(result, named.ablation)


def claim(study: Study) -> str:
    """What was claimed of the study before its runs, and what became of it, as Markdown; "" for none."""
    known = judged_claim(study)
    if known is None:
        return ""
    named, found = known
    count = len(found["findings"])
    three = resolvable(1.0, 3, (1 - CONFIDENCE) / count)
    seeds = max(map(len, study.arms.values()))
    parts = [
        "### The claim",
        f"{named.ablation.claim} ({named.ablation.source}.)",
        text.headline(found),
        text.findings(found),
        ("" if REPLICATE in study.arms else "No replicate was run: the noise floor is not measured. ")
        + (ONE_SEED.format(three=three) if seeds == 1 else "")
        + text.statement(found),
        f"Expected before the runs: {(study.registered or {}).get('expects') or named.ablation.expects}",
        found_of(study),
    ]
    return "\n\n".join(filter(None, parts))


def found_of(study: Study) -> str:
    """What the claim of the study says was found; "" for none."""
    named = _claim_of(study)
    return f"Found: {named.found}" if named is not None and named.found else ""


def _claim_of(study: Study) -> Named | None:
    """The claim whose runs these are: the one that was stated before them, else that with these arms and the
    fewest others."""
    sizes = sorted((size for size in ablation.SIZES if size in study.name), key=len)
    known = [ablation.load(f"{file}:{size}") for size in sizes[-1:] for file in CLAIMS]
    hash_of = (study.registered or {}).get("hash")
    stated = [named for named in known if named.ablation.statement["hash"] == hash_of]
    alike = [named for named in known if (named.ablation.equal == "time") == study.equal_time]
    arms = [{ablation.folder_of(arm) for arm in named.ablation.all_arms} for named in alike]
    fitting = [named for named, own in zip(alike, arms, strict=True) if own >= set(study.arms)]
    fitting.sort(key=lambda named: len(named.ablation.all_arms))
    return next(iter([*stated, *fitting]), None)


def verdicts(study: Study) -> dict[str, tuple[str, float]]:
    """By arm, the verdict on how far it ends behind the reference at most, and this distance, where the claim
    of the study compares them so."""
    known = judged_claim(study)
    if known is None:
        return {}
    named, result = known
    both = zip(named.ablation.verdict.comparisons(), result["findings"], strict=True)
    return {c.arm: (f["verdict"], c.below) for c, f in both if c.reference == study.reference}


def at_equal_time(studies: list[Study]) -> list[str]:
    """A sentence for each study with as much time, and not as many steps, as dense training has, but those
    that decide nothing: how far behind it arms end, by the verdicts on its claim, which are corrected for
    their number."""
    found = []
    for study in studies:
        sides: dict[str, list[str]] = {}
        told = study.equal_time and not study.decides_nothing
        known = verdicts(study) if told else {}
        for arm in study.others if told else ():
            gap, (verdict, margin) = study.gap(arm), known.get(arm, ("", 0.0))
            if gap.mean is None:
                continue
            distance = f"{gap.mean:+.3f}"
            if verdict == "confirmed":
                side = f"at most {margin:g} behind it"
            elif verdict == "refuted":
                side = f"more than {margin:g} behind it"
            elif gap.low is None:
                side = "of one seed"
            elif verdict:
                side = "undecided"
            else:
                side, distance = "compared by no claim", interval(gap, "+.3f")
            sides.setdefault(side, []).append(f"{arm} {distance}")
        if sides:
            ends = "; ".join(f"{side}: {', '.join(arms)}" for side, arms in sorted(sides.items()))
            longer = unequal_times(study)
            has = f"was to have the time of dense training (as timed, {longer})" if longer else ""
            found.append(
                f"At the size `{study.name}`, {tokens_of_a_run(study) / 1e6:.0f}M tokens, where each method "
                f"{has or 'has the time of dense training'}, arms end, in nats per token, {ends}."
            )
    return found


def losing(studies: list[Study]) -> list[str]:
    """Sentences about the studies in which no arm with sparse steps pays; none if there are none."""
    names: dict[tuple[str, bool], list[str]] = {}
    for study in studies:
        sparse = [arm for arm in study.others if study.is_sparse(arm)]
        if study.equal_time and not all(map(study.is_longer, sparse)):
            continue
        gaps, ratios = [study.gap(arm) for arm in sparse], [study.run_speed(arm).mean for arm in sparse]
        if not sparse or None in [*ratios, *(gap.mean for gap in gaps)]:
            continue
        timed = [study.run_speed(arm, corrected=False).mean for arm in sparse]
        faster = not study.equal_time and max(map(min, ratios, timed)) >= CLEARLY
        # By how much one seed alone must be ahead to be so clearly is not known.
        if faster or any(gap.mean <= 0 and (gap.high is None or gap.high < 0) for gap in gaps):
            continue
        what = "loses" if min(gap.mean for gap in gaps) > 0 else "shows no gain"
        one = " (one seed)" if all(gap.n == 1 for gap in gaps) else ""
        names.setdefault((what, study.equal_time), []).append(f"`{study.name}`{one}")
    ends = {"loses": "each sparse arm ends behind", "shows no gain": "no sparse arm ends clearly ahead of"}
    said = {
        False: "at equal steps {} dense training, and the run of none is clearly faster",
        True: "with more steps, which were to take the time of dense training, {} it",
    }
    return [
        f"**Sparsity {what} at the size{'s' * (len(own) > 1)} {' and '.join(own)}**: "
        f"{said[equal_time].format(ends[what])}."
        for (what, equal_time), own in names.items()
    ]


def _beaten(study: Study) -> list[str]:
    """A sentence for each arm without sparse steps that is lower in loss and faster than arms with them."""
    at = {arm: (study.gap(arm).mean, study.run_speed(arm).mean) for arm in study.others}
    at = {arm: numbers for arm, numbers in at.items() if None not in numbers}
    found = []
    for arm in [arm for arm in at if not study.is_sparse(arm)]:
        losers = [other for other in at if at[other][0] > at[arm][0] and at[other][1] < at[arm][1]]
        if losers:
            found.append(
                f"In these means {arm}, which is dense, is lower and faster than {' and '.join(losers)}."
            )
    return found
