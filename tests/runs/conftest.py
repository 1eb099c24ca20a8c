"""What the tests of runs share."""

from parsers import parsers  # noqa: F401
