"""Token datasets written without `prepare`, so that reader and loader are tested on their own."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from heinsen.files import seal

MakeDataset = Callable[..., Path]


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Return a generator with a fresh seed, which is printed if the test fails."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"rng seed {seed}")
    return np.random.default_rng(seed)


@pytest.fixture
def make_dataset(tmp_path: Path) -> MakeDataset:
    """Return a function that writes shards and their metadata into a split's folder and returns its path."""

    def make(shards: Sequence[np.ndarray], name: str = "train", **changes: object) -> Path:
        folder = tmp_path / "dataset" / name
        folder.mkdir(parents=True)
        records = []
        for index, tokens in enumerate(shards):
            path = folder / f"shard-{index:05d}.npy"
            np.save(path, np.asarray(tokens, np.uint16))
            sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
            records.append(
                {
                    "file": path.name,
                    "num_tokens": len(tokens),
                    "num_documents": 1,
                    "num_bytes": len(tokens) - 1,
                    "sha256": sha256,
                }
            )
        for name in ("num_documents", "num_bytes"):  # totals that were asked for: the last shard makes up for the rest
            if name in changes:
                records[-1][name] += changes[name] - sum(record[name] for record in records)
        metadata = {
            "format_version": 1,
            "tokenizer": "bytes",
            "vocab_size": 257,
            "eot_id": 256,
            "dtype": "uint16",
            "num_tokens": sum(map(len, shards)),
            "num_documents": len(shards),
            "num_bytes": sum(map(len, shards)) - len(shards),
            "num_skipped_documents": 0,
            "shards": records,
            "source": {},
            **changes,
        }
        (folder / "metadata.json").write_text(json.dumps(seal(metadata)))
        return folder

    return make
