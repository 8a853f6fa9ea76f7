# Two commands on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt
export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint install clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "== installing into $(VENV) (a few minutes the first time)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) -q torch  # first and by its pinned version, so that no other wheel is ever considered
	$(PIP) -q -e '.[test]'
	@touch $@

demo: install
	$(BIN)/python examples/demo.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest

clean:
	rm -rf build demo_output .pytest_cache .mypy_cache .ruff_cache
