"""Secrets: which names and texts are some, and how they are kept out of what is written.

A secret comes from an environment variable. Where a configuration has one it is a `SecretText`,
which knows how it was written (`${oc.env:API_KEY}`): that is what is recorded. Everything else
that a process writes goes through `hide`, which knows the values by the names of their variables.
"""

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from functools import cache
from typing import Any
from urllib.parse import quote

SECRET_VARIABLES = "INFERKIT_SECRET_VARIABLES"
"""Names of further variables that hold secrets, with commas between them; child processes inherit
it. Names that look like secrets need not be listed."""
MIN_HIDDEN = 6
"""Values shorter than this are too common to be looked for in texts."""
MIN_WORD = 12
"""So is a shorter word of small letters, unless its variable is named as a secret by the user."""

SECRET_WORD = re.compile(
    r"passw(or)?d|passphrase|pwd|secrets?|credentials?|creds|apikey|bearer|authorization|cookie"
    r"|jwt|psk"
)
KEY_WORD = re.compile(
    r"account|access|api|auth|client|encryption|license|private|secret|service|shared|signing|ssh"
    r"|subscription"
    r"|anthropic|aws|azure|cohere|deepseek|gemini|github|gitlab|groq|hf|huggingface|mistral|openai"
    r"|openrouter|wandb"
)
"""A `key` of these is a secret, others are ways to sort or look up."""
PLAIN_KEY_WORD = re.compile(
    r"cache|config|foreign|gpg|group|hash|hot|index|lookup|map|option|partition|pgp|primary|public"
    r"|registry|sort|state"
)
"""A variable that is called `<WORD>_KEY` holds a secret, but for these."""
HEADER_WORD = re.compile(r"auth|authorization|bearer|cookie")
"""A `header` of these is a secret, not the name of one."""
TOKEN_WORD = re.compile(
    r"bos|cls|decoder?|draft|eos|first|image|last|mask|next|output|pad|per|prefill|prompt|sep"
    r"|special|start|stop|unk"
)
"""A `token` of these is a piece of text."""
PLAIN_LAST = re.compile(
    r"budget|count|dir|env|files?|folder|format|header|ids?|index|kind|len|length|limit|names?|num"
    r"|path|port|provider|size|source|type|user(name)?|var|variables?"
)
"""A name that ends so tells about a secret, or where it is, and holds none."""

ENV_REFERENCE = re.compile(r"\$\{\s*oc\.env:\s*([A-Za-z_]\w*)")
ENV_WHOLE = re.compile(r"\$\{\s*oc\.env:\s*(\w+)\s*(?:,[^{}]*)?\}")
ENV_DEFAULT = re.compile(r"\$\{\s*oc\.env:\s*\w+\s*,\s*([^}]*[^}\s])\s*\}")
URL_PASSWORD = re.compile(r"(?<=://)[^/\s:@]+:(?!\$\{|<secret)(?P<secret>[^/\s@]+)@")
BEARER = re.compile(r"\b(?:[Bb]earer|[Bb]asic(?=\s+\S*[\d=]))\s+(?P<secret>[\w.~+/-]{8,}=*)")
ASSIGNED = re.compile(
    r"(?P<name>[A-Za-z_][\w.-]*)[\"']?\s*[=:](?!//)\s*"
    r"(?=[\"']+(?P<quoted>[^\"']+)|(?P<bare>[^\s\"',;&}\]]+))"
)
WELL_KNOWN = re.compile(
    r"(?P<secret>\b(?:sk-(?=[\w-]*\d)[\w-]{20,}|hf_[A-Za-z0-9]{20,}|gh[opsru]_[A-Za-z0-9]{20,}"
    r"|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}"
    r"|AIza[\w-]{30,}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[^$]*)"
)
"""Keys whose makers gave them a form of their own."""


class SecretText(str):
    """A secret of the configuration: its value as text, which is shown to nobody by accident.

    `str(secret)` is the value, as a plain text; `repr` and what is recorded do not have it.
    """

    source: str
    """As it was written: with the name of its variable, without its value."""

    def __new__(cls, value: str, source: str) -> "SecretText":
        text = super().__new__(cls, value)
        text.source = source
        return text

    def __reduce__(self) -> tuple[type["SecretText"], tuple[str, str]]:
        return SecretText, (str(self), self.source)

    def __repr__(self) -> str:
        return repr(self.shown)

    @property
    def shown(self) -> str:
        """`Bearer <secret API_KEY>`."""
        return _shown_source(self.source)


def mark(names: tuple[str, ...] = ()) -> str:
    """What stands for a secret from these variables, or for one that was typed."""
    return f"<secret {' '.join(names)}>" if names else "<secret>"


def references(text: str) -> tuple[str, ...]:
    """Names of the environment variables that a text takes in."""
    return tuple(dict.fromkeys(ENV_REFERENCE.findall(text)))


@cache
def is_secret_name(name: str) -> bool:
    """Whether a key or a variable of this name holds a secret: api_key, HF_PAT, dbPassword."""
    if name in ("PWD", "OLDPWD"):
        return False  # the shell's own: folders
    found = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    words = [word.lower() for word in found]
    before = words[-2] if len(words) > 1 else ""
    if words and words[-1] in ("header", "headers"):
        return HEADER_WORD.fullmatch(before) is not None
    if not words or PLAIN_LAST.fullmatch(words[-1]):
        return False
    is_variable = bool(before) and name.isupper()
    if words[-1] in ("key", "keys"):
        is_plain = not is_variable or PLAIN_KEY_WORD.fullmatch(before) is not None
        return KEY_WORD.fullmatch(before) is not None or not is_plain
    if words[-1] in ("pass", "pat"):  # `first_pass` and `file_pat` are keys of other things
        return is_variable
    if words[-1] == "token":
        return TOKEN_WORD.fullmatch(before) is None
    return words[-1] == "auth" or any(map(SECRET_WORD.fullmatch, words))


def is_secret_key(key: str) -> bool:
    """Whether a dotted key of the configuration holds a secret, or lies below one that does.

    The keys of a model's own config.json never do.
    """
    parts = [part for part in re.split(r"[.\[\]]+", key) if part and not part.isdecimal()]
    if not parts or key.startswith("model.arch.") or PLAIN_LAST.fullmatch(parts[-1].lower()):
        return False
    return any(map(is_secret_name, parts))


def typed_secrets(text: str) -> Iterator[tuple[int, int, str]]:
    """(start, end, what it is called) of secrets that stand in a text themselves."""
    for pattern, name in ((URL_PASSWORD, "PASSWORD"), (BEARER, "TOKEN"), (WELL_KNOWN, "API_KEY")):
        for found in pattern.finditer(text):
            if "${" not in found["secret"]:
                yield found.start("secret"), found.end("secret"), name
    for found in ASSIGNED.finditer(text):
        name, group = found["name"].rpartition(".")[2], str(found.lastgroup)
        is_written = found[group][0] not in "$<" and not BEARER.match(text, found.start(group))
        if is_written and is_secret_name(name):
            yield found.start(group), found.end(group), variable_name(name)


def variable_name(key: str) -> str:
    """A name for the variable that holds the secret of a key: `apiKey` -> `API_KEY`."""
    last = key.rpartition(".")[2]
    return re.sub(r"\W", "_", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", last)).upper()


def without_typed(text: str, put: str | None = None) -> str:
    """`text` with `<secret>` where it holds one; `put` with {} for what it is called instead."""
    spans = sorted(set(typed_secrets(text)))
    pieces, end = [], 0
    for start, stop, name in spans:
        if start >= end:
            pieces += [text[end:start], put.replace("{}", name) if put else mark()]
            end = stop
    return "".join([*pieces, text[end:]])


def shown_override(text: str) -> str:
    """An override as it may be shown, and typed again where it holds `${oc.env:NAME}`."""
    key, equals, value = text.partition("=")
    is_typed = value and not re.search(r"\$\\?\{", value)  # Hydra also writes $\{oc.env\:NAME\}
    if equals and is_typed and is_secret_key(key.lstrip("+~")):
        return f"{key}={value if value.startswith('<secret') else mark()}"
    return without_typed(text)


def shown(key: str, value: Any) -> Any:
    """A value of the configuration as it may be shown, whatever it is made of.

    Takes what runs (where secrets are `SecretText`) and what was written or recorded (where they
    are `${oc.env:NAME}`). Not a text to run again: see `recorded` for that.
    """
    if isinstance(value, Mapping):
        return {name: shown(f"{key}.{name}", child) for name, child in value.items()}
    if isinstance(value, list | tuple):
        return [shown(key, child) for child in value]
    if isinstance(value, SecretText):
        return value.shown
    if isinstance(value, bool) or value is None or value == "":
        return value
    if not isinstance(value, str):
        return mark() if is_secret_key(key) else value
    if references(value) and is_secret_source(key, value):
        return _shown_source(value)
    if is_secret_key(key) and "${" not in value and not value.startswith("<secret"):
        return mark()
    return hide(without_typed(value))


def _shown_source(text: str) -> str:
    """`http://me:${oc.env:PASSWORD}@h` -> `http://me:<secret PASSWORD>@h`."""
    return ENV_WHOLE.sub(lambda found: mark((found[1],)), text)


def is_secret_source(key: str, text: str, variables: Mapping[str, str] = os.environ) -> bool:
    """Whether a text with `${oc.env:NAME}` in it makes a secret: by its key, or by that name."""
    names = references(text)
    listed = _listed(variables)
    if is_secret_key(key) or any(name in listed or is_secret_name(name) for name in names):
        return True
    has_password = re.search(r"://[^/\s:@]+:\$\{[^}]*\}@|[Bb]earer\s+\$\{", text)
    assigned = re.findall(r"([A-Za-z_][\w.-]*)[\"']?\s*[=:]\s*[\"']?\$\{", text)
    return bool(has_password) or any(is_secret_name(n.rpartition(".")[2]) for n in assigned)


def recorded(value: Any) -> Any:
    """A value as it is written down to be run again: secrets as `${oc.env:NAME}`."""
    return _mapped(value, lambda secret: secret.source)


def revealed(value: Any) -> Any:
    """A value as a component gets it: secrets as plain texts."""
    return _mapped(value, str)


def _mapped(value: Any, function: Any) -> Any:
    if isinstance(value, SecretText):
        return function(value)
    if isinstance(value, dict):
        return {name: _mapped(child, function) for name, child in value.items()}
    if isinstance(value, list):
        return [_mapped(child, function) for child in value]
    return value


def hide(text: str, variables: Mapping[str, str] = os.environ) -> str:
    """`text` with `<secret NAME>` in place of the values of secret variables, and without the
    passwords of addresses. For everything that a process writes: logs, files, the terminal."""
    if len(text) < MIN_HIDDEN:
        return text
    for value, name in _values(variables):
        if value in text:
            text = text.replace(value, mark((name,)))
    if "://" not in text:
        return text
    return URL_PASSWORD.sub(lambda found: f"{found[0].partition(':')[0]}:{mark()}@", text)


def unfinished(text: str, variables: Mapping[str, str] = os.environ) -> int:
    """Characters at the end of `text` with which the value of a secret variable may begin, so that
    what is read in pieces can be hidden."""
    return max((_overlap(text, value) for value, _ in _values(variables)), default=0)


def _overlap(text: str, value: str) -> int:
    """The longest end of `text` that `value` begins with, and goes on after."""
    longest = min(len(value) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(value[:n])), 0)


def keep_hidden(names: Collection[str], variables: MutableMapping[str, str] = os.environ) -> None:
    """Have `hide` know further variables, in this process and those that it starts."""
    listed = _listed(variables) | set(names)
    if listed != _listed(variables):
        variables[SECRET_VARIABLES] = ",".join(sorted(listed))


def secret_names(variables: Mapping[str, str] = os.environ) -> list[str]:
    """Variables that hold secrets: by their names, or named as such."""
    listed = _listed(variables)

    def is_word(text: str) -> bool:
        return len(text) < MIN_WORD and text.isalpha() and text.islower()

    return [
        name
        for name, value in variables.items()
        if name in listed or (is_secret_name(name) and not is_word(value))
    ]


def _listed(variables: Mapping[str, str]) -> set[str]:
    return set(filter(None, variables.get(SECRET_VARIABLES, "").split(",")))


def _values(variables: Mapping[str, str]) -> list[tuple[str, str]]:
    """(text to look for, name of its variable), the longest first: also as JSON, Python and
    addresses write it."""
    found: dict[str, str] = {}
    for name in secret_names(variables):
        value = variables[name]
        if len(value) >= MIN_HIDDEN:
            as_json = json.dumps(value, ensure_ascii=False)
            for form in (value, as_json[1:-1], repr(value)[1:-1], quote(value, safe="")):
                found.setdefault(form, name)
    return sorted(found.items(), key=lambda item: -len(item[0]))
