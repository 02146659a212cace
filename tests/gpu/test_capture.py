"""CUDA graphs beside XLA's compiler. `python -m tests.gpu.test_capture` counts how many captures it ends."""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp

import jax_sparse24 as s24
from experiments.benchmarks import check
from experiments.benchmarks.settings import Case
from experiments.benchmarks.suites import train_step


def test_what_steps_must_give_is_found_with_whole_graphs(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 16)  # four threads compile
    methods = {name: getattr(s24.methods, name)() for name in ("FST", "Activation24", "Venom")}
    arms = {n: train_step.config_of(Case(2048, 256, 1024), "bfloat16", m, 6) for n, m in methods.items()}
    steps = check.compiled(train_step.references(arms))
    assert all(train_step.up_to_choices(steps[name], arms[name]).metrics for name in methods)


def compile_attention(length):
    x = jax.ShapeDtypeStruct((2, length, 2, 64), jnp.bfloat16)
    run = partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    jax.jit(jax.grad(lambda x: run(x, x, x).astype(jnp.float32).sum())).lower(x).compile()


if __name__ == "__main__":
    pruned = lambda x, n: (s24.soft24(x + n, -1, implementation="ffi"), None)  # noqa: E731
    chain = jax.jit(lambda x: jax.lax.scan(pruned, x, jnp.arange(100.0, dtype=x.dtype), unroll=100)[0])
    for compilers in (0, 4):
        held, failed = [], []  # each result, so that the next has another address and XLA captures again
        with ThreadPoolExecutor(4) as pool:
            work = [pool.submit(compile_attention, 64 * (n + 1)) for n in range(8 * compilers)]
            while (calls := len(held) + len(failed)) < 100 or not all(w.done() for w in work):
                try:
                    held.append(jax.block_until_ready(chain(jnp.full((256, 256), calls, jnp.bfloat16))))
                except RuntimeError as error:
                    failed.append(error)
        print(f"{compilers} compilers: {len(failed)} of {calls} captures ended", *failed[:1])
