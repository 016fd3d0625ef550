"""Fixtures that all tests share: a tiny pipeline and the repository's clips."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from flowshard.families.tiny import write_tiny_pipeline
from flowshard.libraries import quiet_libraries

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session", autouse=True)
def _quiet() -> None:
    quiet_libraries()


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """From the name of a variant to the folder of its tiny random pipeline."""
    folder = tmp_path_factory.mktemp("models")

    @cache
    def write(variant: str) -> Path:
        write_tiny_pipeline(variant, folder / variant, seed=0)
        return folder / variant

    return write


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """From a variant to the publisher's files of its tiny model."""
    folder = tmp_path_factory.mktemp("originals")

    @cache
    def write(variant: str) -> Path:
        write_tiny_pipeline(variant, folder / variant, seed=0, form="original")
        return folder / variant

    return write


@pytest.fixture(scope="session")
def tiny(tiny_models: Callable[[str], Path]) -> Path:
    """A tiny random `wan2.1-t2v-1.3b` pipeline."""
    return tiny_models("wan2.1-t2v-1.3b")


@pytest.fixture(scope="session")
def clips() -> Path:
    """Folder of five real clips with their `metadata.csv`."""
    return REPOSITORY / "examples" / "data" / "bunny"
