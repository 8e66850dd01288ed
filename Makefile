# make demo    a fresh machine to a fine-tuned tiny model, no download of models or data
# make test    everything that can be tested on this machine
# make lint    style, types
# make wheel   build the wheel and prove it in a clean environment

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Apple silicon trains on MLX, other machines on torch. The tests want both: each runs on the CPU of every machine.
BACKEND := $(if $(findstring Darwin arm64,$(shell uname -sm)),mlx,torch)

.PHONY: demo test lint format wheel clean

demo: .venv/.demo
	$(BIN)/dualtune train --demo

test: .venv/.dev
	$(BIN)/python -m pytest

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: .venv/.dev
	BACKEND=$(BACKEND) scripts/check_wheel.sh $(BIN)/python

clean:
	rm -rf .venv build dist

.venv/.python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dualtune needs Python 3.11 or newer: make PYTHON=python3.12 …")'
	$(PYTHON) -m venv .venv
	touch $@

.venv/.demo: .venv/.python pyproject.toml constraints.txt
	$(if $(findstring torch,$(BACKEND)),$(PIP) torch)
	$(PIP) --editable '.[$(BACKEND)]'
	touch $@

# torch first and alone, so that nothing that depends on it can choose another build.
.venv/.dev: .venv/.python pyproject.toml constraints.txt
	$(PIP) torch
	$(PIP) --editable '.[torch,mlx,dev]'
	touch $@ .venv/.demo
