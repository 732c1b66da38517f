"""Stop strings: where a text ends that arrives in pieces."""

from collections.abc import Sequence

from heinsen.errors import InputError


class StopStrings:
    """Pass text on as it arrives, up to the first of some strings; hold back what may be the beginning of one.

    Raises ValueError for an empty string.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        if not all(strings):
            raise InputError("a stop string is empty: every text would end at once")
        self.strings, self.held, self.found = tuple(strings), "", False

    def feed(self, text: str) -> str:
        """Return the text that can be passed on now; "" after a stop string was found."""
        if self.found:
            return ""
        text = self.held + text
        if hits := [text.index(s) for s in self.strings if s in text]:
            self.found, self.held = True, ""
            return text[: min(hits)]
        begun = [n for s in self.strings for n in range(1, len(s)) if text.endswith(s[:n])]
        keep = len(text) - max(begun, default=0)
        self.held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """Return the text that was held back, at the end of the text."""
        text, self.held = self.held, ""
        return text
