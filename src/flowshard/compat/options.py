"""The options of DiffSynth-Studio's training scripts: what each becomes here, or why it is refused. Needs no torch.

https://github.com/modelscope/DiffSynth-Studio, `diffsynth/diffusion/parsers.py` and
`examples/*/model_training/train.py`; names, types and defaults are theirs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WAN, QWEN, FLUX, FLUX2, Z_IMAGE = "wan", "qwen-image", "flux", "flux2", "z-image"
ALL = (WAN, QWEN, FLUX, FLUX2, Z_IMAGE)


@dataclass(frozen=True)
class Script:
    """One of the training scripts."""

    series: str
    """Name of the models' series here."""
    folder: str
    """Below `examples`."""
    media: str
    """The column of the metadata that is trained on."""

    @property
    def path(self) -> str:
        """Of the script in a checkout."""
        return f"examples/{self.folder}/model_training/train.py"

    @property
    def options(self) -> "tuple[Option, ...]":
        """All that it has, those that are refused as well."""
        return tuple(option for option in OPTIONS if self.series in option.scripts)


SCRIPTS: Mapping[str, Script] = {
    script.series: script
    for script in (
        Script(WAN, "wanvideo", "video"),
        Script(QWEN, "qwen_image", "image"),
        Script(FLUX, "flux", "image"),
        Script(FLUX2, "flux2", "image"),
        Script(Z_IMAGE, "z_image", "image"),
    )
}


@dataclass(frozen=True)
class Option:
    """One option of the scripts."""

    name: str
    kind: type = str
    """`bool` is a flag without a value."""
    default: Any = None
    becomes: str = ""
    """What it does here, in a sentence."""
    fields: tuple[str, ...] = ()
    """Options of our config that it decides, the one that messages name first."""
    scripts: tuple[str, ...] = ALL
    """The series whose scripts have it."""
    refused: str = ""
    """What to do instead, of an option that is not honoured."""
    required: bool = False

    @property
    def flag(self) -> str:
        """As it is written."""
        return f"--{self.name}"


_QUANTISED = "weights are not quantised here; divide them with --layout fsdp2 or zero3 if memory is short"
_TEMPLATE = "template models are not trained here; leave it out"
_DISTILLED = "distillation is not done here; leave it out"
_OFFLOAD = "weights are moved block by block; leave it out, --enable_model_cpu_offload alone does it"

_DMD2 = (
    "student_update_freq",
    "student_sample_steps",
    "student_sample_type",
    "student_schedule",
    "student_t_list",
    "matching_t_min",
    "matching_t_max",
    "matching_t_sampling",
    "matching_t_mean",
    "matching_t_std",
    "gan_loss_weight",
    "gan_r1_reg_weight",
    "gan_r1_reg_alpha",
    "fake_score_learning_rate",
    "discriminator_learning_rate",
    "feature_indices",
    "teacher_cfg_scale",
    "student_grad_clip_norm",
)

OPTIONS: tuple[Option, ...] = (
    # The data.
    Option(
        "dataset_base_path", required=True, becomes="data.root; with --task sft:train data.cache", fields=("data.root",)
    ),
    Option("dataset_metadata_path", becomes="data.metadata", fields=("data.metadata",)),
    Option("dataset_repeat", int, 1, "data.repeat", ("data.repeat",)),
    Option("dataset_num_workers", int, 0, "nothing: samples are encoded once, and read ahead of the step in a thread"),
    Option(
        "data_file_keys",
        default="image,video",
        becomes="with --extra_inputs, data.columns: other columns are left aside",
        fields=("data.columns",),
    ),
    Option("height", int, None, "data.height", ("data.height",)),
    Option("width", int, None, "data.width", ("data.width",)),
    Option(
        "max_pixels",
        int,
        1024 * 1024,
        "data.max_pixels, without height and width: each sample keeps its own size, and is only made smaller",
        ("data.max_pixels",),
    ),
    Option("num_frames", int, 81, "data.frames, the first ones of a clip", ("data.frames",), (WAN,)),
    # The model.
    Option("model_paths", becomes="model.path", fields=("model.path",)),
    Option(
        "model_id_with_origin_paths",
        becomes="model.path: files below models/ or $DIFFSYNTH_MODEL_BASE_PATH, downloaded there if they are missing",
        fields=("model.path",),
    ),
    Option(
        "extra_inputs",
        becomes="columns of the metadata that the model gets; input_image and end_image come from the clip",
        fields=("data.columns",),
    ),
    Option(
        "fp8_models",
        becomes="a note: frozen weights stay in bfloat16; encoders are released once the samples are encoded",
    ),
    Option(
        "offload_models",
        becomes="nothing more: no task loads a model that it does not need, and encoders are released after use",
    ),
    Option("resume_from_checkpoint", becomes="model.weights", fields=("model.weights",)),
    Option(
        "tokenizer_path", becomes="model.parts", fields=("model.parts.tokenizer",), scripts=(WAN, QWEN, FLUX2, Z_IMAGE)
    ),
    Option("processor_path", becomes="model.parts", fields=("model.parts.processor",), scripts=(QWEN,)),
    Option("tokenizer_1_path", becomes="model.parts", fields=("model.parts.tokenizer",), scripts=(FLUX,)),
    Option("tokenizer_2_path", becomes="model.parts", fields=("model.parts.tokenizer_2",), scripts=(FLUX,)),
    Option("audio_processor_path", becomes="a note: no model that is trained here hears", scripts=(WAN,)),
    Option(
        "initialize_model_on_cpu",
        bool,
        False,
        "nothing more: every process reads its part of the weights straight to its device",
        scripts=(WAN, QWEN, FLUX2),
    ),
    Option(
        "zero_cond_t",
        bool,
        False,
        "a check: Qwen-Image-Edit-2511 always has it, and no other model",
        scripts=(QWEN,),
    ),
    Option(
        "enable_npu_patch",
        bool,
        False,
        "nothing more: fused operators are used on NPUs that have them",
        scripts=(Z_IMAGE,),
    ),
    # The training.
    Option("learning_rate", float, 1e-4, "train.learning_rate, without a warm-up", ("train.learning_rate",)),
    Option("num_epochs", int, 1, "train.epochs", ("train.epochs",)),
    Option(
        "trainable_models",
        becomes="dit: train.method=full; vace: the branch of VACE alone",
        fields=("train.method", "train.modules"),
    ),
    Option(
        "find_unused_parameters",
        bool,
        False,
        "nothing more: a parameter without a gradient counts as zero under every strategy",
    ),
    Option(
        "weight_decay", float, 0.01, "train.weight_decay, of all parameters", ("train.weight_decay", "train.groups")
    ),
    Option(
        "task",
        default="sft",
        becomes="sft and sft:train train, sft:data_process is `flowshard cache`; others are refused",
    ),
    Option("customized_optimizer", becomes="train.optimizer", fields=("train.optimizer",)),
    Option(
        "gradient_accumulation_steps",
        int,
        1,
        "train.global_batch = data-parallel processes * this",
        ("train.global_batch",),
    ),
    Option(
        "max_timestep_boundary",
        float,
        1.0,
        "objective.index_range",
        ("objective.index_range",),
        (WAN,),
    ),
    Option("min_timestep_boundary", float, 0.0, "objective.index_range", ("objective.index_range",), (WAN,)),
    Option(
        "use_gradient_checkpointing",
        bool,
        False,
        "memory.activations=recompute; the script for Wan always does",
        ("memory.activations",),
    ),
    Option(
        "use_gradient_checkpointing_offload",
        bool,
        False,
        "memory.activations=offload",
        ("memory.activations",),
    ),
    Option(
        "enable_model_cpu_offload",
        bool,
        False,
        "layout.strategy=fsdp2 with layout.offload_parameters, or the latter with the launcher's ZeRO-3",
        ("layout.offload_parameters",),
    ),
    Option(
        "enable_optimizer_cpu_offload",
        bool,
        False,
        "with --enable_model_cpu_offload, which keeps the optimizer's state in host memory as well",
        ("layout.offload_optimizer",),
    ),
    # LoRA.
    Option("lora_base_model", becomes="train.method=lora on dit or vace", fields=("train.method",)),
    Option(
        "lora_target_modules",
        default="q,k,v,o,ffn.0,ffn.2",
        becomes="lora.targets; empty: all large linear layers of the blocks",
        fields=("lora.targets",),
    ),
    Option("lora_rank", int, 32, "lora.rank and lora.alpha", ("lora.rank", "lora.alpha")),
    Option("lora_checkpoint", becomes="lora.init_from", fields=("lora.init_from",)),
    Option("preset_lora_path", becomes="lora.preset", fields=("lora.preset",)),
    Option("preset_lora_model", becomes="a check: dit or vace"),
    # What is written.
    Option(
        "output_path",
        default="./models",
        becomes="where the files go; the run's own folder is flowshard/ in it",
        fields=("output",),
    ),
    Option("remove_prefix_in_ckpt", default="pipe.dit.", becomes="taken from the names of tensors in the files"),
    Option(
        "save_steps",
        int,
        None,
        "save.every, counting optimizer updates; without it a file is saved after every epoch",
        ("save.every",),
    ),
    Option(
        "align_to_opensource_format",
        bool,
        False,
        "LoRA files with keys lora_unet_..., and alpha",
        scripts=(FLUX,),
    ),
    Option("enable_tensorboard_log", bool, False, "log.trackers", ("log.trackers",)),
    Option("enable_wandb_log", bool, False, "log.trackers", ("log.trackers",)),
    Option("wandb_project", default="DiffSynth-Studio", becomes="log.project", fields=("log.project",)),
    Option("enable_swanlab_log", bool, False, "log.trackers", ("log.trackers",)),
    Option("swanlab_project", default="DiffSynth-Studio", becomes="log.project", fields=("log.project",)),
    Option("enable_csv_log", bool, False, "loss.csv, one line an update"),
    # Ours.
    Option("sp_size", int, 1, "layout.sequence: processes that share the tokens of a sample", ("layout.sequence",)),
    Option("seed", int, 0, "seed", ("seed",)),
    Option("layout", becomes="a layout as `flowshard parity` takes it, for example fsdp2,activations=offload"),
    Option("extend", becomes="model.extend", fields=("model.extend",)),
    # Not honoured.
    Option("quant_options", refused=_QUANTISED),
    Option("template_model_id_or_path", refused=_TEMPLATE),
    Option("enable_lora_hot_loading", bool, refused=_TEMPLATE),
    Option("framewise_decoding", bool, refused="WanToDance is not trained here; leave it out", scripts=(WAN,)),
    Option("cpu_offload_split_threshold", int, refused=_OFFLOAD),
    *(Option(f"dmd2_{name}", refused=_DISTILLED) for name in _DMD2),
)
BY_NAME: Mapping[str, Option] = {option.name: option for option in OPTIONS}
