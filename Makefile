# The two commands of a newcomer are `make demo` and `make test`; both set up what they need.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo test check format bench lock clean

help: ## Show this list
	@awk -F':.*## ' '/^[a-z]+:.*## /{printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/run.stamp ## See Penstock work, on embedded defaults
	@$(BIN)/penstock demo

test: $(VENV)/dev.stamp ## Run all tests; the servers they need are started by them
	@$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/dev.stamp ## Lint, types, formatting, layers, sizes and words
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/architecture

format: $(VENV)/dev.stamp ## Format the code
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

bench: $(VENV)/dev.stamp ## Measure; prints figures, asserts none
	@$(BIN)/python -m benchmarks.store
	@$(BIN)/python -m benchmarks.queue
	@$(BIN)/python -m benchmarks.queue_scale
	@$(BIN)/python -m benchmarks.dispatcher
	@$(BIN)/python -m benchmarks.pipeline

EVERY := --extra local --extra dispatcher --extra spark --extra demo
COMPILE := $(BIN)/uv pip compile --quiet --universal --generate-hashes --no-header --no-annotate \
  --python-version 3.11 $(EVERY)
lock: $(VENV)/dev.stamp ## Resolve the dependencies anew and pin them
	@$(BIN)/pip install --quiet uv
	@$(COMPILE) --extra aws --group dev -o requirements/dev.txt pyproject.toml
	@$(COMPILE) -c requirements/dev.txt -o requirements/run.txt pyproject.toml
	@! grep -nE '://|--(extra-)?index|--find-links' requirements/*.txt

clean: ## Remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Penstock needs Python 3.11 or later; set PYTHON=/path/to/python3.11." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
	  || { echo "python3 -m venv failed; on Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; }

$(VENV)/run.stamp: requirements/run.txt pyproject.toml | $(VENV)/bin/python
	@echo "Installing Penstock into $(VENV) ..."
	@$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/run.txt
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

$(VENV)/dev.stamp: requirements/dev.txt $(VENV)/run.stamp
	@echo "Installing the tools for tests and checks ..."
	@$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt
	@touch $@
