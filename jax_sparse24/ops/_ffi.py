"""The native CPU kernels as JAX calls. The only file that uses `jax.ffi`.

Importing registers the targets of `jax_sparse24._cpu`, if it is built. A handler built with newer FFI
headers than the running jaxlib would make the CPU backend fail to start, so the versions are compared first.
"""

import importlib
import importlib.util
import re
from pathlib import Path

import jax

_MODULE = "jax_sparse24._cpu"
_BUILD = "build it with `pip install -e .` (or `python setup.py build_ext --inplace`) in the source folder"


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


def check_versions(built, runtime):
    """Raise ImportError unless a module built with FFI `built` runs on `runtime`; both are (major, minor)."""
    if built[0] == runtime[0] and built[1] <= runtime[1]:
        return
    raise ImportError(
        f"jax_sparse24._cpu was built with XLA FFI {built[0]}.{built[1]} but the installed jaxlib "
        f"({_jaxlib_version()}) has {runtime[0]}.{runtime[1]}. Reinstall jax_sparse24, built with "
        "the oldest supported jaxlib (pip install --force-reinstall --no-deps -e .), or use a newer jaxlib."
    )


def _jaxlib_version():
    return importlib.import_module("jaxlib").__version__


def _load():
    """(module, None), or (None, reason) if the native module is not built."""
    if importlib.util.find_spec(_MODULE) is None:
        return None, f"the native module {_MODULE} is not built; {_BUILD}"
    try:
        module = importlib.import_module(_MODULE)
    except ImportError as e:
        return None, f"the native module {_MODULE} does not load ({e}); re{_BUILD}"
    check_versions(module.ffi_api_version(), _runtime_version())
    for name, capsule in module.registrations().items():
        jax.ffi.register_ffi_target(name, capsule, platform="cpu")
    return module, None


_cpu, _reason = _load()


def available():
    """(True, "") if the native CPU kernels can be called, else (False, what to do)."""
    return _cpu is not None, _reason or ""


def versions():
    """What `info` shows: is the module built, its FFI version and jaxlib's, the instruction set in use."""
    return {
        "built": _cpu is not None,
        "reason": _reason or "",
        "ffi_built": _cpu.ffi_api_version() if _cpu else None,
        "ffi_runtime": _runtime_version(),
        "isa": _cpu.isa() if _cpu else None,
        "targets": sorted(_cpu.registrations()) if _cpu else [],
    }


def call(name, out_types, *args, **attrs):
    """Call the target `name`.

    Args:
      name: e.g. "s24_prune"; see ffi/cpu/*_handlers.cc.
      out_types: one `jax.ShapeDtypeStruct`, or a sequence of them. Shapes are those without vmap.
      *args: arrays. Under vmap every array gets a leading dimension, of size 1 if it is not mapped;
        handlers broadcast.
      **attrs: integers or bools; handed over as int64 (FFI attributes are strictly typed, and one call with
        a wrong type would spoil the compilation cache for the right one).

    Returns: one array or a list of arrays, as `out_types`.
    """
    if _cpu is None:
        raise RuntimeError(f"jax_sparse24: cannot call {name}: {_reason}")
    fn = jax.ffi.ffi_call(name, out_types, vmap_method="expand_dims")
    return fn(*args, **{key: int(value) for key, value in attrs.items()})
