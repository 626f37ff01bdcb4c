# Talaria. Everything sets itself up: Python 3.11 or newer is all that a machine needs.
# Targets are thin; each is also a plain command (see `talaria --help`, deploy/setup.py, .ci/run).

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
ARGS ?=

# Spinning OpenMP threads of several processes on few cores collapse.
export OMP_WAIT_POLICY ?= passive

.DEFAULT_GOAL := help
.PHONY: help run serve test check messages format setup clean

help: ## Show this list
	@echo "Talaria: serving for tool-using LLM agents on a shared pool of GPUs."
	@echo
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile
	@echo
	@echo "  ARGS='...' is passed on: make run ARGS='--sessions 3', make test ARGS='-k bus'"
	@echo "  TORCH_INDEX=URL takes PyTorch from that index; PYTHON=... chooses the interpreter"

run: setup ## Replay agent sessions on real models under two policies, and compare (2.5 minutes)
	@$(BIN)/talaria demo $(ARGS)

serve: setup ## Serve three small models on this machine until Ctrl-C
	@$(BIN)/talaria up $(ARGS)

test: setup ## Run all tests
	@$(BIN)/talaria models --prepare
	@$(BIN)/python -m pytest $(ARGS)

check: ## Lint, types and tests: what CI runs
	@bash .ci/run

messages: setup ## Write docs/messages.md and the golden bytes anew after a change of wire.py
	@$(BIN)/python -m tests.golden

format: setup ## Format and sort imports
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format .

setup: ## Create or update .venv (the other targets do it when needed)
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer found: install one, or name it: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@$(PYTHON) deploy/setup.py

clean: ## Remove .venv, caches and reports (the models' cache in ~/.cache/talaria stays)
	@rm -rf .venv build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find libs services tests -name __pycache__ -type d -prune -exec rm -rf {} +
