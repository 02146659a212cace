"""The house rules: who may import whom, and which files have become long."""

import ast
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from jax_sparse24.engine import float8, sparsifiers
from jax_sparse24.engine.operand import Sparsifier

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "jax_sparse24"
# From the bottom up. A unit (a module or folder) may import units of lower rows and itself.
LAYERS = [
    {"versions"},
    {"patterns", "schedule"},
    {"dispatch"},
    {"ops"},
    {"engine"},
    {"methods"},
    {"measure", "interception"},
    {"choices"},
    {"nn", "optim", "monitor"},
    {"linen"},
    {"loop", "surgery", "verification", "huggingface"},
    {"explanation", "installation"},
    {"info"},
    {"__init__"},
]
RANK = {unit: rank for rank, units in enumerate(LAYERS) for unit in units}
# The one import inside a function: of what needs a package that may be missing, for models of that package.
WITHIN_FUNCTIONS = {("nn", "jax_sparse24.nn.equinox")}
EXPERIMENT_ONLY = {
    *("orbax", "tensorflow_datasets", "tensorflow", "grain", "array_record"),
    *("tyro", "tqdm", "matplotlib", "tensorboardX", "wandb", "pyarrow", "tokenizers"),
}
FOLDERS = ("jax_sparse24", "experiments", "configs", "ffi", "tests", "docs")
SOURCES = sorted(
    path
    for folder in FOLDERS
    for pattern in ("*.py", "*.h", "*.cc", "*.cu", "*.cuh")
    for path in (ROOT / folder).rglob(pattern)
)


def name(path) -> str:
    return str(path.relative_to(ROOT))


def modules(folder) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def unit(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def imports(path: Path, within: ast.AST | None = None) -> set[str]:
    """Full names of all modules that a file imports, or imports names from, at any depth of its code.

    within: a part of the file's syntax tree, to look at that alone."""
    found = set()
    for node in ast.walk(within or ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}: relative import"
            for alias in node.names:
                inner = ROOT / Path(*node.module.split("."), alias.name)
                is_module = inner.is_dir() or inner.with_suffix(".py").exists()
                found.add(f"{node.module}.{alias.name}" if is_module else node.module)
    return found


def test_there_is_something_to_check():
    assert len(SOURCES) > 50
    assert {"jax", "jax_sparse24.dispatch.operation"} <= imports(PACKAGE / "ops" / "select.py")


@pytest.mark.parametrize("path", modules("jax_sparse24"), ids=name)
def test_imports_point_down(path):
    own = unit(path)
    assert own in RANK, f"{name(path)} has no place in LAYERS: give it one"
    for imported in imports(path):
        top, *rest = imported.split(".")
        assert top not in ("experiments", "configs", "tests"), f"{name(path)} imports {imported}"
        if top != "jax_sparse24":
            continue
        assert rest, f"{name(path)} imports names from the package that contains it"
        allowed = rest[0] == own or RANK[rest[0]] < RANK[own]
        assert allowed, f"{name(path)} ({own}) must not import {imported}: it is not below"


def test_imports_stand_at_the_top():
    """One inside a function hides a circle, unless it is of what needs a package that may be missing."""
    found = set()
    for path in modules("jax_sparse24"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                found |= {(unit(path), imported) for imported in imports(path, function)}
    assert found == WITHIN_FUNCTIONS


@pytest.mark.parametrize("folder", ["jax_sparse24", "experiments"])
def test_no_files_import_each_other_in_a_circle(folder):
    """At any depth of their code; a package counts as its `__init__.py`."""
    files = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in modules(folder)}
    files = {name.removesuffix(".__init__"): path for name, path in files.items()}
    left = {name: (imports(path) & files.keys()) - {name} for name, path in files.items()}
    while free := {name for name, below in left.items() if not below}:
        left = {name: below - free for name, below in left.items() if name not in free}
    assert not left, "these files import each other, or a file that does"


def private_imports(place: str, text: str) -> set[str]:
    """Names with an underscore first that the file at `place` imports from another package than its own.

    A test belongs to the package that its folder mirrors."""
    own = Path(place).parent.parts
    if own[0] == "tests":
        own = (PACKAGE.name, *own[1:])
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for full in names:
            parts = full.split(".")
            first = next((i for i, part in enumerate(parts) if re.match(r"_(?!_)", part)), None)
            if parts[0] not in FOLDERS or first is None:
                continue
            holder = parts[:first] if (ROOT / Path(*parts[:first])).is_dir() else parts[: first - 1]
            if own[: len(holder)] != tuple(holder):
                found.add(full)
    return found


@pytest.mark.parametrize("folder", ["jax_sparse24", "experiments", "configs", "tests"])
def test_nothing_outside_a_package_imports_its_private_names(folder):
    """No private module of it, and no private name of a module."""
    found = {name(path): private_imports(name(path), path.read_text()) for path in modules(folder)}
    assert not {place: names for place, names in found.items() if names}


@pytest.mark.parametrize(
    ("place", "text", "found"),
    [
        ("experiments/a.py", "from jax_sparse24.dispatch import _x", "jax_sparse24.dispatch._x"),
        ("jax_sparse24/engine/a.py", "import jax_sparse24.ops._x", "jax_sparse24.ops._x"),
        ("jax_sparse24/nn/a.py", "from jax_sparse24.ops.select import _x", "jax_sparse24.ops.select._x"),
        ("tests/native/a.py", "from jax_sparse24.ops._x import bits", "jax_sparse24.ops._x.bits"),
        ("tests/dispatch/a.py", "from jax_sparse24.dispatch._x import bits", None),
        ("tests/ops/a.py", "from jax_sparse24 import _cpu", None),
        ("jax_sparse24/dispatch/a.py", "from jax_sparse24.dispatch.table import _x", None),
        ("jax_sparse24/ops/a.py", "from numpy._core import x", None),
        ("jax_sparse24/ops/a.py", "from jax_sparse24.dispatch import __doc__", None),
    ],
)  # fmt: skip
def test_a_private_import_is_found(place, text, found):
    assert private_imports(place, text) == ({found} if found else set())


@pytest.mark.parametrize("folder", ["jax_sparse24", "experiments", "configs"])
def test_nothing_reads_private_names_of_a_module(folder):
    """Nor as an attribute, `module._name`. Tests may, which replace what a module remembers."""
    for path in modules(folder):
        tree = ast.parse(path.read_text())
        imported = {
            (alias.asname or alias.name).split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and re.match(r"_(?!_)", node.attr):
                owner = node.value.id if isinstance(node.value, ast.Name) else None
                assert owner not in imported, f"{name(path)} reads {owner}.{node.attr}"


@pytest.mark.parametrize("folder", ["experiments", "configs"])
def test_experiments_are_on_top(folder):
    below = {"experiments": {"configs", "tests"}, "configs": {"tests"}}[folder]
    for path in modules(folder):
        for imported in imports(path):
            assert imported.split(".")[0] not in below, f"{name(path)} imports {imported}"


# The rooms of experiments/, and the modules that they share, from the bottom up. All else there are commands,
# which may import everything.
ROOMS = [
    {"errors", "files"},
    {"data", "models"},
    {"config", "cli"},
    {"training"},
    {"analysis"},
    {"ablations"},
    {"benchmarks"},
]
ROOM_RANK = {room: rank for rank, rooms in enumerate(ROOMS) for room in rooms}


def room(path: Path) -> str:
    return path.relative_to(ROOT / "experiments").with_suffix("").parts[0]


def test_what_stands_beside_the_rooms_is_a_command():
    for path in modules("experiments"):
        is_command = room(path) not in ROOM_RANK and path.name != "__init__.py"
        assert is_command == (
            '__name__ == "__main__"' in path.read_text() and path.parent.name == "experiments"
        )


@pytest.mark.parametrize("path", [p for p in modules("experiments") if room(p) in ROOM_RANK], ids=name)
def test_rooms_import_rooms_below(path):
    own = room(path)
    for imported in imports(path):
        top, *rest = imported.split(".")
        if top == "experiments" and rest[:1] != [own]:
            below = rest and ROOM_RANK.get(rest[0], 99) < ROOM_RANK[own]
            assert below, f"{name(path)} must not import {imported}: it is not below"


@pytest.mark.parametrize("path", modules("jax_sparse24"), ids=name)
def test_the_package_does_without_packages_of_experiments(path):
    used = {imported.split(".")[0] for imported in imports(path)}
    assert not used & EXPERIMENT_ONLY
    if RANK.get(unit(path), 99) < RANK["nn"]:
        assert not used & {"flax", "optax"}, "the functional core needs neither flax nor optax"


@pytest.mark.parametrize("folder", ["engine", "nn", "methods"])
def test_what_runs_is_decided_in_dispatch(folder):
    """What executes plans reads no measured table and does not ask what machine this is."""
    deciding = {"jax_sparse24.dispatch.table", "jax_sparse24.dispatch.hardware"}
    assert not {
        name(path): found
        for path in modules(ROOT / "jax_sparse24" / folder)
        if (found := imports(path) & deciding)
    }


def asked_of_plans(text: str) -> list[str]:
    """Where code asks of which kind a sparsifier is, or for a row of a plan by the name of its product."""
    found, nodes = [], list(ast.walk(ast.parse(text)))
    own = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
    for node in nodes:
        match node:
            case ast.Call(func=ast.Name("isinstance"), args=[_, kinds]):
                named = {part.id for part in ast.walk(kinds) if isinstance(part, ast.Name)}
                found += [ast.unparse(node)] * bool(named & SPARSIFIERS - own)
            case ast.Call(func=ast.Attribute(attr="row"), args=[ast.Constant(str()), *_]):
                found.append(ast.unparse(node))
    return found


SPARSIFIERS = {
    name
    for module in (sparsifiers, float8)
    for name, value in vars(module).items()
    if isinstance(value, type) and issubclass(value, Sparsifier)
}


def test_only_rules_of_fused_passes_match_plans():
    """Elsewhere no choice depends on the kind of a sparsifier, and the engines ask for rows of products whose
    names they are given."""
    assert {"Top2", "Blocks", "DenseValues", "Float8", "Sparsifier"} <= SPARSIFIERS
    files = [*modules("jax_sparse24"), *modules("experiments")]
    texts = {name(path): path.read_text() for path in files}
    rules = "jax_sparse24/engine/fusions.py"
    assert len(asked_of_plans(texts.pop(rules))) > 9
    found = {place: asked_of_plans(text) for place, text in texts.items()}
    for place, asked in found.items():
        if not place.startswith("jax_sparse24/engine/"):  # who tells of a plan, not who executes it
            found[place] = [call for call in asked if call.startswith("isinstance")]
    assert not {place: asked for place, asked in found.items() if asked}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("isinstance(row.by, Top2)", 1),
        ("isinstance(by, sparse | Blocks)", 1),
        ("plan.row('B2').operand == 'y2'", 1),
        ("plan.row(name)", 0),
        ("isinstance(x, Packed24)", 0),
        ("class Blocks: pass\nisinstance(x, Blocks)", 0),
    ],
)
def test_a_question_about_a_plan_is_found(text, found):
    assert len(asked_of_plans(text)) == found


def test_one_file_calls_the_foreign_function_interface():
    users = {
        name(p)
        for p in modules("jax_sparse24")
        if re.search(r"jax\.ffi|jax import ffi|extend\.ffi", p.read_text())
    }
    assert users == {"jax_sparse24/dispatch/native.py"}


NATIVE = {
    "core": {"core"},
    "call": {"call", "core"},
    "cpu": {"cpu", "call", "core"},
    "cuda": {"cuda", "call", "core"},
}
# Handlers run on the device of the module that they are compiled into.
DEVICES = {"../cpu/device.h", "../cuda/device.h"}


@pytest.mark.parametrize("room", NATIVE)
def test_native_includes_point_down(room):
    """What the CPU and CUDA share is in `call` and `core`; neither includes the other's headers, and one file
    chooses between them."""
    files = [p for p in (ROOT / "ffi" / room).rglob("*") if p.suffix in (".h", ".cc", ".cu", ".cuh")]
    assert files
    for path in files:
        for included in re.findall(r'^#include "(?!xla/)(.+)"', path.read_text(), re.M):
            target = (path.parent / included).resolve()
            assert target.is_file(), f"{name(path)} includes {included}, which is not there"
            if name(path) == "ffi/call/handler.h" and included in DEVICES:
                continue
            to = target.relative_to(ROOT / "ffi").parts[0]
            assert to in NATIVE[room], f"{name(path)} includes {included}"


@pytest.mark.parametrize("path", sorted((ROOT / "ffi/cuda").rglob("*.cu")), ids=name)
def test_a_kernel_begins_with_operands_steps_and_constraints(path):
    """In the comment at its top, in this order, after a sentence that says what it computes."""
    comment = re.match(r"(//.*\n)*", path.read_text())[0]
    assert re.match(r"// [A-Z0-9].*\n((//.*\n)*?)//\n// Operands: ", comment), (
        "what it computes, then operands"
    )
    found = re.findall(r"^// (Operands|Steps|Constraints): ", comment, re.M)
    assert found == ["Operands", "Steps", "Constraints"]


def test_long_files_are_pointed_out():
    for path in SOURCES:
        lines = len(path.read_text().splitlines())
        if lines > 400:
            warnings.warn(f"{name(path)} has {lines} lines: is it still one idea?", stacklevel=1)


def text_files():
    """What is, or would be, in version control."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    paths = [ROOT / line for line in listed.stdout.splitlines()] or SOURCES
    for path in paths:
        if path.suffix not in (".png", ".npz", ".so") and path.is_file():
            yield path, path.read_text(errors="replace")


def test_no_file_names_a_private_host():
    """Hosts in addresses have a public name; no address is of a private network."""
    public = re.compile(r"(^|\.)[\w-]+\.(com|org|io|dev|net|edu|gov|ai|ac\.uk|de)$")
    local = {"localhost", "127.0.0.1", "0.0.0.0"}
    private = re.compile(r"\b(10\.\d+|192\.168|172\.(1[6-9]|2\d|3[01]))\.\d+\.\d+\b")
    for path, text in text_files():
        for host in re.findall(r"\b(?:https?|ftp|ssh|git|s3|gs)://(?:[^/@\s]+@)?([\w.-]+)", text):
            host = host.strip(".")
            assert public.search(host) or host in local, f"{name(path)} names {host}"
        assert not private.search(text), f"{name(path)} names a private address"
        assert "index-url" not in text or path == Path(__file__), f"{name(path)} names a package index"


_BLOCK = """
import importlib.abc, sys
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"No module named {{fullname!r}}", name=fullname.split(".")[0])
sys.meta_path.insert(0, Block())
import jax_sparse24 as s24
"""


def run(code: str) -> str:
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_functional_core_runs_without_flax_and_optax():
    """Every public function runs, and the layers say what to install."""
    out = run(
        _BLOCK.format(blocked={"flax", "optax", *EXPERIMENT_ONLY})
        + """
import jax, jax.numpy as jnp
x = jnp.ones((8, 8))
s24.squared_relu24(s24.matmul(s24.pack24(s24.soft24(x, 1), 1), x)).todense()
s24.sparse_dot(x, x, s24.methods.FST(), state=s24.methods.FST().init(x), key=jax.random.key(0))
for name in ("nn", "optim", "refresh", "explain"):
    try:
        getattr(s24, name)
    except ModuleNotFoundError as error:
        print(name, "|", error)
assert not {"flax", "optax"} & set(sys.modules)
"""
    )
    for attribute, package in (
        ("nn", "flax"),
        ("optim", "optax"),
        ("refresh", "flax"),
        ("explain", "flax"),
    ):
        assert re.search(
            rf"^{attribute} \| s24\.{attribute} needs {package}: pip install {package}$", out, re.M
        ), out


def test_importing_loads_neither_flax_nor_optax():
    out = run("import sys, jax_sparse24; print(sorted({'flax', 'optax'} & set(sys.modules)))")
    assert out.strip() == "[]"
