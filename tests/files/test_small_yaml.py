"""YAML of users and of run folders: what is small is read, whatever else lies there is one clear error, at once."""

from __future__ import annotations

import signal

import pytest

from areno.errors import ConfigError
from areno.files.interrupts import reraise_interrupts
from areno.files.small_yaml import YamlFault, load_yaml
from tests.helpers.played import TASK, load, task_folder


@pytest.fixture
def work(tmp_path, monkeypatch):
    """An empty working directory with a folder `my` for --config-dir that holds the task `small`."""
    return task_folder(tmp_path, monkeypatch)


def test_values_are_those_that_hydra_reads(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("a: &a {b: 1e-6, c: [on, ~, '1', \"${x}\"]}\nd: *a\ne: {<<: *a, b: 2}\nf: 2024-01-01\n")
    inner = {"b": 1e-6, "c": [True, None, "1", "${x}"]}
    assert load_yaml(path) == {"a": inner, "d": inner, "e": {**inner, "b": 2}, "f": "2024-01-01"}
    path.write_text("# nothing\n")
    assert load_yaml(path) in (None, {})
    assert load_yaml(tmp_path / "nowhere.yaml") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [1,\nb: 2", "line 2: expected ',' or ']', but got '<stream end>'"),
        ("a: *b", "line 1: the alias *b has no anchor before it"),
        ("a: 1\na: 2", "line 2: found duplicate key a"),
        ("a: " + "9" * 5000, "Exceeds the limit (4300 digits) for integer string conversion: "),
        ("a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 40)), "more than 32 levels"),
        ("--- 1\n--- 2", "but found another document"),
        ('a: "\\ud800"', "line 1: it has half of a surrogate pair, '\\ud800'"),
        ("a: \0", "special characters are not allowed"),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path, text, expected):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(YamlFault) as caught:
        load_yaml(path)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_signal_is_not_lost_in_a_library():
    """OmegaConf makes its own error of one that comes in its midst."""

    def library():
        try:
            signal.raise_signal(signal.SIGINT)
        except BaseException as error:
            raise ValueError("something else") from error

    with pytest.raises(KeyboardInterrupt), reraise_interrupts():
        library()
    with pytest.raises(ValueError, match="own"), reraise_interrupts():
        raise ValueError("own")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10))


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        pytest.param(BOMB, r"large.yaml: line \d+: it has more than 10,000 values \(each alias counts", id="aliases"),
        pytest.param("saver: &a {path: *a}\n", r"the alias \*a refers to a value that contains it", id="recursive"),
        pytest.param(f"foo: [{'1, ' * 10_000}1]\n", "it has more than 10,000 values", id="long"),
        pytest.param(f"foo: {'[' * 3000}{']' * 3000}\n", "it has more than 32 levels of nesting", id="deep"),
        pytest.param(f"foo: '{'x' * 2**20}'\n", "it has more than 1048576 bytes", id="large"),
        pytest.param(f"foo: '{'${a}' * 5000}'\n", r"a value without quotes, or with \${...}, has 20000 ch", id="texts"),
        pytest.param("hydra: null\n", "hydra: is null; a section is expected", id="hydra"),
        pytest.param("hydra: {launcher: 5}\n", "hydra.launcher: is 5; a section is expected", id="launcher"),
        pytest.param("rollout: [5]\n", "ConfigTypeError raised while .*: Cannot merge DictConfig with", id="list"),
    ],
)
def test_a_file_that_would_take_long_is_refused_at_once(work, more, expected):
    (work / "my/large.yaml").write_text(TASK + more)
    with pytest.raises(ConfigError, match=expected) as caught:
        load(name="large")
    assert "\n" not in str(caught.value)


def test_interpolations_that_repeat_each_other_are_refused_at_once(work):
    lists = "".join(f"a{n}: ['${{a{n - 1}}}', '${{.0}} ${{a{n - 1}}}']\n" for n in range(1, 30))
    texts = "".join(f"a{n}: ${{a{n - 1}}}${{a{n - 1}}}\n" for n in range(1, 40))
    for more in (lists, texts):
        (work / "my/large.yaml").write_text(f"{TASK}a0: x\n{more}")
        with pytest.raises(ConfigError, match="expand to more than 30,000 values"):
            load(name="large")
    (work / "my/large.yaml").write_text(
        f"{TASK}saver: {{path: '${{..experiment_name}}'}}\ntrial_name: ${{saver.path}}\n"
    )
    assert load(name="large").trial_name == "test"


def test_defaults_that_lead_back_to_their_own_file(work):
    (work / "my/one.yaml").write_text("defaults: [recipe, two, _self_]\n")
    (work / "my/two.yaml").write_text("defaults: [one]\n")
    with pytest.raises(ConfigError, match=r"^one: its defaults lead back to the file itself$"):
        load(name="one")
