"""The options of DiffSynth-Studio's earlier script for Wan, `examples/wanvideo/train_wan_t2v.py`. Needs no torch.

https://github.com/modelscope/DiffSynth-Studio, where it was until June 2025; names, types and defaults are its own.
"""

from flowshard.compat.options import WAN, Option, Script

_FILES = "model.path; the file keeps its publisher's name"
_TILES = ("data.tiles",)

EARLIER_OPTIONS: tuple[Option, ...] = (
    Option("task", required=True, becomes="data_process encodes the samples, train trains from them"),
    # The data.
    Option(
        "dataset_path",
        required=True,
        becomes="metadata.csv in it is data.metadata, train/ data.root, flowshard_cache/ data.cache",
        fields=("data.metadata", "data.root", "data.cache"),
    ),
    Option("num_frames", int, 81, "data.frames, the first ones of a clip", ("data.frames",)),
    Option("height", int, 480, "data.height", ("data.height",)),
    Option("width", int, 832, "data.width", ("data.width",)),
    Option("tiled", bool, False, "data.tiles, of the size and at the steps of the options below", _TILES),
    Option("tile_size_height", int, 34, "data.tiles, in latent pixels", _TILES),
    Option("tile_size_width", int, 34, "data.tiles, in latent pixels", _TILES),
    Option("tile_stride_height", int, 18, "data.tiles, in latent pixels", _TILES),
    Option("tile_stride_width", int, 16, "data.tiles, in latent pixels", _TILES),
    Option("dataloader_num_workers", int, 1, "nothing: samples are read ahead of the step in a thread"),
    # The model.
    Option(
        "dit_path",
        becomes="model.path: files, separated by commas; with data_process it says which model the samples are for",
        fields=("model.path", "model.variant"),
    ),
    Option("text_encoder_path", becomes=_FILES, fields=("model.path",)),
    Option("vae_path", becomes=_FILES, fields=("model.path",)),
    Option(
        "image_encoder_path",
        becomes=f"{_FILES}; with data_process the samples are for image to video",
        fields=("model.path",),
    ),
    # The training.
    Option("train_architecture", default="lora", becomes="train.method", fields=("train.method",)),
    Option("learning_rate", float, 1e-5, "train.learning_rate", ("train.learning_rate",)),
    Option(
        "steps_per_epoch", int, 500, "train.steps and save.every: samples of an epoch", ("train.steps", "save.every")
    ),
    Option("max_epochs", int, 1, "train.steps", ("train.steps",)),
    Option("accumulate_grad_batches", int, 1, "train.global_batch = processes * this", ("train.global_batch",)),
    Option("training_strategy", default="auto", becomes="layout.strategy", fields=("layout.strategy",)),
    Option("use_gradient_checkpointing", bool, False, "memory.activations=recompute", ("memory.activations",)),
    Option("use_gradient_checkpointing_offload", bool, False, "memory.activations=offload", ("memory.activations",)),
    # LoRA.
    Option("lora_rank", int, 4, "lora.rank", ("lora.rank",)),
    Option("lora_alpha", float, 4.0, "lora.alpha", ("lora.alpha",)),
    Option("lora_target_modules", default="q,k,v,o,ffn.0,ffn.2", becomes="lora.targets", fields=("lora.targets",)),
    Option("init_lora_weights", default="kaiming", becomes="lora.init", fields=("lora.init",)),
    Option("pretrained_lora_path", becomes="lora.init_from", fields=("lora.init_from",)),
    # What is written.
    Option(
        "output_path",
        default="./",
        becomes="where epoch-0.safetensors and so on go; the run's own folder is flowshard/ in it",
        fields=("output",),
    ),
    Option("use_swanlab", bool, False, "log.trackers and log.project", ("log.trackers", "log.project")),
    Option("swanlab_mode", becomes="SWANLAB_MODE"),
    # Ours.
    Option("processes", int, None, "how many processes are started where no launcher did; default: one a device"),
    Option("seed", int, 0, "seed", ("seed",)),
)


class EarlierScript(Script):
    """The script."""

    @property
    def path(self) -> str:
        return f"examples/{self.folder}/train_wan_t2v.py"

    @property
    def options(self) -> tuple[Option, ...]:
        return EARLIER_OPTIONS


EARLIER = EarlierScript(WAN, "wanvideo", "video")
