#!/usr/bin/env bash
# Full training of Wan 2.1 text to video, 14B, with ZeRO-3 on Ascend NPUs; docs/npu.md.
# DATASET is a folder of your own; options given to this script are added to the command, where the last one counts.
set -eu
export PYTORCH_NPU_ALLOC_CONF=${PYTORCH_NPU_ALLOC_CONF:-expandable_segments:True}
export CPU_AFFINITY_CONF=${CPU_AFFINITY_CONF:-1}

data=${DATASET:-data/diffsynth_example_dataset/wanvideo/Wan2.1-T2V-14B}
[ -e "$data" ] || modelscope download --dataset DiffSynth-Studio/diffsynth_example_dataset \
  --include "wanvideo/Wan2.1-T2V-14B/*" --local_dir data/diffsynth_example_dataset

models="Wan-AI/Wan2.1-T2V-14B:diffusion_pytorch_model*.safetensors"
models+=",Wan-AI/Wan2.1-T2V-14B:models_t5_umt5-xxl-enc-bf16.pth"
models+=",Wan-AI/Wan2.1-T2V-14B:Wan2.1_VAE.pth"

accelerate launch --config_file examples/wanvideo/model_training/full/accelerate_config_zero3.yaml \
  examples/wanvideo/model_training/train.py \
  --model_id_with_origin_paths "$models" \
  --dataset_base_path "$data" --dataset_metadata_path "$data/metadata.csv" --dataset_repeat 100 \
  --height 480 --width 832 --initialize_model_on_cpu \
  --trainable_models dit --remove_prefix_in_ckpt pipe.dit. \
  --learning_rate 1e-5 --num_epochs 2 \
  --output_path models/train/Wan2.1-T2V-14B_full "$@"
