"""The training loop. Everything that can be wrong is found before the run folder is made."""

import contextlib
import dataclasses
import gc
import hashlib
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from experiments import config as configs
from experiments.config import Config
from experiments.data.batches import (
    Corpus,
    bytes_per_token,
    open_corpus,
    second_batches,
    train_batches,
    validation_batches,
)
from experiments.data.vocabulary import Bytes, Subwords, bits_per_byte
from experiments.errors import UserError, require
from experiments.training import memory, rundir, speed, trackers
from experiments.training import mesh as meshes
from experiments.training.checkpoint import Checkpoints, StopSignal
from experiments.training.evaluator import Evaluator, losses_of_program
from experiments.training.lengthen import lengthen
from experiments.training.metrics import Clock, Progress, Writer
from experiments.training.monitor import Leak, Monitor, Probe
from experiments.training.optimiser import learning_rate
from experiments.training.processes import first_process_first, wait_for_all
from experiments.training.start import check_start, has_start, initial_state, step_of_start
from experiments.training.step import Program

SPEEDS = 5  # rows of speed, from the first on, whose median must reach train.least_speed


class Diverged(UserError):
    """The loss, or a parameter, is no longer a finite number."""


@dataclass(frozen=True)
class Result:
    """How a call of `train` ended."""

    out: Path
    step: int
    finished: bool
    losses: dict
    """last evaluation: {"dense": nats, "sparse": nats} per token; {} if none was made"""
    bytes_per_token: float = 1.0
    """of the tokens that were predicted there"""
    stopped: bool = False
    """a signal asked to stop, be it after the last step"""


def train(
    config: Config,
    out: Path,
    *,
    resume: bool = False,
    show: bool | None = None,
    label: str = "",
    begins: Callable[[Config, Corpus], None] = lambda config, corpus: None,
    on_first_batch: Callable[[dict], None] | None = None,
) -> Result:
    """Train a config into a run folder, or continue it, lengthened if it has more steps there now; see
    Progress for `show`. begins: called once config, folder and text are found right, before compilation.
    on_first_batch: called before the first step with what must be equal in runs that are compared,
    {"batch": fingerprint of its tokens, "parameters": how many, "dense_loss": nats of the initial ones on
    these tokens}, which is also written down.

    Raises UserError for a mistake in config, folder or corpus (nothing is written then), also while another
    process trains into that folder, for a run slower than `train.least_speed`, and Diverged when the loss
    or a parameter is no longer finite (metrics and earlier checkpoints are kept then).
    """
    out = Path(out)
    rundir.check_new(out, config, resume)
    with rundir.alone(out):
        rundir.check_new(out, config, resume)  # another process may have begun, and ended, meanwhile
        config = rundir.with_own_tokenizer(out, config) if resume else config
        return _train_alone(config, out, resume, show, label or config.name, begins, on_first_batch)


def _train_alone(
    config: Config, out: Path, resume: bool, show: bool | None, label: str, begins, on_first_batch
) -> Result:
    trackers.check(config.train)
    peak_before = peak_memory()
    speaks = show is not False and jax.process_index() == 0
    if speaks:
        print(f"{label}: preparing the text, compiling", file=sys.stderr, flush=True)
    schedule = config.schedule
    program = Program(config)
    meshes.check(config, program.mesh)
    memory.check(config, program)
    corpus, batches, second = _texts(config, rundir.vocabulary(out) if resume else None)
    iterator = train_batches(corpus, config.data, config.seed)
    if not resume or not any((out / "checkpoints").glob("[0-9]*")):
        check_start(config, corpus.vocabulary)  # else its parameters are no longer asked for
    if resume:
        rundir.check_resumable(out, corpus.statistics)
    begins(config, corpus)
    state = None
    if not resume:
        for phase in schedule.phases:  # a later one that cannot run would end the run in the middle
            program.check(phase.sparse, phase.adapters)
        losses_of_program(program)
        first = schedule.phase_at(0)
        state = initial_state(program)
        program.step(first.sparse, first.adapters)
        wait_for_all("checked")
        rundir.create(out, config, corpus.vocabulary)
    with contextlib.closing(iterator), Checkpoints(out / "checkpoints", config.train.keep) as checkpoints:
        start, events = 0, []
        if resume and checkpoints.latest is not None:
            start = checkpoints.latest
        before = rundir.open_run(out) if resume else config
        if before.train.steps != config.train.steps:
            changes = lengthen(before, config, start, out)
            events = [{"event": "lengthened", "from": before.train.steps, "to": config.train.steps}]
            if speaks:
                print(f"{label}: {changes}", file=sys.stderr, flush=True)
        if start:
            if start == config.train.steps:
                return Result(out, start, True, {})
            state = checkpoints.restore(start, program.abstract_state(), iterator)
            program.check_values(state)
        rundir.truncate_metrics(out, start)
        if before != config and jax.process_index() == 0:
            configs.write(config, out / "config.json")
        state = initial_state(program) if state is None else state
        with (
            Writer(out, trackers.opened(config, out)) as writer,
            Progress(label, start, config.train.steps, show) as progress,
            StopSignal(checkpoints.manager) as stop,
        ):
            begun = {"event": "resume" if resume else "start", "corpus": corpus.statistics}
            begun |= {
                "place": rundir.place(),
                "mesh": dict(program.mesh.shape),
                "processes": jax.process_count(),
            }
            begun |= {"started_from": step_of_start(config)} if config.train.start_from and not start else {}
            for event in [begun, *events]:
                writer.write("event", start, event)
            loop = Loop(
                program,
                iterator,
                corpus.vocabulary,
                batches,
                second,
                checkpoints=checkpoints,
                writer=writer,
                progress=progress,
                stop=stop,
                on_first_batch=on_first_batch,
                peak_before=peak_before,
                has_start=not start or has_start(config, out),
            )
            step, finished, losses = loop.run(start, state)
            return Result(out, step, finished, losses, loop.bytes_per_token, stopped=stop.asked)


def _texts(config: Config, vocabulary) -> tuple:
    """The corpus; batches of its validation, and of the second text, none where none is named.

    vocabulary: of a run that goes on; None for that of the config."""
    with first_process_first("corpus"):
        corpus = open_corpus(config.data, vocabulary)
    batches = validation_batches(corpus, config.data, config.train.eval_batches)
    second, named = [], config.train.second_text
    if named:
        with first_process_first("second text"):
            second = second_batches(named, config.data, corpus.vocabulary, config.train.eval_batches)
        known = corpus.statistics | {"second_digest": fingerprint(second)}
        corpus = dataclasses.replace(corpus, statistics=known)
    return corpus, batches, second


@dataclass
class Loop:
    """The steps of one run from `start` to its end or to a stop signal. batches: for validation; second: of
    `train.second_text`, for one evaluation at the end. on_first_batch: see `train`. peak_before: what
    `peak_memory` gave before the run. has_start: whether the initial parameters can be made again."""

    program: Program
    iterator: Iterator
    vocabulary: Bytes | Subwords
    batches: Sequence[np.ndarray]
    second: Sequence[np.ndarray]
    checkpoints: Checkpoints
    writer: Writer
    progress: Progress
    stop: StopSignal
    on_first_batch: Callable[[dict], None] | None
    peak_before: dict
    has_start: bool

    def __post_init__(self):
        program, batches = self.program, self.batches
        self.config = config = program.config
        self.bytes_per_token = bytes_per_token(self.vocabulary, batches)
        self.evaluator = Evaluator(program, batches)
        self.clock, self.monitor = Clock(), Monitor(program)
        micro = config.data.batch // config.train.accumulate
        self.probe = Probe(program, meshes.place(batches[0][:micro], program.rows))
        self.leak = None
        if not config.method.causal and len(batches) > 1:
            self.leak = program.once("leak", lambda: Leak(program.graphdefs))
        peak = speed.peak(config)
        self.share_per_token = peak and speed.flops_per_token(config) / peak  # of a second of all devices
        self.rate = learning_rate(config.optim, config.train.steps)
        self.pending = None  # the step just dispatched, logged after the next one is dispatched
        self.unlogged, self.speeds = 0, []

    def run(self, start: int, state):
        """(last step, whether the run is complete, last evaluation)."""
        with self.program.inside(), uncollected():
            return self._run(start, state)

    def _run(self, start: int, state):
        train, losses = self.config.train, {}
        if self.config.schedule.phase_at(start).sparse and not self.program.loop.begins(start):
            self.program.check_arranged(state)
        first_masks = self._first_masks(state) if train.monitor_every else None
        for step in range(start, train.steps):
            if self.stop.at(step):
                self._flush()
                self._check_parameters(step - 1, state)
                self.checkpoints.save(step, state, self.iterator)
                self.progress.note(f"stopped by a signal and saved at step {step}")
                return step, False, losses
            phase = self.program.loop.phase(state, step)
            self._compile(phase)
            watched = is_multiple(step, train.monitor_every)
            begins = self.program.loop.begins(step)
            if begins:
                self._flush()
            with self.clock.paused() if begins else contextlib.nullcontext():
                state = self.program.prepare(state, step)
            if watched:
                self._flush()
                with self.clock.paused("monitor"):
                    before = jax.block_until_ready(self.monitor.masks(state["params"]))
            tokens = next(self.iterator)["tokens"]
            if step == 0 and self.on_first_batch is not None:
                with self.clock.paused():
                    self._first(state, tokens)
            batch = self.program.batch(tokens)
            state, metrics = self.program.step(phase.sparse, phase.adapters)(state, batch)
            previous, self.pending = self.pending, (step, phase, metrics, tokens)
            self._log(previous)
            done = step + 1
            if watched:
                self._flush()
                with self.clock.paused("monitor"):
                    after = self.monitor.masks(state["params"])
                    values = self.monitor.compare(before, after, first_masks, state["params"])
                    loss = self.program.loss(phase.sparse, state, batch)
                    values |= self.monitor.descent(metrics, loss)
                self._write("monitor", step, values)
            if is_multiple(step, train.probe_every):
                self._flush()
                with self.clock.paused("probe"):
                    values = self.probe(state["params"], state["sparse"], phase.sparse)
                self._write("probe", step, values)
            evaluated, saved = (
                is_multiple(done, every) or done == train.steps
                for every in (train.eval_every, train.checkpoint_every)
            )
            if evaluated or saved:
                self._flush()
                with self.clock.paused():
                    self._check_parameters(step, state)
            if evaluated:
                with self.clock.paused():
                    losses = self.evaluator(state["params"], state["sparse"])
                    leak = self._leak(state)
                    scored = {"bytes_per_token": self.bytes_per_token}
                    marks = self._marks("sparse")
                    self.writer.write("eval", done, losses | leak | scored | self._peak() | marks)
                    if self.second and done == train.steps:
                        self.writer.write("second", done, self._second(state) | marks)
            if saved:
                with self.clock.paused():
                    self.checkpoints.save(done, state, self.iterator)
        return train.steps, True, losses

    def _first(self, state, tokens):
        loss = self.evaluator.dense(state["params"], state["sparse"], tokens)
        count = sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
        values = {"batch": fingerprint([tokens]), "parameters": count, "dense_loss": loss}
        self.writer.write("event", 0, {"event": "first batch", "first": values})
        self.on_first_batch(values)

    def _second(self, state) -> dict:
        losses = Evaluator(self.program, self.second)(state["params"], state["sparse"])
        size = bytes_per_token(self.vocabulary, self.second)
        tokens = sum(batch[:, 1:].size for batch in self.second)
        return losses | {"bytes_per_token": size, "tokens": tokens, "digest": fingerprint(self.second)}

    def _peak(self) -> dict:
        """The most bytes in use; {} where an earlier run of this process had as many."""
        peak = peak_memory()
        return peak if peak != self.peak_before else {}

    def _write(self, kind, step, values):
        self.writer.write(kind, step, values | {"seconds": self.clock.spent(kind)})

    def _first_masks(self, state):
        if self.program.loop.arranges or not self.has_start:  # neurons change their places
            return None
        # Of the initial weights, which the config determines, so that they need no place in the checkpoint.
        params = state["params"] if int(state["step"]) == 0 else initial_state(self.program)["params"]
        return jax.block_until_ready(self.monitor.masks(params))

    def _compile(self, phase):
        if not self.program.is_compiled(phase.sparse, phase.adapters):
            self._flush()
            with self.clock.paused():
                self.program.step(phase.sparse, phase.adapters)

    def _leak(self, state) -> dict:
        if self.leak is None:
            return {}
        return self.leak(state["params"], state["sparse"], self.evaluator.batches)

    def _flush(self):
        self._log(self.pending)
        self.pending = None

    def _marks(self, loss: str) -> dict:
        """What a row says of a sparse loss that may depend on later tokens."""
        return {} if self.config.method.causal else {"no_language_model_loss": [loss]}

    def _log(self, item):
        """Wait for a dispatched step and record it; a loss that is not finite ends the run."""
        if item is None:
            return
        step, phase, metrics, tokens = item
        loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
        self.unlogged += 1
        finite = math.isfinite(loss)
        logged = is_multiple(step, self.config.train.log_every) or not finite
        if logged or step + 1 == self.config.train.steps:
            rate, joules = self.clock.tick(self.unlogged)
            self.unlogged = 0
            tokens_per_s = rate and rate * self.config.data.batch * self.config.data.seq
            share = tokens_per_s and self.share_per_token and tokens_per_s * self.share_per_token
            row = {"phase": phase.name, "loss": loss, "lr": float(self.rate(step)), "grad_norm": norm}
            if self.program.training.loss is None:
                row["bits_per_byte"] = bits_per_byte(loss, bytes_per_token(self.vocabulary, [tokens]))
            marks = self._marks("loss") if phase.sparse else {}
            speeds = {"steps_per_s": rate, "tokens_per_s": tokens_per_s}
            more = {"mfu": share, "joules_per_step": joules}
            speeds |= {name: value for name, value in more.items() if value is not None}
            said = f"{phase.name} (no language-model loss)" if marks else phase.name
            if logged:
                self.writer.write("train", step, {**row, **speeds, **marks})
            self.progress.update(step + 1, said, loss, row.get("bits_per_byte"), tokens_per_s, share)
            if logged:
                self._check_speed(step, tokens_per_s)
        if not finite:
            self._end(
                step,
                f"The loss became {loss} at step {step} (phase {phase.name}, gradient norm {norm}): the run "
                "has diverged and was stopped.",
            )

    def _check_parameters(self, step: int, state):
        """Ends the run if a parameter is not finite after this step, whose loss was that of the parameters
        before it. Such a state would take the place of a checkpoint from which the run can go on."""

        def compiled():
            def finite(params):
                return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params)]).all()

            return jax.jit(finite, out_shardings=self.program.whole)

        if not bool(self.program.once("finite", compiled)(state["params"])):
            self._end(
                step,
                f"Parameters are no longer finite after step {step}: the run has diverged and was stopped. "
                "That state was not saved.",
            )

    def _end(self, step: int, found: str):
        self.writer.write("event", step, {"event": "diverged"})
        raise Diverged(
            f"{found} Metrics are kept in {self.writer.folder}. Lower --optim.lr, lengthen --optim.warmup, "
            "or lower --optim.clip, and start another run."
        )

    def _check_speed(self, step: int, tokens_per_s: float | None):
        """UserError for a run that is slower than its config demands, as soon as that is seen."""
        if tokens_per_s is None or len(self.speeds) == SPEEDS:
            return
        self.speeds.append(tokens_per_s)
        least, median = self.config.train.least_speed, statistics.median(self.speeds)
        require(
            len(self.speeds) < SPEEDS or median >= least,
            f"This run makes {median:,.0f} tokens/s, less than train.least_speed={least:,}, and was stopped "
            f"at step {step}: such a run would take longer than was planned. See what else the device does "
            "(nvidia-smi) and which options cost time (model.remat, model.scan, model.attention), or lower "
            "--train.least_speed, and start it anew.",
        )


@contextlib.contextmanager
def uncollected():
    """What exists now is left alone by Python's garbage collector until the end of the context. With JAX
    loaded a full collection stops dispatching for 0.1 to 0.3 seconds, longer than a step."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def fingerprint(batches) -> str:
    """Of the tokens in batches (B, L + 1): runs with the same one saw the same tokens in the same order."""
    digest = hashlib.sha256()
    for batch in batches:
        digest.update(np.ascontiguousarray(batch, np.int32).tobytes())
    return digest.hexdigest()[:16]


def peak_memory() -> dict:
    """The most bytes that a device of this process had in use so far; {} where it does not tell."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    return {"peak_bytes": max(peaks)} if all(peaks) else {}


def is_multiple(step: int, every: int) -> bool:
    """Whether something done every `every` steps (0: never) is done at this step."""
    return every > 0 and step % every == 0
