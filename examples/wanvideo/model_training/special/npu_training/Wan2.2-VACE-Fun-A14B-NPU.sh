#!/usr/bin/env bash
# Training of the VACE blocks of Wan 2.2 VACE-Fun, A14B, with ZeRO-3, on Ascend NPUs; docs/npu.md.
# Its transformer for high noise, then the one for low noise. They change over at sigma 0.9, which is 0.358 of the way
# through the 1000 shifted timesteps.
# DATASET is a folder of your own; options given to this script are added to the command, where the last one counts.
set -eu
export PYTORCH_NPU_ALLOC_CONF=${PYTORCH_NPU_ALLOC_CONF:-expandable_segments:True}
export CPU_AFFINITY_CONF=${CPU_AFFINITY_CONF:-1}

data=${DATASET:-data/diffsynth_example_dataset/wanvideo/Wan2.2-VACE-Fun-A14B}
[ -e "$data" ] || modelscope download --dataset DiffSynth-Studio/diffsynth_example_dataset \
  --include "wanvideo/Wan2.2-VACE-Fun-A14B/*" --local_dir data/diffsynth_example_dataset

train() {  # high or low, from, to
  models="PAI/Wan2.2-VACE-Fun-A14B:$1_noise_model/diffusion_pytorch_model*.safetensors"
  models+=",PAI/Wan2.2-VACE-Fun-A14B:models_t5_umt5-xxl-enc-bf16.pth"
  models+=",PAI/Wan2.2-VACE-Fun-A14B:Wan2.1_VAE.pth"
  accelerate launch --config_file examples/wanvideo/model_training/full/accelerate_config_zero3.yaml \
    examples/wanvideo/model_training/train.py \
    --model_id_with_origin_paths "$models" \
    --dataset_base_path "$data" --dataset_metadata_path "$data/metadata.csv" --dataset_repeat 100 \
    --data_file_keys video,vace_video,vace_reference_image --extra_inputs vace_video,vace_reference_image \
    --height 480 --width 832 --num_frames 17 --use_gradient_checkpointing_offload --initialize_model_on_cpu \
    --min_timestep_boundary "$2" --max_timestep_boundary "$3" \
    --trainable_models vace --remove_prefix_in_ckpt pipe.vace. \
    --learning_rate 1e-4 --num_epochs 2 \
    --output_path "models/train/Wan2.2-VACE-Fun-A14B_$1_noise_full" "${options[@]}"
}

options=("$@")
train high 0 0.358
train low 0.358 1
