from lit_grpo.rollout.server.load import ServerLoad


def test_a_version_is_in_use_as_long_as_any_request_uses_it():
    load = ServerLoad()
    with load.using(3):
        with load.using(3), load.using(4):
            assert load.versions_in_use == {3, 4}
        assert load.versions_in_use == {3}
    assert load.versions_in_use == set()


def test_the_tokens_of_unfinished_samples_are_counted_until_their_request_ends():
    load = ServerLoad()
    with load.growing() as one, load.growing() as other:
        one[0] = one[1] = 64
        other[0] = 128
        assert load.num_unfinished_tokens == 256
        del one[1]  # finished
        one[0] = 128
        assert load.num_unfinished_tokens == 256
    assert load.num_unfinished_tokens == 0
