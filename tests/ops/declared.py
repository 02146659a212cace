"""What `jax_sparse24.ops` declares, found by looking: tests that hold for every operation read it here."""

import importlib
import pkgutil

from jax_sparse24 import ops
from jax_sparse24.dispatch.operation import Kernel, Operation


def _found() -> dict[str, object]:
    """The values of all modules of ops, each by one of its names, such as "select.PRUNE24"."""
    found = {}
    for info in pkgutil.iter_modules(ops.__path__):
        module = importlib.import_module(f"{ops.__name__}.{info.name}")
        for name, value in vars(module).items():
            if isinstance(value, Operation | Kernel):
                found.setdefault(value, f"{info.name}.{name}")
    return {name: value for value, name in found.items()}


OPERATIONS = {name: value for name, value in _found().items() if isinstance(value, Operation)}
KERNELS = {value for value in _found().values() if isinstance(value, Kernel)} | {
    kernel
    for operation in OPERATIONS.values()
    for kernel in (operation.kernel, operation.cuda, operation.library)
    if isinstance(kernel, Kernel)
}
