"""`flowshard cache`: encodes the samples of a run and does nothing else."""

from dataclasses import dataclass

from flowshard.config import Config
from flowshard.config_conflicts import from_cache
from flowshard.data.sources import RunData
from flowshard.errors import UserError
from flowshard.families import Family
from flowshard.parallel.layout import Layout, encoding_layout
from flowshard.train.checkpoint import agreed_digest
from flowshard.train.data_inputs import read_samples
from flowshard.train.inputs import check_writable, with_variant
from flowshard.weights.source import ModelSource, OwnFiles, find_encoders


@dataclass(frozen=True)
class EncodingInputs:
    """The checked input of `flowshard cache`."""

    config: Config
    family: Family
    source: ModelSource
    """The model's encoders."""
    data: RunData
    """The samples."""
    layout: Layout


def check_encoding(config: Config) -> EncodingInputs:
    """Find what is wrong with the input before torch is imported. The transformer need not be there.

    Raises:
        UserError: the message names option, file or row, the value, and the fix.
    """
    folder = config.cache_folder
    if folder is None:
        raise UserError("data.cache: 'off' keeps no encoded samples; set data.cache=auto, or to a folder")
    config, family, variant = with_variant(config)
    layout = encoding_layout()
    if from_cache(config.data):
        raise UserError("give data.metadata or data.sources: these are the samples that are encoded")
    config, samples = read_samples(config, family)
    source = find_encoders(config.model.path, family, variant, option="model.path", own=OwnFiles.of(config.model))
    check_writable(folder, option="data.cache")
    return EncodingInputs(config, family, source, samples, layout)


def encode_samples(inputs: EncodingInputs) -> None:
    """Fill the cache, in the processes that the launcher started.

    Raises:
        UserError: a medium cannot be decoded; the message names file and row.
    """
    import torch

    from flowshard.data.dataset import Encoder, open_datasets
    from flowshard.device import check_dtype
    from flowshard.parallel.processes import Processes, run_together

    config = inputs.config

    def work(processes: Processes) -> None:
        agreed_digest(inputs.data.all, processes)
        check_dtype(processes.device, config.model.dtype)
        dtype = getattr(torch, config.model.dtype)
        encoder = Encoder(config, inputs.family, inputs.source, inputs.data.training, dtype, processes.device)
        open_datasets(encoder, inputs.data, config.cache_folder, processes=processes, apart=inputs.layout.world == 1)

    run_together(inputs.layout, work, device_name=config.device, timeout_minutes=config.layout.timeout_minutes)
