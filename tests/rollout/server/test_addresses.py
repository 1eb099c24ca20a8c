"""Servers that a run on several machines cannot share are refused."""

import pytest

from lit_grpo.rollout import Launch, SGLangEngine, VLLMServerEngine
from lit_grpo.types import UserError

LOOPBACK = ["127.0.0.1", "127.8.8.8", "[::1]", "localhost", "0.0.0.0", "[::]"]
ENGINES = [VLLMServerEngine, SGLangEngine]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("host", LOOPBACK)
def test_servers_of_one_machine_are_refused_with_several_machines(engine, host):
    attached = engine(urls=["http://10.0.0.2:8000", f"http://{host}:8000"], directory="/shared")
    attached.check_processes(8, 1)
    rule = r"with trainer.num_nodes: 2, got .* look for the server on its own\)"
    with pytest.raises(UserError, match=rf"urls must .*{rule}. Set model.engine.init_args.urls"):
        attached.check_processes(8, 2)
    launched = engine(launch=Launch(host=host.strip("[]")), directory="/shared")
    launched.check_processes(8, 1)
    with pytest.raises(UserError, match=r"launch.host must .* Set model.engine.init_args.launch"):
        launched.check_processes(8, 2)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_default_server_is_refused_with_several_machines(engine):
    with pytest.raises(UserError, match=r"launch.host must .* with trainer.num_nodes: 4"):
        engine(directory="/shared").check_processes(8, 4)


@pytest.mark.parametrize("engine", ENGINES)
def test_several_machines_can_use_servers_and_a_directory_that_all_reach(engine):
    engine(urls=["http://10.0.0.2:8000"], directory="/shared").check_processes(8, 2)
    engine(launch=Launch(host="10.0.0.2"), directory="/shared").check_processes(8, 2)
    with pytest.raises(UserError, match=r"directory must be .* model.engine.init_args.directory"):
        engine(launch=Launch(host="10.0.0.2")).check_processes(8, 2)
