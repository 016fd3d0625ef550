#!/usr/bin/env bash
# Full training of FLUX.1-dev, with ZeRO-3, on Ascend NPUs; docs/npu.md.
# DATASET is a folder of your own; options given to this script are added to the command, where the last one counts.
set -eu
export PYTORCH_NPU_ALLOC_CONF=${PYTORCH_NPU_ALLOC_CONF:-expandable_segments:True}
export CPU_AFFINITY_CONF=${CPU_AFFINITY_CONF:-1}

data=${DATASET:-data/diffsynth_example_dataset/flux/FLUX.1-dev}
[ -e "$data" ] || modelscope download --dataset DiffSynth-Studio/diffsynth_example_dataset \
  --include "flux/FLUX.1-dev/*" --local_dir data/diffsynth_example_dataset

models="black-forest-labs/FLUX.1-dev:flux1-dev.safetensors"
models+=",black-forest-labs/FLUX.1-dev:text_encoder/model.safetensors"
models+=",black-forest-labs/FLUX.1-dev:text_encoder_2/*.safetensors"
models+=",black-forest-labs/FLUX.1-dev:ae.safetensors"

accelerate launch --config_file examples/flux/model_training/full/accelerate_config_zero3.yaml \
  examples/flux/model_training/train.py \
  --model_id_with_origin_paths "$models" \
  --dataset_base_path "$data" --dataset_metadata_path "$data/metadata.csv" --dataset_repeat 400 \
  --max_pixels 1048576 --use_gradient_checkpointing \
  --trainable_models dit --remove_prefix_in_ckpt pipe.dit. \
  --learning_rate 1e-5 --num_epochs 1 \
  --output_path models/train/FLUX.1-dev_full "$@"
