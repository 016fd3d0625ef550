#!/usr/bin/env bash
# Full training of Z-Image-Turbo.
# DATASET is a folder of your own; options given to this script are added to the command, where the last one counts.
set -eu

data=${DATASET:-data/diffsynth_example_dataset/z_image/Z-Image-Turbo}
[ -e "$data" ] || modelscope download --dataset DiffSynth-Studio/diffsynth_example_dataset \
  --include "z_image/Z-Image-Turbo/*" --local_dir data/diffsynth_example_dataset

models="Tongyi-MAI/Z-Image-Turbo:transformer/*.safetensors"
models+=",Tongyi-MAI/Z-Image-Turbo:text_encoder/*.safetensors"
models+=",Tongyi-MAI/Z-Image-Turbo:vae/diffusion_pytorch_model.safetensors"

accelerate launch --config_file examples/z_image/model_training/full/accelerate_config.yaml \
  examples/z_image/model_training/train.py \
  --model_id_with_origin_paths "$models" \
  --dataset_base_path "$data" --dataset_metadata_path "$data/metadata.csv" --dataset_repeat 400 \
  --max_pixels 1048576 --dataset_num_workers 8 --use_gradient_checkpointing \
  --trainable_models dit --remove_prefix_in_ckpt pipe.dit. \
  --learning_rate 1e-5 --num_epochs 2 \
  --output_path models/train/Z-Image-Turbo_full "$@"
