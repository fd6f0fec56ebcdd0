# make demo and make test work on a fresh machine: each sets up .venv first.
BIN := .venv/bin
# Files in their order: sorted by their number of tests, those with few and long ones would come last, one by one.
PYTEST := $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: help demo test test-thorough lint format bench aot aot-tp aot-gpu aot-gpu-tp lock clean venv-demo venv-dev venv-cuda

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

demo: venv-demo ## run a real model twice on prompts that share a prefix, and show the cache hit
	$(BIN)/jradix demo

test: lint ## lint, types and tests (PYTEST_ARGS="-k name" narrows the tests)
	$(PYTEST) $(PYTEST_ARGS)

test-thorough: venv-dev ## the tests that are too many for make test: every model on several devices and processes
	$(PYTEST) -m thorough $(PYTEST_ARGS)

lint: venv-dev ## formatting, lint rules and types; changes nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

format: venv-dev ## format the code and apply the safe lint fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: venv-demo ## the benchmarks of docs/performance.md on this machine
	$(BIN)/python scripts/bench_raw.py
	$(BIN)/python scripts/bench_prefix.py

aot: venv-dev ## compile every step program for four generations of TPUs, without one (AOT_ARGS="--targets v6e")
	$(BIN)/python scripts/aot_check.py --all-buckets $(AOT_ARGS)

aot-tp: venv-dev ## compile steps of large models for 4 and 8 TPU devices, without one
	$(BIN)/python scripts/aot_check.py --devices 4 8 --targets v5e v6e tpu7x \
		--models llama-3.1-8b qwen3-32b llama-3.1-70b qwen3-30b-a3b $(AOT_ARGS)

aot-gpu: venv-cuda ## the same for an H200: installs jax's CUDA plug-in, 4 GB, into .venv-cuda
	.venv-cuda/bin/python scripts/aot_check.py --targets h200 --all-buckets $(AOT_ARGS)

aot-gpu-tp: venv-cuda ## compile steps of large models for 2, 4 and 8 H200s
	.venv-cuda/bin/python scripts/aot_check.py --devices 2 4 8 --targets h200 \
		--models llama-3.1-8b qwen3-32b llama-3.1-70b qwen3-30b-a3b $(AOT_ARGS)

# A pin stays while pyproject.toml allows it: make lock LOCK_ARGS=--upgrade takes the newest of everything,
# LOCK_ARGS="--upgrade-package jax" of one package.
lock: venv-dev ## resolve pyproject.toml into requirements/*.txt
	$(call COMPILE,dev) --extra demo --extra server --extra dev
	$(call COMPILE,demo) --extra demo --constraints requirements/dev.txt
	$(call COMPILE,cuda) --extra cuda --constraints requirements/dev.txt

COMPILE = $(BIN)/uv pip compile pyproject.toml --group build --output-file requirements/$(1).txt \
	--python $(BIN)/python --python-version 3.12 --universal --generate-hashes --quiet \
	--no-emit-index-url --no-emit-find-links --no-annotate --custom-compile-command "make lock" $(LOCK_ARGS)

clean: ## remove .venv, caches and build output
	rm -rf .venv .venv-cuda build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find jradix scripts tests -name __pycache__ -type d -exec rm -rf {} +

venv-demo venv-dev venv-cuda: venv-%:
	@scripts/setup_venv.sh $*
