"""Configs, one file a run, and the parsing of the flags that override them."""

import sys

from absl import flags


def parse_flags(argv: list[str]) -> list[str]:
    """For `app.run(main, flags_parser=parse_flags)`: a mistyped --config field ends in one line that names it."""
    try:
        return flags.FLAGS(argv)
    except (AttributeError, KeyError) as error:  # from a locked ConfigDict, with a suggestion where one is near
        sys.exit(f"FATAL Flags parsing error: --config has no such field: {error}")
    except flags.Error as error:
        sys.exit(f"FATAL Flags parsing error: {error}\nPass --helpshort to see the flags.")
