import shlex

from inferkit.config.faults import Command
from inferkit.config.help import help_text
from inferkit.config.preflight import preflight
from inferkit.config.space import ConfigSpace
from inferkit.inspect.verbs import VERBS

TEXTS = {name: verb.text for name, verb in VERBS.items()}


def test_help_names_groups_defaults_and_verbs(space: ConfigSpace) -> None:
    text = help_text("inferkit", space, TEXTS)

    for group in set(space.groups) - {"role"}:
        sign = "" if group in space.defaults else "+"
        assert f"\n  {sign}{group}  " in text
    assert "[smollm2_135m]" in text
    assert "schema" not in text
    assert all(verb in text for verb in VERBS)
    assert all(len(line) <= 100 for line in text.splitlines())


def test_help_tells_what_each_role_is(space: ConfigSpace) -> None:
    lines = help_text("inferkit", space, TEXTS).splitlines()

    for role in space.options("role"):
        (line,) = (line for line in lines if line.startswith(f"  {role} "))
        assert line.split(maxsplit=1)[1].startswith(space.comment(f"role/{role}")[:40])


def test_help_fits_two_screens(space: ConfigSpace) -> None:
    text = help_text("python -m inferkit", space, TEXTS)

    assert len(text.splitlines()) <= 100
    assert all(len(line) <= 110 for line in text.splitlines())


def test_many_options_are_easy_to_search(space: ConfigSpace) -> None:
    lines = [line.strip() for line in help_text("inferkit", space, TEXTS).splitlines()]

    assert "ep2, ep4, ep8, ep16, ep32, ep128" in lines
    assert any(line.startswith("of one size, without weights: deepseek_r1_671b") for line in lines)


def test_the_commands_of_the_help_have_no_fault_of_their_own(space: ConfigSpace) -> None:
    text = help_text("inferkit", space, TEXTS)
    start, end = text.index("Start here:"), text.index("Every run")
    commands = [line for line in text[start:end].splitlines() if line.startswith("  inferkit")]
    assert len(commands) == 5

    for line in commands:
        words = shlex.split(line)[1:]
        verb = words.pop(0) if words and words[0] in VERBS else ""
        flags = tuple(word for word in words if word.startswith("-"))
        overrides = tuple(word for word in words if not word.startswith("-"))
        message = preflight(Command(verb=verb, flags=flags, overrides=overrides), space).message
        # Only the example paths do not exist.
        parts = [part for part in message.splitlines() if part.startswith("  ")]
        faults = [part for part in parts if not part.startswith("   ") and "inferkit" not in part]
        assert all("path=" in fault for fault in faults), message
