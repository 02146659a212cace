"""Methods of sparse training, one file per paper: its plan of products, its state and its hooks.

Suffixes of array names in this package: T tokens, n some of the tokens, R rows of tokens with padding, d
model width, f FFN width (neurons), K clusters of neurons, B sequences of a batch, L tokens of a sequence, V
vocabulary."""

from jax_sparse24.methods.activation24 import Activation24 as Activation24
from jax_sparse24.methods.ast import AST as AST
from jax_sparse24.methods.base import Decay as Decay
from jax_sparse24.methods.base import Freeze as Freeze
from jax_sparse24.methods.base import Method as Method
from jax_sparse24.methods.base import Training as Training
from jax_sparse24.methods.bimask import BiMask as BiMask
from jax_sparse24.methods.catalogue import list as list
from jax_sparse24.methods.dense import Dense as Dense
from jax_sparse24.methods.fst import FST as FST
from jax_sparse24.methods.slope import SLoPe as SLoPe
from jax_sparse24.methods.srste import SRSTE as SRSTE
from jax_sparse24.methods.sste import SSTE as SSTE
from jax_sparse24.methods.ste import STE as STE
from jax_sparse24.methods.step import STEP as STEP
from jax_sparse24.methods.venom import Venom as Venom
