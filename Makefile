# Everything here sets up what it needs: a Python of 3.11 or newer is all that must be there.
# `make demo` and `make test` are the two commands of a newcomer.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: help demo test fuzz lint proto mgctl wheel e2e bench clean
.DEFAULT_GOAL := help

help: ## say what there is
	@grep -hE '^[a-z0-9]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

# One stamp for each set of extras: installed anew only when pyproject.toml changed.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "metagpu needs Python 3.11 or newer; name one with: make PYTHON=python3.12 ...")'
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "metagpu needs Python's venv module; Debian and Ubuntu have it in the package python3-venv"; exit 1; }

$(VENV)/.run: pyproject.toml | $(VENV)/bin/python
	@echo "installing metagpu into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.test: pyproject.toml | $(VENV)/bin/python
	@echo "installing metagpu and its test tools into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@ $(VENV)/.run $(VENV)/.build

$(VENV)/.bench: pyproject.toml | $(VENV)/bin/python
	@echo "installing metagpu and its bench tools into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[bench]'
	@touch $@ $(VENV)/.run

demo: $(VENV)/.run ## show half a GPU for a pod, on a simulated node
	@$(BIN)/metagpu demo

# The `mgctl` of containers. Both are made at once; the first time also makes a libc, which takes minutes.
PROGRAMS := metagpu/programs/mgctl-x86_64 metagpu/programs/mgctl-aarch64

$(VENV)/.build: pyproject.toml | $(VENV)/bin/python
	@echo "installing a C compiler into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[build]'
	@touch $@ $(VENV)/.run

$(PROGRAMS) &: mgctl/mgctl.c mgctl/build.py | $(VENV)/.build
	@$(BIN)/python mgctl/build.py

mgctl: $(PROGRAMS) ## build the mgctl of containers, for x86-64 and arm64

wheel: $(PROGRAMS) ## build the package with everything in it, into dist/
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

test: $(VENV)/.test $(PROGRAMS) ## run the tests
	$(BIN)/python -m pytest

fuzz: $(VENV)/.test ## send the daemon's sockets what nobody should, for a minute (PIECES=60; PIECE=N)
	$(BIN)/python -m tests.fuzz $(if $(PIECE),--piece $(PIECE)) $(if $(PIECES),--pieces $(PIECES))

lint: $(VENV)/.test ## ruff, mypy, import contracts, and that generated code is what proto/ says
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python proto/generate.py --check

proto: $(VENV)/.test ## generate the protocol code anew
	$(BIN)/python proto/generate.py

e2e: $(VENV)/.test $(PROGRAMS) ## run the end-to-end tests on a real one-node Kubernetes (root, Go, Debian packages)
	$(BIN)/python -m tests.e2e.rig prepare
	$(BIN)/python -m pytest tests/e2e -m e2e --timeout 600

bench: $(VENV)/.bench ## measure, print side by side with the targets, write bench/results/
	$(BIN)/python -m bench

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) metagpu/programs .pytest_cache .mypy_cache .ruff_cache .hypothesis
