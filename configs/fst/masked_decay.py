"""FST: fully sparse training with transposable masks, MVUE gradients and masked decay (arXiv 2404.01847)."""

import jax_sparse24 as s24
from experiments.config import Config, Optim, Train
from experiments.data import text
from experiments.models import decoder


def config() -> Config:
    """GPT-2 size, the paper's recipe: 85M parameters where tokens are bytes, 110.1M with the vocabulary of
    32768 of the evidence, 124M with GPT-2's of 50257.

    It is for an NVIDIA GPU (`--model.attention xla` elsewhere). Its 300,000 steps take days; shorter:
    `--train.steps 2000 --optim.warmup 100`."""
    return Config(
        name="fst-124m",
        model=decoder.Config(layers=12, d=768, f=3072, heads=12, dtype="bfloat16", attention="cudnn"),
        data=text.Config(seq=1024, batch=512),
        optim=Optim(lr=1.5e-4, final=1 / 15, warmup=3000),
        train=Train(
            steps=300_000,
            accumulate=16,
            log_every=10,
            eval_every=1000,
            eval_batches=4,
            monitor_every=100,
            checkpoint_every=1000,
        ),
        method=s24.methods.FST(decay=6e-5, mvue="approximate"),
    )


def cpu() -> Config:
    """Small enough for a laptop's processor: some minutes."""
    return Config(
        name="fst-cpu",
        model=decoder.Config(layers=4, d=128, f=512, heads=2),
        data=text.Config(seq=128, batch=16),
        optim=Optim(lr=3e-3, warmup=100),
        train=Train(steps=600),
        method=s24.methods.FST(decay=6e-4),
    )
