"""Fixtures that all tests share: a tiny pipeline and the repository's clips."""

from pathlib import Path

import pytest

from flowshard.families.tiny import write_tiny_pipeline
from flowshard.libraries import quiet_libraries

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session", autouse=True)
def _quiet() -> None:
    quiet_libraries()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random `wan2.1-t2v-1.3b` pipeline."""
    folder = tmp_path_factory.mktemp("models") / "wan"
    write_tiny_pipeline("wan2.1-t2v-1.3b", folder, seed=0)
    return folder


@pytest.fixture(scope="session")
def clips() -> Path:
    """Folder of five real clips with their `metadata.csv`."""
    return REPOSITORY / "examples" / "data" / "bunny"
