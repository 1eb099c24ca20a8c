"""Functions for worker processes. They import nothing, so that a worker starts at once."""

import os


def run(code):
    """Execute the code and return what it leaves in ``value``."""
    scope = {"process": os.getpid()}
    exec(code, scope)
    return scope.get("value")
