"""What the tests that run commands in their own process must put away afterwards."""

import logging

from lit_grpo.runs.log import LOGGED


def close_logs() -> None:
    """A command leaves its log open, as it owns the process."""
    for logger in map(logging.getLogger, LOGGED):
        for handler in logger.handlers.copy():
            if isinstance(handler, logging.FileHandler):
                logger.removeHandler(handler)
                handler.close()
    logging.captureWarnings(False)
