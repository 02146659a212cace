"""Checkpoints of a run, its state and its position in the data, through orbax; and the stop signal."""

import contextlib
import dataclasses
import hashlib
import logging
import math
import os
import signal
import sys
import threading
from pathlib import Path

import grain
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

from experiments.errors import UserError, require


def plain(tree):
    """The tree with NNX states as plain dictionaries: what is stored, under plain names."""
    is_state = lambda x: isinstance(x, nnx.State)  # noqa: E731
    return jax.tree.map(lambda x: nnx.to_pure_dict(x) if is_state(x) else x, tree, is_leaf=is_state)


# What layers keep besides masks since November 2026, as it is where a checkpoint is older: masks that are not
# due, sparse mode, and a kernel that no step was told of. The loop computes masks anew as a phase begins.
LATER = ("refreshed", "dense_from", "checksum")


def without_later(template, stored):
    """The dictionary without those of its entries `LATER` that `stored` lacks."""
    if not (isinstance(template, dict) and isinstance(stored, dict)):
        return template
    keep = {key: like for key, like in template.items() if key in stored or key not in LATER}
    return {key: without_later(like, stored.get(key)) for key, like in keep.items()}


def with_later(tree, template):
    """The dictionary with zeros for those entries `LATER` of `template` that it lacks."""
    if not (isinstance(template, dict) and isinstance(tree, dict)):
        return tree

    def entry(key, like):
        if key not in tree and key in LATER:
            return jax.device_put(np.zeros(like.shape, like.dtype), like.sharding)
        return with_later(tree[key], like)

    return {key: entry(key, like) for key, like in template.items()}


def leaves_by_name(tree) -> dict:
    """The arrays of a tree, or what describes them, by their paths, such as params/norm/scale."""

    def name_of(key):
        return str(next(getattr(key, field) for field in ("key", "idx", "name") if hasattr(key, field)))

    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: hasattr(x, "shape"))
    return {"/".join(map(name_of, path)): leaf for path, leaf in leaves}


@jax.jit
def _sum_of_bits(x):
    """A sum, uint32, over the bits of all numbers of an array, mixed with their places: another one where a
    number is another, and the same on every mesh. Orbax and tensorstore do not see that a bit was lost."""
    if x.dtype != bool:
        x = jax.lax.bitcast_convert_type(x, f"uint{8 * min(x.dtype.itemsize, 4)}")
    mixed = x.astype(jnp.uint32)
    for axis in range(x.ndim):
        stride = math.prod(x.shape[axis + 1 :]) * 0x9E3779B1 % 2**32
        mixed += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * jnp.uint32(stride)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):  # as MurmurHash3 ends
        mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)


def sums_of_bits(tree) -> dict[str, int]:
    """That of every array of a tree, by its path."""
    found = {name: _sum_of_bits(leaf) for name, leaf in leaves_by_name(tree).items()}
    return {name: int(value) for name, value in jax.device_get(found).items()}


def _digest(position: str) -> str:
    return hashlib.sha256(position.encode()).hexdigest()[:16]


class PositionHandler(grain.checkpoint.CheckpointHandler):
    """Stores the position in the data, which is one for all processes, in the file that grain's handler has
    for a single process."""

    FILE = "process_0-of-1.json"

    def save(self, directory, item=None, args=None):
        if jax.process_index() == 0:
            (directory / self.FILE).write_text(args.item.get_state().decode())

    def restore(self, directory, item=None, args=None):
        args.item.set_state((directory / self.FILE).read_text().encode())
        args.item.start_prefetch()
        return args.item


@ocp.args.register_with_handler(PositionHandler, for_save=True)
@dataclasses.dataclass
class SavePosition(ocp.args.CheckpointArgs):
    item: object


@ocp.args.register_with_handler(PositionHandler, for_restore=True)
@dataclasses.dataclass
class RestorePosition(ocp.args.CheckpointArgs):
    item: object


def _is_worth_printing(record) -> bool:
    """Not the traceback of a failure in one of orbax's threads, which is raised here as well."""
    return not record.exc_info and "exception was never retrieved" not in record.getMessage()


@contextlib.contextmanager
def quiet_failure():
    """Inside, a read or write that fails does not make those that orbax then abandons print a traceback each.

    These end at any later time, so after a failure the silence stays."""
    before, loggers = (
        (sys.unraisablehook, sys.excepthook),
        [logging.getLogger(n) for n in ("asyncio", "absl")],
    )

    def unraisable(what):
        if str(what.exc_value) != "Event loop is closed":
            before[0](what)

    def raised(kind, value, trace):
        if str(value) != "Event loop is closed":
            before[1](kind, value, trace)

    sys.unraisablehook, sys.excepthook = unraisable, raised
    for logger in loggers:
        logger.addFilter(_is_worth_printing)
    yield
    sys.unraisablehook, sys.excepthook = before
    for logger in loggers:
        logger.removeFilter(_is_worth_printing)


class AnotherModel(UserError):
    """A checkpoint is of another model."""


class Checkpoints:
    """The folder of a run's checkpoints; a context manager that finishes writing when it is left."""

    def __init__(self, folder: Path, keep: int = 2):
        self.folder = Path(folder).resolve()
        self.manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(max_to_keep=keep),
            item_handlers={
                "state": ocp.PyTreeCheckpointHandler(),
                "data": PositionHandler(),
            },
        )

    def __enter__(self):
        self._quiet = quiet_failure()
        self._quiet.__enter__()
        return self

    def __exit__(self, kind, *_):
        try:
            with self._writing():
                self.manager.wait_until_finished()
                self.manager.close()
        except UserError:
            if kind is None:  # else what ended the block says more
                raise
        else:
            if kind is None:  # else abandoned reads may still fail
                self._quiet.__exit__(None, None, None)

    @contextlib.contextmanager
    def _writing(self):
        """Inside, a checkpoint that cannot be written is a UserError; orbax raises many types, and later."""
        try:
            yield
        except Exception as error:
            reason = str(error).strip().split("\n")[0][:300]
            full = "No space left on device" in str(error)
            raise UserError(
                f"A checkpoint could not be written to {self.folder}: "
                f"{'the disk is full' if full else reason}. Earlier checkpoints and all metrics are kept; "
                f"once this is mended, continue with --resume {self.folder.parent}."
            ) from error

    @property
    def latest(self) -> int | None:
        """The newest complete step, or None."""
        return self.manager.latest_step()

    def save(self, step: int, state, iterator=None):
        """Start writing the state and the position of the iterator, if there is one; the arrays are copied
        before this returns."""
        if self.latest != step:
            items = {"state": ocp.args.PyTreeSave(plain(state))}
            known = {"sums": sums_of_bits(plain(state))}
            if iterator is not None:
                items["data"] = SavePosition(iterator)
                known["position"] = _digest(iterator.get_state().decode())
            with self._writing():
                self.manager.save(step, args=ocp.args.Composite(**items), custom_metadata=known)

    def restore(self, step: int, abstract, iterator=None, entries=None):
        """The state saved at this step, and the iterator set to its position.

        entries: those of the state to read; None for all. Of the others shapes and dtypes are compared.

        Raises UserError for a checkpoint of another model (naming the first leaf that differs) and
        for a damaged one.
        """
        items = {} if iterator is None else {"data": RestorePosition(iterator)}
        where = self.folder / str(step)
        require(
            iterator is None or not (where / "state").is_dir() or (where / "data").is_dir(),
            f"The checkpoint {where} has no position in a text, as that of an imported run, and cannot be "
            f"continued. Start another run from its parameters: --train.start-from {where.parents[1]}.",
        )
        try:
            with quiet_failure():
                stored = self.manager.item_metadata(step)["state"].tree
                asked = without_later(plain(abstract), stored)
                self._check_same_model(where, stored, asked)
                skipped = [name for name in asked if entries and name not in entries]
                asked |= {name: jax.tree.map(lambda _: ocp.PLACEHOLDER, asked[name]) for name in skipped}
                args = ocp.checkpoint_utils.construct_restore_args(asked)
                items["state"] = ocp.args.PyTreeRestore(asked, restore_args=args)
                known = self.manager.metadata(step).custom_metadata or {}
                if iterator is not None and "position" in known:
                    position = (where / "data" / PositionHandler.FILE).read_text()
                    require(_digest(position) == known["position"], "the position in the data is another")
                state = self.manager.restore(step, args=ocp.args.Composite(**items))["state"]
                state = {name: state[name] for name in entries or state}
                if "sums" in known:  # not in those of before the 28th of November 2026
                    for name, value in sums_of_bits(state).items():
                        require(
                            known["sums"].get(name) == value, f"{name} has other numbers than were written"
                        )
        except AnotherModel:
            raise
        except Exception as error:  # orbax and tensorstore raise many types for damaged files
            others = [other for other in self.manager.all_steps() if other != step]
            fix = (
                f"Delete it to continue from step {max(others)}."
                if others
                else "There is no other; start a new run."
            )
            reason = str(error).strip().split("\n")[0][:200]
            raise UserError(
                f"The checkpoint {where} cannot be read: it is damaged or incomplete. {fix} ({reason})"
            ) from error
        wanted = {name: abstract[name] for name in state}
        leaves = jax.tree.leaves(with_later(state, plain(wanted)))
        return jax.tree.unflatten(jax.tree.structure(wanted), leaves)

    def _check_same_model(self, where, stored, template):
        stored, wanted = leaves_by_name(stored), leaves_by_name(template)

        def order(name):
            return not name.startswith("params"), name.rpartition("/")[2] in LATER, name

        for name in sorted(wanted.keys() | stored.keys(), key=order):
            sides = [
                f"{tuple(x[name].shape)} {x[name].dtype}" if name in x else "absent" for x in (stored, wanted)
            ]
            if sides[0] != sides[1]:
                raise AnotherModel(
                    f"The checkpoint {where} belongs to another model: {name} is {sides[0]} there, "
                    f"{sides[1]} in this model."
                )


class StopSignal:
    """While active, SIGTERM and Ctrl-C ask the loop to save and stop; a second Ctrl-C interrupts at once.

    With several processes, all must stop at one step: then jax.distributed agrees on it through orbax.
    """

    def __init__(self, manager: ocp.CheckpointManager):
        self.manager, self.asked, self._old = manager, False, {}

    def __enter__(self):
        if jax.process_count() == 1 and threading.current_thread() is threading.main_thread():
            self._old = {
                number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGINT)
            }
        return self

    def __exit__(self, *_):
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _ask(self, number, frame):
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        if number == signal.SIGINT:  # not by sys.stderr, which the signal may have interrupted
            os.write(2, b"\nSaving after this step; a second Ctrl-C ends at once, without saving.\n")
        self.asked = True

    def at(self, step: int) -> bool:
        """Whether the run must stop before this step."""
        return self.asked or (jax.process_count() > 1 and self.manager.reached_preemption(step))
