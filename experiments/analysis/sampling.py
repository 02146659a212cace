"""Text sampled from a run."""

import codecs
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.training import rundir
from experiments.training.stored import load_state

CHUNK = 8  # tokens that are drawn by one call of the device, and shown at once
SHORTEST = 16  # tokens of a prompt as the device sees it: longer ones are padded to powers of two


def stream(
    graphdef,
    params,
    sparse,
    prompt: bytes,
    *,
    vocabulary,
    length: int,
    tokens: int,
    temperature: float,
    seed: int,
    to_end: bool = False,
    pad: bool = True,
) -> Iterator[bytes]:
    """Text that follows a prompt, in parts, of at most so many tokens; temperature 0 always takes the
    likeliest.

    The model sees the last `length` tokens, through its cache. A separator, the end of a record, is shown as
    the vocabulary shows it; with `to_end` it is the last token, and is not shown. pad: whether prompts of
    some lengths share a program, which needs a causal model."""
    context = np.array([vocabulary.separator, *vocabulary.encode(prompt)][-length:], np.int32)
    size = len(context)
    padded = min(max(SHORTEST, 1 << (size - 1).bit_length()), length) if pad else size
    context = np.pad(context, (0, padded - size))[None]
    variables = graphdef, params, sparse
    logits, cache = _read(*variables, context, size - 1, length)
    keys = jax.random.split(jax.random.key(seed), -(-tokens // CHUNK) * CHUNK)
    for start in range(0, tokens, CHUNK):
        logits, cache, made = _draw(
            *variables, logits, cache, size + start, temperature, keys[start : start + CHUNK]
        )
        made = np.asarray(made)[: tokens - start]
        ends = np.flatnonzero(made == vocabulary.separator) if to_end else ()
        yield vocabulary.decode(made[: ends[0]] if len(ends) else made)
        if len(ends):
            return


@partial(jax.jit, static_argnums=(0, 5))
def _read(graphdef, params, sparse, context, last, length):
    """Logits after the token `last` of a context, and its cache."""
    # Slots of later tokens, which only fill the context, are written anew before a token sees them.
    model = nnx.merge(graphdef, params, sparse)
    logits, cache = model.decode(context, model.empty_cache(1, length), 0)
    return logits[0, last], cache


@partial(jax.jit, static_argnums=0)
def _draw(graphdef, params, sparse, logits, cache, position, temperature, keys):
    """A token for each key, with logits and cache after them."""
    model = nnx.merge(graphdef, params, sparse)

    def draw(logits, key):
        drawn = jax.random.categorical(key, logits / jnp.where(temperature > 0, temperature, 1.0))
        return jnp.where(temperature > 0, drawn, logits.argmax()).astype(jnp.int32)

    def one(carry, key):
        logits, cache, position = carry
        token = draw(logits, key)
        logits, cache = model.decode(token[None, None], cache, position)
        return (logits[0, -1], cache, position + 1), token

    (logits, cache, _), made = jax.lax.scan(one, (logits, cache, jnp.int32(position)), keys)
    return logits, cache, made


def generate(graphdef, params, sparse, prompt: bytes, **options) -> bytes:
    """The prompt and what follows it, see `stream`."""
    return prompt + b"".join(stream(graphdef, params, sparse, prompt, **options))


class Sampler:
    """Samples from the newest checkpoint of a run. sparse: with its sparse products, and masks of the weights
    as they are, as in evaluations and exports; None if its last step was by sparse weights."""

    def __init__(self, run: Path, sparse: bool | None = None):
        self.config, program, _, self.state = load_state(run)
        self.sparse = program.loop.by_sparse_weights(self.state) if sparse is None else sparse
        self.vocabulary, self.graphdef = rundir.vocabulary(run), program.graphdefs[self.sparse]
        if self.sparse:
            params, own, at = (self.state[name] for name in ("params", "sparse", "step"))
            refresh = partial(program.loop.view.refresh, sparse=True, due=True)
            self.state = self.state | {"sparse": jax.jit(refresh)(params, own, at)}

    def __call__(self, prompt: str, **options) -> Iterator[str]:
        """Text that follows a prompt, in parts; bytes that are no UTF-8 become replacement characters.
        options: of `stream`."""
        own = {"vocabulary": self.vocabulary, "length": self.config.data.seq, "pad": not self.sparse}
        parts = stream(
            self.graphdef, self.state["params"], self.state["sparse"], prompt.encode(), **own, **options
        )
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a part may end in a character
        for part in parts:
            yield decoder.decode(part).replace("\x0c", "\n\n")
        yield decoder.decode(b"", final=True)


def sample_run(out: Path, prompt: str, *, tokens: int, temperature: float, seed: int) -> str:
    """A prompt and text sampled after it from the newest checkpoint of a run."""
    made = Sampler(out)(prompt, tokens=tokens, temperature=temperature, seed=seed)
    return prompt + "".join(made)
