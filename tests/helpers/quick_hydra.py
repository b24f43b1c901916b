"""Compositions of Hydra that do not repeat what an earlier one of this process has done.

A composition takes a tenth of a second, and the tests make about a thousand; this saves three quarters of it. What is
left out has no effect: a text of YAML or of an interpolation is parsed once, a list of sources that is replaced at once
is not copied deeply, and the settings in Hydra's store are made once and copied by pickle, which is eight times as fast
as OmegaConf's own copy. Which files the defaults name, and what these make together, is found once for each choice of
groups, if all of them are files of this checkout or in a small folder of the test.
"""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

_ROOT = Path(__file__).parents[2]
_CONSTANT = {"hydra.conf", str(_ROOT / "conf"), str(_ROOT / "recipes"), ""}  # "": the store, whose nodes are known


def quicken(patch: pytest.MonkeyPatch) -> None:
    _quicken_parts(patch)
    _quicken_defaults(patch)


def _quicken_defaults(patch: pytest.MonkeyPatch) -> None:
    from hydra._internal import config_loader_impl, config_repository
    from hydra._internal.defaults_list import DefaultsList, Overrides
    from hydra.core.config_store import ConfigStore
    from hydra.core.override_parser import overrides_parser
    from hydra.errors import ConfigCompositionException

    kept: dict[tuple[int, ...], Any] = {}  # or another node could get its identity

    def places(repo: Any) -> tuple[Any, ...] | None:
        """What compositions are made of, wherever it lies; None where there is too much that may change."""
        found: list[Any] = []
        for source in repo.get_sources():
            path = source.path.removeprefix("pkg://")
            found.append((source.provider, path if path in _CONSTANT else texts_of(path)))
        return tuple(found) if all(what is not None for _, what in found) else None

    def texts_of(folder: str) -> tuple[tuple[str, bytes], ...] | None:
        """The few files of a folder that a test has made."""
        paths = sorted(itertools.islice(Path(folder).rglob("*"), 9))
        if len(paths) > 8 or not paths or not all(path.is_file() for path in paths):
            return None
        return tuple((path.name, path.read_bytes()) for path in paths)

    def stored() -> tuple[int, ...]:
        """The nodes that differ from one recipe to another."""
        store = ConfigStore.instance().repo
        nodes = [store["recipe.yaml"].node, store["hydra"]["launcher"]["basic.yaml"].node]
        ids = tuple(map(id, nodes))
        kept[ids] = nodes
        return ids

    def remembered(known: dict[Any, bytes | str], key: Any, find: Callable[[], Any]) -> Any:
        """What `find` returns or refuses, which is found once."""
        if key not in known:
            try:
                known[key] = pickle.dumps(find())
            except ConfigCompositionException as error:
                if type(error) is not ConfigCompositionException or error.__cause__ is not None:
                    raise
                known[key] = str(error)
        if isinstance(found := known[key], str):
            raise ConfigCompositionException(found)
        return pickle.loads(found)

    lists: dict[Any, bytes | str] = {}
    list_slowly = config_loader_impl.create_defaults_list

    def create_defaults_list(repo: Any, config_name: Any, overrides_list: list[Any], **how: Any) -> Any:
        if (base := places(repo)) is None:
            return list_slowly(repo, config_name, overrides_list, **how)
        overrides = Overrides(repo, overrides_list)
        values = {id(override) for override in overrides.config_overrides}
        groups = [override for override in overrides_list if id(override) not in values]

        def find() -> Any:
            found = list_slowly(repo, config_name, groups, **how)
            return found.defaults, found.defaults_tree, vars(found.overrides)

        key = base, stored(), config_name, tuple(override.input_line for override in groups), *sorted(how.items())
        defaults, tree, overrides_of_groups = remembered(lists, key, find)
        vars(overrides).update({**overrides_of_groups, "config_overrides": overrides.config_overrides})
        return DefaultsList(defaults, tree, overrides.config_overrides, overrides)

    merged: dict[Any, bytes | str] = {}
    merge_slowly = config_loader_impl.ConfigLoaderImpl._compose_config_from_defaults_list

    def compose_config(self: Any, defaults: list[Any], repo: Any) -> Any:
        if (base := places(repo)) is None:
            return merge_slowly(self, defaults, repo)
        key = base, stored(), *(tuple(vars(default).values()) for default in defaults)
        return remembered(merged, key, lambda: merge_slowly(self, defaults, repo))

    files: dict[Any, bytes | str] = {}
    load_slowly = config_repository.CachingConfigRepository.load_config

    def load_config(self: Any, config_path: str) -> Any:
        if f"config_path={config_path}" in self.cache or (base := places(self)) is None:
            return load_slowly(self, config_path)
        nodes = stored() if config_path in ("recipe", "hydra/launcher/basic") else ()
        key = base, nodes, config_path, *(source.path for source in self.get_sources())  # which it tells
        found = remembered(files, key, lambda: load_slowly(self, config_path))
        self.cache[f"config_path={config_path}"] = found
        return found

    parsed: dict[tuple[str, str], bytes] = {}
    parse_slowly = overrides_parser.OverridesParser.parse_rule

    def parse_rule(self: Any, text: str, rule_name: str) -> Any:
        if (text, rule_name) not in parsed:
            parsed[text, rule_name] = pickle.dumps(parse_slowly(self, text, rule_name))
        return pickle.loads(parsed[text, rule_name])

    patch.setattr(config_repository.CachingConfigRepository, "load_config", load_config)
    patch.setattr(overrides_parser.OverridesParser, "parse_rule", parse_rule)
    patch.setattr(config_loader_impl, "create_defaults_list", create_defaults_list)
    patch.setattr(config_loader_impl.ConfigLoaderImpl, "_compose_config_from_defaults_list", compose_config)


def copied_by_pickle(node: Any) -> Any:
    return pickle.loads(pickle.dumps(node))


def _quicken_parts(patch: pytest.MonkeyPatch) -> None:
    import yaml
    from hydra._internal.config_repository import CachingConfigRepository
    from hydra.core import config_store, utils
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf, _utils, base, omegaconf

    def keep(self: Any, delegate: Any) -> None:
        self.delegate, self.cache = copy.copy(delegate), {}

    known: dict[str, bytes] = {}

    def load(stream: Any, Loader: Any) -> Any:  # the name is PyYAML's
        start = 0 if isinstance(stream, str) else stream.tell()
        text = stream if isinstance(stream, str) else stream.read()
        if text not in known:
            if not isinstance(stream, str):
                stream.seek(start)  # errors name the file
            known[text] = pickle.dumps(yaml.load(stream, Loader=Loader))
        return pickle.loads(known[text])

    made: dict[bytes, Any] = {}

    def structured(node: Any) -> Any:
        """Of plain settings, one node for all that are equal: the store gives out copies."""
        if not isinstance(node, dict):  # classes of Hydra's plugins, which it may import again
            return OmegaConf.structured(node)
        key = pickle.dumps(node)
        if key not in made:
            made[key] = OmegaConf.structured(node)
        return made[key]

    slow_dumper = _utils.get_omega_conf_dumper()

    class Dumper(yaml.CDumper):
        """OmegaConf's with the emitter in C, which writes the same."""

        yaml_representers = slow_dumper.yaml_representers
        yaml_multi_representers = slow_dumper.yaml_multi_representers
        yaml_implicit_resolvers = slow_dumper.yaml_implicit_resolvers

    kept: dict[int, tuple[Any, bytes]] = {}  # by the identity of the node
    load_slowly = config_store.ConfigStore.load

    def load_stored(self: Any, config_path: str) -> Any:
        found = copy.copy(self._load(config_path))
        if id(found.node) not in kept:
            try:
                kept[id(found.node)] = found.node, pickle.dumps(found.node)
            except pickle.PicklingError:
                return load_slowly(self, config_path)
        found.node = pickle.loads(kept[id(found.node)][1])
        return found

    def set_hydra_config(self: Any, cfg: Any) -> None:
        node = cfg.hydra
        OmegaConf.set_readonly(node, True)
        parent, node.__dict__["_parent"] = node._get_parent(), None  # or pickle would copy the whole configuration
        try:
            copied = copied_by_pickle(node)
        finally:
            node.__dict__["_parent"] = parent
        self.cfg = OmegaConf.create()
        self.cfg.__dict__["_content"]["hydra"] = copied
        copied._set_parent(cfg)

    patch.setattr(HydraConfig, "set_config", set_hydra_config)
    patch.setattr(utils, "copy", SimpleNamespace(deepcopy=copied_by_pickle))  # of whole configurations, for each job
    patch.setattr(omegaconf, "get_omega_conf_dumper", lambda: Dumper)
    patch.setattr(CachingConfigRepository, "__init__", keep)
    patch.setattr(base, "parse", cache(base.parse))
    patch.setattr(omegaconf, "yaml", SimpleNamespace(**{**vars(yaml), "load": load}))
    patch.setattr(config_store, "OmegaConf", SimpleNamespace(structured=structured))
    patch.setattr(config_store.ConfigStore, "load", load_stored)
