"""``run.log``: what is written to it."""

import logging
import warnings

import pytest

from lit_grpo.runs.files.log import LOGGED, open_run_log


@pytest.fixture
def run_log(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="lightning.pytorch")  # commands silence it
    handler = open_run_log(tmp_path)
    yield tmp_path / "run.log"
    for name in LOGGED:
        logging.getLogger(name).removeHandler(handler)
    logging.captureWarnings(False)
    handler.close()


def test_run_log_holds_messages_and_warnings_of_all_sources(run_log):
    logging.getLogger("lit_grpo.callbacks.timing").info("a stage line")
    logging.getLogger("lightning.pytorch.trainer").info("from lightning")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("from python", stacklevel=1)
    text = run_log.read_text()
    assert "INFO lit_grpo.callbacks.timing: a stage line" in text
    assert "from lightning" in text
    assert "from python" in text
