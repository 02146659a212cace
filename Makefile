# `make demo` and `make test` are all a newcomer needs; both install into .venv first, once.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test test-fast lint format clean
.DEFAULT_GOAL := help

help:
	@echo "make demo   train a small language model dense and sparse, with a report (some minutes)"
	@echo "make test-fast  run the tests that are cheap to compile (4 minutes on two cores)"
	@echo "make test   run all tests (17 minutes on two cores); build/durations*.txt have the slowest"
	@echo "make lint   check style;  make format  apply it"
	@echo "make clean  remove .venv and everything built"

$(INSTALLED): pyproject.toml setup.py $(wildcard ffi/*.py ffi/*/* ffi/*/*/*)
	@$(PYTHON) -c 'import sys; v = sys.version_info; \
	  v >= (3, 11) or sys.exit(f"jax_sparse24 needs Python 3.11 or newer, this is {v[0]}.{v[1]}; use make PYTHON=python3.x")'
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

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist *.egg-info jax_sparse24/*.so
