#!/usr/bin/env bash
# Full training of Qwen-Image-Edit-2509, with ZeRO-3, on Ascend NPUs; docs/npu.md.
# DATASET is a folder of your own; options given to this script are added to the command, where the last one counts.
set -eu
export PYTORCH_NPU_ALLOC_CONF=${PYTORCH_NPU_ALLOC_CONF:-expandable_segments:True}
export CPU_AFFINITY_CONF=${CPU_AFFINITY_CONF:-1}

data=${DATASET:-data/diffsynth_example_dataset/qwen_image/Qwen-Image-Edit-2509}
[ -e "$data" ] || modelscope download --dataset DiffSynth-Studio/diffsynth_example_dataset \
  --include "qwen_image/Qwen-Image-Edit-2509/*" --local_dir data/diffsynth_example_dataset

models="Qwen/Qwen-Image-Edit-2509:transformer/diffusion_pytorch_model*.safetensors"
models+=",Qwen/Qwen-Image:text_encoder/model*.safetensors"
models+=",Qwen/Qwen-Image:vae/diffusion_pytorch_model.safetensors"

accelerate launch --config_file examples/qwen_image/model_training/full/accelerate_config_zero3.yaml \
  examples/qwen_image/model_training/train.py \
  --model_id_with_origin_paths "$models" \
  --dataset_base_path "$data" --dataset_metadata_path "$data/metadata.json" --dataset_repeat 50 \
  --data_file_keys image,edit_image --extra_inputs edit_image \
  --max_pixels 1048576 --use_gradient_checkpointing --find_unused_parameters --initialize_model_on_cpu \
  --trainable_models dit --remove_prefix_in_ckpt pipe.dit. \
  --learning_rate 1e-5 --num_epochs 2 \
  --output_path models/train/Qwen-Image-Edit-2509_full "$@"
