PYTHON ?= $(shell command -v python3.11 || command -v python3)
# The newest torch may come with several GB of CUDA libraries that a machine without a GPU has no use for.
# This version is known to work on a CPU; with a GPU, say `make setup TORCH=torch`.
TORCH ?= torch==2.13.0
ARGS ?=

BIN := .venv/bin
INSTALLED := .venv/.installed
# Two processes of one thread each: most tests compute tiny tensors, for which threads wait for each other.
PYTEST := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help setup demo bench check test test-all lint format clean

help: ## list these targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 16

setup: $(INSTALLED) ## create .venv and install the project into it, with all that tests and examples need

$(INSTALLED): pyproject.toml
	@echo "Creating .venv with $(PYTHON)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing $(TORCH)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check "$(TORCH)"
	@echo "Installing the project and its development tools"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -e ".[dev]"
	@touch $@

demo: setup ## fetch the embedded model and run an agent on it
	@$(BIN)/python -m agentspec.models.embedded
	@$(BIN)/python examples/agent_loop.py

bench: setup ## compare with transformers and others on the embedded model; ARGS="--quick"
	@$(BIN)/python -m agentspec.models.embedded
	@$(BIN)/python examples/benchmark/peers.py $(ARGS)

check: lint ## style, types and the tests without model weights: about a minute
	@$(PYTEST) tests/unit $(ARGS)

test: setup ## run the tests that a change must pass; ARGS="-k name" passes options to pytest
	@$(BIN)/python -m agentspec.models.embedded
	@$(PYTEST) -m "not soak and not sweep" $(ARGS)

test-all: setup ## what `make test` leaves out, for it takes minutes: soak, sweeps, whole enumerations
	@$(BIN)/python -m agentspec.models.embedded
	@AGENTSPEC_TESTS=whole $(PYTEST) -m "soak or sweep or whole" $(ARGS)

lint: setup ## check style, format and types
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

format: setup ## rewrite the code in the project's format
	@$(BIN)/ruff check --fix-only
	@$(BIN)/ruff format

clean: ## remove what was built and cached here; .venv and the embedded model stay
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find agentspec integrations tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
