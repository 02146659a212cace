"""Hardware sparsity for pre-training transformers in JAX."""

import importlib

from jax_sparse24 import measure as measure
from jax_sparse24 import methods as methods
from jax_sparse24 import patterns as patterns
from jax_sparse24.engine import sparsifiers as sparsifiers
from jax_sparse24.engine.ffn import sparse_ffn as sparse_ffn
from jax_sparse24.engine.linear import sparse_dot as sparse_dot
from jax_sparse24.engine.stats import activation_stats as activation_stats
from jax_sparse24.explain import explain as explain
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

__version__ = "0.1.0"

# Loaded on first use, so that the functional core needs neither flax nor optax.
_LAZY = {
    "nn": ("jax_sparse24.nn", None),
    "sharding": ("jax_sparse24.nn.sharding", None),
    "optim": ("jax_sparse24.optim", None),
    "linen": ("jax_sparse24.linen", None),
    "refresh": ("jax_sparse24.nn", "refresh"),
    "Loop": ("jax_sparse24.loop", "Loop"),
    "Tree": ("jax_sparse24.nn.view", "Tree"),
    "Rule": ("jax_sparse24.surgery", "Rule"),
    "sparsify": ("jax_sparse24.surgery", "sparsify"),
    "densify": ("jax_sparse24.surgery", "densify"),
    "verify": ("jax_sparse24.verification", "verify"),
    "export": ("jax_sparse24.huggingface", "export"),
}


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
