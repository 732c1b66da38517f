"""Quantities as text."""

from heinsen.quantities import count, format_bytes


def test_one_thing_is_singular():
    texts = {0: "0 shards", 1: "1 shard", 2: "2 shards", 1234: "1,234 shards"}
    assert {n: count(n, "shard") for n in texts} == texts


def test_bytes_have_the_unit_that_shows_them():
    sizes = {0: "0 bytes", 1: "1 byte", 7_987: "7.8 KiB", 3 << 20: "3.0 MiB", 5 << 30: "5.00 GiB"}
    assert {n: format_bytes(n) for n in sizes} == sizes
