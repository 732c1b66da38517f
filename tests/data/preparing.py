"""What the tests of sources and preparations share: inputs, settings, and the truth about a prepared split."""

import json

import numpy as np
import pytest

from heinsen.data import writer as writer_module
from heinsen.data.dataset import TokenDataset
from heinsen.data.preparation import Settings, prepare
from heinsen.data.tokenizer import get_tokenizer


def jsonl(texts, field="text"):
    # Both ways of writing a non-ASCII character in JSON, and a blank line after each record.
    lines = [json.dumps({"meta": 1, field: t}, ensure_ascii=bool(i % 2)) for i, t in enumerate(texts)]
    return "\n\n".join(lines).encode()


def settings_of(*sources, split="train", tokenizer="bytes", **changes):
    return Settings(sources=tuple(map(str, sources)), split=split, tokenizer=tokenizer, **changes)


def files_of(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def times_of(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def check_split(folder, texts, tokenizer="bytes"):
    """Check that the split in `folder` holds `texts`, each followed by eot, and that its metadata is right."""
    dataset = TokenDataset(folder)
    dataset.verify()
    tokenizer = get_tokenizer(tokenizer)
    expected = np.concatenate([np.append(tokenizer.encode(text), tokenizer.eot_id) for text in texts])
    np.testing.assert_array_equal(dataset.read(0, dataset.n_tokens), expected)
    assert dataset.n_documents == len(texts)
    assert dataset.n_bytes == sum(len(text.encode()) for text in texts)
    shards = dataset.metadata["shards"]
    for key in ("num_tokens", "num_documents", "num_bytes"):
        assert sum(shard[key] for shard in shards) == dataset.metadata[key]
    assert sorted(files_of(folder)) == ["metadata.json", *(shard["file"] for shard in shards)]  # nothing is left over
    for shard in shards:
        tokens = np.load(folder / shard["file"])
        assert tokens.dtype == np.uint16
        assert np.count_nonzero(tokens == tokenizer.eot_id) == shard["num_documents"]
        assert tokens[-1] == tokenizer.eot_id  # closed at a document boundary
    return dataset


def interrupt(settings, out, shards):
    """Stop a preparation, as Ctrl-C does, when it is about to close the shard after `shards`; return its folder."""
    close_shard = writer_module.ShardWriter.close_shard

    def close(writer):
        if len(writer.shards) == shards:
            raise KeyboardInterrupt
        close_shard(writer)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(writer_module.ShardWriter, "close_shard", close)
        prepare(settings, out)
    folder = out / settings.split
    assert len(list(folder.glob("shard-?????.npy"))) == shards and not (folder / "metadata.json").exists()
    return folder
