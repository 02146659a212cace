"""Text sampled from a run."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.training import rundir
from experiments.training.stored import load_state


def generate(
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
) -> bytes:
    """The prompt and `tokens` more tokens as text; temperature 0 always takes the likeliest.

    The model sees the last `length` tokens, through its cache. A separator, the end of a record, is shown as
    the vocabulary shows it.
    """
    context = jnp.array([[vocabulary.separator, *vocabulary.encode(prompt)][-length:]], jnp.int32)
    key = jax.random.key(seed)
    made = _sample(graphdef, params, sparse, context, length, temperature, key, tokens)
    return prompt + vocabulary.decode(made)


@partial(jax.jit, static_argnums=(0, 4, 7))
def _sample(graphdef, params, sparse, context, length, temperature, key, tokens):
    model = nnx.merge(graphdef, params, sparse)

    def draw(logits, key):
        drawn = jax.random.categorical(key, logits / jnp.where(temperature > 0, temperature, 1.0))
        return jnp.where(temperature > 0, drawn, logits.argmax()).astype(jnp.int32)

    def one(carry, key):
        logits, cache, position = carry
        token = draw(logits, key)
        logits, cache = model.decode(token[None, None], cache, position)
        return (logits[0, -1], cache, position + 1), token

    logits, cache = model.decode(context, model.empty_cache(1, length), 0)
    start = (logits[0, -1], cache, jnp.int32(context.shape[1]))
    return jax.lax.scan(one, start, jax.random.split(key, tokens))[1]


def sample_run(
    out: Path, prompt: str, *, tokens: int, temperature: float, seed: int, sparse: bool = False
) -> str:
    """Text sampled from the newest checkpoint; bytes that are no UTF-8 become replacement characters."""
    config, program, _, state = load_state(out)
    made = generate(
        program.graphdefs[sparse],
        state["params"],
        state["sparse"],
        prompt.encode(),
        vocabulary=rundir.vocabulary(out),
        length=config.data.seq,
        tokens=tokens,
        temperature=temperature,
        seed=seed,
    )
    return made.decode("utf-8", errors="replace").replace("\x0c", "\n\n")
