"""Starting and stopping one server: what answers at its address may be no such server."""

import subprocess
import sys

import pytest
from served_engines import failure_of
from sglang_server import free_port, running_server


def test_a_server_that_is_never_healthy_is_not_used(policy, directory):
    quick = {"startup_timeout": 1.0, "max_restarts": 0}
    with running_server(directory, never_healthy=True) as ill:
        why = failure_of(policy, urls=[ill.url], supervision=quick)
    assert "did not answer within 1 s (GET /health: 503" in why


def test_an_address_where_nothing_listens_is_not_used(policy):
    quick = {"max_restarts": 1, "startup_timeout": 0.5}
    why = failure_of(policy, urls=[f"http://127.0.0.1:{free_port()}"], supervision=quick)
    assert "did not answer within 0.5 s" in why


@pytest.fixture
def file_server(tmp_path):
    """The address of a server that answers 200 to every request, and has no weights."""
    for name in ("health", "model_info", "abort_request", "continue_generation"):
        (tmp_path / name).write_text("fine")
    code = (
        "import http.server as h; H = h.SimpleHTTPRequestHandler; H.do_POST = H.do_GET;"
        f"h.ThreadingHTTPServer(('127.0.0.1', {(port := free_port())}), H).serve_forever()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, stderr=subprocess.DEVNULL
    )
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


def test_another_program_that_reports_to_be_healthy_is_not_used(policy, file_server):
    quick = {"max_restarts": 1, "startup_timeout": 20.0}
    why = failure_of(policy, urls=[file_server], supervision=quick)
    assert "is still unhealthy" in why
