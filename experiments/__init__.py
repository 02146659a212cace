"""Training language models with jax_sparse24: configs, data, training, reports. Needs the extra `train`."""

import importlib.util
import signal
import sys

# While `python -m experiments.COMMAND` is imported, which takes seconds, Ctrl-C ends it at once, without a
# traceback; `cli.command` takes it over.
if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _require(*packages: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(
            f"experiments needs {', '.join(missing)}, of the extra `train`: pip install -e '.[train]'"
        )


_require("orbax", "tensorflow_datasets", "grain", "array_record", "tyro", "tqdm")
