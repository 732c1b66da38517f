"""Text files that are there whole, or as they were before."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write to a file beside it, path with the suffix .tmp, which then takes its name. Raises OSError."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
