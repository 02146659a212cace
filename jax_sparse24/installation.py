"""`info` shows versions, devices and implementations of this installation."""

import importlib.metadata
import os
import platform

import jax

from jax_sparse24.dispatch import cusparselt, hardware, native, table
from jax_sparse24.dispatch.decision import library_obstacle
from jax_sparse24.versions import __version__


def info() -> None:
    """Prints versions, devices, and which implementations are on or off and why.

    `python -m jax_sparse24.info` prints the same."""
    print("\n".join(_info_lines()))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _dotted(version) -> str:
    return ".".join(map(str, version))


def _info_lines() -> list[str]:
    lines = [f"jax_sparse24 {__version__}, Python {platform.python_version()}, {platform.platform()}"]
    lines.append("packages:")
    for package in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tensorflow-datasets"):
        lines.append(f"  {package:20} {_version(package)}")
    lines.append("devices:")
    unreachable = ""
    try:
        for device in jax.devices():
            lines.append(f"  {device.platform}:{device.id} {device.device_kind}")
    except Exception as error:  # a GPU whose driver is missing, or that another process holds, and others
        first = (str(error).strip() or type(error).__name__).split("\n")[0]
        unreachable = f"no device answers: {first}"
        lines.append(f"  {unreachable}")
        lines.append("  JAX_PLATFORMS=cpu leaves the accelerator alone")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    lines.append(f"  CPU cores usable: {cores}")
    available, reason = native.available()
    lines.append("implementations:")
    lines.append("  reference   on    jnp, any device")
    built = native.versions()
    detail = (
        f"CPU kernels for {built.get('isa')}, FFI API {_dotted(built.get('ffi_built'))}"
        if available
        else reason
    )
    lines.append(f"  ffi         {'on ' if available else 'off'}   {detail}")
    cuda, reason = native.available("cuda")
    if cuda:
        reason = f"CUDA kernels, cuSPARSELt {_dotted(cusparselt.OLDEST)} or newer"
        reason += "" if unreachable or hardware.platform() == "cuda" else "; no CUDA device is here"
    lines.append(f"  ffi (CUDA)  {'on ' if cuda else 'off'}   {reason}")
    obstacle = unreachable or library_obstacle()
    detail = obstacle or f"version {_dotted(cusparselt.version())}"
    if obstacle and not unreachable and hardware.runs_code("sm_90a"):
        detail += "; our kernel takes its place in whole tiles (s24.explain)"
    lines.append(f"  cusparselt  {'off' if obstacle else 'on '}   {detail}")
    if not unreachable:
        found, note = table.tables()
        chosen = f"the faster, as {found[0].origin}" if found else "dense products; run s24.tune()"
        lines.append(f"where none is named: {chosen}{f' ({note})' if note else ''}")
    return lines
