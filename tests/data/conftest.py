"""Token datasets written without `prepare`, so that reader and loader are tested on their own."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runs import write_split

MakeDataset = Callable[..., Path]


@pytest.fixture
def make_dataset(tmp_path: Path) -> MakeDataset:
    """Return a function that writes shards and their metadata into a split's folder and returns its path."""

    def make(shards: Sequence[np.ndarray], name: str = "train", **changes: Any) -> Path:
        folder = tmp_path / "dataset" / name
        write_split(folder, *shards, **changes)
        return folder

    return make
