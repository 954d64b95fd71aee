"""What the engine knows of a request while it runs: sequences, the prefixes they start from, and when they stop.

A request asks for ``n`` samples of one prompt. Its prompt becomes a :class:`Prefix`, which is prefilled once, and each
sample a :class:`Sequence`, which starts where the prefix ends: it shares the prefix's full pages and copies the partly
filled last one. A sequence that had to give up its pages becomes the only member of a new prefix, made of everything it
had so far; nothing else in the engine has to know about preemption.

A *ticket* is a number that a writer leaves beside each row it records. When a rollout is finished its rows must carry
the tickets of the prefix and the sequence that they belong to; a row with another ticket was never recorded, and is
marked so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from tracefp4.core import FinishReason, Request
from tracefp4.errors import EngineError


class Sampled(NamedTuple):
    """The sampled tokens of ``B`` sequences, on the host. Lists, since a step handles each of them in Python."""

    tokens: list[int]
    logprobs: list[float]
    top: Tensor | None = None
    """float64 ``(B, 2, k)``: ids and log-probs of the likeliest tokens, if anyone in the batch asked for them."""


@dataclass(eq=False, slots=True)
class Sequence:
    """One sample of one request."""

    request: Request
    sample: int
    arrival: int
    """Number of the request, in the order of :meth:`Engine.add`."""
    stream: int
    """Key of its random numbers (:mod:`tracefp4.rollout.sampler`)."""
    guidance: bool
    """Whether its recorded rows are shipped."""
    response: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[Tensor] = field(default_factory=list)
    """``(2, k)`` a response token, if the request asked for them."""
    pages: list[int] = field(default_factory=list)
    """Pages of the KV pool, only while it runs."""
    state_row: int | None = None
    """Row of linear-attention state, only while it runs."""
    prefix_length: int = 0
    """Rows that its prefix recorded; the rest it recorded itself."""
    prefix_ticket: int = 0
    ticket: int = 0
    finish: FinishReason | None = None
    prompt: int = field(init=False)
    """Tokens of the prompt."""
    most: int = field(init=False)
    """Tokens that the response may have."""

    def __post_init__(self) -> None:
        self.prompt, self.most = len(self.request.prompt_ids), self.request.sampling.max_new_tokens

    @property
    def key(self) -> tuple[int, int]:
        """Age: of two sequences the one with the smaller key came first."""
        return self.arrival, self.sample

    @property
    def length(self) -> int:
        """Tokens so far, prompt and response. The last one has not been forwarded."""
        return self.prompt + len(self.response)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and response so far."""
        return (*self.request.prompt_ids, *self.response)

    @property
    def last_token(self) -> int:
        """The token that the next decode step forwards."""
        return self.response[-1]

    def append(self, token: int, logprob: float, top: Tensor | None = None) -> None:
        """Take a sampled token; ``top`` float64 ``(2, k)`` as in :class:`Sampled`."""
        self.response.append(token)
        self.logprobs.append(logprob)
        if top is not None and self.request.sampling.top_logprobs:
            self.top.append(top[:, : self.request.sampling.top_logprobs])


@dataclass(eq=False, slots=True)
class Prefix:
    """Tokens that are prefilled once, and the sequences that start at their end."""

    tokens: tuple[int, ...]
    members: deque[Sequence]
    """Sequences that have not started yet, never empty while the prefix exists."""
    pages: list[int] = field(default_factory=list)
    state_row: int | None = None
    done: int = 0
    """Tokens forwarded so far."""
    hidden: Tensor | None = None
    """``(hidden,)`` last hidden state once all tokens were forwarded: each member samples its first token from it."""
    ticket: int = 0

    @property
    def key(self) -> tuple[int, int]:
        """Age of the oldest member that waits."""
        return self.members[0].key

    @property
    def complete(self) -> bool:
        """Whether members can start."""
        return self.hidden is not None


class StopRules:
    """Decides whether a sequence ends at its newest token.

    A stop string may begin inside one token and end inside another, so the text of the last few tokens is searched. The
    token that completes it stays in the response: a log-probability and a row of guidance belong to it.

    Args:
        eos_ids: token ids that end every sequence.
        decode: token ids to text, special tokens kept; ``None`` if there is no tokenizer.
    """

    def __init__(self, eos_ids: frozenset[int], decode: Callable[[Items[int]], str] | None) -> None:
        self.eos_ids, self._decode = eos_ids, decode

    @property
    def finds_text(self) -> bool:
        """Whether stop strings can be found."""
        return self._decode is not None

    def check(self, request: Request) -> None:
        """Refuse a request whose stop strings cannot be found.

        Raises:
            EngineError: stop strings without a tokenizer, or an empty one.
        """
        stop = request.sampling.stop
        if stop and self._decode is None:
            raise EngineError(f"request {request.id!r} has stop strings, but the engine was built without a tokenizer")
        if "" in stop:
            raise EngineError(
                f"request {request.id!r} has an empty stop string, which would end it at once; leave it out"
            )

    def reason(self, sequence: Sequence) -> FinishReason | None:
        """``"stop"``, ``"length"`` or ``None`` to go on."""
        sampling = sequence.request.sampling
        newest = sequence.response[-1]
        if newest in self.eos_ids or newest in sampling.stop_token_ids:
            return "stop"
        if sampling.stop and self._found(sequence.response, sampling.stop):
            return "stop"
        return "length" if len(sequence.response) >= sampling.max_new_tokens else None

    def _found(self, response: list[int], stop: tuple[str, ...]) -> bool:
        if self._decode is None:
            return False
        # A token stands for at least one byte, so a match that ends at the newest token lies within this window.
        window = max(len(text.encode()) for text in stop) + 4
        text = self._decode(response[-window:])
        return any(item in text for item in stop)


def eos_token_ids(model: object, tokenizer: object | None) -> frozenset[int]:
    """Collect the ids that end a sequence, from generation settings, configuration and tokenizer."""
    sources = [getattr(model, "generation_config", None), getattr(model, "config", None), tokenizer]
    found: set[int] = set()
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            found.update([value] if isinstance(value, int) else value)
    return frozenset(found)
