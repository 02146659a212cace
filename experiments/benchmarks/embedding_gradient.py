"""How the gradient of an embedding is summed fastest: `python -m experiments.benchmarks.embedding_gradient`.

For each number of rows of the table, in random order: a product with one-hot tokens, a sum over sorted
tokens, and a scatter that adds, which is not deterministic on a GPU. Tokens are drawn by Zipf's law, as text
has them. `experiments.models.parts.ROWS_BY_PRODUCT` is chosen from this table. Written as a table, and with
--out as JSON."""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from experiments import files
from experiments.analysis.tables import markdown
from experiments.cli import command
from experiments.errors import UserError
from experiments.models import parts
from experiments.training import environment
from jax_sparse24.measure import Times, interleaved

ROWS = (257, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
SEQUENCE = 1024


def by_scatter(tokens_BL, ct_BLd, vocabulary: int):
    """What each row gets, added where it is, in float32."""
    table_Vd = jnp.zeros((vocabulary, ct_BLd.shape[-1]), jnp.float32)
    return table_Vd.at[tokens_BL].add(ct_BLd.astype(jnp.float32)).astype(ct_BLd.dtype)


WAYS = {"product": parts.sums_by_product, "sorted": parts.sums_by_segment, "scatter": by_scatter}


def zipf(rows: int, shape: tuple[int, ...]) -> np.ndarray:
    """int32 of that shape; token i of `rows` has a probability in proportion to 1 / (i + 1)."""
    share = 1 / np.arange(1, rows + 1)
    return np.random.default_rng(0).choice(rows, shape, p=share / share.sum()).astype(np.int32)


def measure(rows: int, tokens: int, width: int, repeats: int, seconds: float) -> dict[str, Times]:
    """The times of all ways with bfloat16 gradients of `width` numbers a token."""
    sequence = min(SEQUENCE, tokens)
    tokens_BL = jnp.asarray(zipf(rows, (tokens // sequence, sequence)))
    ct_BLd = jax.random.normal(jax.random.key(1), (*tokens_BL.shape, width), jnp.bfloat16)
    wanted = WAYS["scatter"](tokens_BL, ct_BLd.astype(jnp.float32), rows)
    programs = {}
    for name, way in WAYS.items():
        run = jax.jit(way, static_argnums=2).lower(tokens_BL, ct_BLd, rows).compile()
        found = run(tokens_BL, ct_BLd).astype(jnp.float32)
        error = float(jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted))
        if not error < 2**-8:
            raise UserError(
                f"The way {name!r} is wrong at {rows} rows: it is off by {error:.1%} of the norm."
            )
        programs[name] = lambda run=run: run(tokens_BL, ct_BLd)
    return interleaved(programs, repeats, seconds, seed=rows)


@command
def main(argv=None):
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m experiments.benchmarks.embedding_gradient", description=__doc__, formatter_class=form
    )
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=65536, help="of a step (default: %(default)s)")
    parser.add_argument("--widths", type=int, nargs="+", default=(768, 2048), help="(default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=7, help="rounds (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=2.0, help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="file of the results, JSON")
    args = parser.parse_args(argv)
    found, table = [], [["rows", "width", *(f"{name}, ms" for name in WAYS)]]
    for width in args.widths:
        for rows in args.rows:
            times = measure(rows, args.tokens, width, args.repeats, args.seconds)
            found.append({"rows": rows, "width": width} | {n: t.samples for n, t in times.items()})
            table.append([str(rows), str(width), *(f"{1e3 * times[name].median:.3f}" for name in WAYS)])
    about = environment.describe()
    if args.out:
        settings = {name: getattr(args, name) for name in ("tokens", "repeats", "seconds")}
        files.write(args.out, json.dumps({**about, **settings, "seconds_per_call": found}, indent=1) + "\n")
    print(f"{about['hardware']['description']}; {args.tokens} tokens, bfloat16\n\n{markdown(table)}")


if __name__ == "__main__":
    main()
