"""The space of configurations: the schema, the groups under conf/, and how Hydra composes them.

Leaves Hydra's global state alone, so it works inside a notebook or another Hydra program. The
few Hydra internals that are used here are pinned by tests/config/test_space.py.
"""

import contextlib
import copy
import itertools
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import yaml
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.defaults_list import DefaultsList
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import setup_globals
from hydra.errors import ConfigCompositionException, HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException

from inferkit.config.schema import DecodeSchedulerConfig, InferenceConfig

CONF_DIR = Path(__file__).resolve().parent.parent / "conf"
CONFIG_NAME = "config"
VERSION_BASE = "1.3"

_store = ConfigStore.instance()
_store.store(name="schema", node=InferenceConfig, provider="inferkit")
# Outside the groups, so that it is no option: a role pulls it in with
# `/schema/scheduler/decode@_here_`.
_store.store(
    group="schema/scheduler", name="decode", node=DecodeSchedulerConfig, provider="inferkit"
)


class ConfigSpace:
    """Composes configurations of one primary configuration; keeps what it has composed.

    Args:
        config_dir: a further directory of options, after `conf/` (Hydra's `--config-dir`).
        conf_dir: the directory of the primary configuration.
    """

    def __init__(
        self,
        *,
        config_dir: Path | None = None,
        conf_dir: Path = CONF_DIR,
        config_name: str = CONFIG_NAME,
    ) -> None:
        version.setbase(VERSION_BASE)
        setup_globals()
        search_path = create_config_search_path(str(conf_dir))
        if config_dir is not None:
            search_path.prepend(
                provider="command-line",
                path=f"file://{config_dir.resolve()}",
                anchor=SearchPathQuery(provider="schema"),
            )
        self.config_name = config_name
        self.loader = ConfigLoaderImpl(config_search_path=search_path)
        self._parser = OverridesParser.create(config_loader=self.loader)
        self._parsed: dict[str, Override] = {}
        self._composed: dict[tuple[str, ...], DictConfig] = {}
        self._defaults_lists: dict[tuple[str, ...], DefaultsList] = {}
        self._jobs: dict[tuple[str, ...], DictConfig] = {}
        self._options: dict[str, list[str]] = {}

    def parse(self, override: str) -> Override:
        """One override.

        Raises:
            HydraException: it is not of Hydra's grammar.
        """
        if override not in self._parsed:
            parsed = self._parser.parse_override(override)
            parsed.config_loader = self.loader
            self._parsed[override] = parsed
        return self._parsed[override]

    def compose(self, overrides: Sequence[str] = ()) -> DictConfig:
        """A configuration with its `hydra` node. The result must not be changed.

        Raises:
            HydraException: it does not compose.
        """
        key = tuple(overrides)
        if key not in self._composed:
            with _broken_files_named():
                self._composed[key] = self.loader.load_configuration(
                    config_name=self.config_name,
                    overrides=list(overrides),
                    run_mode=RunMode.RUN,
                    from_shell=False,
                )
        return self._composed[key]

    def defaults_list(self, overrides: Sequence[str] = ()) -> DefaultsList:
        """What is merged into a configuration, in order. The result must not be changed.

        Raises:
            HydraException: it does not compose.
        """
        key = tuple(overrides)
        if key not in self._defaults_lists:
            with _broken_files_named():
                self._defaults_lists[key] = self.loader.compute_defaults_list(
                    self.config_name, list(overrides), RunMode.RUN
                )
        return self._defaults_lists[key]

    def compose_job(self, overrides: Sequence[str] = ()) -> DictConfig:
        """A fresh configuration without the `hydra` node."""
        key = tuple(overrides)
        if key not in self._jobs:
            job = copy.deepcopy(self.compose(overrides))
            with open_dict(job):
                del job["hydra"]
            self._jobs[key] = job
        return copy.deepcopy(self._jobs[key])

    def apply(self, override: str, cfg: DictConfig) -> None:
        """Change a composed configuration as Hydra does for an override that is no group choice.

        Raises:
            HydraException: the key or value does not fit.
        """
        try:
            ConfigLoaderImpl._apply_overrides_to_config([self.parse(override)], cfg)
        except (OmegaConfBaseException, AttributeError, AssertionError) as error:
            # omegaconf 2.3 fails so where a dictionary that is null gets entries.
            raise ConfigCompositionException(f"{override} does not fit") from error

    def is_group(self, name: str) -> bool:
        """Whether options can be chosen for `name`; a folder that only holds groups has none."""
        is_schema = name == "schema" or name.startswith("schema/")
        is_folder = not is_schema and self.loader.repository.group_exists(name)
        return bool(is_folder and self.options(name))

    def options(self, group: str) -> list[str]:
        """Options of a group in alphabetical order, numbers within them by value."""
        if group not in self._options:
            found = self.loader.get_group_options(group)
            self._options[group] = sorted(found, key=_natural_key)
        return self._options[group]

    def comment(self, option: str) -> str:
        """The comment that the file of `group/option` begins with; empty where it has none.

        Raises:
            HydraException: there is no such option, or its file is broken.
        """
        with _broken_files_named():
            found = self.loader.repository.load_config(option)
        if found is None or not found.path.startswith("file://"):
            return ""
        file = Path(found.path.removeprefix("file://"), f"{option}.yaml")
        lines = file.read_text("utf-8").splitlines()
        comments = itertools.takewhile(lambda line: line.startswith("#"), lines)
        texts = (line.lstrip("# ") for line in comments)
        return " ".join(text for text in texts if not text.startswith("@package"))

    @cached_property
    def defaults(self) -> dict[str, str | None]:
        """Group -> option that is chosen where the command line names none."""
        return dict(self.defaults_list().overrides.known_choices)

    @cached_property
    def groups(self) -> list[str]:
        """Groups beside Hydra's own: those with a default first."""
        chosen = [name for name in reversed(self.defaults) if name.split("/")[0] != "hydra"]
        listed = [name for name in self.loader.list_groups("") if name != "hydra"]
        found = [name for name in listed if self.is_group(name)]
        return chosen + [name for name in sorted(found) if name not in chosen]

    @cached_property
    def model_targets(self) -> dict[str, str]:
        """Option of conf/model -> its `_target_`, of those that take any size of their family.

        A broken file matters to who chooses it, not here.
        """
        targets = {}
        for option in self.options("model"):
            loaded = None
            with contextlib.suppress(HydraException), _broken_files_named():
                loaded = self.loader.repository.load_config(f"model/{option}")
            if loaded is None or not isinstance(loaded.config, DictConfig):
                continue
            target, has_shape = loaded.config.get("_target_"), "arch" in loaded.config
            if target is not None and not has_shape:
                targets[option] = str(target)
        return targets


@contextlib.contextmanager
def _broken_files_named() -> Iterator[None]:
    """Raise for a file that is no YAML what Hydra raises for every other fault of a file."""
    try:
        yield
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = (
            f"{shown_path(Path(mark.name))} line {mark.line + 1} column {mark.column + 1}: "
            if mark
            else ""
        )
        problem = error.problem or error.context
        raise ConfigCompositionException(f"{place}broken YAML: {problem}") from None
    except yaml.YAMLError as error:
        raise ConfigCompositionException(f"broken YAML: {error}") from None
    except UnicodeDecodeError as error:
        raise ConfigCompositionException(f"a file is not written in UTF-8: {error}") from None


def shown_path(path: Path) -> str:
    """Short where the file lies below the folder that the command was started in."""
    absolute, here = path.absolute(), Path.cwd()
    return str(absolute.relative_to(here) if absolute.is_relative_to(here) else path)


def _natural_key(option: str) -> list[int | str]:
    """`tp2` before `tp16`."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", option)]
