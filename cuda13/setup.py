"""Builds the module `jax_sparse24_cuda13._cuda` for a wheel of its own, of the same release as jax_sparse24.

The sources are in ../ffi, so that wheels are built in the repository (`make wheels`) and there is no sdist.
Who has the sources and nvcc needs no second distribution: ../setup.py builds `jax_sparse24._cuda`."""

import sys
from pathlib import Path

from setuptools import setup

sys.path.insert(0, str(Path(__file__).parent.parent / "ffi"))
import build_cuda
import build_modules

version = build_modules.version()
toolkit = build_cuda.required("the distribution jax_sparse24_cuda13 is built with CUDA 13")
setup(
    version=version,
    install_requires=[f"jax_sparse24=={version}", "jax[cuda13]", "nvidia-cusparselt-cu13>=0.8.1"],
    packages=["jax_sparse24_cuda13"],
    ext_modules=[build_modules.cuda("jax_sparse24_cuda13._cuda", toolkit)],
    cmdclass={"build_ext": build_modules.BuildNative},
)
