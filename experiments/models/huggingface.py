"""The decoder and the classes of the library `transformers` that compute the same.

Both ways: from the decoder's config and parameters to config.json and tensors, and back. A kernel (in, out)
of ours is a weight (out, in) there; our queries, keys and values are one kernel.
"""

import numpy as np

from experiments.errors import require
from experiments.models import decoder
from experiments.models.parts import ROPE_BASE

# Of (ffn, qk_norm): class, type and activation there.
CLASSES = {
    ("squared_relu", False): ("ArceeForCausalLM", "arcee", "relu2"),
    ("gelu", False): ("ArceeForCausalLM", "arcee", "gelu_pytorch_tanh"),
    ("swiglu", False): ("LlamaForCausalLM", "llama", "silu"),
    ("swiglu", True): ("Qwen3ForCausalLM", "qwen3", "silu"),
}
EPSILONS = {"ArceeForCausalLM": 1e-5, "LlamaForCausalLM": 1e-6, "Qwen3ForCausalLM": 1e-6}  # if none is said
PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def description(model: decoder.Config, rows: int, length: int, end: int) -> dict:
    """The config.json of a decoder. rows: of its embedding; length: of the sequences that it was trained on;
    end: the token that ends a record. Raises UserError where no class computes the same."""
    known = CLASSES.get((model.ffn, model.qk_norm))
    require(
        known is not None and not model.rank,
        f"No class of transformers computes what a decoder with ffn {model.ffn}, qk_norm {model.qk_norm} and "
        f"rank {model.rank} does. Exported are squared_relu and gelu without qk_norm, swiglu with and "
        "without, each of full rank.",
    )
    kind, short, activation = known
    kv_heads, head = model.own_shape
    return {
        "architectures": [kind],
        "model_type": short,
        "hidden_act": activation,
        "vocab_size": rows,
        "hidden_size": model.d,
        "intermediate_size": model.f,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_base,
        "tie_word_embeddings": model.tied,
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": length,
        "bos_token_id": end,
        "eos_token_id": end,
        "torch_dtype": "float32",
    }


def model_of(described: dict) -> decoder.Config:
    """The decoder that a config.json describes. Raises UserError for another architecture, and for options
    of these classes that our decoder does not have."""
    require(isinstance(described, dict), f"config.json holds no object, but {described!r:.40}.")
    names = described.get("architectures")
    kind = str(names[0]) if isinstance(names, list) and names else "none"
    known = {(name, act): key for key, (name, _, act) in CLASSES.items()}
    act = described.get("hidden_act", "relu2" if kind == "ArceeForCausalLM" else "silu")
    named = f" with hidden_act {act!r}" if "hidden_act" in described else ""
    require(
        (kind, act) in known,
        f"config.json names the architecture {kind}{named}. Our decoder computes the same "
        f"as {', '.join(f'{name} with {act!r}' for name, act in known)}: give a folder of one of these.",
    )
    ropes = [described.get(name) or {} for name in ("rope_parameters", "rope_scaling")]
    scaled = any(map(_scaled, ropes))
    rope = {} if scaled else ropes[0] | ropes[1]
    refused = {
        "attention_bias": described.get("attention_bias", False),
        "mlp_bias": described.get("mlp_bias", False),
        "rope_scaling": scaled,
        "partial_rotary_factor": any(
            place.get("partial_rotary_factor") not in (None, 1) for place in (described, rope)
        ),
        "use_sliding_window": described.get("use_sliding_window", False),
        "layer_types": any(kind != "full_attention" for kind in described.get("layer_types") or ()),
        "quantization_config": described.get("quantization_config"),
    }
    wrong = [name for name, value in refused.items() if value]
    require(
        not wrong,
        f"config.json has {', '.join(wrong)}, which our decoder does not: its outputs would be wrong. "
        "Give a folder without.",
    )

    def number(name, default=None, kinds=int):
        value = default if described.get(name) is None else described[name]
        require(value is not None, f"config.json lacks {name!r}, without which no {kind} can be built.")
        whole = "whole " if kinds is int else ""
        require(
            isinstance(value, kinds) and value > 0,
            f"config.json: {name} must be a positive {whole}number, got {value!r}.",
        )
        return value

    ffn, qk_norm = known[kind, act]
    heads, d = number("num_attention_heads"), number("hidden_size")
    return decoder.Config(
        layers=number("num_hidden_layers"),
        d=d,
        f=number("intermediate_size"),
        heads=heads,
        kv_heads=number("num_key_value_heads", heads),
        head_dim=number("head_dim", d // heads),
        rope_base=float(number("rope_theta", rope.get("rope_theta", ROPE_BASE), (int, float))),
        qk_norm=qk_norm,
        norm_eps=number("rms_norm_eps", EPSILONS[kind], (int, float)),
        vocabulary=number("vocab_size"),
        ffn=ffn,
        tied=bool(described.get("tie_word_embeddings", False)),
    )


def _scaled(rope) -> bool:
    """Whether what config.json says of positions is anything but the plain ones. Numbers without a type are:
    some versions of transformers refuse them, and others leave them out."""
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        return True  # also those of each kind of layer
    plain = rope.keys() <= {"rope_theta", "partial_rotary_factor"}
    return not plain and rope.get("rope_type", rope.get("type")) != "default"


def _pairs(model: decoder.Config) -> list[tuple[str, str]]:
    """Our names and theirs of all parameters but queries, keys and values, which are one of ours."""
    pairs = [("embedding.embedding", "model.embed_tokens"), ("norm.scale", "model.norm")]
    pairs += [] if model.tied else [("head.kernel", "lm_head")]
    own = [("norm1.scale", "input_layernorm"), ("norm2.scale", "post_attention_layernorm")]
    own += [("attention.out.kernel", "self_attn.o_proj")]
    own += [("ffn.up.kernel", "mlp.up_proj"), ("ffn.down.kernel", "mlp.down_proj")]
    own += [("ffn.gate.kernel", "mlp.gate_proj")] if model.ffn == "swiglu" else []
    if model.qk_norm:
        own += [(f"attention.{name}_norm.scale", f"self_attn.{name[0]}_norm") for name in ("query", "key")]
    for n in range(model.layers):
        pairs += [(f"blocks.{n}.{ours}", f"model.layers.{n}.{theirs}") for ours, theirs in own]
    return [(ours, f"{theirs}.weight") for ours, theirs in pairs]


def _turned(name: str, array):
    return array.T if name.endswith(".kernel") else array


def _projections(model: decoder.Config) -> list[tuple[str, list[str]]]:
    return [
        (
            f"blocks.{n}.attention.qkv.kernel",
            [f"model.layers.{n}.self_attn.{name}.weight" for name in PROJECTIONS],
        )
        for n in range(model.layers)
    ]


def tensors_of(model: decoder.Config, params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors by their names there, of the parameters of an unrolled decoder by their paths."""
    found = {theirs: _turned(ours, params[ours]) for ours, theirs in _pairs(model)}
    kv_heads, head = model.own_shape
    ends = (model.heads * head, (model.heads + kv_heads) * head)
    for ours, theirs in _projections(model):
        found |= dict(zip(theirs, np.split(params[ours].T, ends), strict=True))
    return found


def params_of(model: decoder.Config, tensors: dict[str, np.ndarray], like: dict) -> dict[str, np.ndarray]:
    """The inverse of `tensors_of`. like: what has the shapes of our parameters, by their paths. Raises
    UserError where a tensor is missing, has another shape, or nobody asks for it."""
    blank = {ours: np.broadcast_to(np.float32(0), value.shape) for ours, value in like.items()}
    asked = {theirs: value.shape for theirs, value in tensors_of(model, blank).items()}
    # Some writers also store what follows from the rest.
    there = {name for name in tensors if not name.endswith("rotary_emb.inv_freq")}
    if model.tied and "lm_head.weight" in there:
        there.remove("lm_head.weight")
        require(
            np.array_equal(tensors["lm_head.weight"], tensors.get("model.embed_tokens.weight")),
            "config.json says tie_word_embeddings, but lm_head.weight is not model.embed_tokens.weight. "
            'Write "tie_word_embeddings": false there if the head is its own, or take lm_head.weight away.',
        )
    for names, word in (
        (asked.keys() - there, "lacks"),
        (there - asked.keys(), "has, but this model has not,"),
    ):
        require(not names, f"The folder {word} {len(names)} tensors; the first is {min(names, default='')}.")
    for name, shape in asked.items():
        own = tensors[name].shape
        require(
            own == shape,
            f"{name} is {own}, but by config.json it must be {shape}. Give the "
            "config.json that belongs to these weights.",
        )
        require(
            bool(np.isfinite(tensors[name]).all()),
            f"{name} has numbers that are not finite, and so would every output: the weights are damaged, or "
            "overflowed as they were made float16. Give others.",
        )
    found = {ours: _turned(ours, tensors[theirs]) for ours, theirs in _pairs(model)}
    for ours, theirs in _projections(model):
        found[ours] = np.concatenate([tensors[name] for name in theirs]).T
    return found
