"""A split of a token dataset at an address, copied into the cache on first use, with its digests checked."""

from pathlib import Path

from heinsen.contrib.remote.files import PATIENCE, Remote, cache_folder
from heinsen.data.dataset import read_metadata
from heinsen.data.shards import METADATA_FILE, DatasetError
from heinsen.data.tokenizer import TOKENIZER_FILE, digest_of_file
from heinsen.files import file_sha256, hold_lock
from heinsen.progress import track


def fetch_split(address: str, split: str) -> Path:
    """Return the folder in the cache that holds a split of the dataset at an address, after copying what is missing.

    A dataset that is prepared anew at the same address is another one in the cache. Processes of one machine copy it
    once.

    Raises:
      DatasetError: there is no such split, or a file is not the one in its metadata.json.
      RemoteError: the address cannot be read.
    """
    remote = Remote(f"{address.rstrip('/')}/{split}")
    content = remote.read(METADATA_FILE)
    if content is None:
        raise DatasetError(
            f"{remote.address} has no {METADATA_FILE}: prepare the dataset with scripts/prepare_data.py, and copy its "
            "folder there"
        )
    address = address.rstrip("/")
    folder = cache_folder("data", address, content.decode(errors="replace")) / address.rsplit("/", 1)[-1] / split
    folder.mkdir(parents=True, exist_ok=True)
    with hold_lock(folder.parent / f"{split}.lock", PATIENCE):
        if not (folder / METADATA_FILE).exists():
            _copy(remote, content, folder)
    return folder


def _copy(remote: Remote, content: bytes, folder: Path) -> None:
    """Copy all files that are not there whole; metadata.json, which makes the split complete, is the last."""
    fetched = folder / f"{METADATA_FILE}.fetched"
    fetched.write_bytes(content)
    try:
        metadata = read_metadata(fetched)
    except ValueError as error:
        raise DatasetError(f"{remote.address}/{METADATA_FILE} is damaged ({error}): copy it there again") from error
    shards = metadata["shards"]
    records = [*shards, *(shard["sources"] for shard in shards if "sources" in shard)]
    files = [(record["file"], record["sha256"]) for record in records]
    if (digest := digest_of_file(metadata["tokenizer"])) is not None:
        files.append((TOKENIZER_FILE, digest))
    for name, sha256 in track(files, f"fetching {remote.address}", len(files), lambda _: 1, "files"):
        path = folder / name
        if path.exists() and file_sha256(path).startswith(sha256):  # of a fetch that was interrupted
            continue
        remote.download(name, path)
        if not file_sha256(path).startswith(sha256):
            path.unlink()
            raise DatasetError(
                f"{remote.address}/{name} is damaged: its SHA-256 is not the one in {METADATA_FILE}. Copy the dataset "
                "there again"
            )
    fetched.rename(folder / METADATA_FILE)
