# `make demo` and `make test` are all a newcomer needs; both install into .venv first, once.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test test-fast lint format clean
.DEFAULT_GOAL := help

help:
	@echo "make demo   train a small language model dense and sparse, with a report (some minutes)"
	@echo "make test-fast  run the tests that are not marked slow (meant to take 4 minutes on two cores; not measured)"
	@echo "make test   run all tests (28 minutes on two cores); build/durations.txt has the slowest"
	@echo "make lint   check style;  make format  apply it"
	@echo "make clean  remove .venv and everything built"

$(INSTALLED): pyproject.toml setup.py $(wildcard ffi/*.py ffi/*/* ffi/*/*/*)
	@$(PYTHON) -c 'import sys; v = sys.version_info; \
	  v >= (3, 11) or sys.exit(f"jax_sparse24 needs Python 3.11 or newer, this is {v[0]}.{v[1]}; use make PYTHON=python3.x")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[train,plots,tensorboard,test]"
	@touch $@

demo: $(INSTALLED)
	$(BIN)/python -m experiments.demo

# A process takes whole files, in the order of the collection: slow ones first.
PYTEST := JAX_PLATFORMS=cpu $(BIN)/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

test: $(INSTALLED)
	$(PYTEST) --limit=120 --record=build/durations.txt

test-fast: $(INSTALLED)
	$(PYTEST) -m "not slow"

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist *.egg-info jax_sparse24/*.so
