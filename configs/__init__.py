"""Configs, one file per kind of run, and the parsing of the flags that override them."""

import sys
from typing import Any

from absl import flags
from ml_collections import ConfigDict


def parse_flags(argv: list[str]) -> list[str]:
    """Parse flags for `app.run(main, flags_parser=parse_flags)`; a mistyped field of --config exits with one line."""
    try:
        return flags.FLAGS(argv)
    except (AttributeError, KeyError) as error:  # from a locked ConfigDict, which suggests a similar name
        sys.exit(f"FATAL Flags parsing error: --config has no such field: {error}")
    except flags.Error as error:
        sys.exit(f"FATAL Flags parsing error: {error}\nPass --helpshort to see the flags.")


def read_config(flag: flags.FlagHolder[ConfigDict]) -> dict[str, Any]:
    """Return the values of a --config flag as nested dicts. Raises ConfigError if its file cannot be loaded."""
    from heinsen.config import ConfigError

    try:
        return flag.value.to_dict()
    except OSError as error:
        raise ConfigError(f"--config cannot be loaded: {str(error).splitlines()[-1].strip()}") from error
