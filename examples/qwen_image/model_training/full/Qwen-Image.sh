#!/usr/bin/env bash
# Full training of Qwen-Image.
# DATASET is a folder of your own; options given to this script are added to the command, where the last one counts.
set -eu

data=${DATASET:-data/diffsynth_example_dataset/qwen_image/Qwen-Image}
[ -e "$data" ] || modelscope download --dataset DiffSynth-Studio/diffsynth_example_dataset \
  --include "qwen_image/Qwen-Image/*" --local_dir data/diffsynth_example_dataset

models="Qwen/Qwen-Image:transformer/diffusion_pytorch_model*.safetensors"
models+=",Qwen/Qwen-Image:text_encoder/model*.safetensors"
models+=",Qwen/Qwen-Image:vae/diffusion_pytorch_model.safetensors"

accelerate launch --config_file examples/qwen_image/model_training/full/accelerate_config_zero2offload.yaml \
  examples/qwen_image/model_training/train.py \
  --model_id_with_origin_paths "$models" \
  --dataset_base_path "$data" --dataset_metadata_path "$data/metadata.csv" --dataset_repeat 50 \
  --max_pixels 1048576 \
  --trainable_models dit --remove_prefix_in_ckpt pipe.dit. \
  --learning_rate 1e-5 --num_epochs 2 \
  --use_gradient_checkpointing --find_unused_parameters \
  --output_path models/train/Qwen-Image_full "$@"
