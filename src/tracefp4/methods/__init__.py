"""Methods: one small file for each way to pair a rollout with its trainer."""

from __future__ import annotations

from tracefp4.errors import ConfigError, suggest
from tracefp4.methods.base import Method
from tracefp4.methods.bf16 import Bf16
from tracefp4.methods.qarl import Qarl
from tracefp4.methods.qat import Qat
from tracefp4.methods.qat_w4a16 import QatW4A16
from tracefp4.methods.quads import Quads
from tracefp4.methods.tis_sc import TisSc
from tracefp4.methods.trace import Trace
from tracefp4.methods.trace_quads import TraceQuads

METHODS: dict[str, type[Method]] = {
    method.name: method for method in (Bf16, Qat, QatW4A16, Qarl, Quads, TisSc, Trace, TraceQuads)
}


def get_method(name: str) -> Method:
    """The method called ``name``; raises :class:`ConfigError` with the nearest valid name."""
    if name not in METHODS:
        raise ConfigError(f"unknown method {name!r}{suggest(name, METHODS)}")
    return METHODS[name]()


__all__ = ["METHODS", "Method", "get_method"]
