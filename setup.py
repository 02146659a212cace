"""Builds the native modules `jax_sparse24._cpu` and, where nvcc is found, `jax_sparse24._cuda`
(ffi/build_modules.py). Project metadata are in pyproject.toml."""

import sys
from pathlib import Path

from setuptools import setup

sys.path.insert(0, str(Path(__file__).parent / "ffi"))
import build_cuda
import build_modules

modules = [build_modules.cpu("jax_sparse24._cpu")]
toolkit = build_cuda.wanted()
if toolkit is not None:
    modules.append(build_modules.cuda("jax_sparse24._cuda", toolkit))
setup(ext_modules=modules, cmdclass={"build_ext": build_modules.BuildNative})
