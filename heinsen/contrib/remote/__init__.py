"""Runs and datasets at addresses such as s3://bucket/name. The core reaches this package through `heinsen.remote`."""

from heinsen.contrib.remote.datasets import fetch_split
from heinsen.contrib.remote.runs import RunMirror, fetch_run

__all__ = ["RunMirror", "fetch_run", "fetch_split"]
