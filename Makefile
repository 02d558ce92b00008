# Every target sets up what it needs; `make` alone lists them. PYTHON=python3.13 chooses another interpreter.

PYTHON ?= python3
# Another interpreter gets a folder of its own: packages built for one version do not run on the next.
VENV := .venv$(if $(filter-out python3,$(PYTHON)),-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])'))
BIN := $(VENV)/bin
# The benchmark has a folder of its own, too: a library that it compares with Semel needs an older redis-py, which pip
# installs instead of the one that the tests use.
BENCH := $(VENV)-bench
QUICK := "not server and not process and not faults and not slow"
TYPED := src tests/servers tests/conftest.py tests/workers.py tests/tracing.py $(wildcard tests/test_*.py tests/typing)

.DEFAULT_GOAL := help
.PHONY: help run test cover quick everywhere check twins format bench docs servers clean

# pytest rewrites the asserts of each test module. Without the compiled files every worker does that again in every run.
unexport PYTHONDONTWRITEBYTECODE

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

run: $(VENV)/.demo ## the demo service on 127.0.0.1:8080; ARGS="..." goes to it
	$(BIN)/semel demo $(ARGS)

test: check servers ## lint, types, all tests on real servers, coverage; WORKERS=1: one after the other
	$(BIN)/pytest --workers=$(or $(WORKERS),4) --cov --cov-sparingly --cov-report=term $(ARGS)

cover: servers ## all tests, and the coverage of their child processes as well: slower
	$(BIN)/pytest --workers=$(or $(WORKERS),4) --cov --cov-config=tools/cover_children.ini --cov-report=term $(ARGS)

quick: $(VENV)/.test ## the tests that start no server and no service: seconds
	$(BIN)/pytest --workers=$(or $(WORKERS),5) --randomly-dont-reset-seed --hypothesis-profile=quick -m $(QUICK) $(ARGS)

everywhere: ## the quick tests on every other Python from 3.12 on that is found here
	@tools/pythons.sh $(PYTHON) | { found=; while read -r version python; do found=1; \
	  echo "== quick tests on Python $$version ($$python)"; \
	  $(MAKE) --no-print-directory quick PYTHON="$$python" < /dev/null || exit 1; \
	done; test "$$found" || echo "== no other Python from 3.12 on was found: the quick tests ran on none"; }

check: $(VENV)/.dev ## lint, format, twins and types, nothing changed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/twins.py --check
	$(BIN)/mypy $(TYPED)

twins: $(VENV)/.dev ## generate the sync twins of async modules
	$(BIN)/python tools/twins.py

format: $(VENV)/.dev ## put the code in shape
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: $(BENCH)/.bench ## the measurements; ARGS="..." goes to them
	$(BENCH)/bin/python -m bench $(ARGS)

docs: $(VENV)/.dev ## build the pages into site/
	$(BIN)/python tools/docs/generate.py
	$(BIN)/zensical build --strict

servers: $(VENV)/.dev ## install the servers the tests want, where we may
	$(BIN)/python -m tests.servers

clean: ## remove all that was made here
	rm -rf .venv .venv-* build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage .coverage.*
	find src tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# A stamp for each set of packages, so that nothing waits for more than it needs.

$(VENV)/.core $(BENCH)/.core: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Semel needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "Name another one: make PYTHON=/path/to/python3.13 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.demo: $(VENV)/.core
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[demo]'
	@touch $@

$(VENV)/.test $(BENCH)/.test: %/.test: %/.core
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	$(@D)/bin/python -m pip install --quiet --editable '.[all]' --group test
	@touch $@

$(VENV)/.dev: $(VENV)/.test
	$(BIN)/python -m pip install --quiet --group dev
	@touch $@

$(BENCH)/.bench: $(BENCH)/.test
	$(BENCH)/bin/python -m pip install --quiet --group bench
	@touch $@
