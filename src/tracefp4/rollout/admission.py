"""What the engine refuses before it starts: settings and requests that could only fail later."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tracefp4.core import Request, SiteShape
from tracefp4.errors import EngineError
from tracefp4.formats.spec import Spec
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.store import Store
from tracefp4.models.layout import ModelLayout


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes of an engine. Raises :class:`EngineError` for sizes that cannot work."""

    max_tokens: int
    page_size: int
    max_batch: int
    prefill_chunk: int

    def __post_init__(self) -> None:
        for name in ("max_tokens", "page_size", "max_batch", "prefill_chunk"):
            value = getattr(self, name)
            if value < 1:
                raise EngineError(f"{name} is {value}, it must be at least 1")
        if self.max_tokens % self.page_size:
            nearest = max(self.max_tokens // self.page_size, 1) * self.page_size
            raise EngineError(
                f"max_tokens = {self.max_tokens} is no multiple of page_size = {self.page_size}; take {nearest}"
            )


def stored_plan(plan: Plan | None, store: Store | None, *, serves_pulls: bool = False) -> Plan | None:
    """The plan that an engine follows: ``None`` for one that records nothing.

    Args:
        plan: what is to be recorded.
        store: where it goes.
        serves_pulls: whether the engine hands out bits later that a checked plan does not send.

    Raises:
        EngineError: a plan that records something, without a store to put it into; or a checked one, for an engine or
            a store that cannot serve pulls.
    """
    if plan and store is None:
        raise EngineError(f"plan {str(plan)!r} records guidance, but there is no store to put it into")
    if plan and plan.checked and not (serves_pulls and store is not None and store.serves_pulls):
        raise EngineError(
            f"plan {str(plan)!r} leaves bits with the engine until they are pulled, which takes the embedded engine "
            f"and a store in its process; plan {str(replace(plan, checked=False))!r} sends them"
        )
    return plan or None


def recorded_shapes(layout: ModelLayout, spec: Spec, plan: Plan | None) -> tuple[SiteShape, ...]:
    """The sites that the engine records: those of the plan."""
    return () if plan is None else plan.select(layout.recordable_shapes(spec), layout.num_layers)


def check_request(request: Request, limits: Limits, max_length: int, vocabulary: int) -> None:
    """Refuse a request that could never run.

    Raises:
        EngineError: saying why.
    """
    name, sampling, prompt = f"request {request.id!r}", request.sampling, len(request.prompt_ids)
    if request.samples < 1:
        raise EngineError(f"{name} asks for {request.samples} samples; ask for at least 1")
    if not prompt:
        raise EngineError(f"{name} has no prompt; begin with a begin-of-sequence token, say")
    wrong = next((t for t in request.prompt_ids if not 0 <= t < vocabulary), None)
    if wrong is not None:
        raise EngineError(f"{name} has token id {wrong} in its prompt, the model has ids 0..{vocabulary - 1}")
    if sampling.max_new_tokens < 1:
        raise EngineError(f"{name} has max_new_tokens = {sampling.max_new_tokens}; ask for at least 1")
    for option, value, valid in (
        ("temperature", sampling.temperature, sampling.temperature >= 0),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1),
        ("top_k", sampling.top_k, sampling.top_k >= 0),
    ):
        if not valid:
            ranges = {"temperature": "0 (greedy) or more", "top_p": "above 0 and at most 1", "top_k": "0 (all) or more"}
            raise EngineError(f"{name} has {option} = {value}; it must be {ranges[option]}")
    if not 0 <= sampling.top_logprobs <= vocabulary:
        raise EngineError(
            f"{name} has top_logprobs = {sampling.top_logprobs}; ask for 0 to {vocabulary}, the size of the vocabulary"
        )
    total = prompt + sampling.max_new_tokens
    if total > max_length:
        raise EngineError(f"{name} may grow to {total} tokens, the model has positions for {max_length}")
    # The last token is never forwarded; samples that share a partly filled page copy it.
    pages = -(-(total - 1) // limits.page_size) + (request.samples > 1 and prompt % limits.page_size > 0)
    if pages * limits.page_size > limits.max_tokens:
        raise EngineError(
            f"{name} may grow to {total} tokens ({pages} pages of {limits.page_size}), more than the whole KV pool of "
            f"{limits.max_tokens}; raise max_tokens to {pages * limits.page_size} or lower max_new_tokens"
        )
