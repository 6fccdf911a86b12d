# `make demo` and `make test` do all their own set-up; nothing but Python (3.10 or newer) and make is needed.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# the CUDA version that the driver supports, and the extra that brings a CuPy for it; empty where there is no GPU
CUDA_MAJOR := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9]*\).*/\1/p')
EXTRA := $(if $(CUDA_MAJOR),$(shell [ $(CUDA_MAJOR) -ge 13 ] && echo cuda13 || echo cuda12))
COMMA := ,

.PHONY: demo test test-gpu lint format clean

demo: $(VENV)/.demo
	$(BIN)/autodispatch demo

test: $(VENV)/.test
	$(BIN)/python -m pytest -n 2

test-gpu: $(VENV)/.test
	$(BIN)/python -m pytest -m gpu

lint: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build *.egg-info

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.demo: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.$(if $(EXTRA),[$(EXTRA)])'
	@touch $@

$(VENV)/.test: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[test$(if $(EXTRA),$(COMMA)$(EXTRA))]'
	@touch $@ $(VENV)/.demo
