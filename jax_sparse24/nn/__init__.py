"""Flax NNX layers: their parameters are dense, and their products are sparse as a method says.

Suffixes of array names in this package: T tokens, d model width, f FFN width, E experts, C tokens that one
expert takes, k experts that one token goes to, A assignments of a token to an expert (T * k)."""

from jax_sparse24.nn.adapters import merge_adapters as merge_adapters
from jax_sparse24.nn.adapters import set_adapting as set_adapting
from jax_sparse24.nn.arrange import arrange as arrange
from jax_sparse24.nn.ffn import FFN as FFN
from jax_sparse24.nn.ffn import GatedFFN as GatedFFN
from jax_sparse24.nn.linear import Linear as Linear
from jax_sparse24.nn.linear import SparseState as SparseState
from jax_sparse24.nn.linear import Statistic as Statistic
from jax_sparse24.nn.low_rank import LowRank as LowRank
from jax_sparse24.nn.low_rank import LowRankFFN as LowRankFFN
from jax_sparse24.nn.moe import MoE as MoE
from jax_sparse24.nn.state import fold_key as fold_key
from jax_sparse24.nn.state import masks as masks
from jax_sparse24.nn.state import observe as observe
from jax_sparse24.nn.state import refresh as refresh
from jax_sparse24.nn.state import reset as reset
from jax_sparse24.nn.state import set_sparse as set_sparse
from jax_sparse24.nn.state import sparse_layers as sparse_layers
