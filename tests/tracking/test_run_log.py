"""The log of a run leaves the logging of the host program as it was."""

from __future__ import annotations

import logging

import pytest

from areno.errors import ConfigError
from areno.tracking.run_log import RunLog

logger = logging.getLogger("areno")


class Heard(logging.Handler):
    """A handler of the host."""

    def __init__(self):
        super().__init__()
        self.lines, self.closed = [], False

    def emit(self, record):
        self.lines.append(record.getMessage())

    def close(self):
        self.closed = True
        super().close()


def no_host(monkeypatch):
    """From here on nobody else listens. To be called in the test: pytest itself listens, and looks when it starts."""
    monkeypatch.setattr(logger, "propagate", False)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No run is open: a trainer that another file's fixture keeps open in this process has set up the log, too."""
    monkeypatch.setattr(RunLog, "_open", [])
    monkeypatch.setattr(RunLog, "_has_set_level", False)
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    monkeypatch.setattr(logger, "_cache", {})


@pytest.fixture
def heard():
    handler = Heard()
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def state():
    return list(logger.handlers), logger.level, logger.propagate


def lines(path):
    return [line[9:] for line in path.read_text().splitlines()]


def test_a_run_says_its_lines_and_leaves_nothing(monkeypatch, capsys, tmp_path):
    no_host(monkeypatch)
    before = state()
    log = RunLog(tmp_path / "run.log")
    logger.info("in the run")
    log.close()
    log.close()
    assert state() == before
    logger.info("after it")
    assert [line[9:] for line in capsys.readouterr().err.splitlines()] == lines(tmp_path / "run.log") == ["in the run"]


@pytest.mark.parametrize("own_process", [False, True])
def test_the_file_also_has_the_lines_before_it(monkeypatch, capsys, tmp_path, own_process):
    no_host(monkeypatch)
    before = state()
    with RunLog(own_process=own_process):  # of the command or, in a script, of another trainer
        logger.info("of the command")
        with RunLog():
            logger.info("of the loop")
            with RunLog(tmp_path / "run.log") as log:
                logger.info("in the run")
                log.write_buffered()
                log.write_buffered()
    assert lines(tmp_path / "run.log") == ["in the run", *["of the command"] * own_process, "of the loop"]
    assert state() == before


@pytest.mark.parametrize("own_process", [False, True])
def test_handlers_of_the_host_stay(heard, capsys, tmp_path, own_process):
    before, level, formatter = state(), heard.level, heard.formatter
    with RunLog(tmp_path / "run.log", own_process=own_process):
        logger.info("in the run")
    assert state() == before
    assert (heard.closed, heard.level, heard.formatter) == (False, level, formatter)
    assert heard.lines == lines(tmp_path / "run.log") == ["in the run"]
    assert capsys.readouterr().err == "", "no second copy"


def test_a_host_that_listens_at_the_root_has_no_second_copy(caplog, capsys, tmp_path):
    with RunLog(tmp_path / "run.log"):
        logger.info("in the run")
    assert caplog.messages == lines(tmp_path / "run.log") == ["in the run"]
    assert capsys.readouterr().err == ""


def test_a_host_that_sets_up_its_logging_later_has_no_second_copy(monkeypatch, capsys):
    no_host(monkeypatch)
    with RunLog():
        logger.info("to stderr")
        host = Heard()
        logger.addHandler(host)
        logger.info("to the host")
        logger.removeHandler(host)
    assert capsys.readouterr().err[9:] == "to stderr\n"
    assert host.lines == ["to the host"]


def test_a_process_of_our_own_has_stderr(capsys, caplog):
    before = state()
    with RunLog(own_process=True):
        logger.info("in the run")
    assert state() == before
    assert capsys.readouterr().err[9:] == "in the run\n"
    assert caplog.messages == []


def test_a_level_of_the_host_stays(heard, monkeypatch, tmp_path):
    monkeypatch.setattr(logger, "level", logging.WARNING)
    with RunLog(tmp_path / "run.log"):
        assert logger.level == logging.WARNING
    assert logger.level == logging.WARNING
    with RunLog(tmp_path / "run.log"):
        logger.setLevel(logging.ERROR)
    assert logger.level == logging.ERROR, "set by the host during the run"


def test_a_library_use_lets_the_host_choose_the_level(heard):
    with RunLog():
        assert logger.level == logging.NOTSET


@pytest.mark.parametrize("first_closed", ["outer", "inner"])
def test_two_runs_at_a_time(monkeypatch, capsys, tmp_path, first_closed):
    no_host(monkeypatch)
    before = state()
    logs = {"outer": RunLog(tmp_path / "outer.log"), "inner": RunLog(tmp_path / "inner.log")}
    logger.info("both")
    logs.pop(first_closed).close()
    logger.info("one")
    [(name, log)] = logs.items()
    log.close()
    assert state() == before
    assert lines(tmp_path / f"{first_closed}.log") == ["both"]
    assert lines(tmp_path / f"{name}.log") == ["both", "one"]
    assert [line[9:] for line in capsys.readouterr().err.splitlines()] == ["both", "one"]


def test_two_runs_one_after_another(monkeypatch, capsys, tmp_path):
    no_host(monkeypatch)
    for name in ("first", "second"):
        with RunLog(tmp_path / name):
            logger.info(name)
        assert lines(tmp_path / name) == [name]
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_a_log_that_cannot_be_made_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("x")
    before = state()
    with pytest.raises(ConfigError, match=r"cluster.fileroot: cannot write .*file/run.log: "):
        RunLog(tmp_path / "file/run.log")
    assert state() == before
