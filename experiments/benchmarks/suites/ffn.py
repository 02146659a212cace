"""Suite ffn: a feed-forward block per method, forward and backward, with packing and draws counted."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_sparse24 as s24
from experiments.benchmarks import check, dense_e4m3, rows, xla_programs
from experiments.benchmarks.rows import show_mb, show_ms, show_ratio
from experiments.benchmarks.settings import Case, Settings
from experiments.benchmarks.torch import programs as torch_programs
from jax_sparse24.dispatch.decision import dense_float8_obstacle
from jax_sparse24.engine import fusions
from jax_sparse24.engine.execution import Execution
from jax_sparse24.engine.operand import Operands, Request
from jax_sparse24.engine.plan import FFN
from jax_sparse24.measure import Oracle, Program, interleaved, random, untuned

WHAT = """`act(X W1) W2` with squared ReLU, T tokens, widths d and f: the forward pass, and forward with
backward (gradients of X, W1 and W2). Everything a step does is counted: packing, draws, unpacking where
the product runs dense; FST's search for masks, once in 40 steps, is in the suite train-step. *against* names
the fastest dense block of the case, which ratios divide by the block's time. *Producers* and *products* are
measured one by one; the rest is what they leave of the whole, below zero where the whole takes less, which
XLA compiles together. F1 that gives Y2, with squared ReLU in its kernel, is a product, and so is B1 that
gives dY1; a pass that makes dY1 and its estimate for B4 is a producer; else activation and dY1 are rest.
*torch dense* is the same block compiled by PyTorch; *torch 2:4*, on a GPU, cuts both weights by a
transposable mask, compresses them along both axes and multiplies by PyTorch's cuSPARSELt, gradients of
weights being dense: the products of `FST-dense-wgrad`. *torch 2:4, compressed once in 40* counts a fortieth
of the cut and the compression: weights would be 40 steps old, so it bounds what that could give."""
COMPRESSED_EVERY = 40
KEY = np.array([2404, 1847], np.uint32)
OUTPUTS = ("y", "dx", "dw1", "dw2")
KINDS = ("producer", "product")
PARTS = ("forward", "both")
TORCH_SPARSE, BEFORE = "torch 2:4", "compressed before"


def run(settings: Settings, progress) -> Iterator[tuple[str, Callable[[], list[dict]]]]:
    """Names of cases and what gives their rows, one per method."""
    for case in settings.cases("ffn"):
        for dtype in settings.dtypes:
            what = f"T={case.T} d={case.d} f={case.f} {dtype}"
            yield what, partial(measure_case, case, dtype, settings, progress)


def data(case: Case, dtype: str) -> dict:
    """Random operands of the six products; weights scaled as at initialisation."""
    T, d, f = case
    shapes = {"x": (T, d), "w1": (d, f), "w2": (f, d), "y2": (T, f), "dy1": (T, f), "dy3": (T, d)}
    scale = {"w1": d**-0.5, "w2": f**-0.5}
    found = {
        name: (random(shape, "float32", seed) * scale.get(name, 1.0)).astype(dtype)
        for seed, (name, shape) in enumerate(shapes.items())
    }
    return found | {"y2": jnp.square(jax.nn.relu(found["y2"]))}


def dense_block(x, w1, w2, state=None):
    return jnp.square(jax.nn.relu(x @ w1)) @ w2


def block(method, implementation):
    """(x, w1, w2, state) -> y of a method; Dense in plain jnp, independent of this package. The state is an
    argument as in training: XLA's compiler computes with constants, such as large masks for half a minute."""
    if type(method) is s24.methods.Dense:
        return dense_block
    key = KEY if method.stochastic else None
    return lambda x, w1, w2, state: s24.sparse_ffn(
        x, w1, w2, method, state, key, implementation=implementation
    )


def state_of(method, operands) -> dict:
    """The state of both weights, neurons clustered but not moved: it costs the same."""
    state = {w: method.init(operands[w], w) for w in ("w1", "w2")}
    if method.router:
        state["w1"] |= method.router.arrange(operands["w1"])[1]
    return state


def forward_backward(function):
    """(x, w1, w2, dy, and what else the function takes) -> (y, dx, dw1, dw2)."""

    def run(x, w1, w2, dy, *state):
        y, vjp = jax.vjp(lambda *inputs: function(*inputs, *state), x, w1, w2)
        return y, *vjp(dy)

    return run


class Expected(NamedTuple):
    """What a block's (y, dx, dw1, dw2) must be, and how far each may be from it."""

    results: tuple
    near: tuple[float, ...]


def verdict(result, expected: Expected) -> str:
    """Of (y, dx, dw1, dw2), or of a leading part."""
    far = [check.distance(a, b) > near for a, b, near in zip(result, *expected, strict=False)]
    return "wrong" if any(far) else "ok"


def float64_block(x, w1, w2, dy):
    """(y, dx, dw1, dw2) of the dense block in NumPy."""
    x, w1, w2, dy = (np.asarray(v).astype(np.float64) for v in (x, w1, w2, dy))
    relu = np.maximum(x @ w1, 0)
    dy1 = (dy @ w2.T) * 2 * relu
    return relu**2 @ w2, dy1 @ w1.T, x.T @ dy1, (relu**2).T @ dy


def float32_block(x, w1, w2, dy):
    """The same in float32 on the device, where NumPy would take minutes."""
    wide = [v.astype(jnp.float32) for v in (x, w1, w2, dy)]
    with jax.default_matmul_precision("highest"):
        return Program(forward_backward(dense_block), *wide, timed=False).result


def exact(case: Case):
    """What computes the dense block's (y, dx, dw1, dw2)."""
    return float64_block if case.T * case.d * case.f <= Oracle.LARGE else float32_block


def expected(
    case: Case, dtype: str, methods: dict, states: dict, args, progress=lambda text: None
) -> dict[str, Expected]:
    """Of each method, by masked-dense products. progress: called with what is worked on."""

    def program(name):
        function = block(methods[name], "reference")
        if function is dense_block:
            return lambda *given: exact(case)(*given[:-1])
        lowered = jax.jit(forward_backward(function)).lower(*args, states[name])
        return lowered.compile(compiler_options=untuned())

    def truth(name, compiled):
        results = compiled(*args, states[name])
        if not chooses(methods[name]):
            return up_to_rounding(results, dtype, case)
        x, w1, w2, dy = args
        others = compiled(x, check.moved(w1, 1), check.moved(w2, 2), dy, states[name])
        near = check.tolerance(dtype, max(case))
        return Expected(
            results,
            tuple(
                check.tolerance_of_choices(near, check.distance(a, b), choices(methods[name], case))
                for a, b in zip(others, results, strict=True)
            ),
        )

    progress(f"{len(methods)} programs of what the results must be are compiled")
    programs = check.compiled({name: partial(program, name) for name in methods})
    progress("masked-dense products run")
    return {name: truth(name, compiled) for name, compiled in programs.items()}


def up_to_rounding(results, dtype: str, case: Case) -> Expected:
    """Of a block that makes no choices (`chooses`)."""
    return Expected(results, (check.tolerance(dtype, max(case)),) * len(OUTPUTS))


def chooses(method) -> bool:
    """Whether results depend on which activations or gradients are cut or drawn, or on what is rounded to 8
    bits, which roundings decide."""
    row = method.ffn_plan().row("F2")
    rounds = row is not None and row.other is not None
    return method.stochastic or rounds or (row is not None and row.operand == "y2")


def choices(method, case: Case) -> int:
    """How many choices a method makes among the activations or gradients of a block: of two in each group of
    four, or of four columns in each block of V rows and M columns."""
    row = method.ffn_plan().row("F2")
    *rows, _, columns = (row.by.pattern if row is not None else "2:4").split(":")
    return case.T * case.f // math.prod(map(int, (*rows, columns)))


class Block(NamedTuple):
    """A dense block as XLA compiles it otherwise, like PyTorch's (`torch_ffn.Block`)."""

    forward: Program
    both: Program
    weights: tuple[jax.Array, jax.Array]


def dense_variants(args, dtype: str, exhaustive: bool) -> dict:
    """XLA's dense blocks besides the default one, by name."""
    found = {}
    for name, variant in xla_programs.variants(dtype, exhaustive).items():

        def build(name=name, variant=variant):
            *inputs, dy = xla_programs.cast(variant, args)
            forward = Program(lambda *inputs: (dense_block(*inputs),), *inputs, options=variant.options)
            both = Program(forward_backward(dense_block), *inputs, dy, options=variant.options)
            return {f"Dense: {name}": Block(forward, both, tuple(args[1:3]))}

        found |= torch_programs.or_warn(f"XLA's dense block, {name},", build)
    return found


def rival_blocks(*args) -> dict:
    """PyTorch's, by name."""
    from experiments.benchmarks.torch import ffn as torch_ffn

    return torch_ffn.blocks(*args)


def made_by(name: str) -> str:
    """The implementation of a block that is no method's."""
    return "torch" if name.startswith("torch") else "xla"


def with_amortised(found: list[dict]) -> list[dict]:
    """Rows, and after PyTorch's 2:4 block one that compresses once in COMPRESSED_EVERY calls."""
    by_name = {row["method"]: row for row in found}
    if not {TORCH_SPARSE, f"{TORCH_SPARSE}, {BEFORE}"} <= set(by_name):
        return found
    often, never = by_name[TORCH_SPARSE], by_name[f"{TORCH_SPARSE}, {BEFORE}"]
    ms = dict(never["ms"])
    for part in PARTS:
        if part in ms and part in often["ms"]:
            ms[part] = rows.amortised(never["ms"][part], often["ms"][part], COMPRESSED_EVERY)
        else:
            ms.pop(part, None)
    row = never | {"method": f"{TORCH_SPARSE}, compressed once in {COMPRESSED_EVERY}", "ms": ms}
    place = found.index(never) + 1
    return [*found[:place], row, *found[place:]]


def rival_verdict(rival, part: str, args, truth, dtype, case: Case) -> str:
    """Of a block that multiplies by weights of its own; truth: what dense weights give."""
    x, *weights, dy = args
    pruned = [p is not w for p, w in zip(rival.weights, weights, strict=True)]
    if any(pruned):
        if not all(map(check.is_pruned, rival.weights, weights)):
            return "wrong"
        truth = exact(case)(x, *rival.weights, dy)
    return verdict(getattr(rival, part).result, up_to_rounding(truth, dtype, case))


def measure_case(case: Case, dtype: str, settings: Settings, progress=lambda text: None) -> list[dict]:
    """All methods of one case, sampled in turn. progress: called with what is worked on."""
    where = f"T={case.T} d={case.d} f={case.f} {dtype}"
    operands = data(case, dtype)
    args = [operands[name] for name in ("x", "w1", "w2")]
    implementation = None if settings.implementation == "auto" else settings.implementation
    states = {name: state_of(method, operands) for name, method in settings.methods.items()}
    truths = expected(
        *(case, dtype, settings.methods, states, (*args, operands["dy3"])),
        lambda text: progress(f"{where}: {text}"),
    )
    programs, status = {}, {}
    for name, method in settings.methods.items():
        progress(f"{where}: {name} is checked")
        function, state = block(method, implementation), states[name]
        programs[name, "forward"] = Program(lambda *args, run=function: (run(*args),), *args, state)
        programs[name, "both"] = Program(forward_backward(function), *args, operands["dy3"], state)
        for part in PARTS:
            result = programs[name, part].result
            status[name, part] = verdict(result, truths[name])
    args += [operands["dy3"]]
    progress(f"{where}: dense blocks by other programs")
    rivals = dense_variants(args, dtype, settings.exhaustive)
    if settings.torch:
        rivals |= torch_programs.where_possible("block", lambda: rival_blocks(*args))
    for name, rival in rivals.items():
        for part in PARTS:
            programs[name, part] = getattr(rival, part)
            status[name, part] = rival_verdict(rival, part, args, truths["Dense"].results, dtype, case)
    progress(f"{where}: all in turn")
    times = interleaved(
        programs, settings.repeats, settings.seconds, seed=settings.seed_of("ffn", *case, dtype)
    )
    for place, program in programs.items():
        if status[place] == "ok" and not program.repeats_itself():
            status[place] = "not repeatable"
    ms = rows.times({place: t for place, t in times.items() if status[place] == "ok"})
    found, dense = [], [name for name in ("Dense", *rivals) if rows.dense_name(name, "both")]
    for name in ("Dense", *rivals, *list(settings.methods)[1:]):
        own = {rows.dense_name(base, part): (base, part) for base, part in programs if base in dense}
        own |= {part: (name, part) for part in PARTS}
        if name in settings.methods and (rival := settings.arms[name].rival):
            own |= {dense_e4m3.named(part): (rival, part) for part in PARTS}
        row = {
            **case._asdict(),
            "dtype": dtype,
            "method": name,
            "implementation": settings.implementation if name in settings.methods else made_by(name),
            "status": {k: status[v] for k, v in own.items()},
            "ms": {k: ms[v] for k, v in own.items() if v in ms},
            "xla_bytes": {part: programs[name, part].bytes for part in PARTS},
        }
        if name in settings.methods:
            method, state = settings.methods[name], states[name]
            row |= dense_e4m3.simulated(settings.arms[name].rival)
            row |= {"bytes": weight_bytes(method, operands, state)}
        if name in settings.methods and settings.parts:
            progress(f"{where}: parts of {name}")
            row["parts_ms"] = parts(case, method, operands, state, implementation, settings)
        found.append(row)
    return with_amortised(found)


def parts(case: Case, method, operands, states, implementation, settings: Settings) -> dict:
    """Medians of each product alone, and of what makes its sparse operand, by product. One pass that makes
    the operands of several is counted at B3, one that packs a weight for two at the forward one, and one that
    makes dY1 and its estimate at B4. A product whose kernel also applies the activation, or its slope, is one
    with it."""
    run = Execution("bench", "ffn", method.ffn_plan(), implementation, "squared_relu")
    saved, made, features, programs, weights = None, {}, None, {}, {}
    x, dy1, dy3 = (operands[name] for name in ("x", "dy1", "dy3"))
    decisions = run.decisions(FFN, {name: operand.shape for name, operand in operands.items()}, x.dtype)
    if run.plan.save_packed:
        given, counts = {"y2": dy1, "w2": operands["w2"]}, fusions.COUNTS.matches(run, dy1)
        first = run.cut("F2", given, states, KEY, decisions["F2"], packed=True, counts=counts)
        saved = first.left
        if fusions.SAVED_24.matches(run, saved, decisions):
            one_pass = partial(fusions.SAVED_24.run, decisions, run)
            programs["producer", "B3"] = Program(one_pass, saved, first.counts, dy1, x, dy3)
            saved, made, features = programs["producer", "B3"].result
        for name, dense in (("B2", dy3), ("B4", x)):
            if fusions.SAVED_VNM.matches(run, name, saved, decisions[name]):
                again = partial(fusions.SAVED_VNM.run, decisions[name], run, name)
                programs["producer", name] = Program(partial(_made_only, again), saved, dense)
                made[name] = jax.jit(again)(saved, dense)
    for names, weight, dense in ((("F1", "B3"), "w1", (x, dy1)), (("F2", "B1"), "w2", (operands["y2"], dy3))):
        if fusions.BOTH_WAYS.matches(run, names, decisions):
            pack = partial(fusions.BOTH_WAYS.run, run, names, decisions=decisions)
            program = programs["producer", names[0]] = Program(pack, operands[weight], states)
            for name, left, right in zip(names, dense, program.result, strict=True):
                made[name] = Operands(left, right, decisions[name])
        if fusions.UNPACKED.matches(run, names, decisions):
            own = {key: operands[key] for key, _ in FFN[names[0]]}
            done = fusions.operands_of(run, names[0], own, states, KEY, decisions[names[0]])
            weights[names[1]] = {weight: done.right}
    rule = fusions.dy1_in_one_pass(run, dy3, operands["y2"], decisions)
    if rule is fusions.SLOPE_MVUE:
        one_pass = partial(fusions.SLOPE_MVUE.run, decisions["B4"], run, key=KEY)

        def dy1_and_estimate(*given):
            dy1, done = one_pass(*given)
            return dy1, done.right  # X would be copied to be a result

        given = operands["y2"], dy1, x
        programs["producer", "B4"] = Program(dy1_and_estimate, *given)
        _, made["B4"] = jax.jit(one_pass)(*given)
    for name, ((a, _), (b, _)) in FFN.items():
        own = {key: operands[key] for key in (a, b)} | weights.get(name, {})
        decision = decisions[name]
        parts_of = (rule for rule in fusions.MEASURED if rule.name == name)
        part = next((rule for rule in parts_of if rule.matches(run, *own.values(), decision)), None)

        def cut(own, states, saved, name=name, decision=fusions.DENSE if part else decision):
            return fusions.operands_of(run, name, own, states, KEY, decision, saved)

        given = own, states, saved if name == "B3" else None
        done = made.get(name) or jax.jit(cut)(*given)
        if run.plan.row(name) is not None and name not in made and ("producer", name) not in programs:
            programs["producer", name] = Program(partial(_made_only, cut), *given)
        if part:
            at_entries = partial(part.values, implementation=implementation)
            programs["product", name] = Program(at_entries, done.left, done.right, saved)
        elif name == "F1" and fusions.SQUARED.matches(run, x, case.f, decision, None):
            programs["product", name] = Program(partial(fusions.SQUARED.run, run), done)
        elif name == "B1" and rule is fusions.SLOPED:
            programs["product", name] = Program(partial(fusions.SLOPED.run, run), done, operands["y2"])
        else:
            programs["product", name] = Program(partial(run.multiply, name, features=features), done)
    seed = settings.seed_of("parts", *case, type(method).__name__)
    times = interleaved(programs, settings.repeats, settings.seconds, seed=seed)
    found = {kind: {} for kind in KINDS}
    for (kind, name), t in times.items():
        found[kind][name] = rows.ms(t.median)
    return found


def _made_only(make, *given) -> list:
    """The operands that `make(*given)` makes. One that stays as it is would be copied to be a result."""
    done, own = make(*given), jax.tree.leaves(given)
    return [x for x in (done.left, done.right) if not any(x is array for array in own)]


def weight_bytes(method, operands, states) -> dict:
    """Bytes of both weights as parameters, and as what the forward products read.

    A weight that is rounded to 8 bits has that many only where hardware multiplies it so."""
    simulated, total = dense_float8_obstacle() is not None, {"dense": 0, "packed": 0}
    for product, weight in (("F1", "w1"), ("F2", "w2")):
        row, w = method.ffn_plan().row(product), operands[weight]
        total["dense"] += w.nbytes
        if row is None or row.operand != weight:
            total["packed"] += w.nbytes
        else:
            eight_bits = () if simulated else row.eight_bits
            make = row.by.quantised if eight_bits else row.by
            form = "packed" if "packed" in (eight_bits or row.by.forms) else "dense"
            request = Request(states[weight], None, "reference", form)
            made = jax.eval_shape(lambda w, make=make, request=request: make(w, -2, request), w)
            total["packed"] += sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(made))
    return total


def part(row: dict, kind: str) -> float | None:
    """What all producers or all products take one by one, in ms; None where they were not measured."""
    found = row.get("parts_ms")
    return None if found is None else math.fsum(found[kind].values())


def rest(row: dict) -> float | None:
    """What forward and backward take besides producers and products, in ms. Below zero where the whole takes
    less than its parts one by one: noise, or fusion across them."""
    both, known = row["ms"].get("both"), [part(row, kind) for kind in KINDS]
    return None if both is None or None in known else math.fsum((both["median"], *(-time for time in known)))


def table(found: list[dict]) -> str:
    """Ratios first, then times, energy, where the time goes, and memory."""
    in_8_bits = rows.any_in_8_bits(found)
    header = [
        *("method", "T", "d", "f", "dtype", "forward + backward", "forward", "against", "sessions: fwd+bwd"),
        *rows.IN_8_BITS_HEADER * in_8_bits,
        *(
            "fwd+bwd ms",
            "dense fwd+bwd ms",
            *rows.ENERGY_HEADER,
            *(f"{kind}s ms" for kind in KINDS),
            "rest ms",
        ),
        *("weights MB: dense", "packed", "XLA temporaries MB"),
    ]
    lines = []
    for row in found:
        bytes_of = row.get("bytes", {})
        lines.append(
            [
                *(row[k] for k in ("method", "T", "d", "f", "dtype")),
                show_ratio(row, "dense both", "both"),
                show_ratio(row, "dense forward", "forward"),
                rows.against(row, "dense both"),
                rows.over_sessions(row, "dense both", "both"),
                *rows.in_8_bits(row, "both") * in_8_bits,
                show_ms(row, "both"),
                show_ms(row, rows.base_of(row, "dense both")),
                *rows.energy(row, "dense both", "both"),
                *("-" if ms is None else f"{ms:.3g}" for ms in (*(part(row, k) for k in KINDS), rest(row))),
                show_mb(bytes_of.get("dense")),
                show_mb(bytes_of.get("packed")),
                show_mb(row["xla_bytes"]["both"].get("temp")),
            ]
        )
    return rows.table(header, lines)
