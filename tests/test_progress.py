"""Progress in a log file."""

import itertools
import types

from heinsen import progress


def test_lines_of_a_log_have_the_rate_without_what_compiles(monkeypatch, capsys):
    """The first item takes a minute, others 4 seconds: a line every 10, at the first, and at the end."""
    clock = itertools.chain([0.0], itertools.count(60.0, 4.0))
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    assert list(progress.track([3, 2, 2, 2, 2, 1], "reading", 12, lambda n: n, "tokens")) == [3, 2, 2, 2, 2, 1]
    assert capsys.readouterr().err.splitlines() == [
        "reading: 3 of 12 tokens, 0.05 tokens/s, ETA 03:00",
        "reading: 9 of 12 tokens, 0.50 tokens/s, ETA 00:06",
        "reading: 12 of 12 tokens, 0.45 tokens/s, ETA 00:00",
    ]
