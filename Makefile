# make demo | make test | make check | make docs | make map | make bench | make fuzz; each makes .venv and installs
# what it needs when it is not there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Threads that wait should sleep, not spin: several times faster where the cores are shared.
export OMP_WAIT_POLICY ?= PASSIVE

# Compiled modules are kept: without them every process that a test starts compiles the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo test test-all check format docs map bench fuzz clean

install: $(STAMP)

INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) ".[dev]"
	touch $@

# What the demo needs, which is a fraction of what tests need.
demo: $(VENV)/.demo-installed
	mkdir -p build
	$(BIN)/structgp demo -o build/demo.html

$(VENV)/.demo-installed: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) ".[fast,crf]"
	touch $@

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal

# Everything, the paper's folds included (set STRUCTGP_DATA); skips what this machine cannot run.
test-all: $(STAMP)
	$(BIN)/python -m pytest -m ""

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The map of modules in CONTRIBUTING.md, from their docstrings.
map:
	$(PYTHON) docs/_ext/module_map.py

# The site, in build/docs/index.html; a warning is an error.
docs: $(VENV)/.docs-installed
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs
	@echo "build/docs/index.html"

$(VENV)/.docs-installed: $(STAMP)
	$(INSTALL) ".[docs]"
	touch $@

# Speed and memory beside named peers; all of it, or BENCH="chain --quick".
bench: $(VENV)/.bench-installed
	$(BIN)/python -m benchmarks $(BENCH)

$(VENV)/.bench-installed: $(STAMP)
	$(INSTALL) ".[bench]"
	touch $@

# Attacks, with a seed: FUZZ="--seed 3 --scale 2 models". What fails is kept in build/fuzz.
fuzz: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m fuzz $(FUZZ)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
