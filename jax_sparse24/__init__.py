"""Hardware sparsity for pre-training transformers in JAX."""

import importlib
import typing

from jax_sparse24 import versions as versions  # first, before anything asks jax for what it may not have

# isort: split
from jax_sparse24 import measure as measure
from jax_sparse24 import methods as methods
from jax_sparse24 import patterns as patterns
from jax_sparse24.engine import sparsifiers as sparsifiers
from jax_sparse24.engine.ffn import sparse_ffn as sparse_ffn
from jax_sparse24.engine.linear import sparse_dot as sparse_dot
from jax_sparse24.engine.stats import activation_stats as activation_stats
from jax_sparse24.installation import info as info
from jax_sparse24.interception import intercept as intercept
from jax_sparse24.measure.tuning import tune as tune
from jax_sparse24.monitor import density as density
from jax_sparse24.monitor import flip_rate as flip_rate
from jax_sparse24.monitor import kept_share as kept_share
from jax_sparse24.ops.gated import gated as gated
from jax_sparse24.ops.matmul import matmul as matmul
from jax_sparse24.ops.mvue import mvue24 as mvue24
from jax_sparse24.ops.packed24 import Packed24 as Packed24
from jax_sparse24.ops.packed24 import pack24 as pack24
from jax_sparse24.ops.packed24 import squared_relu24 as squared_relu24
from jax_sparse24.ops.packed_vnm import PackedVNM as PackedVNM
from jax_sparse24.ops.packed_vnm import pack_vnm as pack_vnm
from jax_sparse24.ops.packed_vnm import vnm_mask as vnm_mask
from jax_sparse24.ops.prune_check import prune_check24 as prune_check24
from jax_sparse24.ops.select import double_prune24 as double_prune24
from jax_sparse24.ops.select import mask24 as mask24
from jax_sparse24.ops.select import mask_nm as mask_nm
from jax_sparse24.ops.select import prune24 as prune24
from jax_sparse24.ops.soft import soft24 as soft24
from jax_sparse24.ops.transposable import transposable_mask24 as transposable_mask24
from jax_sparse24.ops.transposable import transposable_pack24 as transposable_pack24
from jax_sparse24.schedule import Phase as Phase
from jax_sparse24.schedule import Schedule as Schedule
from jax_sparse24.schedule import due as due
from jax_sparse24.versions import __version__ as __version__

if typing.TYPE_CHECKING:  # the names of _LAZY, as a type checker finds them
    from jax_sparse24 import linen as linen
    from jax_sparse24 import nn as nn
    from jax_sparse24 import optim as optim
    from jax_sparse24.explanation import explain as explain
    from jax_sparse24.huggingface import export as export
    from jax_sparse24.loop import Loop as Loop
    from jax_sparse24.nn import refresh as refresh
    from jax_sparse24.nn import sharding as sharding
    from jax_sparse24.nn.function import Function as Function
    from jax_sparse24.nn.view import Tree as Tree
    from jax_sparse24.surgery import Rule as Rule
    from jax_sparse24.surgery import densify as densify
    from jax_sparse24.surgery import sparsify as sparsify
    from jax_sparse24.verification import verify as verify

# Loaded on first use, so that the functional core needs neither flax nor optax.
_LAZY = {
    "nn": ("jax_sparse24.nn", None),
    "sharding": ("jax_sparse24.nn.sharding", None),
    "optim": ("jax_sparse24.optim", None),
    "linen": ("jax_sparse24.linen", None),
    "explain": ("jax_sparse24.explanation", "explain"),
    "refresh": ("jax_sparse24.nn", "refresh"),
    "Loop": ("jax_sparse24.loop", "Loop"),
    "Tree": ("jax_sparse24.nn.view", "Tree"),
    "Function": ("jax_sparse24.nn.function", "Function"),
    "Rule": ("jax_sparse24.surgery", "Rule"),
    "sparsify": ("jax_sparse24.surgery", "sparsify"),
    "densify": ("jax_sparse24.surgery", "densify"),
    "verify": ("jax_sparse24.verification", "verify"),
    "export": ("jax_sparse24.huggingface", "export"),
}


if not typing.TYPE_CHECKING:  # a checker that sees it would accept any name

    def __getattr__(name):
        if name not in _LAZY:
            raise AttributeError(f"module 'jax_sparse24' has no attribute {name!r}")
        module_name, attribute = _LAZY[name]
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name in ("flax", "optax", "safetensors"):
                raise ModuleNotFoundError(
                    f"s24.{name} needs {error.name}: pip install {error.name}", name=error.name
                ) from error
            raise
        return getattr(module, attribute) if attribute else module


def __dir__():
    return sorted([*globals(), *_LAZY])
