# Sets up .venv where needed and runs the harness: `make parity`, `make test`, `make lint`.

PYTHON ?= python3
# Extra package index for torch, for instance one with CPU builds.
TORCH_INDEX ?=
WORKERS ?= auto
# More options for pytest, for instance --require-engine vllm.
ARGS ?=

# Relative, so that a space in the folder's path breaks neither a target nor a prerequisite.
RUN := .venv/bin/python -m
STAMP := .venv/.installed
PIP := $(RUN) pip install --quiet --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := parity
.PHONY: parity test lint format

# Judges every cell within the pre-merge budget, prints the matrix.
parity: $(STAMP)
	@$(RUN) reports.cli run --profile premerge --workers $(WORKERS)

# The same, and the harness on trial.
test: $(STAMP)
	@$(RUN) pytest -n $(WORKERS) $(ARGS)

lint: $(STAMP)
	@$(RUN) ruff check .
	@$(RUN) ruff format --check .
	@$(RUN) pyright
	@.venv/bin/lint-imports

format: $(STAMP)
	@$(RUN) ruff check --fix .
	@$(RUN) ruff format .

# torch first and alone, so that its index serves nothing else.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"$(PYTHON) is Python {v[0]}.{v[1]}, expected 3.11 or newer; say make PYTHON=python3.11")'
	@echo "Setting up .venv (once, and whenever pyproject.toml or constraints.txt change)"
	@rm -f $(STAMP)
	@$(PYTHON) -m venv .venv
	@$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	@$(PIP) --editable '.[dev]'
	@touch $(STAMP)
