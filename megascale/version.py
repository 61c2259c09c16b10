"""The version of megascale, as pyproject.toml has it."""

VERSION = "0.1.0"
