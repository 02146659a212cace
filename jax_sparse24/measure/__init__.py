"""Measuring programs that compete: compiled, checked against an exact result, timed in random order.

`Program` compiles a function and compares all its results bit for bit, `Oracle` says how far a product may
be from the exact one, `interleaved` times several programs in one process, `paired` and `contradictions`
compare their times. `measure_product` does all of it for one product of an FFN, and `tune` for all products
of a machine."""

from jax_sparse24.measure.entries import FLOAT8_PRODUCTS as FLOAT8_PRODUCTS
from jax_sparse24.measure.nvml import gauge as gauge
from jax_sparse24.measure.products import FORMAT_24 as FORMAT_24
from jax_sparse24.measure.products import PATTERNS as PATTERNS
from jax_sparse24.measure.products import FFNProduct as FFNProduct
from jax_sparse24.measure.products import Format as Format
from jax_sparse24.measure.products import Measurement as Measurement
from jax_sparse24.measure.products import ffn_products as ffn_products
from jax_sparse24.measure.products import formats_of as formats_of
from jax_sparse24.measure.products import measure_product as measure_product
from jax_sparse24.measure.products import product_of as product_of
from jax_sparse24.measure.programs import Oracle as Oracle
from jax_sparse24.measure.programs import Program as Program
from jax_sparse24.measure.programs import random as random
from jax_sparse24.measure.programs import random_words as random_words
from jax_sparse24.measure.programs import roundoff as roundoff
from jax_sparse24.measure.programs import same_bits as same_bits
from jax_sparse24.measure.programs import untuned as untuned
from jax_sparse24.measure.timing import Interrupted as Interrupted
from jax_sparse24.measure.timing import Paired as Paired
from jax_sparse24.measure.timing import Times as Times
from jax_sparse24.measure.timing import contradictions as contradictions
from jax_sparse24.measure.timing import interleaved as interleaved
from jax_sparse24.measure.timing import paired as paired
from jax_sparse24.measure.tuning import ensure as ensure
from jax_sparse24.measure.tuning import tune as tune
