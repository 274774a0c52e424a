import copy
import json
import pickle

import pytest

from inferkit.core.secrets import (
    SECRET_VARIABLES,
    SecretText,
    hide,
    is_secret_key,
    is_secret_name,
    keep_hidden,
    recorded,
    revealed,
    shown,
    shown_override,
    without_typed,
)


@pytest.mark.parametrize(
    "name",
    [
        "api_key",
        "apiKey",
        "API_KEY",
        "X-Api-Key",
        "token",
        "HF_TOKEN",
        "access_token",
        "password",
        "dbPassword",
        "secret",
        "client_secret",
        "AWS_SECRET_ACCESS_KEY",
        "AccountKey",
        "authorization",
        "credentials",
        "private_key",
        "auth",
        "HF_PAT",
        "GITHUB_PAT",
        "OPENAI_KEY",
        "openai_key",
        "openaiKey",
        "MY_SERVICE_KEY",
        "ACME_KEYS",
        "AUTH_HEADER",
        "auth_headers",
        "DB_PASS",
        "AWS_CREDS",
        "SESSION_JWT",
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "key",
        "sort_key",
        "num_key_value_heads",
        "token_budget",
        "max_new_tokens",
        "first_token",
        "eos_token",
        "eos_token_id",
        "tokenizer",
        "secret_env",
        "password_file",
        "SSH_AUTH_SOCK",
        "GPG_KEY",
        "PUBLIC_KEY",
        "SORT_KEY",
        "lookup_key",
        "api_key_header",
        "headers",
        "first_pass",
        "file_pat",
        "PAT",
        "DB_PASS_FILE",
        "auth_header_name",
        "author",
        "",
    ],
)
def test_names_of_other_things(name: str) -> None:
    assert not is_secret_name(name)


def test_a_key_is_secret_by_each_of_its_parts_but_not_in_a_model_s_own_config() -> None:
    assert is_secret_key("scheduler.params.api_key")
    assert is_secret_key("scheduler.params.credentials.value")
    assert is_secret_key("scheduler.params.api_keys[0]")
    assert not is_secret_key("scheduler.params.credentials.user")
    assert not is_secret_key("model.arch.image_token")


@pytest.mark.parametrize(
    ("text", "hidden", "instead"),
    [
        ("http://me:pw1@h/x", "http://me:<secret>@h/x", "http://me:${oc.env:PASSWORD}@h/x"),
        ("Bearer abcdefgh1", "Bearer <secret>", "Bearer ${oc.env:TOKEN}"),
        (
            "Authorization: Bearer abcdefgh1",
            "Authorization: Bearer <secret>",
            "Authorization: Bearer ${oc.env:TOKEN}",
        ),
        ("https://h/?api_key=z&y=1", "https://h/?api_key=<secret>&y=1", None),
        ("export HF_TOKEN=abc", "export HF_TOKEN=<secret>", "export HF_TOKEN=${oc.env:HF_TOKEN}"),
        ("parallel=tp2 +a.params.apiKey=abc", "parallel=tp2 +a.params.apiKey=<secret>", None),
        ("{'password': 'a b', 'user': 'x'}", "{'password': '<secret>', 'user': 'x'}", None),
        ("sk-abcdefghijklmnopqr1234", "<secret>", "${oc.env:API_KEY}"),
        ("x=token=abc", "x=token=<secret>", None),
    ],
)
def test_secrets_that_stand_in_a_text(text: str, hidden: str, instead: str | None) -> None:
    assert without_typed(text) == hidden
    if instead is not None:
        assert without_typed(text, "${oc.env:{}}") == instead


@pytest.mark.parametrize(
    "text",
    [
        "http://host:8000/x",
        "ssh://git@host/x",
        "http://me:${oc.env:PW}@h",
        "+scheduler.params.api_key=${oc.env:KEY}",
        "disagg.secret_env=INFERKIT_SECRET",
        "scheduler.max_new_tokens=4 router.first_token=prefill",
        "/models/sk-test",
        "org/sk-a-model-of-many-words",
        "num_key_value_heads: 2",
    ],
)
def test_texts_without_secrets_stay(text: str) -> None:
    assert without_typed(text) == text
    assert hide(text, {}) == text


def test_an_override_is_shown_without_its_secret() -> None:
    assert shown_override("+a.params.api_key=two words") == "+a.params.api_key=<secret>"
    kept = "+a.params.api_key=${oc.env:KEY}"
    assert shown_override(kept) == kept
    escaped = "+a.params.api_key=$\\{oc.env\\:KEY\\}"
    assert shown_override(escaped) == escaped
    assert shown_override("parallel=tp2") == "parallel=tp2"


def test_a_secret_text_is_its_value_but_is_not_shown() -> None:
    secret = SecretText("hush", "Bearer ${oc.env:API_KEY}")

    for other in (secret, copy.deepcopy(secret), pickle.loads(pickle.dumps(secret))):
        assert other == "hush" and other.source == "Bearer ${oc.env:API_KEY}"
        assert repr(other) == "'Bearer <secret API_KEY>'"
        assert repr({"key": [other]}) == "{'key': ['Bearer <secret API_KEY>']}"
        assert type(str(other)) is str


def test_what_is_recorded_runs_again_and_what_is_revealed_is_plain() -> None:
    secret = SecretText("hush", "${oc.env:API_KEY}")
    value = {"a": [secret, 1], "b": {"c": secret}, "d": None}

    assert recorded(value) == {
        "a": ["${oc.env:API_KEY}", 1],
        "b": {"c": "${oc.env:API_KEY}"},
        "d": None,
    }
    assert revealed(value) == {"a": ["hush", 1], "b": {"c": "hush"}, "d": None}
    assert json.dumps(revealed(value)).count("hush") == 2


def test_values_are_shown_without_secrets_whatever_they_come_from() -> None:
    key = "scheduler.params.api_key"
    assert shown(key, SecretText("hush", "${oc.env:X}")) == "<secret X>"
    assert shown(key, "${oc.env:X}") == "<secret X>"
    assert shown(key, "typed") == "<secret>" == shown(key, 1234)
    assert shown(key, "<secret X>") == "<secret X>"
    assert shown("scheduler.params.note", "${oc.env:HF_TOKEN}") == "<secret HF_TOKEN>"
    assert shown("scheduler.params.url", "http://u:${oc.env:PW}@h") == "http://u:<secret PW>@h"
    assert shown("scheduler.params.note", "${oc.env:HOME}") == "${oc.env:HOME}"
    assert shown("scheduler.params", {"password": "p", "n": [1, "http://u:p@h"]}) == {
        "password": "<secret>",
        "n": [1, "http://u:<secret>@h"],
    }
    assert shown("disagg.secret_env", "NAME") == "NAME"


def test_what_is_written_has_no_value_of_a_secret_variable() -> None:
    variables = {
        "HF_TOKEN": "hf_marker1",
        "DB_PASSWORD": 'with "quotes" and \\',
        "MY_CODE": "marker-2",
        "A_TOKEN": "default",
        "B_TOKEN": "abc",
        "PATH": "/usr/bin",
    }

    assert (
        hide("401 for hf_marker1 in /usr/bin", variables) == "401 for <secret HF_TOKEN> in /usr/bin"
    )
    password = variables["DB_PASSWORD"]
    assert hide(json.dumps(password), variables) == '"<secret DB_PASSWORD>"'
    assert hide(repr(password), variables) == "'<secret DB_PASSWORD>'"
    assert hide("the default is abc", variables) == "the default is abc"
    assert hide("got marker-2", variables) == "got marker-2"

    keep_hidden({"MY_CODE"}, variables)
    assert variables[SECRET_VARIABLES] == "MY_CODE"
    assert hide("got marker-2", variables) == "got <secret MY_CODE>"
    assert hide("at http://me:pw@h:80/x", variables) == "at http://me:<secret>@h:80/x"
