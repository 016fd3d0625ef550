#!/usr/bin/env bash
# Full training of Z-Image-Turbo, with ZeRO-3, on Ascend NPUs; docs/npu.md.
# DATASET is a folder of your own; options given to this script are added to the command, where the last one counts.
set -eu
export PYTORCH_NPU_ALLOC_CONF=${PYTORCH_NPU_ALLOC_CONF:-expandable_segments:True}
export CPU_AFFINITY_CONF=${CPU_AFFINITY_CONF:-1}

data=${DATASET:-data/diffsynth_example_dataset/z_image/Z-Image-Turbo}
[ -e "$data" ] || modelscope download --dataset DiffSynth-Studio/diffsynth_example_dataset \
  --include "z_image/Z-Image-Turbo/*" --local_dir data/diffsynth_example_dataset

models="Tongyi-MAI/Z-Image-Turbo:transformer/*.safetensors"
models+=",Tongyi-MAI/Z-Image-Turbo:text_encoder/*.safetensors"
models+=",Tongyi-MAI/Z-Image-Turbo:vae/diffusion_pytorch_model.safetensors"

accelerate launch --config_file examples/z_image/model_training/full/accelerate_config_zero3.yaml \
  examples/z_image/model_training/train.py \
  --model_id_with_origin_paths "$models" \
  --dataset_base_path "$data" --dataset_metadata_path "$data/metadata.csv" --dataset_repeat 400 \
  --max_pixels 1048576 --use_gradient_checkpointing --dataset_num_workers 8 --enable_npu_patch \
  --trainable_models dit --remove_prefix_in_ckpt pipe.dit. \
  --learning_rate 1e-5 --num_epochs 2 \
  --output_path models/train/Z-Image-Turbo_full "$@"
