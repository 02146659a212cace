# `make demo` and `make test` are all a newcomer needs; both install into .venv first, once.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test lint format clean
.DEFAULT_GOAL := help

help:
	@echo "make demo   train a small language model dense and sparse, with a report (some minutes)"
	@echo "make test   run the whole test suite"
	@echo "make lint   check style;  make format  apply it"
	@echo "make clean  remove .venv and everything built"

$(INSTALLED): pyproject.toml setup.py $(wildcard ffi/*.py ffi/*/*)
	@$(PYTHON) -c 'import sys; v = sys.version_info; \
	  v >= (3, 11) or sys.exit(f"jax_sparse24 needs Python 3.11 or newer, this is {v[0]}.{v[1]}; use make PYTHON=python3.x")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[train,plots,tensorboard,test]"
	@touch $@

demo: $(INSTALLED)
	$(BIN)/python -m experiments.demo

test: $(INSTALLED)
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest --numprocesses auto --dist loadfile

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist *.egg-info jax_sparse24/*.so
