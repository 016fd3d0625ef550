#!/usr/bin/env bash
# Full training of Qwen-Image-Edit-2511.
# The model takes its reference pictures at noise level 0, which --zero_cond_t says.
# DATASET is a folder of your own; options given to this script are added to the command, where the last one counts.
set -eu

data=${DATASET:-data/diffsynth_example_dataset/qwen_image/Qwen-Image-Edit-2511}
[ -e "$data" ] || modelscope download --dataset DiffSynth-Studio/diffsynth_example_dataset \
  --include "qwen_image/Qwen-Image-Edit-2511/*" --local_dir data/diffsynth_example_dataset

models="Qwen/Qwen-Image-Edit-2511:transformer/diffusion_pytorch_model*.safetensors"
models+=",Qwen/Qwen-Image:text_encoder/model*.safetensors"
models+=",Qwen/Qwen-Image:vae/diffusion_pytorch_model.safetensors"

accelerate launch --config_file examples/qwen_image/model_training/full/accelerate_config_zero2offload.yaml \
  examples/qwen_image/model_training/train.py \
  --model_id_with_origin_paths "$models" \
  --dataset_base_path "$data" --dataset_metadata_path "$data/metadata.json" --dataset_repeat 50 \
  --data_file_keys image,edit_image --extra_inputs edit_image \
  --max_pixels 1048576 \
  --trainable_models dit --remove_prefix_in_ckpt pipe.dit. \
  --learning_rate 1e-5 --num_epochs 2 \
  --use_gradient_checkpointing --find_unused_parameters --zero_cond_t \
  --output_path models/train/Qwen-Image-Edit-2511_full "$@"
