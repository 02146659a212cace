"""The version of this package and the versions of jax that it runs with, checked when it is imported."""

import importlib.metadata
import re

__version__ = "0.1.0"

# As in pyproject.toml; the release `BELOW` was not tried.
OLDEST, BELOW = "0.10.2", "0.13"


def numbers(version: str) -> tuple[int, ...]:
    """The release of a version: (0, 13, 0) of "0.13.0.dev20261101"."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def check() -> None:
    """Raises ImportError, in one sentence, where jax or jaxlib is older or newer than this package knows."""
    for package in ("jax", "jaxlib"):
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # the import of jax says what is missing
        if not numbers(OLDEST) <= numbers(found) < numbers(BELOW):
            how = "old" if numbers(found) < numbers(OLDEST) else "new"
            raise ImportError(
                f"jax_sparse24 {__version__} runs with {package}>={OLDEST},<{BELOW}, and {package} {found} "
                f'is too {how}: pip install "jax>={OLDEST},<{BELOW}" "jaxlib>={OLDEST},<{BELOW}".'
            )


check()
