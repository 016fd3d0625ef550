"""The processor of Qwen2.5-VL for prompts with pictures, without torchvision."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.processing_utils import ProcessorMixin


class PictureProcessor(Qwen2VLProcessor):
    """`Qwen2VLProcessor` without the part for videos, which alone needs torchvision. Pictures go through Pillow."""

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        """Put both together."""
        self.image_token = "<|image_pad|>"  # noqa: S105
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        # Not that of the class above, which insists on a processor for videos.
        ProcessorMixin.__init__(self, image_processor, tokenizer)

    @property
    def model_input_names(self) -> list[str]:
        """What it gives."""
        return [*self.tokenizer.model_input_names, *self.image_processor.model_input_names]


def read_processor(folder: Path) -> PictureProcessor:
    """From the `processor` folder of a pipeline."""
    pictures = Qwen2VLImageProcessorPil.from_pretrained(folder, local_files_only=True)
    return PictureProcessor(pictures, AutoTokenizer.from_pretrained(folder, local_files_only=True))
