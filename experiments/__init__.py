"""Training language models with jax_sparse24: configs, data, training, reports. Needs the extra `train`."""

import importlib.util


def _require(*packages: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(
            f"experiments needs {', '.join(missing)}, of the extra `train`: pip install -e '.[train]'"
        )


_require("orbax", "tensorflow_datasets", "grain", "array_record", "tyro", "tqdm")
