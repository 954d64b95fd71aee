"""The process that hosts an engine: it takes orders from the trainer's process, and answers.

Serving engines are made to own their process. They install signal handlers, keep settings in globals, and end every
child of the process when they shut down, a trainer's reward workers included. So an engine gets a process of its own,
and what it needs to be importable (shims, plugins) stays there too::

    python -m tracefp4.integrations.engines.host FD SETTINGS MODULE:CLASS

``FD`` is one end of a socket pair, ``SETTINGS`` the file of :class:`~.settings.EngineSettings`, ``MODULE:CLASS`` a
:class:`Backend`. When the trainer's end closes, for whatever reason, the engine is shut down.
"""

from __future__ import annotations

import importlib
import json
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from tracefp4.errors import EngineError, TraceError
from tracefp4.integrations.engines.settings import EngineSettings, read_settings
from tracefp4.integrations.engines.wire import (
    Abort,
    Ask,
    Channel,
    Close,
    Failed,
    Finished,
    Load,
    Loaded,
    Report,
    Sample,
)

POLL = 0.05
"""Seconds between two looks for orders while samples are in flight."""


class Backend(Protocol):
    """What an engine has to offer to be hosted. Built as ``backend(settings, arguments)``."""

    def submit(self, sample: Sample) -> None:
        """Start a sample."""
        ...

    def abort(self, key: str) -> None:
        """Give up on a sample, which is then returned by :meth:`poll`; an unknown or finished one is ignored."""
        ...

    def poll(self, timeout: float) -> Sequence[Finished | Failed]:
        """Work for at most ``timeout`` seconds, or until something ends; return what did."""
        ...

    def load(self, path: str, version: int) -> str:
        """Take the weights in a file of :mod:`tracefp4.models.weight_file`, under the trainer's names.

        Returns:
            The checksum of what is served.

        Raises:
            TraceError: they are not in place.
        """
        ...

    def report(self) -> Report:
        """Say what is served."""
        ...

    def close(self) -> None:
        """Shut down."""
        ...


class Host:
    """Serves a backend until it is told to stop.

    Args:
        channel: to the trainer's process.
        backend: the engine.
    """

    def __init__(self, channel: Channel, backend: Backend) -> None:
        self._channel, self._backend = channel, backend
        self._pending: set[str] = set()

    def run(self) -> None:
        """Answer orders; returns when the other side says so, or is gone."""
        while True:
            try:
                order = self._channel.receive_order(0 if self._pending else None)
                while order is not None:
                    if isinstance(order, Close):
                        return
                    self._obey(order)
                    order = self._channel.receive_order(0)
                if self._pending:
                    for reply in self._backend.poll(POLL):
                        self._pending.discard(reply.key)
                        self._channel.send(reply)
            except EngineError as error:
                if "is gone" in str(error):
                    return
                raise

    def _obey(self, order: Any) -> None:
        if isinstance(order, Sample):
            self._pending.add(order.key)
            self._backend.submit(order)
        elif isinstance(order, Abort):
            self._backend.abort(order.key)
        else:
            self._channel.send(self._answer(order))

    def _answer(self, order: Load | Ask) -> Loaded | Report | Failed:
        """What fails here leaves the engine as it is: the other side decides whether to try again."""
        try:
            if isinstance(order, Load):
                return Loaded(order.version, self._backend.load(order.path, order.version))
            return self._backend.report()
        except TraceError as error:
            return Failed(str(error))


def build(name: str, settings: EngineSettings, arguments: dict[str, Any]) -> Backend:
    """Make the backend ``module:class``."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)(settings, arguments)


def main(argv: Sequence[str]) -> int:
    """Host a backend; see the text of this module."""
    channel = Channel(socket.socket(fileno=int(argv[0])))
    backend: Backend | None = None
    try:
        settings = read_settings(argv[1])
        arguments = json.loads(Path(argv[1]).with_name("arguments.json").read_text(encoding="utf-8"))
        backend = build(argv[2], settings, arguments)
        channel.send(backend.report())
        Host(channel, backend).run()
    except Exception as error:  # The process ends here: whatever went wrong becomes the other side's sentence.
        text = str(error).strip() or type(error).__name__
        channel.send(Failed(text if "EngineError" in type(error).__name__ else f"{type(error).__name__}: {text}"))
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    finally:
        if backend is not None:
            backend.close()
        channel.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
