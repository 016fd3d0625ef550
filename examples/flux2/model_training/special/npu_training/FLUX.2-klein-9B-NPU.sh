#!/usr/bin/env bash
# Full training of FLUX.2-klein-9B, with ZeRO-3, on Ascend NPUs; docs/npu.md.
# With pictures to edit, in the column edit_image: --data_file_keys image,edit_image --extra_inputs edit_image
# DATASET is a folder of your own; options given to this script are added to the command, where the last one counts.
set -eu
export PYTORCH_NPU_ALLOC_CONF=${PYTORCH_NPU_ALLOC_CONF:-expandable_segments:True}
export CPU_AFFINITY_CONF=${CPU_AFFINITY_CONF:-1}

data=${DATASET:-data/diffsynth_example_dataset/flux2/FLUX.2-klein-9B}
[ -e "$data" ] || modelscope download --dataset DiffSynth-Studio/diffsynth_example_dataset \
  --include "flux2/FLUX.2-klein-9B/*" --local_dir data/diffsynth_example_dataset

models="black-forest-labs/FLUX.2-klein-9B:transformer/*.safetensors"
models+=",black-forest-labs/FLUX.2-klein-9B:text_encoder/*.safetensors"
models+=",black-forest-labs/FLUX.2-klein-9B:vae/diffusion_pytorch_model.safetensors"

accelerate launch --config_file examples/flux2/model_training/full/accelerate_config_zero3.yaml \
  examples/flux2/model_training/train.py \
  --model_id_with_origin_paths "$models" \
  --dataset_base_path "$data" --dataset_metadata_path "$data/metadata.csv" --dataset_repeat 50 \
  --tokenizer_path black-forest-labs/FLUX.2-klein-9B:tokenizer/ \
  --max_pixels 1048576 --use_gradient_checkpointing \
  --trainable_models dit --remove_prefix_in_ckpt pipe.dit. \
  --learning_rate 1e-5 --num_epochs 2 \
  --output_path models/train/FLUX.2-klein-9B_full "$@"
