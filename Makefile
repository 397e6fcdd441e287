# Two commands on a fresh machine: `make up` serves a model, `make test` passes the tests.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PORT   ?= 8000
ARGS   ?=

.DEFAULT_GOAL := help
.PHONY: help install up test bench chaos lint format clean

help:
	@echo "make up       environment, default model, embedded NATS server, the five services  [PORT=8000 ARGS=…]"
	@echo "make test     environment, everything the tests need, the whole test suite         [ARGS=…]"
	@echo "make bench    measure the mesh on this machine                                       [ARGS=…]"
	@echo "make chaos    streams, while processes die at random                          [ARGS='--minutes 10', --matrix, --compose]"
	@echo "make lint     format check, lint, types, import rules"
	@echo "make format   bring the code into the house format"
	@echo "make install  the environment only, in $(VENV)"
	@echo "make clean    delete the environment, caches and build outputs; models stay in ~/.shoal"
	@echo "make help     this list"

$(VENV)/pip.stamp:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else f"Shoal needs Python 3.11 or newer; {sys.executable} is {v.major}.{v.minor}. Choose another with: make PYTHON=python3.11 …")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	@touch $@

$(VENV)/run.stamp: $(VENV)/pip.stamp pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[all]"
	@touch $@

$(VENV)/dev.stamp: $(VENV)/pip.stamp pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@ $(VENV)/run.stamp

install: $(VENV)/run.stamp

up: $(VENV)/run.stamp
	@exec $(BIN)/shoal up --port $(PORT) $(ARGS)

test: $(VENV)/dev.stamp
	@$(BIN)/shoal pull --quiet smollm2-135m
	$(BIN)/python -m pytest $(ARGS)

bench: $(VENV)/dev.stamp
	@$(BIN)/shoal pull --quiet smollm2-135m
	$(BIN)/shoal bench $(ARGS)

chaos: $(VENV)/dev.stamp
	$(BIN)/python -m tests.chaos $(ARGS)

lint: $(VENV)/dev.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/dev.stamp
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
