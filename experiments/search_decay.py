"""Choose the rate of masked decay by flip rates: `python -m experiments.search_decay CONFIG`.

A dense copy and one sparse copy per candidate are trained through the learning-rate warm-up, from the same
parameters on the same batches. mu = flip rate of the sparse run / flip rate of the dense run (arXiv
2404.01847, section 4): a rate is feasible if mu lies in 0.60 to 0.95; at 1 and above masks flip too much, far
below they freeze too early.
"""

import argparse
import dataclasses
import json
import math
from pathlib import Path

import jax
import numpy as np

from experiments import config as configs
from experiments import files
from experiments.analysis.tables import markdown
from experiments.cli import command
from experiments.config import Config
from experiments.data import batches as datas
from experiments.errors import UserError, require
from experiments.training.monitor import Monitor
from experiments.training.start import initial_state
from experiments.training.step import Program
from jax_sparse24.methods import FST, Dense
from jax_sparse24.methods.search_decay import CANDIDATES, FEASIBLE


def flip_rates(config: Config, watched, corpus, steps: int, every: int):
    """(measured steps, flip rates) of the first `steps` steps; rates None if the loss is no longer finite.

    watched: the method whose fresh masks are compared.
    """
    program = Program(config)
    monitor = Monitor(program, watched)
    state, batches = initial_state(program), datas.train_batches(corpus, config.data, config.seed)
    measured, rates, metrics = [], [], None
    for step in range(steps):
        look = (step + 1) % every == 0
        before = jax.block_until_ready(monitor.masks(state["params"])) if look else None
        tokens = program.batch(next(batches)["tokens"])
        phase = config.schedule.phase_at(step)
        state = program.prepare(state, step)
        state, metrics = program.step(phase.sparse, phase.adapters)(state, tokens)
        if look:
            after = monitor.masks(state["params"])
            measured.append(step)
            rates.append(monitor.compare(before, after, before, state["params"])["flip_rate"])
    return measured, rates if math.isfinite(float(metrics["loss"])) else None


def search(config: Config, candidates=CANDIDATES, steps: int | None = None, show=lambda text: None):
    """(`DecaySearch`, measured steps) for a config with masked decay.

    steps: default all of the warm-up. show: called with a line of text before each run. Raises UserError for
    a method without decay and for steps that the config does not have.
    """
    fields = {field.name for field in dataclasses.fields(config.method)}
    require("decay" in fields, f"{type(config.method).__name__} has no decay to choose; FST has.")
    steps = config.optim.warmup if steps is None else steps
    require(
        4 <= steps <= config.train.steps,
        f"The search needs 4 to {config.train.steps} steps, got {steps}. Give --steps.",
    )
    corpus, every, measured = datas.open_corpus(config.data), max(steps // 50, 1), []

    def rates_of(decay):
        show("dense" if decay is None else f"decay {decay:g}")
        method = Dense() if decay is None else dataclasses.replace(config.method, decay=decay)
        arm = dataclasses.replace(config, method=method)
        measured[:], rates = flip_rates(arm, config.method, corpus, steps, every)
        return rates

    try:
        return FST.search_decay(rates_of, candidates), measured
    except ValueError as error:
        raise UserError(str(error)) from error


def table(measured, choice, rows: int = 10) -> str:
    """mu over the steps, as means over `rows` windows."""
    lines = [["steps", "dense flip rate", *(f"mu({decay:g})" for decay in choice.sparse)]]
    for part in np.array_split(np.arange(len(measured)), min(rows, len(measured))):
        base = float(np.mean(np.array(choice.dense)[part]))
        cells = [
            "diverged" if r is None else f"{np.mean(np.array(r)[part]) / base:.3f}" if base else "-"
            for r in choice.sparse.values()
        ]
        lines.append([f"{measured[part[0]]}-{measured[part[-1]]}", f"{base:.5f}", *cells])
    return markdown(lines)


def draw(measured, choice, path: Path):
    """mu(t) of every candidate, and the feasible range."""
    from experiments.analysis.curves import smooth
    from experiments.analysis.style import STYLE, colours, name_at_end, plt, save

    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(8, 4.5))
        window = max(len(measured) // 8, 1)
        base = smooth(np.array(choice.dense), window)
        axes.axhspan(*FEASIBLE, color="grey", alpha=0.15)
        middle = measured[len(measured) // 2]
        axes.axvline(middle, color="grey", linestyle=":", label="_middle")
        for colour, (decay, rates) in zip(colours(choice.sparse), choice.sparse.items(), strict=True):
            if rates is not None:
                ratio = smooth(np.array(rates), window) / np.where(base > 0, base, np.nan)
                axes.plot(measured, ratio, color=colour, label=f"decay {decay:g}")
        axes.set(xlabel="optimiser step", ylabel="mu: flip rate / dense flip rate")
        axes.set_ylim(bottom=0)
        axes.annotate(f"feasible, {FEASIBLE[0]} to {FEASIBLE[1]}", (measured[0], FEASIBLE[0]), fontsize=8)
        axes.annotate("mean from here on", (middle, 0), fontsize=8)
        name_at_end(axes)
        save(figure, path)


@command
def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m experiments.search_decay", description=__doc__.split("\n\n")[1]
    )
    parser.add_argument("config", metavar="CONFIG", help="such as configs/fst/masked_decay.py:cpu")
    parser.add_argument("--decays", help="comma-separated candidates (default: 6e-6 to 2e-3)")
    parser.add_argument("--steps", type=int, help="steps to train (default: the learning-rate warm-up)")
    parser.add_argument("--out", type=Path, help="folder (default: runs/search_decay/NAME)")
    args = parser.parse_args(argv)
    config = configs.load(args.config)
    try:
        decays = [float(d) for d in args.decays.split(",") if d.strip()] if args.decays else CANDIDATES
    except ValueError as error:
        raise UserError(f"--decays takes numbers with commas between, got {args.decays!r}.") from error
    out = args.out or Path("runs/search_decay") / config.name
    choice, measured = search(config, decays, args.steps, show=lambda text: print(text, flush=True))
    out.mkdir(parents=True, exist_ok=True)
    data = {**dataclasses.asdict(choice), "feasible": FEASIBLE, "steps": measured}
    files.write(out / "decay.json", json.dumps(data | {"config": configs.to_dict(config)}, indent=1) + "\n")
    draw(measured, choice, out / "mu.png")
    print(f"\n{table(measured, choice)}\n")
    print(
        "mu: " + ", ".join(f"{d:g}: {'diverged' if m is None else f'{m:.3f}'}" for d, m in choice.mu.items())
    )
    require(choice.decay is not None, f"Refused: {choice.reason}. The curve is in {out}.")
    print(f"Accepted: decay {choice.decay:g}, {choice.reason}. Written to {out / 'decay.json'}.")


if __name__ == "__main__":
    main()
