"""A run as a folder that `transformers` and what builds on it read: `python -m experiments.export RUN`.

A decoder with squared ReLU or GELU becomes an ArceeForCausalLM, with SwiGLU a LlamaForCausalLM, and with
norms of queries and keys besides a Qwen3ForCausalLM; docs/data.md has an example.
"""

import argparse
import json
import sys
from pathlib import Path

from flax import nnx

from experiments.cli import command
from experiments.data.vocabulary import ENDS
from experiments.errors import UserError, require
from experiments.models import decoder, huggingface
from experiments.training import rundir
from experiments.training.stored import load_state


def write(run: Path, out: Path, *, step: int | None = None, weights=None, dtype="float32") -> dict:
    """Export a checkpoint of a run; the shapes of the tensors. weights: as `--weights`; None for its default.
    Raises UserError where that cannot be done."""
    rundir.open_run(run)
    try:
        from jax_sparse24.huggingface import export
    except ModuleNotFoundError as error:
        raise UserError("Exporting needs safetensors: pip install -e '.[huggingface]'.") from error
    require(not out.exists(), f"{out} exists already. Name another folder with --out.")
    config, program, step, state = load_state(run, step)
    model, vocabulary = config.model, rundir.vocabulary(run)
    require(
        isinstance(model, decoder.Config),
        f"Only decoders are exported (experiments.models.decoder), not {type(model).__module__}.",
    )
    sparse = program.loop.by_sparse_weights(state)
    weights = weights or ("sparse" if sparse else "dense")
    require(
        weights == "dense" or config.method.sparse_weights or bool(model.attention_method),
        f"The run was trained by {type(config.method).__name__}, so it has no sparse weights. "
        "Write --weights dense.",
    )
    if weights == "dense" and sparse:
        print(
            f"warning: step {step} of this run, by {type(config.method).__name__}, was by sparse weights, so "
            "that they are the trained model and the kernels are not: leave --weights out.",
            file=sys.stderr,
        )
    rows = state["params"]["embedding"]["embedding"].shape[0]
    described = huggingface.description(model, rows, config.data.seq, vocabulary.separator)
    described["torch_dtype"] = dtype
    if weights == "sparse":
        described["jax_sparse24"] = {"weights": "sparse", "method": type(config.method).__name__}
    trained = nnx.merge(program.graphdefs[True], state["params"], state["sparse"])
    end = {"bos_token_id": vocabulary.separator, "eos_token_id": vocabulary.separator}
    others = {
        "generation_config.json": end | {"do_sample": True, "temperature": 0.8},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config.data.seq,
            **({"bos_token": name, "eos_token": name} if (name := _end_of(vocabulary)) else {}),
        },
    }
    texts = {name: json.dumps(content, indent=2) + "\n" for name, content in others.items()}
    try:
        return export(
            decoder.unrolled(trained),
            out,
            config=described,
            rename=lambda params: huggingface.tensors_of(model, params),
            weights=weights,
            dtype=dtype,
            others=texts | {"tokenizer.json": vocabulary.text},
        )
    except (ValueError, FileExistsError) as error:  # for a number too large, and for another export
        raise UserError(str(error)) from error


def _end_of(vocabulary) -> str | None:
    """The name of the token that ends a record, where the tokenizer has one."""
    added = json.loads(vocabulary.text)["added_tokens"]
    names = {token["id"]: token["content"] for token in added}
    return names.get(vocabulary.separator) if set(ENDS) & set(names.values()) else None


@command
def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m experiments.export", description=__doc__.split(":")[0] + "."
    )
    parser.add_argument("run", type=Path, help="folder of a run, such as runs/demo/fst")
    parser.add_argument("--out", type=Path, help="folder to write (default: RUN/export)")
    parser.add_argument("--step", type=int, help="checkpoint to export (default: the newest)")
    parser.add_argument(
        "--weights",
        choices=("dense", "sparse"),
        help="dense: the kernels as they are; sparse: what the method's forward products multiply, "
        "such as kernels cut to 2:4 (default: sparse where the last step was by sparse weights)",
    )
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32")
    args = parser.parse_args(argv)
    out = args.out or args.run / "export"
    shapes = write(args.run, out, step=args.step, weights=args.weights, dtype=args.dtype)
    described = json.loads((out / "config.json").read_text())
    (kind,), weights = described["architectures"], described.get("jax_sparse24", {}).get("weights", "dense")
    print(f"{out}: {kind}, {len(shapes)} tensors, {weights} weights in {args.dtype}")
    print(f"Load it with transformers.AutoModelForCausalLM.from_pretrained({str(out)!r})")


if __name__ == "__main__":
    main()
