# Needs Python >= 3.10, pip and make; everything else is installed into .venv.
PYTHON ?= python3
# Processes that share the tests: more than two cores, because tests wait for servers, ranks and deadlines.
JOBS   ?= 2
# After this time `make soak` begins no further test: by default all of it runs.
SOAK_MINUTES ?= 100
VENV   := .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip --disable-pip-version-check --quiet
CACHE  := .venv-bootstrap
INT    := .venv-integrations

# Installed once; again when the dependencies change.
DEV  := $(VENV)/.installed-dev
DEMO := $(VENV)/.installed-demo
FRAMEWORKS := $(INT)/.installed

# `make demo` needs only the runtime and one extra: do not make a first look wait for the test tools.
DEMO_OR_DEV := $(if $(wildcard $(DEV)),$(DEV),$(DEMO))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo test test-docs test-integrations test-pythons test-torch soak lint fmt pages docs package bench clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(DEV) ## create .venv with everything (runtime, tests, lint, benchmarks)

demo: $(DEMO_OR_DEV) ## the demo on a local S3 server
	@$(VENV)/bin/dcp-s3 demo

# These wait more than they compute.
test test-docs: JOBS = 3

test: $(DEV) ## pytest in JOBS processes (3), without what takes long; ARGS=... is passed on
	@$(PY) -m pytest -n $(JOBS) --dist worksteal -m "not soak and not docs" $(ARGS)

test-docs: $(DEV) ## pages as pasted, examples, demo, benchmarks, the package; ARGS=... is passed on
	@$(PY) -m pytest -n $(JOBS) --dist worksteal -m "docs and not soak" $(ARGS)

test-integrations: $(FRAMEWORKS) ## the adapters, with the real frameworks in an environment of their own; ARGS=... is passed on
	@DCP_S3_TEST_INTEGRATIONS=1 $(INT)/bin/python -m pytest -n $(JOBS) --dist worksteal tests/frameworks $(ARGS)

# Minutes that one further Python may take, its installation included.
PYTHON_MINUTES ?= 3
test-pythons: $(DEV) ## a fast part of the tests with the other Pythons of 3.10 to 3.13 that are here; says what is not run
	@PYTHON_MINUTES=$(PYTHON_MINUTES) .ci/pythons

TORCH ?= 2.15.0
test-torch: $(DEV) ## what depends on torch, with other versions of it (7 GB each, removed afterwards): TORCH='2.15.0 2.9.0'
	@IF_ROOM=$(IF_ROOM) JOBS=$(JOBS) .ci/torch $(TORCH)

# What `test` leaves out, then the tests that break things, with these counts. What is not begun in time is named.
CYCLES ?= 500
LOOPS  ?= 1000
KILLS  ?= 100
FAULTS ?= 100
FLIPS  ?= 0
soak: $(DEV) ## what takes long, in JOBS processes; SOAK_MINUTES=... begins nothing after that; ARGS=... is passed on
	@DCP_S3_TEST_CYCLES=$(CYCLES) DCP_S3_TEST_LOOPS=$(LOOPS) DCP_S3_TEST_KILLS=$(KILLS) DCP_S3_TEST_FAULTS=$(FAULTS) \
		DCP_S3_TEST_FLIPS=$(FLIPS) \
		DCP_S3_TEST_MINUTES=$(SOAK_MINUTES) \
		$(PY) -m pytest -n $(JOBS) --dist load --maxschedchunk 1 --timeout 5400 -m "soak or counted" $(ARGS)

lint: $(DEV) ## ruff, mypy, import-linter
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

fmt: $(DEV) ## format, and fix what ruff can fix
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

pages: $(DEV) ## write the pages of docs/ that are made from the code: settings, command line
	@$(PY) docs/tools/pages.py

docs: $(DEV) ## the documentation as a site in .venv/site, with its links and anchors checked
	@$(PY) docs/tools/pages.py --check
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet --site-dir $(abspath $(VENV))/site
	@echo "$(VENV)/site/index.html"

package: $(DEV) ## the wheel and the sdist in dist/
	@$(PY) -m build --quiet --outdir dist

bench: $(DEV) ## save and load (also over a slow link, TLS, by several ranks), the stall of training, spilling, against other backends; ARGS=... is passed on
	@$(PY) -m benchmarks.save_load $(ARGS)
	@$(PY) -m benchmarks.save_load --size 3GiB --latency 0.06 --connection-rate 85MiB --json benchmarks/results/capped.json $(ARGS)
	@$(PY) -m benchmarks.save_load --tls --json benchmarks/results/tls.json $(ARGS)
	@$(PY) -m benchmarks.ranks --size 2GiB
	@$(PY) -m benchmarks.stall $(ARGS)
	@$(PY) -m benchmarks.spill $(ARGS)
	@$(PY) -m benchmarks.reshard
	@$(PY) -m benchmarks.small_tensors
	@$(PY) -m benchmarks.foreign
	@$(PY) -m benchmarks.planning
	@$(PY) -m benchmarks.coordinator
	@$(PY) -m benchmarks.hedging
	@$(PY) -m benchmarks.export --rounds 3

clean: ## remove the environments, caches and build output
	rm -rf $(VENV) $(INT) $(CACHE) .venv-torch build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(DEV): pyproject.toml constraints.txt | $(PY)
	@echo "installing dcp-s3[dev] into $(VENV) (a few minutes the first time)"
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

$(DEMO): pyproject.toml constraints.txt | $(PY)
	@echo "installing dcp-s3[demo] into $(VENV) (a few minutes the first time)"
	@$(PIP) install -c constraints.txt -e '.[demo]'
	@touch $@

# pip takes the torch of the constraints; uv, with torch there, resolves in seconds what takes pip minutes.
$(FRAMEWORKS): pyproject.toml constraints-integrations.txt | $(PY)
	@echo "installing the frameworks into $(INT) (a few minutes the first time)"
	@$(PIP) install -c constraints-integrations.txt uv
	@$(PY) -m uv --quiet venv --allow-existing --seed --python $(PY) $(INT)
	@$(INT)/bin/python -m pip --disable-pip-version-check --quiet install -c constraints-integrations.txt torch
	@$(PY) -m uv --quiet pip install --python $(INT)/bin/python -c constraints-integrations.txt -e '.[integrations]'
	@touch $@

# Some distributions ship Python without ensurepip, so without a working `-m venv`; virtualenv brings its own pip.
# It goes into a directory of its own (--target): no system or user site is changed.
$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else \
		"dcp-s3 needs Python >= 3.10; %s is %s. Set PYTHON=..." % (sys.executable, sys.version.split()[0]))'
	@if $(PYTHON) -c 'import venv, ensurepip' 2>/dev/null; then \
		$(PYTHON) -m venv $(VENV); \
	else \
		echo "no ensurepip in $(PYTHON): using virtualenv"; \
		$(PYTHON) -m pip --disable-pip-version-check --quiet install --target $(CACHE) virtualenv && \
		PYTHONPATH=$(CACHE) $(PYTHON) -m virtualenv --quiet $(VENV) && \
		rm -rf $(CACHE); \
	fi
