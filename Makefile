# make help lists the targets. Everything runs in .venv, which is made at first need and then reused.
VENV ?= .venv
EXTRAS ?= dev
RESOLUTION ?= tested
DEMO_ARGS ?= recipe=demo
PYTEST_ARGS ?=
WORKERS ?= $(shell nproc)
PYTHON := $(VENV)/bin/python

.DEFAULT_GOAL := help
.PHONY: help env demo check test test-real test-all lint format docs clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1@\2/p' $(MAKEFILE_LIST) | awk -F@ '{ printf "%-14s %s\n", $$1, $$2 }'

env: ## make or renew the environment in .venv (EXTRAS=dev,wandb adds; RESOLUTION=lowest or newest; ZOO_PYTHON=/path)
	@sh scripts/setup_env.sh $(VENV) $(EXTRAS) $(RESOLUTION)

demo: env ## train a tiny Qwen3-Omni on real digits, spoken and written: a few minutes, no GPU (DEMO_ARGS="...")
	@$(VENV)/bin/zoo train $(DEMO_ARGS)

check: env ## ruff, mypy and the tests closest to your change: under two minutes
	@$(PYTHON) scripts/check.py

test: env ## every promise once, in WORKERS processes, by default one a core: minutes (PYTEST_ARGS="-x" adds options)
	@$(PYTHON) scripts/run_tests.py fast --workers $(WORKERS) $(PYTEST_ARGS)

test-real: env ## zoo against published artefacts, fetched, or found in ZOO_ARTEFACTS: skipped, with the reason, where there are none
	@$(PYTHON) scripts/run_tests.py real -rs $(PYTEST_ARGS)

test-all: env ## every test: the slow ones too, and those for a GPU where there is one: hours
	@$(PYTHON) scripts/run_tests.py all --workers $(WORKERS) $(PYTEST_ARGS)

lint: env ## ruff, ruff format --check, mypy, and calls in tests: all run, and all must pass
	@status=0; \
	$(PYTHON) -m ruff check . || status=1; \
	$(PYTHON) -m ruff format --check . || status=1; \
	sh scripts/typecheck.sh $(PYTHON) || status=1; \
	$(PYTHON) scripts/check_test_calls.py || status=1; \
	exit $$status

format: env ## let ruff fix and format the code
	@$(PYTHON) -m ruff check --fix .
	@$(PYTHON) -m ruff format .

docs: ## build the documentation site into build/site
	@sh scripts/build_docs.sh

clean: ## remove the environment and caches (runs/ stays)
	rm -rf $(VENV) .typecheck .mypy_cache .pytest_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
