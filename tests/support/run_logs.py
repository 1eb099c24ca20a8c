"""Clean-up for tests that run commands in their own process."""

import logging

from lit_grpo.runs.log import LOGGED


def close_logs() -> None:
    """Close the log files, which a command leaves open until its process ends."""
    for logger in map(logging.getLogger, LOGGED):
        for handler in logger.handlers.copy():
            if isinstance(handler, logging.FileHandler):
                logger.removeHandler(handler)
                handler.close()
    logging.captureWarnings(False)
