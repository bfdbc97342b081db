# Everything a user or developer runs. Each target sets up what it needs first.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
RUN := $(VENV)/bin/python
TRAINERS := .venv-trainers
RAY_LATEST := .venv-ray-latest

# A machine with a GPU comes with its own PyTorch: gpu-check takes the Python that has it.
GPU_PYTHON ?= python3
GPU_TESTS := tests/test_on_gpu.py tests/test_allocator_on_gpu.py
GPU_PROCESSES = $(shell $(GPU_PYTHON) -c 'import xdist' 2> /dev/null && echo --numprocesses 8)
OUT ?= runs/gpu-check
LIMIT ?= 480

# Nothing is compiled ahead: what is imported is, once, unless the environment forbids to keep it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup sweep demo browser test test-long test-ray-latest chaos fuzz test-ssh trainers check mutants docs bench gpu-check kernel-sweep kernel-check kernel-constants scoreboard kuberay-check image-check

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST)

setup: $(VENV)/.ready  ## the virtual environment, with pinned versions

# The pip of Python 3.11 takes almost twice the time of today's.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed; name one with make PYTHON=...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -qq --no-compile --disable-pip-version-check --upgrade pip
	$(RUN) -m pip install -qq --no-compile --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

sweep: setup  ## small models on this machine: measures, fits, ranks (SPEC=my.yaml for your own)
	$(RUN) -m orchestrator sweep $(SPEC)

demo: setup browser  ## three example reports in build/demo: this machine, every GPU, one to eight GPUs
	$(RUN) -m orchestrator sweep --out build/demo/laptop
	$(RUN) -m orchestrator report build/demo/laptop --image > build/demo/laptop.md
	$(RUN) -m orchestrator sweep docs/demo/all-gpus.yaml --out build/demo/all-gpus
	$(RUN) -m orchestrator report build/demo/all-gpus --image > build/demo/all-gpus.md
	$(RUN) -m orchestrator sweep docs/demo/one-to-eight.yaml --out build/demo/one-to-eight
	$(RUN) -m orchestrator report build/demo/one-to-eight --image > build/demo/one-to-eight.md

browser:  ## Chromium, which the tests open the report in (apt, where there is none)
	@command -v chromium > /dev/null || command -v chromium-browser > /dev/null || \
	command -v google-chrome > /dev/null || command -v google-chrome-stable > /dev/null || { \
	  command -v apt-get > /dev/null || { echo 'no browser: install Chromium'; exit 1; }; \
	  run=; [ "$$(id -u)" = 0 ] || run=sudo; \
	  $$run apt-get update -qq && $$run env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; }

# One process more than the two cores of a small machine: tests of Ray and of processes mostly wait.
# A crash ends the run and names its test: pytest-xdist 3.8 hangs when it replaces the process that
# ran it (its issue 1378). Threads of OpenMP spin where they wait for a core that another process has.
test: setup  ## a case of each kind, a Ray cluster on this machine among them
	OMP_NUM_THREADS=1 $(RUN) -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --durations 12

test-long: setup  ## the rest: every model, recipe and layout; drivers and nodes killed again and again, as root; hours
	$(RUN) -m pytest -rs -m long

chaos: setup  ## children, ranks, workers, nodes, raylet, GCS and driver killed at random while sweeps run (MINUTES=60, SEED=0)
	MINUTES=$(or $(MINUTES),60) SEED=$(or $(SEED),0) $(RUN) -W ignore tests/chaos.py

fuzz: setup  ## damaged and hostile input of every kind: no traceback, 10 s, 2 GB (EXAMPLES=10000, SEED=0)
	OMP_NUM_THREADS=1 EXAMPLES=$(or $(EXAMPLES),10000) SEED=$(or $(SEED),0) $(RUN) tests/fuzz.py

test-ssh: setup  ## `ray up`, a job and `ray down` over ssh on hosts of this machine; as root, with sshd and rsync
	$(RUN) -m pytest -rs -m ssh tests/test_ssh_cluster.py

test-ray-latest:  ## the tests of Ray with the newest one on PyPI, in .venv-ray-latest
	$(PYTHON) -m venv $(RAY_LATEST)
	grep -v '^ray==' constraints.txt > $(RAY_LATEST)/constraints.txt
	$(RAY_LATEST)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint $(RAY_LATEST)/constraints.txt --upgrade --editable '.[dev]' 'ray[default,tune]'
	$(RAY_LATEST)/bin/python -m pytest -rs tests/test_ray_backend_*.py tests/test_sweep_on_*.py tests/test_sweep_gang_on_*.py tests/test_clouds_*.py
	$(RAY_LATEST)/bin/python -m pytest -rs -m long tests/test_sweep_on_ray.py tests/test_sweep_gang_on_nodes.py

$(TRAINERS)/.ready: tests/trainers.txt
	$(PYTHON) -m venv $(TRAINERS)
	$(TRAINERS)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --requirement tests/trainers.txt
	$(TRAINERS)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --no-deps --upgrade --target $(TRAINERS)/trainers axolotl==0.19.0 llamafactory==0.9.5 trl==1.16.0
	$(RUN) -m pip install --quiet --no-compile --disable-pip-version-check --no-deps --upgrade --target $(TRAINERS)/tokenizers tiktoken regex sentencepiece llama-models==0.3.0 mistral-common==1.13.1 dashscope==2.0.2
	touch $@

trainers: setup $(TRAINERS)/.ready  ## what is written for other projects, read by their own parsers in .venv-trainers
	$(RUN) -m pytest -rs -m trainers
	$(if $(EXAMPLES),$(RUN) tests/benchmarks/configurations.py $(EXAMPLES) --page docs/reference/configurations.md)

check: setup  ## format, lint, types, layers, images, commands and links of the documentation
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/hadolint deploy/Dockerfile.cpu deploy/Dockerfile.cuda
	$(RUN) tests/readme_commands.py
	$(RUN) tests/readme_stories.py

MUTMUT := nice -n 15 $(VENV)/bin/mutmut run
mutants: setup  ## changes the code in small ways and counts the changes that a test notices: hours (SAMPLE=40 of each module)
	rm -rf mutants
	{ $(if $(SAMPLE),$(MUTMUT) 'fitting.laws.fit_failure.*' && \
	  $(MUTMUT) $$($(RUN) tests/mutation_score.py --draw $(SAMPLE)),$(MUTMUT)); } > mutants.log 2>&1 || \
	  { tail -n 40 mutants.log; exit 1; }
	$(RUN) tests/mutation_score.py $(if $(SAMPLE),--sample)

docs: setup  ## the documentation as a site in build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet --strict

gpu-check:  ## on a machine with an NVIDIA GPU and PyTorch: its tests, then measures it (OUT=, LIMIT= seconds)
	$(GPU_PYTHON) -m pytest -m 'gpu and not alone' $(GPU_PROCESSES) -W default $(GPU_TESTS)
	$(GPU_PYTHON) -m pytest -m 'gpu and alone' -W default $(GPU_TESTS)
	$(GPU_PYTHON) -m orchestrator gpu-check --out $(OUT) --seconds $(LIMIT)

kuberay-check: setup  ## the manifests in deploy/ against KubeRay's own schemas (FOLDER=helm-chart/kuberay-operator/crds)
	$(RUN) tests/kuberay_schema.py $(FOLDER)

image-check: setup  ## what the images in deploy/ install, against the package indexes; downloads gigabytes, builds nothing
	$(RUN) tests/image_check.py

kernel-sweep:  ## on a machine with an NVIDIA GPU and PyTorch: measures a step's kernels, 8 minutes, resumable (FOLDER=)
	$(GPU_PYTHON) tests/benchmarks/kernel_sweep.py $(FOLDER) --seconds $(LIMIT)

kernel-check: setup  ## the clock's kernels against a folder of kernels measured on GPUs (FOLDER=)
	$(RUN) tests/benchmarks/kernel_times.py $(FOLDER)

kernel-constants: setup  ## fits the clock's rates to such a folder, and prints the held-out errors (FOLDER=)
	$(RUN) tests/benchmarks/kernel_constants.py $(FOLDER)

scoreboard: setup  ## docs/accuracy.md: runs that were predicted, then measured on GPUs
	$(RUN) tests/benchmarks/scoreboard.py --page docs/accuracy.md

bench: setup  ## side by side with what a user would otherwise use
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench]'
	$(RUN) tests/benchmarks/search_probes.py
	$(RUN) tests/benchmarks/step_time_laws.py
	$(RUN) tests/benchmarks/adaptive_choice.py
	$(RUN) tests/benchmarks/ranking.py
	$(RUN) tests/benchmarks/simulated_gpu.py
	$(RUN) tests/benchmarks/recipe_grid.py
	$(RUN) tests/benchmarks/many_ranks.py
	$(RUN) tests/benchmarks/torchtitan_runs.py
	$(RUN) tests/benchmarks/placement.py
	$(RUN) tests/benchmarks/orchestration.py
	$(RUN) tests/benchmarks/large_log.py
	$(RUN) tests/benchmarks/price_drift.py
	$(RUN) tests/benchmarks/end_forecast.py
