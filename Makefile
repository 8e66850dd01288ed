# make demo    a fresh machine to a fine-tuned tiny model, no download of models or data
# make test    everything that can be tested on this machine
# make lint    style, types
# make wheel   build the wheel and prove it in a clean environment

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Apple silicon runs on MLX. Elsewhere torch does the work, and MLX's CPU build is there to test both backends.
ifeq ($(shell uname -sm),Darwin arm64)
  BACKEND := mlx
  BACKENDS := mlx
else
  BACKEND := torch
  BACKENDS := torch,mlx
endif

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

# torch first and alone, so that nothing that depends on it can choose another build.
.venv/.torch: .venv/.python
	$(if $(findstring torch,$(BACKENDS)),$(PIP) torch)
	touch $@

.venv/.demo: .venv/.torch pyproject.toml constraints.txt
	$(PIP) --editable '.[$(BACKEND)]'
	touch $@

.venv/.dev: .venv/.torch pyproject.toml constraints.txt
	$(PIP) --editable '.[$(BACKENDS),dev]'
	touch $@ .venv/.demo
