# `make test` and `make demo` set up everything they need in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# torch first and on its own: a range would pull several gigabytes of CUDA packages.
TORCH := $(shell grep '^torch==' constraints.txt)

.PHONY: test lint demo docs clean

test: lint
	$(BIN)/pytest -n 2 --dist worksteal

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

demo: $(VENV)/.demo
	$(BIN)/rankfold compare --preset tiny

docs: $(VENV)/.dev  # the documentation site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/.base: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH)
	touch $@

$(VENV)/.demo: $(VENV)/.base pyproject.toml
	$(BIN)/pip install --quiet -c constraints.txt -e '.[bench]'
	touch $@

$(VENV)/.dev: $(VENV)/.base pyproject.toml
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) build dist
