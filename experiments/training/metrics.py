"""Where numbers of a running training go: metrics.jsonl, trackers, progress bar; and its clock."""

import contextlib
import json
import math
import sys
import time
from pathlib import Path

import jax
from tqdm import tqdm

from experiments.errors import UserError
from jax_sparse24.measure.nvml import gauge


class Writer:
    """Appends rows to metrics.jsonl, and hands them to trackers (process 0 only); see trackers.py."""

    def __init__(self, out: Path, trackers=()):
        self.folder, self.main, self.trackers = out, jax.process_index() == 0, trackers
        self.file = (out / "metrics.jsonl").open("a") if self.main else None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.main:
            with contextlib.suppress(OSError):  # a row that could not be written was reported
                self.file.close()
        for tracker in self.trackers:
            tracker.close()

    def write(self, kind: str, step: int, values: dict):
        """One row: `kind` is train, monitor, probe, eval or event."""
        if not self.main:
            return
        # JSON knows no NaN: what is not finite is written as null.
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        try:
            self.file.write(json.dumps({"kind": kind, "step": step, **finite}) + "\n")
            self.file.flush()
        except OSError as error:
            raise UserError(
                f"{self.folder / 'metrics.jsonl'} could not be written at step {step}: {error.strerror}. "
                "What was written before is kept; once this is mended, continue with --resume "
                f"{self.folder}."
            ) from error
        numbers = {f"{kind}/{name}": value for name, value in values.items() if isinstance(value, float)}
        for tracker in self.trackers:
            tracker.write(step, numbers)


class Clock:
    """Time and energy of training: run from the first `tick`, stand still while something else is done."""

    def __init__(self):
        self._last, self._spent = None, {}

    def tick(self, steps: int) -> tuple[float | None, float | None]:
        """Steps per second since the last tick, and joules of the GPU per step. None the first time, joules
        also where no GPU, or more than one, tells them."""
        now, before = _now(), self._last
        self._last = now
        if before is None or not steps:
            return None, None
        return steps / (now[0] - before[0]), None if now[1] is None else (now[1] - before[1]) / steps

    @contextlib.contextmanager
    def paused(self, kind: str = ""):
        start = _now()
        yield
        end = _now()
        self._spent[kind] = self.spent(kind) + end[0] - start[0]
        if self._last is not None:
            self._last = tuple(
                None if last is None else last + b - a
                for last, a, b in zip(self._last, start, end, strict=True)
            )

    def spent(self, kind: str) -> float:
        """Seconds paused for this kind since the last call."""
        return self._spent.pop(kind, 0.0)


def _now() -> tuple[float, float | None]:
    """Seconds, and joules where one GPU trains and its driver tells them."""
    meter = gauge()[0] if jax.local_device_count() == 1 else None
    if meter is None:
        return time.perf_counter(), None
    reading = meter.read()
    return reading.at, reading.joules


class Progress:
    """A bar with loss, tokens/s and time left; on a pipe or file, a plain line at the first step, every
    `SECONDS` and at the end.

    `show`: True for the bar, False for silence, None to decide by whether stderr is a terminal.
    """

    SECONDS = 30.0
    FORMAT = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps, {remaining} left{postfix}"

    def __init__(self, label: str, start: int, total: int, show: bool | None):
        main = jax.process_index() == 0
        self.label, self.total = label, total
        self.first = self.said = None  # (time, steps done) of the first line and of the newest
        self.lines = main and show is None and not sys.stderr.isatty()
        bar = main and (sys.stderr.isatty() if show is None else show)
        self.bar = tqdm(
            total=total,
            initial=start,
            desc=label,
            bar_format=self.FORMAT,
            disable=not bar,
            file=sys.stderr,
            dynamic_ncols=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.bar.close()

    def update(
        self,
        done: int,
        phase: str,
        loss: float,
        bits: float | None,
        tokens_per_s: float | None,
        share: float | None = None,
    ):
        """`done` optimiser steps are complete. loss: in nats per token; bits: per byte, None for a loss that
        is no cross entropy; share: of the peak of the devices' arithmetic, where that is known."""
        speed = f", {tokens_per_s:,.0f} tokens/s" if tokens_per_s else ""
        speed += f" ({share:.0%} of peak)" if share else ""
        meant = "no cross entropy" if bits is None else f"{bits:.3f} bits per byte"
        said = f"loss {loss:.3f} ({meant})"
        self.bar.set_postfix_str(f"{phase}, {said}{speed}", refresh=False)
        self.bar.update(done - self.bar.n)
        now = time.monotonic(), done
        if self.lines and (self.said is None or now[0] - self.said[0] >= self.SECONDS or done == self.total):
            self.first, self.said = self.first or now, now
            print(
                f"{self.label}: step {done}/{self.total}, {phase}, {said}{speed}{self._left(*now)}",
                file=sys.stderr,
                flush=True,
            )

    def _left(self, now: float, done: int) -> str:
        """The time left at the mean speed since the first line, evaluations counted."""
        seconds, steps = now - self.first[0], done - self.first[1]
        if not steps or done == self.total:
            return ""
        return f", {tqdm.format_interval(seconds / steps * (self.total - done))} left"

    def note(self, text: str):
        """A line above the bar."""
        if self.lines:
            print(f"{self.label}: {text}", file=sys.stderr, flush=True)
        elif not self.bar.disable:
            self.bar.write(f"{self.label}: {text}", file=sys.stderr)
