# Everything a fresh machine needs: Python, gcc, g++ and make.
PYTHON ?= python3
BIN := .venv/bin
DEMO := runs/demo
MODEL := runs/shapes
# Two tests at a time, each with one thread: tiny models are no faster with two. Tests of a file share what they set up.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile

.PHONY: demo shapes test test-all lint bench clean

demo: .venv/installed
	rm -rf $(DEMO)
	$(BIN)/python examples/shapes/make_clips.py --shape star --count a --clips 90 --known 60 --output $(DEMO)/clips
	$(BIN)/flowshard train examples/shapes/lora.yaml data.metadata=$(DEMO)/clips/metadata.csv output=$(DEMO)/run
	$(BIN)/flowshard generate --model examples/shapes/model --lora $(DEMO)/run --height 64 --width 64 --frames 9 --fps 8 \
		--steps 20 --guidance 2 --prompt "a white star shrinks" --output $(DEMO)/stars.mp4
	$(BIN)/flowshard report $(DEMO)/run
	@echo
	@echo "before and after    $(DEMO)/run/samples/grid.png"
	@echo "all as one page     $(DEMO)/run/report.html"
	@echo "clips of stars      $(DEMO)/clips"
	@echo "run and its config  $(DEMO)/run"
	@echo "numbers of a step   $(DEMO)/run/metrics.jsonl"
	@echo "trained LoRA        $(DEMO)/run/checkpoints/step-00000240/lora.safetensors"
	@echo "generated clip      $(DEMO)/stars.mp4"

shapes: .venv/installed
	rm -rf $(MODEL)
	$(BIN)/python examples/shapes/make_clips.py --output $(MODEL)/clips
	$(BIN)/python examples/shapes/train_vae.py --output $(MODEL)/first_vae
	$(BIN)/python examples/shapes/train_vae.py --start $(MODEL)/first_vae --clips 1200 --output $(MODEL)/vae
	$(BIN)/python examples/shapes/train_text.py --output $(MODEL)/text
	$(BIN)/python examples/shapes/assemble.py --vae $(MODEL)/vae --text $(MODEL)/text --output $(MODEL)/untrained
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 -m flowshard train examples/shapes/base.yaml
	$(BIN)/python examples/shapes/assemble.py --vae $(MODEL)/vae --text $(MODEL)/text \
		--transformer $(MODEL)/base/checkpoints/step-00004800/ema/transformer --dtype float16 --output $(MODEL)/model

test: .venv/installed
	$(PYTEST) -m "not slow"

test-all: .venv/installed
	$(PYTEST)

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/installed
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/job.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/sequence.py
	$(BIN)/python benchmarks/loading.py
	$(BIN)/python benchmarks/data.py

clean:
	rm -rf .venv runs

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[deepspeed,dev]'
	touch $@
