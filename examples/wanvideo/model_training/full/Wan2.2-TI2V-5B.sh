#!/usr/bin/env bash
# Full training of Wan 2.2 text and image to video, 5B.
# DATASET is a folder of your own; options given to this script are added to the command, where the last one counts.
set -eu

data=${DATASET:-data/diffsynth_example_dataset/wanvideo/Wan2.2-TI2V-5B}
[ -e "$data" ] || modelscope download --dataset DiffSynth-Studio/diffsynth_example_dataset \
  --include "wanvideo/Wan2.2-TI2V-5B/*" --local_dir data/diffsynth_example_dataset

models="Wan-AI/Wan2.2-TI2V-5B:diffusion_pytorch_model*.safetensors"
models+=",Wan-AI/Wan2.2-TI2V-5B:models_t5_umt5-xxl-enc-bf16.pth"
models+=",Wan-AI/Wan2.2-TI2V-5B:Wan2.2_VAE.pth"

accelerate launch examples/wanvideo/model_training/train.py \
  --model_id_with_origin_paths "$models" \
  --dataset_base_path "$data" --dataset_metadata_path "$data/metadata.csv" --dataset_repeat 100 \
  --extra_inputs input_image \
  --height 480 --width 832 --num_frames 49 \
  --trainable_models dit --remove_prefix_in_ckpt pipe.dit. \
  --learning_rate 1e-5 --num_epochs 2 \
  --output_path models/train/Wan2.2-TI2V-5B_full "$@"
