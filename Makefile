# The two commands of a newcomer are `make demo` and `make test`; both set up what they need.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# How many processes run tests: one more than there are cores, for much of a test is waiting. Each has
# servers of its own; more than four want a large machine.
JOBS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); [ "$$n" -gt 3 ] && echo 4 || echo $$((n + 1)))

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast proof mutants spark check format bench bench-check jar lock clean

help: ## Show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/run.stamp ## See Penstock work, on embedded defaults
	@$(BIN)/penstock demo

test: $(VENV)/dev.stamp $(VENV)/chromium.stamp ## Run all tests; the servers they need are started by them
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

# What of it takes longest is left to `make test`: prices, compilers, saturated fleets, broken rules.
SLOW := tests/unit/testing/test_cost.py tests/unit/runtimes/spark/test_jar.py \
  tests/simulation/test_saturated.py tests/simulation/test_queue_awake.py tests/simulation/test_moving.py
FAST := tests/unit tests/architecture tests/simulation $(SLOW:%=--ignore=%)
test-fast: $(VENV)/dev.stamp ## Run what needs no server, for the loop at the desk
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(FAST) $(ARGS)

proof: $(VENV)/dev.stamp ## Run the proofs at full size (tests/sizes.py); PENSTOCK_PROOF_SEED=2 makes other plans
	@PENSTOCK_PROOF=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m proof --durations=0 $(ARGS)

mutants: $(VENV)/dev.stamp ## Break the core in small ways and see what the tests notice; about an hour
	@$(BIN)/python -m tests.mutants $(ARGS)

SPARK ?= 4.1.4
SPARK_VENV := $(VENV)/spark-$(SPARK)
# PySpark 4.1 leaves it to the garbage collector to close what a result came through.
OLD_SOCKETS := -W ignore::pytest.PytestUnraisableExceptionWarning
spark: $(SPARK_VENV)/stamp ## Run the tests of Spark on another release: make spark SPARK=4.2.1
	@$(SPARK_VENV)/bin/python -m pytest $(OLD_SOCKETS) $(or $(ARGS),tests/unit/runtimes/spark tests/integration/spark)

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
	@$(BIN)/python -m benchmarks.queue_cpu
	@$(BIN)/python -m benchmarks.queue_scale
	@$(BIN)/python -m benchmarks.dispatcher
	@$(BIN)/python -m benchmarks.pipeline
	@$(BIN)/python -m benchmarks.pipeline_cost
	@$(BIN)/python -m benchmarks.light
	@$(BIN)/python -m benchmarks.waiting
	@$(BIN)/python -m benchmarks.tables
	@$(BIN)/python -m benchmarks.query
	@$(BIN)/python -m benchmarks.console

bench-check: $(VENV)/dev.stamp ## Say which ratios of the benchmarks moved since they were accepted
	@$(BIN)/python -m benchmarks.check $(ARGS)

jar: $(VENV)/dev.stamp ## Compile java/ into the jar that Spark is given; needs javac
	@$(BIN)/python java/build.py

EVERY := --extra local --extra dispatcher --extra spark --extra query --extra demo --group build
COMPILE := $(BIN)/uv pip compile --quiet --universal --generate-hashes --no-header --no-annotate \
  --python-version 3.11 $(EVERY)
lock: $(VENV)/dev.stamp ## Resolve the dependencies anew and pin them
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
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/dev.stamp: requirements/dev.txt $(VENV)/run.stamp
	@echo "Installing the tools for tests and checks ..."
	@$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt
	@touch $@

# All that is pinned but PySpark, and py4j, whose release it chooses.
$(SPARK_VENV)/stamp: requirements/dev.txt pyproject.toml | $(VENV)/bin/python
	@echo "Installing PySpark $(SPARK) and the tools for tests into $(SPARK_VENV) ..."
	@$(VENV)/bin/python -m venv $(SPARK_VENV)
	@awk '/^[^ ]/ {is_kept = !/^(pyspark|py4j)==/} is_kept' requirements/dev.txt > $(SPARK_VENV)/dev.txt
	@$(SPARK_VENV)/bin/pip install --quiet --disable-pip-version-check --require-hashes -r $(SPARK_VENV)/dev.txt
	@$(SPARK_VENV)/bin/pip install --quiet --disable-pip-version-check 'pyspark==$(SPARK)'
	@$(SPARK_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

# The console is tested in a real browser. It is installed, once, where that needs no questions: as
# root on Debian. Elsewhere, and if it fails, those tests are skipped and say why.
APT := DEBIAN_FRONTEND=noninteractive apt-get -qq
$(VENV)/chromium.stamp: | $(VENV)/bin/python
	@for name in "$$CHROMIUM" chromium chromium-browser google-chrome; do \
	  if command -v "$$name" >/dev/null 2>&1; then touch $@; exit 0; fi; \
	done; \
	if [ "$$(id -u)" = 0 ] && grep -qx 'ID=debian' /etc/os-release 2>/dev/null; then \
	  echo "Installing Chromium for the tests of the console ..."; \
	  timeout 60 env $(APT) update >/dev/null 2>&1; \
	  timeout 300 env $(APT) install -y --no-install-recommends chromium >/dev/null 2>&1 \
	    || echo "Chromium could not be installed; the tests that need it are skipped." >&2; \
	fi; \
	touch $@
