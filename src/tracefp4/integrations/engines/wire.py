"""Messages between the trainer's process and the one that hosts an engine, as msgpack with a length in front.

Token ids, log-probs and handles only: kilobytes a rollout. Weights, frames and routes lie in files
(:mod:`tracefp4.integrations.engines.handover`); a message names them. Floats travel as IEEE doubles, so a log-prob
arrives as the engine computed it.
"""

from __future__ import annotations

import select
import socket
import struct
from typing import Any, Literal

import msgspec

from tracefp4.core import FinishReason
from tracefp4.errors import EngineError

_LENGTH = struct.Struct("<I")


class Sample(msgspec.Struct, tag=True, frozen=True):
    """To the host: generate one sample."""

    key: str
    """Names it, and its frame in the folder."""
    tokens: list[int]
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    stop: list[str]
    stop_token_ids: list[int]
    seed: int
    guidance: bool


class Abort(msgspec.Struct, tag=True, frozen=True):
    """To the host: give up on a sample; it is answered by :class:`Finished`."""

    key: str


class Load(msgspec.Struct, tag=True, frozen=True):
    """To the host: take the weights in a file, packed or not; answered by :class:`Loaded`. Nothing is in flight."""

    path: str
    version: int


class Ask(msgspec.Struct, tag=True, frozen=True):
    """To the host: say what is served; answered by :class:`Report`."""


class Close(msgspec.Struct, tag=True, frozen=True):
    """To the host: stop the engine and end."""


class Parcel(msgspec.Struct, frozen=True):
    """A file in the folder."""

    key: str
    nbytes: int
    shape: list[int] = []
    dtype: str = ""


class Finished(msgspec.Struct, tag=True, frozen=True):
    """From the host: a sample has ended."""

    key: str
    tokens: list[int]
    logprobs: list[float]
    finish: FinishReason
    version: int
    routes: Parcel | None = None
    guidance: Parcel | None = None
    cached_tokens: int = 0
    """Prompt tokens whose K and V a prefix cache had."""
    retractions: int = 0
    invalid_rows: int = 0


State = Literal["recorded", "not planned", "fused away", "not quantized", "not bound", "expected, not run"]
"""What becomes of a site here."""


class SiteLine(msgspec.Struct, frozen=True):
    """One line of the capability table; see :mod:`tracefp4.integrations.engines.sites`."""

    site: str
    path: str
    codes: bool
    scales: bool
    state: State
    note: str = ""


class Report(msgspec.Struct, tag=True, frozen=True):
    """From the host: what is served."""

    digest: str
    version: int
    formats: list[tuple[int, str, str, str, int]]
    """Layer, kind, name and hash of the numerics (empty: none), and calls since the weights came, of every tensor that
    the plugin met."""
    sites: list[SiteLine]
    facts: dict[str, Any] = {}
    """Versions, backend names and sizes, for people."""


class Loaded(msgspec.Struct, tag=True, frozen=True):
    """From the host: the weights are in place."""

    version: int
    digest: str


class Failed(msgspec.Struct, tag=True, frozen=True):
    """From the host: what was asked for failed. With a key, that sample alone."""

    reason: str
    key: str = ""


Order = Sample | Abort | Load | Ask | Close
Reply = Finished | Loaded | Report | Failed


class Channel:
    """One end of a connected stream socket. Not thread-safe.

    Args:
        connection: owned from now on.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._encoder = msgspec.msgpack.Encoder()
        self._orders: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Order)
        self._replies: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Reply)
        self._rest = bytearray()

    def send(self, message: Order | Reply) -> None:
        """Send one message. What arrives meanwhile is kept, so two ends that send at once do not wait for each other.

        Raises:
            EngineError: the other end is gone.
        """
        data = self._encoder.encode(message)
        left = memoryview(_LENGTH.pack(len(data)) + data)
        self.connection.setblocking(False)
        try:
            while len(left):
                readable, writable, _ = select.select([self.connection], [self.connection], [])
                if readable:
                    self._read()
                if writable:
                    left = left[self.connection.send(left) :]
        except OSError as error:
            raise EngineError(f"the other process is gone: {error}") from error
        finally:
            self.connection.setblocking(True)

    def receive(self, timeout: float | None = None) -> Any:
        """The next reply; ``None`` if none came within ``timeout`` seconds.

        Raises:
            EngineError: the other end is gone, or sent something else.
        """
        return self._next(self._replies, timeout)

    def receive_order(self, timeout: float | None = None) -> Any:
        """The next order; see :meth:`receive`."""
        return self._next(self._orders, timeout)

    def close(self) -> None:
        """Close this end."""
        self.connection.close()

    def _next(self, decoder: msgspec.msgpack.Decoder[Any], timeout: float | None) -> Any:
        self.connection.settimeout(timeout)
        try:
            while (size := self._size()) is None or len(self._rest) < _LENGTH.size + size:
                self._read()
        except (TimeoutError, BlockingIOError):
            return None
        except OSError as error:
            raise EngineError(f"the other process is gone: {error}") from error
        finally:
            self.connection.settimeout(None)
        data = bytes(self._rest[_LENGTH.size : _LENGTH.size + size])
        del self._rest[: _LENGTH.size + size]
        try:
            return decoder.decode(data)
        except msgspec.DecodeError as error:
            raise EngineError(f"a message between the processes cannot be read: {error}") from error

    def _read(self) -> None:
        part = self.connection.recv(1 << 20)
        if not part:
            raise EngineError("the other process is gone: it closed the connection")
        self._rest += part

    def _size(self) -> int | None:
        return _LENGTH.unpack_from(self._rest)[0] if len(self._rest) >= _LENGTH.size else None
