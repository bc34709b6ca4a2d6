# The first run installs into .venv, later runs install nothing.
#
#   make                         verify every form of every variant against the golden outputs
#   make verify ARGS=gqa         the same for one variant
#   make test                    run the tests
#   make test ARGS="-k gqa -x"   some of them, up to the first failure
#   make golden                  compute the golden outputs anew, to the same bytes
#   make notebooks               run the notebooks, write their outputs and the figures
#   make notebooks ARGS=--check  run them and compare, write nothing
#   make docs                    write anew what README.md and docs/ quote from commands
#   make peers                   compare with torch, jax and onnx (a large download)
#   make clean                   remove .venv and all caches
#   make clean test PYTHON=python3.13   start over with another Python, 3.11 or newer

PYTHON ?= python3
BIN := .venv/bin

verify: .venv/installed-core
	@$(BIN)/attention-ref verify $(ARGS)

test: .venv/installed-test
	@$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

golden: .venv/installed-golden
	@$(BIN)/attention-ref golden $(ARGS)

notebooks: .venv/installed-test
	@$(BIN)/python notebooks/build.py $(ARGS)

docs: .venv/installed-core
	@$(BIN)/python docs/refresh.py $(ARGS)

peers: .venv/installed-test,peers
	@$(BIN)/python -m pytest tests/peers $(ARGS)

clean:
	@rm -rf .venv .pytest_cache .ruff_cache dist
	@find . -name __pycache__ -prune -exec rm -rf {} +

help:
	@sed -n '/^$$/q; s/^# \{0,1\}//p' Makefile

.venv/installed-%: pyproject.toml | $(BIN)/pip
	@echo "Installing attention_ref ($*) and what it needs into .venv: once, some minutes on a new machine"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -e '$(subst [core],,.[$*])'
	@touch $@

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.13")'
	@echo "Creating .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv

.PHONY: verify test golden notebooks docs peers clean help
.NOTPARALLEL:
