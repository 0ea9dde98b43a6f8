# Every target but test-gpu and test-newest sets up the virtual environment first, through docker/install.sh, which is done at
# once if nothing changed.
#
#   PYTHON      interpreter for the environment, 3.10 to 3.13
#   DALI_EXTRA  cuda12 or cuda13
#   ARGS        more arguments for dali-stream or pytest, e.g. make test ARGS='-k order -x'

PYTHON ?= python3
DALI_EXTRA ?= cuda12
ARGS ?=
VENV := .venv
RUN := $(VENV)/bin/python -m
SELFTEST_NEEDS := import dali_stream.cli, dali_stream.tools.selftest, torchcodec.decoders, torchcodec.encoders

export PYTHON DALI_EXTRA
# If it was set, each program that a test starts would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo train-demo bench figures docs test test-repo test-slow test-all test-gpu test-lerobot test-newest \
    check types lint format locks release-files clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: ## set up .venv with all that is needed (and FFmpeg, as root on Debian and Ubuntu)
	@bash docker/install.sh $(VENV)

demo: install ## make a small dataset in .demo/dataset and stream it
	$(VENV)/bin/dali-stream demo --root .demo/dataset $(ARGS)

# What is there already goes on: with all of its steps behind it, it draws its pictures only.
train-demo: install ## train a policy on a demo dataset, in a few minutes of a CPU; metrics and predictions in .demo/run
	test -d .demo/small || $(VENV)/bin/dali-stream demo --root .demo/small --episodes 56 --size 120x160
	$(VENV)/bin/python pipelines/train.py .demo/small --out .demo/run --resume --device cpu --val-episodes 4 \
	    --image-size 96 128 --chunk 20 --max-steps 500 --save-every 100 --learning-rate 1e-3 $(ARGS)

bench: install ## measure data loading on the demo dataset; ends with a table, and summary.csv in .demo/bench
	test -d .demo/dataset || $(VENV)/bin/dali-stream demo --root .demo/dataset
	rm -rf .demo/bench
	RUN=here SOURCES=local=.demo/dataset OUT_DIR=.demo/bench DECODES=auto NUM_BATCHES=60 BATCH_SIZE=32 WARMUP=5 $(ARGS) \
	    bash benchmarks/slurm/matrix.sh

# The chart is drawn from committed reports: after new reports, draw it again. docs/figures/path.svg is edited by hand.
figures: install ## draw the pictures in docs/ from the demo dataset and from the reports in benchmarks/results
	test -d .demo/dataset || $(VENV)/bin/dali-stream demo --root .demo/dataset
	$(VENV)/bin/dali-stream preview .demo/dataset --out docs/figures/demo.png --batch-size 2 \
	    --window observation.images.top=-1,-0.5,0 --image-size 150x200
	$(VENV)/bin/dali-stream preview .demo/dataset --out docs/figures/replay.png --batch-size 3 --image-size 112x144 \
	    --epoch 0 --batch 5 --plots --normalize mean_std
	$(VENV)/bin/python benchmarks/peers_chart.py benchmarks/results/peers_g1_2cores.json \
	    benchmarks/results/peers_windows_g1_2cores.json --frame-cache benchmarks/results/disk_frames_2cores.json \
	    --out docs/figures/peers.svg

# Offline: nothing is fetched, and the pages load nothing from another host. A broken link is an error.
docs: install ## build the documentation site in site/
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet --clean

# The tests of one file stay in one process, since they share what they have written. tests/conftest.py says how many processes
# there are, and which files come first.
SEVERAL := -n auto --maxprocesses 8 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder

test: install ## run the tests of the library, without the slow ones
	$(RUN) pytest -q -m 'not slow' --ignore tests/repo $(SEVERAL) $(ARGS)

test-repo: install ## run the tests of documents, Dockerfiles and benchmarks, without the slow ones
	$(RUN) pytest -q -m 'not slow' tests/repo $(SEVERAL) $(ARGS)

test-slow: install ## run the slow tests, and the property tests with all of their examples
test-slow: ONLY := slow or hypothesis
test-all: install ## run the tests of test, test-repo and test-slow in one run

test-slow test-all:
	ALL_EXAMPLES=1 $(RUN) pytest -q -m '$(ONLY)' $(SEVERAL) $(ARGS)

# In an environment that is there: a GPU machine may reach no package index.
test-gpu: ## try NVDEC through DALI on this machine; without a GPU it says so
	@for python in $(wildcard $(VENV)/bin/python) $(PYTHON); do \
	    why=$$("$$python" -c '$(SELFTEST_NEEDS)' 2>&1) && exec "$$python" -m dali_stream selftest $(ARGS); \
	    echo "make test-gpu: $$python: $$(echo "$$why" | tail -n 1)" >&2; \
	done; \
	bash docker/install.sh $(VENV) && exec $(VENV)/bin/python -m dali_stream selftest $(ARGS)

test-lerobot: install ## compare LeRobot's training script on a Loader with its own, for 0.6.1 and for LEROBOT_SOURCE=CHECKOUT (6 GB each)
	bash benchmarks/lerobot.sh $(ARGS)

# In an environment of its own, whose other packages are those of constraints.txt.
NEWEST := .venv-newest-$(DALI_EXTRA)
# Tests of decoders, then of identity, then of routes.
DECODING := bad_video clips codecs containers decodes depth edit_lists frame_size other_sizes resizing turned work \
    delivered_frames frame_cache loader parity timestamps dali_route routes torchcodec_cuda

test-newest: ## run the tests of decoders with the newest torch and torchcodec, or TORCH=2.14.1 TORCHCODEC=0.14.0 (8 GB)
	INSTALL=libraries bash docker/install.sh
	test -x $(NEWEST)/bin/pip || $(PYTHON) -m venv $(NEWEST)
	grep -Ev '^torch(codec|vision)?==' constraints.txt >$(NEWEST)/constraints.txt
	$(NEWEST)/bin/python -m pip install --quiet --upgrade -c $(NEWEST)/constraints.txt -e '.[$(DALI_EXTRA),dev]' \
	    'torch$(TORCH:%===%)' 'torchcodec$(TORCHCODEC:%===%)'
	$(NEWEST)/bin/python -m pytest -q -p no:cacheprovider -m 'not slow' $(DECODING:%=tests/test_%.py) $(SEVERAL) $(ARGS)

check: install docs types ## lint, format check, types, documentation site
	$(RUN) ruff check
	$(RUN) ruff format --check

types: install ## check the types
	$(RUN) mypy

lint: ## lint the image, its deployments, the workflows and the shell scripts
	@INSTALL=develop-all bash docker/install.sh $(VENV)
	$(VENV)/bin/hadolint docker/Dockerfile
	$(VENV)/bin/shellcheck .ci/run docker/install.sh docker/slurm/*.sbatch benchmarks/*.sh benchmarks/slurm/*
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.compose-spec docker/compose.yaml
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml \
	    .github/ISSUE_TEMPLATE/feature.yml
	$(VENV)/bin/kubernetes-validate --strict docker/k8s/pod.yaml

# The programs of a release, in an environment of their own, which its lock fixes as well.
RELEASE := .venv-release
$(RELEASE)/done: locks/release.txt
	$(PYTHON) -m venv --clear $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet --require-hashes -r locks/release.txt
	touch $@

# A lock is for Python 3.10 to 3.13 on x86-64 and aarch64. Versions stay what they are unless constraints.txt has another one, or
# ARGS=--upgrade is given. The extras are resolved together first, so that several of them can be installed together.
LOCKED := cuda12 cuda13 depth ray s3 slurm train
LOCK = $(RELEASE)/bin/uv pip compile --quiet --no-config --default-index https://pypi.org/simple --universal --generate-hashes \
    --no-annotate --python-version 3.10 --custom-compile-command 'make locks'

locks: $(RELEASE)/done ## update the files in locks/, which pin what each extra installs with hashes, from PyPI
	@cat $(wildcard $(LOCKED:%=locks/%.txt)) | sed -n 's/^\([a-z].*==.*\) \\$$/\1/p' | sort -u >$(RELEASE)/all.txt
	$(LOCK) pyproject.toml $(LOCKED:%=--extra %) -c constraints.txt $(ARGS) -o $(RELEASE)/all.txt
	for extra in $(LOCKED); do \
	    $(LOCK) pyproject.toml --extra $$extra -c $(RELEASE)/all.txt -o locks/$$extra.txt || exit 1; \
	done
	$(LOCK) locks/release.in $(ARGS) -o locks/release.txt
	$(LOCK) locks/build.in -c locks/release.txt -o locks/build.txt

# The environment of each CUDA is installed as a user would install it, since only installed packages tell their licences.
release-files: $(RELEASE)/done ## build wheel, sdist, locks, SBOM, licences and hashes in release/ (downloads 4 GB)
	rm -rf dist release
	mkdir release
	$(RELEASE)/bin/python -m build --no-isolation
	$(RELEASE)/bin/twine check --strict dist/*
	cp dist/* release/
	for extra in $(LOCKED); do cp locks/$$extra.txt release/$$extra.lock || exit 1; done
	for extra in cuda12 cuda13; do \
	    $(PYTHON) -m venv --clear $(RELEASE)/installed && \
	    $(RELEASE)/installed/bin/python -m pip install --quiet --no-cache-dir --require-hashes -r locks/$$extra.txt && \
	    $(RELEASE)/bin/cyclonedx-py environment --pyproject pyproject.toml --mc-type library --output-reproducible \
	        -o release/sbom-$$extra.cdx.json $(RELEASE)/installed/bin/python && \
	    $(RELEASE)/bin/pip-licenses --python $(RELEASE)/installed/bin/python --format csv --with-urls \
	        --output-file release/licenses-$$extra.csv || exit 1; \
	done
	rm -r $(RELEASE)/installed
	cd release && sha256sum * >SHA256SUMS

format: install ## format the code and fix what ruff can fix
	$(RUN) ruff check --fix
	$(RUN) ruff format

clean: ## remove the environment, the demo and every cache
	rm -rf $(VENV) $(RELEASE) .venv-lerobot-* .venv-newest-* .demo .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist release site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
