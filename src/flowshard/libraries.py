"""Settings of the libraries that we call, made before they are imported."""

import logging
import os
import warnings


def quiet_libraries() -> None:
    """Keep progress bars and notices of other libraries out of the way of ours; errors still show."""
    # Before torch is imported: the reducer of DDP warns on every process when all parameters are in use.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

    from flowshard.device import resolve_device

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if resolve_device("auto").type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed, if installed, prints that it found no GPU
    for message in (
        "`broadcast_buffers` is deprecated",  # buffers are built alike everywhere and need no exchange at all
        "FSDP2-wrapped module .* returned a view tensor",  # nothing here works in place on a model's output
        "`torch.distributed.all_gather_into_tensor` is deprecated",  # called by engines
        "`torch.distributed.reduce_scatter_tensor` is deprecated",
    ):
        warnings.filterwarnings("ignore", message=message)
    # peft imports bitsandbytes if it is there, which then says that it lacks a kernel; nothing here uses that.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    # `dtype` is new; the older name works in all releases of diffusers that we support.
    warnings.filterwarnings("ignore", message="`torch_dtype` is deprecated")
    # float32 masters of norm scales beside bfloat16 activations are what autocast is meant to give.
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")

    import diffusers.utils.logging
    import transformers.utils.logging

    for library in (diffusers.utils.logging, transformers.utils.logging):
        library.disable_progress_bar()
        library.set_verbosity_error()
