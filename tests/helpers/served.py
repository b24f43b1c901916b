"""`areno serve` in a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

from tests.helpers import warm_python
from tests.helpers.agent_model import model_folder

BASE = ["--device", "cpu", "--port", "0", "--max-running", "8"]


class Served:
    """A server in a process of its own."""

    def __init__(self, *arguments: str, folder: str = ""):
        of = [folder] if folder else [model_folder(), "--random-weights"]
        words = ["-m", "areno.cli", "serve", *of, *BASE, *arguments]
        self.lines: list[str] = []
        with contextlib.ExitStack() as stack:
            self.process, said = stack.enter_context(warm_python.said_by(words))
            for line in said:
                self.lines.append(line)
                if "serving" in line:
                    self.url = line.partition(" at ")[2].split()[0]
                    break
            else:
                raise AssertionError("".join(self.lines))
            self.close = stack.pop_all().close
        self._rest = threading.Thread(target=lambda: self.lines.extend(said), daemon=True)
        self._rest.start()

    def end(self) -> int:
        """Its exit code after SIGTERM; then `lines` has all of them."""
        os.kill(self.process.pid, signal.SIGTERM)
        code = self.process.wait(100)
        self._rest.join(60)
        return code
