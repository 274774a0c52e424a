from inferkit.online.cluster.restart import RestartPolicy


def test_the_delay_doubles_up_to_its_limit_and_then_the_child_is_given_up():
    policy = RestartPolicy(max_quick_deaths=8)
    delays = [policy.on_death(1.0) for _ in range(8)]
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, None]


def test_a_long_life_starts_over():
    policy = RestartPolicy(max_quick_deaths=3)
    assert [policy.on_death(0.5), policy.on_death(59.0)] == [1.0, 2.0]
    assert policy.on_death(60.0) == 1.0
    assert [policy.on_death(0.0), policy.on_death(0.0)] == [2.0, None]


def test_one_death_can_be_enough():
    assert RestartPolicy(max_quick_deaths=1).on_death(0.0) is None
    assert RestartPolicy(max_quick_deaths=1).on_death(60.0) is None
