from inferkit.inspect.circumstances import circumstances

COMMIT, DIGEST = "0123456789abcdef", "fedcba9876543210"


def test_everything_that_is_recorded_has_a_name() -> None:
    found = circumstances(
        {
            "git": {"commit": COMMIT, "is_dirty": False},
            "versions": {"torch": "2.13.0", "torch_npu": None},
            "python": "3.11.7 (main) [GCC]",
            "host": {"name": "one", "usable_cores": 2},
            "identity": {
                "code": DIGEST,
                "model": {"a.json": {"size": 1234, "sha256": DIGEST}},
                "dataset": {},
            },
            "environment": {"OMP_NUM_THREADS": "2"},
            "rank_environment": {"OMP_NUM_THREADS": "1", "TORCHELASTIC_ERROR_FILE": "/x/y"},
        }
    )

    assert found == {
        "code": "files fedcba9876",
        "commit": "0123456789",
        "version torch": "2.13.0",
        "version torch_npu": "not installed",
        "version python": "3.11.7",
        "model file a.json": "1,234 bytes fedcba9876",
        "host name": "one",
        "host usable cores": "2",
        "environment OMP_NUM_THREADS": "1",
    }


def test_code_is_what_can_run_and_not_what_git_calls_changed() -> None:
    """A file of tests/ makes the checkout dirty, and is no other code."""
    identity = {"code": DIGEST}
    dirty = {"commit": COMMIT, "is_dirty": True}
    clean = dirty | {"is_dirty": False}

    assert circumstances({"git": dirty, "identity": identity}) == {
        "code": "files fedcba9876",
        "commit": "0123456789",
    }
    assert circumstances({"git": dirty, "identity": identity}) == circumstances(
        {"git": clean, "identity": identity}
    )
    assert circumstances({"git": dirty}) == {"commit": "0123456789 with changes"}
    assert circumstances({"git": clean}) == {"commit": "0123456789"}
    assert circumstances({"git": None, "identity": identity}) == {"code": "files fedcba9876"}
    assert circumstances({}) == {}
