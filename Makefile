# Everything is made below this folder: .venv (the command line and its tools), .cache (downloads, engine), build (bundles, demo).

PYTHON ?= python3
BIN := .venv/bin
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo demo-decode test soak check patches readme engine bench-deploy clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14

# The stamp is rebuilt when the metadata changes; pip's own resolver decides what that means.
.venv/.stamp: pyproject.toml scripts/setup
	@PYTHON=$(PYTHON) scripts/setup
	@touch $@

demo: .venv/.stamp ## patch a real SGLang 0.5.11 behind a private sshd and take it away again (no GPU, no torch)
	@$(BIN)/python scripts/demo

demo-decode: .venv/.stamp engine ## decode on the CPU: plain, DFLASH and DDTREE side by side
	@$(BIN)/python scripts/demo_decode

test: .venv/.stamp engine ## every test
	@scripts/all_tests $(PYTEST_ARGS)

soak: .venv/.stamp engine ## 500 random scenarios against plain decoding on the CPU (SOAK_ARGS="--scenarios N --seed S")
	$(BIN)/python -m tests.engine.soak $(SOAK_ARGS)

check: .venv/.stamp ## format, lint, types, stale patches
	@scripts/check

patches: .venv/.stamp ## regenerate patches/ from the edits
	for release in $$($(BIN)/python scripts/releases); do \
		$(BIN)/ddtree-overlay snapshot --release $$release && $(BIN)/ddtree-overlay patch --release $$release || exit; \
	done

readme: .venv/.stamp ## run the README's session again and paste what it prints (root, Linux)
	$(BIN)/python scripts/readme_session

bench-deploy: .venv/.stamp ## time push and snapshot beside scp, ssh and tar on a private sshd
	$(BIN)/python benchmarks/deploy.py

engine: .venv/.stamp ## the environment of the engine tests, in .cache/engine (2.3 GB)
	@scripts/engine_env

clean: ## remove what was made here, downloads included
	rm -rf .venv .cache build snapshots/*/files .pytest_cache .mypy_cache .ruff_cache .hypothesis
