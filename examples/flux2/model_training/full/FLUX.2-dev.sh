#!/usr/bin/env bash
# Full training of FLUX.2-dev.
# DATASET is a folder of your own; options given to this script are added to the command, where the last one counts.
set -eu

data=${DATASET:-data/diffsynth_example_dataset/flux2/FLUX.2-dev}
[ -e "$data" ] || modelscope download --dataset DiffSynth-Studio/diffsynth_example_dataset \
  --include "flux2/FLUX.2-dev/*" --local_dir data/diffsynth_example_dataset

models="black-forest-labs/FLUX.2-dev:transformer/*.safetensors"
models+=",black-forest-labs/FLUX.2-dev:text_encoder/*.safetensors"
models+=",black-forest-labs/FLUX.2-dev:vae/diffusion_pytorch_model.safetensors"

accelerate launch --config_file examples/flux2/model_training/full/accelerate_config_zero3.yaml \
  examples/flux2/model_training/train.py \
  --model_id_with_origin_paths "$models" \
  --dataset_base_path "$data" --dataset_metadata_path "$data/metadata.csv" --dataset_repeat 50 \
  --max_pixels 1048576 --use_gradient_checkpointing --initialize_model_on_cpu \
  --trainable_models dit --remove_prefix_in_ckpt pipe.dit. \
  --learning_rate 1e-5 --num_epochs 2 \
  --output_path models/train/FLUX.2-dev_full "$@"
