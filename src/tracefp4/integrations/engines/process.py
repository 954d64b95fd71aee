"""Starting and ending the process that hosts an engine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tracefp4.errors import EngineError, TraceError
from tracefp4.integrations.engines.settings import VARIABLE, EngineSettings
from tracefp4.integrations.engines.wire import Channel, Close, Failed

_GRACE = 20.0
"""Seconds that an engine has to shut down."""
_TIDY = 0.3
"""Seconds that helpers of its processes have to remove what they shared."""


class HostProcess:
    """A running host; see :mod:`tracefp4.integrations.engines.host`.

    Args:
        folder: where settings and the engine's output (``engine.log``) go.
        settings: of the engine.
        backend: ``module:class``.
        arguments: for the backend, plain data.
        environment: variables besides this process's own.

    Raises:
        EngineError: it did not start.
    """

    def __init__(
        self,
        folder: Path,
        settings: EngineSettings,
        backend: str,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str],
    ) -> None:
        path = folder / "settings.json"
        settings.write(path)
        (folder / "arguments.json").write_text(json.dumps(dict(arguments)), encoding="utf-8")
        self._log = folder / "engine.log"
        mine, theirs = socket.socketpair()
        with theirs, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tracefp4.integrations.engines.host", str(theirs.fileno()), str(path), backend],
                env={**os.environ, **environment, VARIABLE: str(path)},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.channel = Channel(mine)

    @property
    def output(self) -> str:
        """What the engine's processes have printed."""
        return self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""

    def reply(self, timeout: float | None = None) -> Any:
        """The next reply; ``None`` if none came in time.

        Raises:
            EngineError: the engine failed, or its process ended; the message has its last words.
        """
        try:
            found = self.channel.receive(timeout)
        except EngineError as error:
            raise EngineError(f"the engine's process has ended: {self._last_words()}") from error
        if isinstance(found, Failed) and not found.key:
            raise EngineError(f"the engine failed: {found.reason}")
        return found

    def close(self) -> None:
        """End the engine and all processes that it started; again is harmless."""
        if self._process.returncode is None:
            with contextlib.suppress(TraceError):
                self.channel.send(Close())
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE)
            time.sleep(_TIDY)
            # Its own children carry its session: whatever is left of them ends here.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self.channel.close()

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        time.sleep(0.1)
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line]
        return (errors or lines or ["it printed nothing"])[-1]
