"""Sample text from a checkpoint: `python -m experiments.generate RUN --prompt "def " --tokens 300`."""

import argparse
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.cli import command
from experiments.config import require
from experiments.data import SEPARATOR
from experiments.evaluate import load_state


def generate(
    graphdef, params, sparse, prompt: bytes, *, length: int, tokens: int, temperature: float, seed: int
) -> bytes:
    """The prompt and `tokens` more bytes; temperature 0 always takes the likeliest.

    The model sees the last `length` tokens, through a cache of keys and values. A separator, the end of a
    record, is shown as a form feed.
    """
    context = jnp.array([[SEPARATOR, *prompt][-length:]], jnp.int32)
    key = jax.random.key(seed)
    made = _sample(graphdef, params, sparse, context, length, temperature, key, tokens)
    return prompt + bytes(np.where(np.asarray(made) == SEPARATOR, 0x0C, made).astype(np.uint8))


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
        length=config.data.seq,
        tokens=tokens,
        temperature=temperature,
        seed=seed,
    )
    return made.decode("utf-8", errors="replace").replace("\x0c", "\n\n")


@command
def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m experiments.generate", description=__doc__.split(":")[0] + "."
    )
    parser.add_argument("run", type=Path, help="folder of a run, such as runs/demo/fst")
    parser.add_argument("--prompt", default="def ", help="text to continue (default: %(default)r)")
    parser.add_argument("--tokens", type=int, default=300, help="bytes to generate (default: %(default)s)")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        help="0 always takes the likeliest byte (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--sparse", action="store_true", help="use the sparse products with the run's stored masks"
    )
    args = parser.parse_args(argv)
    require(args.tokens > 0, f"--tokens must be positive, got {args.tokens}.")
    require(args.temperature >= 0, f"--temperature must not be negative, got {args.temperature}.")
    print(
        sample_run(
            args.run,
            args.prompt,
            tokens=args.tokens,
            temperature=args.temperature,
            seed=args.seed,
            sparse=args.sparse,
        )
    )


if __name__ == "__main__":
    main()
