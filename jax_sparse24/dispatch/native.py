"""The native kernels as JAX calls them; no other file uses `jax.ffi`.

Importing this file registers the targets of the CPU's module and of CUDA's, as far as they are installed,
under the same names for their platforms. A handler built with newer FFI headers than the running jaxlib would
make the backend fail to start, so the versions are compared first."""

import importlib
import importlib.metadata
import importlib.util
import re
from pathlib import Path
from typing import NamedTuple

import jax

from jax_sparse24 import versions as releases
from jax_sparse24.dispatch import shards


class _Module(NamedTuple):
    """Where the kernels of a platform may be.

    names: of the module; the first that is found is taken.
    registered_for: the platform of its targets, in JAX's words.
    remedy: what to do where none is found."""

    names: tuple[str, ...]
    registered_for: str
    remedy: str


_BUILD = "`pip install -e .` in a clone of the repository builds it"
_WHEEL = "jax_sparse24_cuda13"  # the distribution, and its package
# Platform, as in jax.lax.platform_dependent -> its module. What was built from source comes first.
_MODULES = {
    "cpu": _Module(
        ("jax_sparse24._cpu",),
        "cpu",
        f"{_BUILD} with a C++17 compiler, and the wheel of `make wheels` has it",
    ),
    "cuda": _Module(
        ("jax_sparse24._cuda", f"{_WHEEL}._cuda"),
        "CUDA",
        "with nvcc on PATH, `S24_CUDA=1 pip install -e '.[cuda13]'` (or cuda12) in a clone of "
        f"the repository builds it, and the wheel {_WHEEL} of `make wheels` has it for jax with CUDA 13",
    ),
}
PLATFORMS = tuple(_MODULES)


def _runtime_version():
    """(major, minor) of the XLA FFI API of the installed jaxlib, from its header."""
    header = Path(importlib.util.find_spec("jaxlib").origin).parent / "include/xla/ffi/api/c_api.h"
    try:
        text = header.read_text()
    except OSError as e:
        raise ImportError(
            f"jax_sparse24: cannot read the FFI version of jaxlib ({e}); reinstall jaxlib"
        ) from None
    found = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    if None in found:
        raise ImportError(f"jax_sparse24: {header} names no FFI version; reinstall jaxlib")
    return tuple(int(m.group(1)) for m in found)


def check_versions(built, runtime, module="jax_sparse24._cpu"):
    """Raise ImportError unless a module built with FFI `built` runs on `runtime`; both are (major, minor)."""
    if built[0] == runtime[0] and built[1] <= runtime[1]:
        return
    raise ImportError(
        f"{module} was built with XLA FFI {built[0]}.{built[1]} but the installed jaxlib "
        f"({_jaxlib_version()}) has {runtime[0]}.{runtime[1]}. Reinstall jax_sparse24, built with "
        "the oldest supported jaxlib (pip install --force-reinstall --no-deps -e .), or use a newer jaxlib."
    )


def _jaxlib_version():
    return importlib.import_module("jaxlib").__version__


def _check_release(found):
    """Raise ImportError unless the wheel with the CUDA kernels is of the release of this package."""
    own = releases.__version__
    if found != own:
        raise ImportError(
            f"jax_sparse24 is {own} and {_WHEEL} {found}, but they must be of one release: "
            f"install both wheels of one `make wheels` by their paths, or uninstall {_WHEEL}."
        )


def _is_there(name):
    package = name.rpartition(".")[0]
    return importlib.util.find_spec(package) is not None and importlib.util.find_spec(name) is not None


def _load(platform="cpu"):
    """(module, None), or (None, reason) if the native module is not installed."""
    names, registered_for, remedy = _MODULES[platform]
    name = next(filter(_is_there, names), None)
    if name is None:
        return None, f"the native module {names[0]} is not installed; {remedy}"
    if name.startswith(_WHEEL):
        _check_release(importlib.metadata.version(_WHEEL))
    try:
        module = importlib.import_module(name)
    except ImportError as e:
        return None, f"the native module {name} does not load ({e}); install it again: {remedy}"
    check_versions(module.ffi_api_version(), _runtime_version(), name)
    for target, handler in module.registrations().items():
        jax.ffi.register_ffi_target(target, handler, platform=registered_for)
    return module, None


_loaded = {platform: _load(platform) for platform in PLATFORMS}


def module(platform):
    """The native module of a platform, or None."""
    return _loaded[platform][0]


def available(platform="cpu"):
    """(True, "") if the native kernels of a platform can be called, else (False, why not and what to do)."""
    loaded, reason = _loaded[platform]
    return loaded is not None, reason or ""


def versions():
    """What `info` shows: whether the module is built, both FFI versions, the instruction set in use."""
    cpu, reason = _loaded["cpu"]
    return {
        "built": cpu is not None,
        "reason": reason or "",
        "ffi_built": cpu.ffi_api_version() if cpu else None,
        "ffi_runtime": _runtime_version(),
        "isa": cpu.isa() if cpu else None,
        "targets": sorted(cpu.registrations()) if cpu else [],
    }


def call(name, out_types, *args, **attrs):
    """Calls a native target on the platform that the program is lowered for.

    name: such as "s24_prune", the first argument of an S24_TARGET in ffi/cpu or ffi/cuda.
    out_types: one `jax.ShapeDtypeStruct`, or a sequence of them, with shapes without vmap.
    args: arrays. Under vmap every array gets a leading dimension, of size 1 if it is not mapped; handlers
        broadcast.
    attrs: integers or bools, handed over as int64 (FFI attributes are strictly typed, and one call with a
        wrong type would spoil the compilation cache for the right one).

    Inside `jax.shard_map` the results vary over every axis over which an array does; JAX takes the results of
    a foreign call for equal in all shards.

    Returns: one array or a list of arrays, as `out_types`.
    Raises: RuntimeError if no native module is installed."""
    if all(loaded is None for loaded, _ in _loaded.values()):
        raise RuntimeError(f"jax_sparse24: cannot call {name}: {_loaded['cpu'][1]}")
    fn = jax.ffi.ffi_call(name, out_types, vmap_method="expand_dims")
    results = fn(*shards.alike(args), **{key: int(value) for key, value in attrs.items()})
    return shards.varying_as(results, args)
