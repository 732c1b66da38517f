"""Progress of an iteration on stderr."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")

LOG_SECONDS = 10  # between lines of progress where stderr is not a terminal


def track(items: Iterable[T], label: str, total: int, size: Callable[[T], int], unit: str) -> Iterator[T]:
    """Yield the items; meanwhile show count, rate and ETA on stderr: a bar on a terminal, lines in a log file.

    The lines' rate leaves out the first item, for which programs may have been compiled.

    Args:
      label: names what is done.
      total: the sum of the sizes of all items.
      size: how many units an item counts for.
      unit: plural name of what is counted, such as tokens.
    """
    done = before = 0  # before: the first item
    bar = tqdm(desc=label, total=total, unit=f" {unit}", unit_scale=True) if sys.stderr.isatty() else None
    begin = start = last = time.monotonic()
    for item in items:
        yield item
        now = time.monotonic()
        done += size(item)
        if not before:
            before, start = done, now
        if bar is not None:
            bar.update(size(item))
        elif now - last >= LOG_SECONDS or (done == total and last > begin):
            counted, since = (done - before, start) if done > before else (done, begin)
            last, per_second = now, counted / max(now - since, 1e-9)
            rate, eta = tqdm.format_sizeof(per_second), tqdm.format_interval((total - done) / per_second)
            print(f"{label}: {done:,} of {total:,} {unit}, {rate} {unit}/s, ETA {eta}", file=sys.stderr, flush=True)
    if bar is not None:
        bar.close()
