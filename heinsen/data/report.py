"""Progress of a preparation on stderr."""

import sys
import time

import tqdm

from heinsen.data.shards import ShardWriter

_LINE_SECONDS = 10.0  # between lines where stderr is no terminal
_BAR_SECONDS = 0.2


class Report:
    """Shows a bar on a terminal, else a line now and then. `summarize` prints the totals."""

    def __init__(self, label: str, num_inputs: int, writer: ShardWriter):
        self._label, self._num_inputs, self._writer = label, num_inputs, writer
        self._start_tokens = writer.num_tokens
        self._start = self._last = time.monotonic()
        self._bar = tqdm.tqdm(desc=label, unit=" tokens", unit_scale=True) if sys.stderr.isatty() else None

    def update(self) -> None:
        now = time.monotonic()
        if now - self._last < (_LINE_SECONDS if self._bar is None else _BAR_SECONDS):
            return
        self._last = now
        writer = self._writer
        current = 1 if writer.position is None else writer.position.input + 1
        state = f"{writer.num_documents:,} documents, input {current} of {self._num_inputs}"
        if self._bar is None:
            line = f"{self._label}: {writer.num_tokens:,} tokens, {state}, {self._rate():,.0f} tokens/s"
            print(line, file=sys.stderr, flush=True)
        else:
            self._bar.set_postfix_str(state, refresh=False)
            self._bar.update(writer.num_tokens - self._start_tokens - self._bar.n)

    def summarize(self) -> None:
        writer = self._writer
        skipped = f", {writer.num_skipped:,} bad documents skipped" if writer.num_skipped else ""
        print(
            f"{self._label}: {writer.num_documents:,} documents, {writer.num_tokens:,} tokens, "
            f"{writer.num_bytes:,} bytes in {len(writer.shards)} shards{skipped}; "
            f"{time.monotonic() - self._start:.1f} s, {self._rate():,.0f} tokens/s",
            file=sys.stderr,
        )

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _rate(self) -> float:
        """Return tokens/s since the start of this process's work."""
        return (self._writer.num_tokens - self._start_tokens) / max(time.monotonic() - self._start, 1e-9)
