"""What a command sees of folders in which it has files of its own."""

from __future__ import annotations

import subprocess
import tempfile
import venv
from pathlib import Path

import pytest

from areno.sandbox.box import network_problem

REPO = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(bool(network_problem()), reason=network_problem())


@pytest.mark.parametrize("parent", ["/tmp", "/dev/shm"])
def test_the_environment_of_python_may_lie_in_a_folder_that_a_command_has_for_itself(parent):
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        for name in ("real", "work"):
            Path(folder, name).mkdir()
        Path(folder, "link").symlink_to("real")
        venv.create(f"{folder}/real/env", with_pip=False)
        seen = f"import os, sys; print(sys.prefix, sorted(os.listdir({folder!r})), os.listdir({parent!r}))"
        code = f"""
import sys; sys.path.append({str(REPO)!r})
from areno.sandbox.box import Box, run
for _ in range(2):
    print(run([sys.executable, "-c", {seen!r}], Box("{folder}/work")).output, end="")
"""
        for at, names in (("real", ["real", "work"]), ("link", ["link", "real", "work"])):
            ran = subprocess.run([f"{folder}/{at}/env/bin/python", "-c", code], capture_output=True, text=True)
            assert ran.stdout == f"{folder}/{at}/env {names} ['{Path(folder).name}']\n" * 2, ran.stderr
