"""The dense decoder of `experiments.models.decoder` and its optimiser step in PyTorch, compiled by PyTorch.

Imported where PyTorch is installed. The same parameters, casts and optimiser as the JAX program: float32
parameters, products in the model's dtype, statistics of norms and the loss in float32, AdamW with clipping.

Shape suffixes as there: B sequences, L tokens, N layers, d width, H heads, h head width, V vocabulary.
"""

from functools import partial

import jax
import numpy as np
import torch
import torch.nn.functional as F
from flax import nnx

from experiments.benchmarks.torch import programs as torch_programs
from experiments.config import Config
from experiments.models import decoder, parts
from experiments.training.optimiser import learning_rate

EPSILON = 1e-6  # of flax's norms


def norm(x_BLd, scale_d):
    wide = x_BLd.float()
    return (wide * (torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON) * scale_d)).to(x_BLd.dtype)


def angles(length: int, width: int):
    """Cosines and sines (L, 1, h/2) of `rotate`, made once: PyTorch would compute them for every element."""
    half, device = width // 2, torch_programs.device()
    frequency = parts.ROPE_BASE ** (-torch.arange(half, dtype=torch.float32, device=device) / half)
    angle_Lh = torch.arange(length, dtype=torch.float32, device=device)[:, None] * frequency
    return torch.cos(angle_Lh)[:, None], torch.sin(angle_Lh)[:, None]


def rotate(x_BLHh, cos, sin):
    a, b = x_BLHh.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x_BLHh.dtype)


def attention(model: decoder.Config, params: dict, turns, x_BLd):
    batch, length, d = x_BLd.shape
    qkv = x_BLd @ params["qkv"]["kernel"].to(x_BLd.dtype)
    q, k, v = qkv.view(batch, length, 3, model.heads, d // model.heads).unbind(2)
    heads = [part.transpose(1, 2) for part in (rotate(q, *turns), rotate(k, *turns), v)]
    y_BLHh = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)
    return y_BLHh.reshape(batch, length, d) @ params["out"]["kernel"].to(x_BLd.dtype)


def feed_forward(x, w1, w2):
    """`act(x W1) W2` with squared ReLU, W1 (d, f) and W2 (f, d)."""
    return torch.relu(x @ w1).square() @ w2


def logits(model: decoder.Config, params: dict, turns, tokens_BL):
    dtype = getattr(torch, model.dtype)
    table_Vd = params["embedding"]["embedding"].to(dtype)
    x_BLd = F.embedding(tokens_BL, table_Vd)
    for n in range(model.layers):
        block = params["blocks"][n]
        x_BLd = x_BLd + attention(model, block["attention"], turns, norm(x_BLd, block["norm1"]["scale"]))
        weights = (block["ffn"][name]["kernel"].to(dtype) for name in ("up", "down"))
        x_BLd = x_BLd + feed_forward(norm(x_BLd, block["norm2"]["scale"]), *weights)
    return (norm(x_BLd, params["norm"]["scale"]) @ table_Vd.T).float()


def loss_of(model: decoder.Config, params: dict, turns, tokens_BL):
    """Mean cross entropy in nats of each token given those before it."""
    found = logits(model, params, turns, tokens_BL[:, :-1])
    return F.cross_entropy(found.flatten(0, 1), tokens_BL[:, 1:].flatten())


class Steps:
    """Optimiser steps of the dense model, one a call, as `experiments.benchmarks.suites.train_step.Steps`.

    params: the JAX program's first parameters, which are copied. Raises RuntimeError where PyTorch cannot
    compile the model."""

    def __init__(self, config: Config, params, tokens_BL):
        self.config, self.start = config, nnx.to_pure_dict(params)
        self.tokens = torch_programs.tensor(tokens_BL).long()
        self.turns = angles(config.data.seq, config.model.d // config.model.heads)
        steps = config.train.steps
        rates = jax.vmap(learning_rate(config.optim, steps))(np.arange(steps)).tolist()
        self.rate_at = lambda step: rates[min(step, steps - 1)]
        self.loss = torch.compile(partial(loss_of, config.model), dynamic=False)
        self.metrics = self.first_two()

    def first_two(self) -> list[dict]:
        """Loss and gradient norm of the first two steps from the initial parameters; later calls go on."""
        optim = self.config.optim
        leaves = lambda x: torch_programs.tensor(x).clone().requires_grad_()  # noqa: E731
        self.params = jax.tree.map(leaves, self.start)
        self.leaves = jax.tree.leaves(self.params)
        groups = [
            {"params": [x for x in self.leaves if x.ndim > 1], "weight_decay": optim.weight_decay},
            {"params": [x for x in self.leaves if x.ndim == 1], "weight_decay": 0.0},
        ]
        self.optimiser = torch.optim.AdamW(groups, lr=1.0, betas=(optim.b1, optim.b2), fused=True)
        self.rate = torch.optim.lr_scheduler.LambdaLR(self.optimiser, self.rate_at)
        return [{name: float(value) for name, value in self().items()} for _ in range(2)]

    def __call__(self) -> dict:
        loss = self.loss(self.params, self.turns, self.tokens)
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(self.leaves, self.config.optim.clip)
        self.optimiser.step()
        self.rate.step()
        self.optimiser.zero_grad()
        return {"loss": loss.detach(), "grad_norm": grad_norm}

    @property
    def temp_bytes(self) -> None:
        """Unknown before it runs."""

    def wait(self, out):
        torch_programs.wait()
