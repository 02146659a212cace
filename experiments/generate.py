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

    The model sees the last `length` tokens.

    A separator, the end of a record, is shown as a form feed.
    """
    context = [SEPARATOR, *prompt][-length:]
    window = jnp.zeros((1, length), jnp.int32).at[0, : len(context)].set(jnp.array(context))
    key = jax.random.key(seed)
    made = _sample(graphdef, params, sparse, window, len(context), temperature, key, tokens)
    return prompt + bytes(np.where(np.asarray(made) == SEPARATOR, 0x0C, made).astype(np.uint8))


@partial(jax.jit, static_argnums=(0, 7))
def _sample(graphdef, params, sparse, window, filled, temperature, key, tokens):
    model = nnx.merge(graphdef, params, sparse)
    length = window.shape[1]

    def one(carry, key):
        window, filled = carry
        logits = model(window)[0, filled - 1]
        drawn = jax.random.categorical(key, logits / jnp.where(temperature > 0, temperature, 1.0))
        token = jnp.where(temperature > 0, drawn, logits.argmax()).astype(jnp.int32)
        full = filled == length
        window = jnp.where(full, jnp.roll(window, -1, axis=1), window)
        filled = jnp.where(full, length, filled + 1)
        return (window.at[0, filled - 1].set(token), filled), token

    return jax.lax.scan(one, (window, jnp.int32(filled)), jax.random.split(key, tokens))[1]


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
