"""Services that follow a run: Weights & Biases, Trackio, SwanLab and MLflow, as they write without a network."""

from __future__ import annotations

import json
import logging
import math
import os
import sqlite3
import struct
import subprocess
import sys
import threading
import types
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import areno
from areno.config.run import StatsLoggerConfig
from areno.errors import ConfigError
from areno.launch.compose import load
from areno.recipes.gspo import GSPOConfig
from areno.schema.fields import Section, setting
from areno.services import installed_services
from areno.services.mlflow import allowed_metric_name
from areno.services.service import RunInfo, Service
from areno.tracking import recorder as services_tracker
from areno.tracking.recorder import RESUMED, ServiceTracker, check_services, open_trackers
from tests.helpers.waiting import until

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path_factory):
    """None of the packages reports to anybody how it is used, and each may take its time on a busy machine."""
    monkeypatch.setattr(services_tracker, "_END_S", 500.0)
    for name in ("DO_NOT_TRACK", "MLFLOW_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "true")
    for name in ("WANDB_ERROR_REPORTING", "TRACKIO_AUTO_LOG_CPU"):
        monkeypatch.setenv(name, "false")
    for name in ("WANDB_API_KEY", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    if "trackio" not in sys.modules:  # it reads this once
        monkeypatch.setenv("TRACKIO_DIR", str(tmp_path_factory.mktemp("trackio")))


def config_of(tmp_path, *settings):
    return load(GSPOConfig, "quickstart", [f"cluster.fileroot={tmp_path}", *settings])


SESSIONS = (((1, 2, 3), None), ((3, 4), 2))
"""Three steps of a run; then it goes on after the second one and has two more."""


def session(tmp_path, settings, steps, resumed):
    """One session of a run; its folder."""
    config = config_of(tmp_path, *settings)
    folder = tmp_path / "quickstart" / "first"
    folder.mkdir(parents=True, exist_ok=True)
    trackers = open_trackers(config, folder)
    if resumed is not None:
        trackers.resume(resumed)
    for step in steps:
        trackers.log(step, {"rollout/rewards_mean": step / 8, "eval/pass@4": math.nan})
        trackers.log(step, {"train/loss": 1 / step, "time/step": 1.0})
        trackers.log(step, {"eval/rewards_mean": step / 16})
    trackers.finish()
    return folder


def followed(tmp_path, *settings):
    """Both sessions; the folder of the run."""
    folders = [session(tmp_path, settings, *each) for each in SESSIONS]
    return folders[0]


def ids(folder):
    return json.loads((folder / "trackers.json").read_text())


REWARDS = [(1, 0.125), (2, 0.25), (3, 0.375), (3, 0.375), (4, 0.5)]


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}


def wandb_records(file):
    """The records of a .wandb file: protobuf messages in the log format of LevelDB, behind a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, message = file.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):  # a file that is being written may end within a record
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        if at + 7 + length > len(data):
            return
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(message)
            yield record
            message = b""


def wandb_rows(files):
    """The scalars in .wandb files, in order."""
    histories = [record.history for file in files for record in wandb_records(file) if record.HasField("history")]
    rows = [{"/".join(each.nested_key) or each.key: each.value_json for each in history.item} for history in histories]
    return [{name: json.loads(value) for name, value in row.items() if name[0] != "_"} for row in rows]


@pytest.mark.slow
def test_wandb_offline(tmp_path):
    pytest.importorskip("wandb", reason="needs the extra wandb")
    settings = ["mode=offline", "tags=[a,b]", "notes=why", "group=some", "project=mine"]
    given = [f"stats_logger.wandb.{setting}" for setting in settings]
    first, second = SESSIONS
    # In processes of their own: wandb may lose a run that a process begins a second time.
    code = "from pathlib import Path; from tests.tracking.test_services import session; "
    code += f"session(Path('.'), {given}, *{first})"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment(), check=True, capture_output=True)
    folder = session(tmp_path, given, *second)
    files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
    assert [file.stem for file in files] == [f"run-{ids(folder)['wandb']}"] * 2, "one run, of two sessions"
    until(lambda: len(wandb_rows(files)) >= 11)  # the process of wandb that writes may be behind on a busy machine
    rows = wandb_rows(files)
    about = next(record.run for record in wandb_records(files[0]) if record.HasField("run"))
    assert (about.project, about.display_name, about.run_group, about.notes) == ("mine", "first", "some", "why")
    assert list(about.tags) == ["a", "b"]
    sent = {each.key: json.loads(each.value_json) for each in about.config.update}
    assert sent["actor"]["optimizer"]["lr"] == 2e-4
    assert [(row["step"], row["rollout/rewards_mean"]) for row in rows if "train/loss" in row] == REWARDS
    assert [row["step"] for row in rows if "eval/rewards_mean" in row] == [1, 2, 3, 3, 4]
    assert [row for row in rows if RESUMED in row] == [{"step": 2, RESUMED: 2}]
    assert not any("eval/pass@4" in row for row in rows), "what is not finite is left out"


def test_trackio_local(tmp_path):
    trackio = pytest.importorskip("trackio", reason="needs the extra trackio")
    folder = followed(tmp_path, "stats_logger.trackio.mode=local", f"stats_logger.trackio.project={tmp_path.name}")
    assert ids(folder) == {"trackio": "first"}
    [file] = trackio.utils.TRACKIO_DIR.glob(f"{tmp_path.name}*.db")
    with sqlite3.connect(file) as database:
        found = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
        configs = database.execute("select run_name, config from configs").fetchall()
    rows = [(step, json.loads(metrics)) for _, step, metrics in found]
    assert {name for name, *_ in [*found, *configs]} == {"first"}
    assert [(step, row["rollout/rewards_mean"]) for step, row in rows if "train/loss" in row] == REWARDS
    assert [(step, row[RESUMED]) for step, row in rows if RESUMED in row] == [(2, 2.0)]
    assert json.loads(configs[0][1])["actor"]["optimizer"]["lr"] == 2e-4


def test_swanlab_offline(tmp_path):
    pytest.importorskip("swanlab", reason="needs the extra swanlab")
    logs = tmp_path / "logs"
    folder = followed(tmp_path, "stats_logger.swanlab.mode=offline", f"stats_logger.swanlab.logdir={logs}")
    files = sorted(logs.glob("run-*/run-*.swanlab"), key=lambda file: file.stat().st_mtime)
    assert [file.stem for file in files] == [f"run-{ids(folder)['swanlab']}"] * 2, "one run, of two sessions"
    first, second = (file.read_bytes() for file in files)
    for content, losses in ((first, (1.0, 0.5, 1 / 3)), (second, (1 / 3, 0.25))):
        assert b"train/loss" in content
        assert all(struct.pack("<d", loss) in content for loss in losses)
    assert RESUMED.encode() in second
    assert RESUMED.encode() not in first


@pytest.mark.slow
@pytest.mark.parametrize("uri", [None, "here/runs"])
def test_mlflow_in_files(tmp_path, uri, monkeypatch):
    pytest.importorskip("mlflow", reason="needs the extra mlflow")
    from mlflow import MlflowClient

    monkeypatch.chdir(tmp_path)
    more = [] if uri is None else [f"stats_logger.mlflow.tracking_uri={uri}"]
    folder = followed(tmp_path, "stats_logger.mlflow.mode=local", "stats_logger.mlflow.name=mine", *more)
    client = MlflowClient(tracking_uri=(tmp_path / (uri or "mlruns")).as_uri())
    [run] = client.search_runs([client.get_experiment_by_name("quickstart").experiment_id])
    assert run.info.run_id == ids(folder)["mlflow"]
    assert (run.info.run_name, run.info.status) == ("mine", "FINISHED")
    assert run.data.params["actor.optimizer.lr"] == "0.0002"
    history = client.get_metric_history(run.info.run_id, "rollout/rewards_mean")
    assert sorted((each.step, each.value) for each in history) == REWARDS
    assert run.data.metrics[RESUMED] == 2.0
    assert allowed_metric_name("eval/pass@4 <x>") == "eval/pass_at_4 _x_"


class Faulty(Service):
    """Remembers what it got, and fails where it is told to."""

    package = "json"

    def __init__(self, fails="", error=None):
        self.calls, self.fails, self.error = [], fails, error or ConnectionError("no route")

    def _called(self, name, *given):
        self.calls.append((name, *given))
        if name == self.fails:
            raise self.error

    def start(self, run, run_id):
        self._called("start", run_id)
        return "id1"

    def log(self, step, scalars):
        self._called("log", step, dict(scalars))

    def finish(self):
        self._called("finish")


def tracker_of(service, folder, name="wandb"):
    return ServiceTracker(name, service, RunInfo(folder, "e", "n", None, {}, folder))


@pytest.mark.parametrize("fails", ["start", "log", "finish"])
@pytest.mark.parametrize("error", [ConnectionError("no route"), SystemExit(1)])
def test_a_service_that_fails_is_told_once(tmp_path, caplog, fails, error):
    service = Faulty(fails, error)
    tracker = tracker_of(service, tmp_path)
    for step in range(1, 5):
        tracker.log(step, {"train/loss": 1.0, "time/step": 1.0})
    tracker.finish()
    tracker.finish()
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    shown = f"{type(error).__name__}: {error}"
    assert told == [f"stats_logger.wandb: {shown}; the run goes on without it"]
    assert [call[0] for call in service.calls][-1] == fails
    assert len(service.calls) == {"start": 1, "log": 2, "finish": 6}[fails]


def test_a_service_that_hangs_does_not_hold_up_the_end(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(services_tracker, "_END_S", 0.1)
    service, free = Faulty(), threading.Event()
    service.log = lambda step, scalars: free.wait(30)
    tracker = tracker_of(service, tmp_path)
    tracker.log(1, {"train/loss": 1.0, "time/step": 1.0})
    tracker.finish()
    free.set()
    assert "stats_logger.wandb: is still sending after 0 s; the run ends without waiting for it" in caplog.text


def test_a_service_starts_with_the_first_scalars_and_gets_whole_steps(tmp_path):
    service = Faulty()
    tracker = tracker_of(service, tmp_path)
    tracker.finish()
    assert service.calls == []
    assert not list(tmp_path.iterdir()), "a run that fails before it has results leaves nothing"
    tracker.log(1, {"a": 1.0, "nan": math.nan})
    tracker.log(1, {"b": 2.0, "time/step": 0.5})
    tracker.log(1, {"eval/c": 3.0})
    tracker.log(2, {"a": 4.0})
    tracker.resume(1)
    tracker.finish()
    expected = [(1, {"a": 1.0, "b": 2.0, "time/step": 0.5}), (1, {"eval/c": 3.0}), (1, {RESUMED: 1.0})]
    assert service.calls == [("start", None), *[("log", *each) for each in expected], ("finish",)]
    again = Faulty()
    tracker = tracker_of(again, tmp_path)
    tracker.log(2, {"a": 1.0})
    tracker.finish()
    assert again.calls[0] == ("start", "id1")


def test_the_ids_of_several_services_are_kept(tmp_path):
    for name in ("wandb", "mlflow"):
        tracker = tracker_of(Faulty(), tmp_path, name)
        tracker.log(1, {"a": 1.0})
        tracker.finish()
    assert ids(tmp_path) == {"wandb": "id1", "mlflow": "id1"}


def test_a_missing_package_is_told_at_the_door(tmp_path, monkeypatch):
    modes = ["wandb.mode=offline", "swanlab.mode=cloud", "trackio.mode=local", "mlflow.mode=online"]
    config = config_of(tmp_path, *[f"stats_logger.{mode}" for mode in modes])
    assert sorted(config.stats_logger.services()) == ["mlflow", "swanlab", "trackio", "wandb"]
    monkeypatch.setattr(services_tracker, "find_spec", lambda name: None if name != "trackio" else "here")
    with pytest.raises(ConfigError) as told:
        check_services(config.stats_logger)
    assert [problem.key for problem in told.value.problems] == [
        f"stats_logger.{name}.mode" for name in ("mlflow", "swanlab", "wandb")
    ]
    assert "needs the package wandb: pip install 'areno[wandb]', or set it to disabled" in str(told.value)
    with pytest.raises(ConfigError, match="needs the package mlflow"):
        areno.PolicyOnlyTrainer(config, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert not config_of(tmp_path).stats_logger.services()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("trackio.mode=online", "trackio.space_id: is null, but mode is online"),
        ("trackio={mode: local, space_id: a/b}", "trackio.space_id: is a/b, but mode=local sends nothing"),
        ("mlflow={mode: local, tracking_uri: 'http://x'}", "mlflow.tracking_uri: is http://x, but mode is local"),
        ("wandb.mode=cloud", "wandb.mode: is 'cloud'; expected one of"),
        ("swanlab.api_key=x", "swanlab.api_key: unknown key; it would be kept in the files of the run; set the"),
    ],
)
def test_settings_that_do_not_fit(tmp_path, setting, message):
    with pytest.raises(ConfigError, match=message):
        config_of(tmp_path, f"stats_logger.{setting}")


@pytest.mark.parametrize("mode", ["cloud", "local", "offline"])
def test_modes_of_swanlab(tmp_path, monkeypatch, mode):
    """Under the names that the package has for them."""
    given = {}
    package = types.ModuleType("swanlab")
    package.Settings = lambda **settings: None
    package.Settings.Terminal = lambda **settings: None
    package.init = lambda **settings: given.update(settings)
    monkeypatch.setitem(sys.modules, "swanlab", package)
    [service] = config_of(tmp_path, f"stats_logger.swanlab.mode={mode}").stats_logger.services().values()
    service.start(RunInfo(tmp_path, "e", "n", None, {}, tmp_path), None)
    assert given["mode"] == {"cloud": "online"}.get(mode, mode)


@pytest.mark.slow
def test_a_run_of_wandb_that_others_write_to(tmp_path, monkeypatch):
    """Needs a key as mode=online does, and has the id that is in trackers.json."""
    wandb = pytest.importorskip("wandb", reason="needs the extra wandb")
    given, logins = {}, []
    run = types.SimpleNamespace(define_metric=lambda *name, **how: None, id="shared-id")
    monkeypatch.setattr(wandb, "login", lambda **how: logins.append(how) or True)
    monkeypatch.setattr(wandb, "init", lambda **how: given.update(how) or run)
    [service] = config_of(tmp_path, "stats_logger.wandb.mode=shared").stats_logger.services().values()
    assert service.start(RunInfo(tmp_path, "e", "n", None, {}, tmp_path), None) == "shared-id"
    assert (given["mode"], len(logins)) == ("shared", 1)


def test_wandb_without_a_key(tmp_path, caplog):
    wandb = pytest.importorskip("wandb", reason="needs the extra wandb")
    if wandb.login(prompt=False):
        pytest.skip("there is a key on this machine")
    trackers = open_trackers(config_of(tmp_path, "stats_logger.wandb.mode=online"), tmp_path)
    trackers.log(1, {"train/loss": 1.0})
    trackers.finish()
    assert "stats_logger.wandb: RuntimeError: there is no key; set WANDB_API_KEY" in caplog.text


def test_a_sweep_is_a_group(tmp_path):
    from areno.tracking.recorder import _run_info

    config = config_of(tmp_path)
    (tmp_path / "sweep/3").mkdir(parents=True)
    (tmp_path / "sweep/multirun.yaml").touch()
    about = _run_info(config, tmp_path / "sweep/3")
    assert (about.name, about.group, about.experiment) == ("sweep-3", "sweep", "quickstart")
    about = _run_info(config, tmp_path / "alone")
    assert (about.name, about.group) == ("alone", None)
    assert about.flat()["actor.optimizer.lr"] == 2e-4


def test_a_run_goes_on_without_a_service_that_fails(tmp_path, monkeypatch, caplog):
    service = Faulty("log")
    monkeypatch.setattr(StatsLoggerConfig, "services", lambda config: {"wandb": service})
    settings = ["total_train_steps=3", "train_dataset.batch_size=2", "gconfig.n_samples=2", "gconfig.max_new_tokens=4"]
    config = load(GSPOConfig, "quickstart", [*settings, "valid_dataset=null", "reward.workers=1", "engine.device=cpu"])
    with areno.PolicyOnlyTrainer(config, run_dir=tmp_path / "run", reward_fn=lambda record: 1.0) as trainer:
        trainer.fit()
    assert caplog.text.count("stats_logger.wandb: ConnectionError: no route; the run goes on without it") == 1
    assert len((tmp_path / "run/logs/metrics.jsonl").read_text().splitlines()) > 3


@dataclass(kw_only=True)
class MineConfig(Section):
    """Settings of a tracker in another package."""

    limit: int = setting(3, help="A number", gt=0)


class Mine(Faulty):
    settings, title, package, install = MineConfig, "Mine", "json", "mine"

    def __init__(self, config):
        super().__init__()
        self.config = config


@pytest.fixture
def installed(monkeypatch):
    """A package that declares Mine, and one whose entry point names no service."""
    group = "areno.trackers"
    found = [EntryPoint(name, value, group) for name, value in [("mine", f"{__name__}:Mine"), ("odd", "json:dumps")]]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: found)
    installed_services.cache_clear()
    yield
    installed_services.cache_clear()


def test_a_tracker_of_another_package(tmp_path, installed, monkeypatch):
    config = config_of(tmp_path, "stats_logger.trackers.mine.limit=4")
    [(name, service)] = config.stats_logger.services().items()
    assert (name, type(service), service.config.limit) == ("trackers.mine", Mine, 4)
    assert load(GSPOConfig, "quickstart", ["stats_logger.trackers.mine=null"]).stats_logger.services()
    monkeypatch.setattr(services_tracker, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"trackers.mine: needs the package json: pip install 'mine', or leave it"):
        check_services(config.stats_logger)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("mine.limit=0", "trackers.mine.limit: is 0; it must be more than 0"),
        ("mine.limt=4", r"trackers.mine.limt: unknown key; did you mean limit\?"),
        ("mine=4", "trackers.mine: is 4; a mapping of its settings is expected"),
        ("mien.limit=4", r"trackers.mien: is no installed tracker; did you mean mine\?; its package declares it"),
        ("odd.limit=4", "trackers.odd: does not import: TypeError: json:dumps is no subclass of"),
    ],
)
def test_settings_of_a_tracker_of_another_package(tmp_path, installed, setting, message):
    with pytest.raises(ConfigError, match=rf"stats_logger\.{message}"):
        config_of(tmp_path, f"stats_logger.trackers.{setting}")
