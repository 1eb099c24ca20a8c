from lit_grpo.rollout.server.load import ServerLoad


def test_a_version_is_in_use_as_long_as_any_request_uses_it():
    load = ServerLoad()
    with load.using(3):
        with load.using(3), load.using(4):
            assert load.versions_in_use == {3, 4}
        assert load.versions_in_use == {3}
    assert load.versions_in_use == set()
