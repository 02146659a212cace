"""`export` writes a model as Hugging Face's libraries read it: safetensors, and JSON beside them."""

import contextlib
import fcntl
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors
from flax import nnx
from safetensors.numpy import save_file

from jax_sparse24.nn.adapters import merge_adapters
from jax_sparse24.nn.state import refresh, set_sparse, sparse_layers

WEIGHTS = ("dense", "sparse")
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
# Of the format, and of numpy.
STORED = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
SHARD_BYTES = 5 * 10**9
INDEX = "model.safetensors.index.json"  # which tensor is in which file


def export(
    model: nnx.Module,
    folder: str | Path,
    *,
    config: dict,
    rename: Callable[[dict], dict] = dict,
    weights: str | None = None,
    dtype: str = "float32",
    others: dict[str, str] | None = None,
) -> dict[str, tuple[int, ...]]:
    """Writes a model as safetensors with a config.json: its parameters and, where it has them, the statistics
    of batch norms (`nnx.BatchStat`); all of them or nothing.

    Adapters are folded into the kernels beside which they stand, so that the folder holds an ordinary dense
    model. Tensors of more than 5 GB together are in several files, with an index.

    model: any NNX module; it stays as it is. Blocks must be unrolled where weights is "sparse".
    folder: a path that does not exist yet.
    config: the content of config.json, which says what model this is.
    rename: from these by their paths, such as "blocks.0.ffn.up.kernel" or "norm.mean", arrays as they are in
        the model (a kernel is (in, out)), to tensors by the names of that model (a weight is (out, in)
        there). By default both are the same.
    weights: "dense" for the kernels as they are, which the model has in a dense phase; "sparse" for what its
        sparse products multiply in the forward pass, with masks computed for these kernels. None for dense,
        with a warning where trained layers in sparse mode multiply sparse weights.
    dtype: "float32", "float16" or "bfloat16", of all tensors.
    others: texts of more files by their names, such as {"tokenizer.json": ...}.

    Returns: the shapes of the tensors by their names.
    Raises: FileExistsError if the folder exists or is being written, another OSError for what the system
        refuses, such as a full disk, ValueError for unknown weights or dtype, and for a finite number that
        the dtype has no room for, TypeError if `model` is no NNX module."""
    if weights not in (None, *WEIGHTS):
        raise ValueError(f'export: weights are "dense" or "sparse", got {weights!r}.')
    if dtype not in DTYPES:
        raise ValueError(f"export: dtype is one of {', '.join(DTYPES)}, got {dtype!r}.")
    if not isinstance(model, nnx.Module):
        raise TypeError(f"export: model must be an NNX module, got {type(model).__name__}.")
    folder = Path(folder)
    _check_new(folder)
    model = nnx.merge(*nnx.split(model), copy=True)  # other variables with the same arrays
    if layers := sparse_layers(model):
        if weights is None and any(layer.trained_sparse for _, layer in layers):
            warnings.warn(
                "export: writes the kernels as they are, but the layers multiply sparse weights in their "
                'present mode. Say weights="sparse" for these, or weights="dense".',
                stacklevel=2,
            )
        set_sparse(model, weights == "sparse")
        if weights == "sparse":
            refresh(model)
        merge_adapters(model)
    values = nnx.to_flat_state(nnx.state(model, (nnx.Param, nnx.BatchStat)))
    tensors = rename({".".join(map(str, path)): np.asarray(value[...]) for path, value in values})
    with _alone(folder) as partial:
        _check_new(folder)  # another one may have been written meanwhile
        _write(tensors, DTYPES[dtype], partial)
        texts = {"config.json": json.dumps(config, indent=2) + "\n", **(others or {})}
        for name, text in texts.items():
            (partial / name).write_text(text, encoding="utf-8")
        for file in partial.glob("*.safetensors"):  # which safetensors lets nobody else read
            shutil.copymode(partial / "config.json", file)
        partial.rename(folder)
    return {name: tensor.shape for name, tensor in tensors.items()}


def _check_new(folder: Path) -> None:
    if folder.exists():
        raise FileExistsError(f"export: {folder} exists. Name a folder that does not.")


@contextlib.contextmanager
def _alone(folder: Path):
    """Yields an empty folder beside `folder` that no other export has; it vanishes when the block raises.
    What an export that was killed left there is deleted: its lock ended with it."""
    partial = folder.with_name(f".{folder.name}.partial")
    with contextlib.ExitStack() as stack:
        try:
            partial.mkdir(parents=True)
            new = True
        except FileExistsError:
            new = False
        if not _locked(partial, new, stack):  # two that write there would mix their tensors
            raise FileExistsError(
                f"export: {partial} is of another export into {folder}, which still writes or was killed. "
                "Name another folder, or delete that one if nothing writes."
            )
        stack.callback(shutil.rmtree, partial, ignore_errors=True)
        for left in partial.iterdir():
            left.unlink()
        yield partial


def _locked(partial: Path, new: bool, stack: contextlib.ExitStack) -> bool:
    """Whether the folder is ours, to the end of the stack. new: whether it was made here; that decides where
    the system has no locks of folders, as over NFS."""
    try:
        held = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
        stack.callback(os.close, held)
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(held), partial.stat())
    except (BlockingIOError, FileNotFoundError):  # another holds it, or has just ended
        return False
    except OSError:
        return new


def _write(tensors: dict, dtype, folder: Path) -> None:
    """Tensors in files of at most `SHARD_BYTES`, and an index where these are several."""
    shards, size = [[]], 0
    for name, tensor in tensors.items():
        own = tensor.size * np.dtype(dtype).itemsize
        if shards[-1] and size + own > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += own
    places = {}
    for number, names in enumerate(shards, 1):
        file = "model.safetensors"
        if len(shards) > 1:
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        own = {name: _as(tensors[name], dtype, name) for name in names}
        _save(own, folder / file)
        places |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(tensor.size for tensor in tensors.values()) * np.dtype(dtype).itemsize
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _as(tensor, dtype, name: str) -> np.ndarray:
    """The tensor in a dtype. Raises ValueError where a finite number became an infinite one."""
    with np.errstate(over="ignore"):
        found = np.ascontiguousarray(tensor, dtype)
    lost = np.isfinite(tensor) & ~np.isfinite(found)
    if lost.any():
        first = np.asarray(tensor)[lost][0]
        raise ValueError(
            f"export: {name} has {lost.sum()} numbers, such as {first:g}, that are infinite as "
            f'{np.dtype(dtype).name}. Write dtype="bfloat16" or "float32".'
        )
    return found


def _save(tensors: dict, file: Path) -> None:
    """A file of tensors. What the system refuses, such as a full disk, is an OSError, as of any file;
    safetensors has its number in words alone."""
    try:
        save_file(tensors, file, {"format": "pt"})
    except safetensors.SafetensorError as error:
        if (number := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code), str(file)) from error


def read_tensors(folder) -> dict[str, np.ndarray]:
    """The tensors of a folder's safetensors files, float ones, by their names: of those that its index names,
    or of all where it has none.

    folder: a path, as `export` or Hugging Face's libraries write it.

    Returns: arrays in the dtypes that the files have.
    Raises: FileNotFoundError if there is no such file, or one that the index names is missing; ValueError for
        a file that is damaged or has a tensor of another dtype, and for a tensor in two files."""
    found = {}
    for file in _files(Path(folder)):
        try:
            entries = safetensors.deserialize(file.read_bytes())
        except safetensors.SafetensorError as error:
            raise ValueError(f"{file} cannot be read: {error}.") from error
        for name, entry in entries:
            if entry["dtype"] not in STORED:
                raise ValueError(
                    f"{file}: {name} is {entry['dtype']}, not one of {', '.join(STORED)}: quantised weights "
                    "cannot be read."
                )
            if name in found:
                raise ValueError(
                    f"{name} is in {file} and in another file of the folder, of which at most one is of this "
                    "model. Take the other away."
                )
            data = np.frombuffer(entry["data"], STORED[entry["dtype"]])
            found[name] = data.reshape(entry["shape"])
    return found


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if not index.exists() or (folder / "model.safetensors").exists():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(
                f"{folder} has no *.safetensors. Convert other weights to safetensors first."
            )
        return files
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is no index of safetensors: {error!r}.") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{folder} lacks {', '.join(missing)}, which {INDEX} names. Download it, too."
        )
    return [folder / name for name in names]
