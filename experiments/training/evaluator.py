"""Validation loss with dense and with sparse weights, and how it is said."""

import dataclasses

import jax
import numpy as np
from flax import nnx

import jax_sparse24 as s24
from experiments.data.vocabulary import bits_per_byte
from experiments.errors import UserError
from experiments.training.mesh import place
from experiments.training.step import Program, abstract_model, graphdefs_of, loss_of


class Evaluator:
    """`evaluator(params, sparse)` is {"dense": nats, "sparse": nats} over fixed batches int32 (B, L + 1), the
    same in every process, whose sequences are split over the mesh of the program."""

    def __init__(self, program: Program, batches):
        self.batches, self._inside = [place(batch, program.rows) for batch in batches], program.inside
        self._rows = program.rows
        self._losses = losses_of_program(program)

    def __call__(self, params, sparse) -> dict:
        with self._inside():
            losses = {
                name: [loss(params, sparse, b) for b in self.batches] for name, loss in self._losses.items()
            }
        return {name: float(np.mean(jax.device_get(values))) for name, values in losses.items()}

    def dense(self, params, sparse, batch) -> float:
        """The loss of another batch (B, L + 1) with every product dense, nats."""
        with self._inside():
            return float(self._losses["dense"](params, sparse, place(batch, self._rows)))


def losses_of_program(program: Program) -> dict:
    """The two losses of (params, sparse, tokens), compiled: "dense" and "sparse". UserError for a model
    without sparse weights that cannot be cut to 2:4 after training, whose loss every evaluation tells."""
    return program.once("losses", lambda: _losses(program))


def _losses(program: Program) -> dict:
    config, graphdefs = program.config, program.graphdefs
    cut_once = not config.method.ffn_plan().rows
    if cut_once:
        top2 = config.train.monitor_mask == "top-2"
        masked = s24.methods.STE() if top2 else s24.methods.FST(mvue=None)
        cut = dataclasses.replace(config, method=masked)
        try:
            cut_graphdefs = graphdefs_of(cut)
        except UserError as error:
            raise UserError(f"{error} Evaluations of a dense run cut its weights to 2:4, too.") from error
        _, _, blank = nnx.split(abstract_model(cut), nnx.Param, s24.nn.SparseState)

    def dense_loss(params, sparse, tokens_BL):
        return loss_of(nnx.merge(graphdefs[False], params, sparse), tokens_BL)

    def sparse_loss(params, sparse, tokens_BL):
        if cut_once:
            sparse = jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), blank)
        model = nnx.merge((cut_graphdefs if cut_once else graphdefs)[True], params, sparse)
        s24.refresh(model)  # on this copy only: the run keeps its masks
        return loss_of(model, tokens_BL)

    return {"dense": jax.jit(dense_loss), "sparse": jax.jit(sparse_loss)}


def mark(method, name: str) -> str:
    """What has to stand beside a method's loss "dense" or "sparse": "" where the name says it all."""
    if name == "dense":
        return ""
    if not method.causal:
        return " (no language-model loss: it may depend on later tokens)"
    return " (its weights cut to 2:4 after training)" if isinstance(method, s24.methods.Dense) else ""


def said(nats: float, bytes_per_token: float, joined: str = " = ") -> str:
    """A loss in nats per token, and in bits per byte of its text."""
    unit = "" if bytes_per_token == 1 else " per token"
    return f"{nats:.4f} nats{unit}{joined}{bits_per_byte(nats, bytes_per_token):.4f} bits per byte"
