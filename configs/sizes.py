"""Models of the usual sizes with a real vocabulary, dense; `--method NAME` trains them by another method.

The names 124m, 350m and 774m are those of GPT-2's shapes, whose vocabulary has 50257 tokens. With the 32768
of these models they have 110.1M, 336M and 750M parameters.

They are trained on the Linux source (`--data text --data.corpus FOLDER` for another text). But for the
smallest, attention is cuDNN's, so that they need an NVIDIA GPU (`--model.attention xla` elsewhere).
Micro-batches and `remat` suit one of 80 GB, but for the largest:
`python -m experiments.memory configs/sizes.py:b7 --mesh.fsdp 8`."""

import dataclasses

from experiments.config import Config, Mesh, Optim, Train
from experiments.data import linux
from experiments.models import decoder


def config() -> Config:
    """The shape of GPT-2's 124M, 110.1M, 64 x 1024 tokens a step."""
    return _sized("124m", 12, 768, lr=6e-4)


def cpu() -> Config:
    """10M, dense: some minutes on two cores of a processor."""
    large = config()
    return dataclasses.replace(
        large,
        name="10m",
        model=decoder.Config(layers=8, d=256, f=1024, heads=4),
        data=dataclasses.replace(large.data, seq=256, batch=8, tokenizer="train:16384"),
        optim=Optim(lr=2e-3, warmup=20),
        train=Train(
            steps=200,
            log_every=5,
            eval_every=200,
            eval_batches=16,
            monitor_every=0,
            probe_every=0,
            checkpoint_every=100,
        ),
    )


def m350() -> Config:
    """336M, dense, in two micro-batches."""
    return _sized("350m", 24, 1024, lr=3e-4, accumulate=2)


def m774() -> Config:
    """750M, dense, in four micro-batches."""
    return _sized("774m", 36, 1280, lr=2.5e-4, accumulate=4)


def b1_3() -> Config:
    """1.3B, dense, in four micro-batches."""
    return _sized("1.3b", 24, 2048, lr=2e-4, heads=16, accumulate=4)


def b7() -> Config:
    """7B, the shape of Llama 2: its state of 108 GB needs several GPUs that share it. Whole parameters,
    masks and gradients, 88 GB, fit into none, so that weights are gathered for each product."""
    shape = {"ffn": "swiglu", "tied": False, "remat": True, "scan": True}
    sized = _sized("7b", 32, 4096, f=11008, lr=1.5e-4, heads=32, accumulate=8, **shape)
    return dataclasses.replace(sized, mesh=Mesh(gather="product"))


def wide270() -> Config:
    """270M in four wide blocks, where sparse products pay."""
    return _sized("wide-270m", 4, 2048, lr=4e-4, heads=16)


def _sized(name: str, layers: int, d: int, *, lr: float, f=0, heads=0, accumulate=1, **model) -> Config:
    return Config(
        name=name,
        model=decoder.Config(
            layers=layers,
            d=d,
            f=f or 4 * d,
            heads=heads or d // 64,
            dtype="bfloat16",
            attention="cudnn",
            **model,
        ),
        data=linux.Config(seq=1024, batch=64, tokenizer="train:32768"),
        optim=Optim(lr=lr, warmup=500),
        train=Train(
            steps=10_000,
            accumulate=accumulate,
            log_every=10,
            eval_every=500,
            eval_batches=4,
            monitor_every=100,
            probe_every=0,
            checkpoint_every=1000,
        ),
    )
