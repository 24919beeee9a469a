# Everything here sets up what it needs: a Python of 3.11 or newer is all that must be there.
# `make demo` and `make test` are the two commands of a newcomer.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

# Every package that is installed here is named in requirements/*.lock with its hashes.
PIP    := $(BIN)/python -m pip --quiet --disable-pip-version-check
LOCKED := $(PIP) install --require-hashes --no-deps
OURS   := $(PIP) install --no-build-isolation --no-deps --editable .

.PHONY: help demo test fuzz soak chaos mutants lint proto mgctl reproducible reasons man wheel pictures chart image e2e conformance docs cost bench locks sbom release release-check clean
.DEFAULT_GOAL := help

help: ## say what there is
	@grep -hE '^[a-z0-9]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

# One stamp for each lock: installed again only when it or pyproject.toml changed.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "metagpu needs Python 3.11 or newer; name one with: make PYTHON=python3.12 ...")'
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "metagpu needs Python's venv module; Debian and Ubuntu have it in the package python3-venv"; exit 1; }

$(VENV)/.run: pyproject.toml requirements/run.lock requirements/package.lock | $(VENV)/bin/python
	@echo "installing metagpu into $(VENV)"
	@$(LOCKED) -r requirements/run.lock -r requirements/package.lock
	@$(OURS)
	@touch $@

$(VENV)/.build: pyproject.toml requirements/build.lock | $(VENV)/bin/python
	@echo "installing metagpu and a C compiler into $(VENV)"
	@$(LOCKED) -r requirements/build.lock
	@$(OURS)
	@touch $@ $(VENV)/.run

$(VENV)/.test: pyproject.toml requirements/dev.lock | $(VENV)/bin/python
	@echo "installing metagpu and its development tools into $(VENV)"
	@$(LOCKED) -r requirements/dev.lock
	@$(OURS)
	@touch $@ $(VENV)/.run $(VENV)/.build

$(VENV)/.docs: pyproject.toml requirements/docs.lock | $(VENV)/bin/python
	@echo "installing mkdocs into $(VENV)"
	@$(LOCKED) -r requirements/docs.lock
	@touch $@

demo: $(VENV)/.run ## show half a GPU for a pod, on a simulated node
	@$(BIN)/metagpu demo

# The `mgctl` of containers. Both are made at once; the first time also makes a libc, which takes minutes.
PROGRAMS := metagpu/programs/mgctl-x86_64 metagpu/programs/mgctl-aarch64

$(PROGRAMS) &: mgctl/mgctl.c mgctl/hook.c mgctl/hook.h mgctl/build.py metagpu/plugins/pod_api/command.py | $(VENV)/.build
	@$(BIN)/python mgctl/build.py

mgctl: $(PROGRAMS) ## build the mgctl of containers, for x86-64 and arm64

reproducible: $(PROGRAMS) ## build the mgctl of containers again, from nothing, and compare the bytes
	$(BIN)/python mgctl/build.py --verify

reasons: $(VENV)/.test ## write the tables of docs/events.md, docs/pools.md, docs/status.md and docs/performance.md, after a change of Events, warnings, reasons, reports or results
	$(BIN)/python docs/reasons.py
	$(BIN)/python docs/availability.py
	$(BIN)/python docs/status_schema.py
	$(BIN)/python docs/performance.py

man: $(VENV)/.build ## write the manual pages of all programs, into dist/man
	$(BIN)/python docs/manpages.py

wheel: $(PROGRAMS) man ## build the package with everything in it, into dist/
	$(PIP) wheel --no-build-isolation --no-deps --wheel-dir dist .

test: export METAGPU_PIECE = $(PIECE)
test: $(VENV)/.test $(PROGRAMS) ## run the tests (PIECE=N of the long ones)
	@# One process more than cores: many tests wait for a while, and leave theirs idle. A broken tree
	@# fails in waits of 30 s each: the first failure ends the run (pytest without -x shows all).
	$(BIN)/python -m pytest --numprocesses $$(($$(nproc) + 1)) --maxprocesses 4 --dist worksteal -x

fuzz: $(VENV)/.test ## send the daemon what nobody should, at moments that nobody chooses, for two minutes (PIECES=30; PIECE=N)
	$(BIN)/python -m tests.fuzz $(if $(PIECE),--piece $(PIECE)) $(if $(PIECES),--pieces $(PIECES))

chaos: $(VENV)/.test ## run random schedules of pods, restarts, faults and exchanges, judged from outside (MINUTES=60; SEED=N)
	$(BIN)/python -m tests.chaos --minutes $(or $(MINUTES),60) $(if $(SEED),--seed $(SEED)) $(if $(PIECE),--piece $(PIECE))

mutants: $(VENV)/.test ## plant small faults, one at a time, and report which of them no test of their folder catches (COUNT=40; SEED=N; ROOMS='core/state backends/mig')
	$(BIN)/python -m tests.mutants --count $(or $(COUNT),40) $(if $(SEED),--seed $(SEED)) $(if $(ROOMS),--rooms $(ROOMS))

lint: $(VENV)/.test ## ruff, mypy, import contracts, generated code and tables, docstrings and words, and the budget
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python proto/generate.py --check
	$(BIN)/python docs/reasons.py --check
	$(BIN)/python docs/availability.py --check
	$(BIN)/python docs/status_schema.py --check
	$(BIN)/python docs/performance.py --check
	$(BIN)/python -m tests.language
	$(BIN)/python -m tests.budget --check

proto: $(VENV)/.test ## generate the protocol code anew
	$(BIN)/python proto/generate.py

e2e: export METAGPU_E2E_KUBERNETES = $(KUBERNETES)
e2e: export METAGPU_PIECE = $(PIECE)
e2e: $(VENV)/.test $(PROGRAMS) ## run the end-to-end tests on a real one-node Kubernetes (root, Go, Debian packages; KUBERNETES=1.34; PIECE=N of the long ones)
	$(BIN)/python -m tests.e2e.rig prepare
	$(BIN)/python -m pytest -m e2e -rfEs --timeout 600 --junit-xml=dist/e2e.xml

conformance: $(VENV)/.test ## what the CNCF's AI conformance asks for, from the last `make e2e`, into dist/conformance.md and .json
	$(BIN)/python -m tests.e2e.conformance

pictures: $(VENV)/.test ## take the pictures of docs/images again, in Debian's Chromium
	METAGPU_SCREENSHOTS=1 $(BIN)/python -m pytest tests/web -m e2e -k pictures

chart: $(VENV)/.test ## render deploy/*.yaml, the dashboards and the chart's table of values (needs helm; HELM=PATH)
	$(BIN)/python deploy/render.py
	$(BIN)/python deploy/monitoring/dashboards.py

# The site has the tree of the repository, so that one link is right in both.
docs: $(VENV)/.docs ## build these pages as a site, into dist/site
	@rm -rf dist/pages && mkdir -p dist/pages
	@ln -s $(CURDIR)/docs $(CURDIR)/deploy $(CURDIR)/bench $(CURDIR)/proto $(CURDIR)/tests $(CURDIR)/*.md dist/pages
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

cost: $(VENV)/.test ## count what each call and an idle daemon do, and fail where it is 5 % more than in bench/cost.json (WRITE=1 writes that file anew)
	$(BIN)/python -m bench.cost $(if $(WRITE),--write,--check)

bench: $(VENV)/.test ## measure, print side by side with the targets, write bench/results/ (BEFORE=PATH: beside another commit's tree; PIECE=N: see that some of it works)
	$(BIN)/python -m bench $(if $(BEFORE),--before $(BEFORE)) $(if $(PIECE),--piece $(PIECE))

# Resolved for every Python that metagpu supports, and for every machine; what a lock has stays,
# unless it must change. LOCKS=--upgrade takes the newest of everything.
LOCK := $(BIN)/uv pip compile --quiet --universal --generate-hashes --python-version 3.11 \
	--no-annotate --custom-compile-command 'make locks' $(LOCKS)

locks: $(VENV)/.test ## resolve the dependencies again, into requirements/ (LOCKS=--upgrade)
	$(LOCK) --extra test --extra bench --extra supply pyproject.toml requirements/package.in -o requirements/dev.lock
	$(LOCK) -c requirements/dev.lock --extra build pyproject.toml requirements/package.in -o requirements/build.lock
	$(LOCK) -c requirements/dev.lock pyproject.toml -o requirements/run.lock
	$(LOCK) -c requirements/dev.lock requirements/package.in -o requirements/package.lock
	$(LOCK) -c requirements/dev.lock --extra docs pyproject.toml -o requirements/docs.lock

# docker, podman or buildah where one answers; else a script that lays the same layer on Debian's Python.
ENGINE ?= $(firstword $(foreach it,docker podman buildah,$(shell $(it) info >/dev/null 2>&1 && echo $(it))))
ARCHITECTURE ?= $(if $(filter aarch64,$(shell uname -m)),arm64,amd64)
VERSION = $(shell $(BIN)/python -c 'import metagpu; print(metagpu.__version__)')
export REVISION ?= $(shell git rev-parse HEAD 2>/dev/null)
export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 0)
IMAGE := $(BIN)/python -m deploy.image

image: $(VENV)/.test $(PROGRAMS) ## build the container image, into dist/ or into the container engine at hand (ARCHITECTURE=arm64)
ifeq ($(ENGINE),)
	@$(IMAGE) archive --architecture $(ARCHITECTURE)
else
	$(ENGINE) build --file deploy/Dockerfile --tag metagpu:$(VERSION) --platform linux/$(ARCHITECTURE) \
		--build-arg VERSION=$(VERSION) --build-arg REVISION --build-arg SOURCE_DATE_EPOCH .
endif

sbom: $(VENV)/.test $(PROGRAMS) ## list what an image contains, and its licences, into dist/
	@mkdir -p dist && $(IMAGE) inventory dist --architecture $(ARCHITECTURE)

release: $(VENV)/.test $(PROGRAMS) man ## make what a version is published as, from the commit, into dist/vVERSION (REGISTRY=registry.example.com/team)
	@$(BIN)/python -m deploy.release $(if $(REGISTRY),--registry $(REGISTRY))

release-check: export METAGPU_RELEASE = $(CURDIR)/dist/v$(VERSION)
release-check: $(VENV)/.test ## install dist/vVERSION as a user would, from a registry on loopback (root, Go, Debian packages)
	$(BIN)/python -m tests.e2e.rig prepare
	$(BIN)/python -m pytest tests/e2e/test_release.py -m e2e -rs

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) dist metagpu/programs .pytest_cache .mypy_cache .ruff_cache .hypothesis
