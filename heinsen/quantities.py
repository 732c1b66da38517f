"""Quantities as text."""


def count(n: int, noun: str) -> str:
    """Return "1 shard", or "1,234 shards"."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def format_bytes(n: int) -> str:
    """Return a number of bytes in the largest unit of which there is one: 7.8 KiB."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= size:
            return f"{n / size:,.2f} {unit}" if unit == "GiB" else f"{n / size:.1f} {unit}"
    return count(n, "byte")
