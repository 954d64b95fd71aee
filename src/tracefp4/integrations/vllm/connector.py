"""The moment between a request's last token and the loss of its blocks.

vLLM tells its KV connector when a request has finished, with the ids of its blocks, before it frees them, and returns
what the connector answers with the request's output. That is all that this connector uses of the interface: it moves no
KV. It gathers the request's rows from the recorder, which therefore has to live in the scheduler's process (the
host starts vLLM so), and answers::

    output.kv_transfer_params = {"tracefp4": {"key": ..., "nbytes": ..., "rows": ..., "invalid_rows": ...,
                                              "preemptions": ...}}

A handle and counts, never the bytes. A request asks for guidance with ``extra_args = {"tracefp4": {"guidance": true,
"key": NAME}}`` in its sampling parameters; ``key`` names its frame, and is vLLM's id of the request if it is left out.
Without ``guidance`` only its routes are kept for the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

from tracefp4.errors import EngineError
from tracefp4.integrations.engines.recorder import Collected
from tracefp4.integrations.vllm.plugin import METHOD
from tracefp4.integrations.vllm.session import session
from tracefp4.rollout.attend import slots_of_pages

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class NoMetadata(KVConnectorMetadata):
    """Nothing has to reach the worker."""


class TraceConnector(KVConnectorBase_V1, SupportsHMA):
    """Gathers rows of finished requests; loads and saves no KV."""

    # -- Scheduler side

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """No tokens can be had from elsewhere."""
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        """Nothing to keep."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Nothing to say to the worker."""
        return NoMetadata()

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Gather the rows of ``request``; its blocks may be freed at once.

        Raises:
            EngineError: no recorder lives in this process.
        """
        if request.status.name == "FINISHED_ABORTED" or not request.num_output_tokens:
            return False, None
        here, asked = session(), request_options(request.sampling_params)
        tokens = list(request.all_token_ids)
        key = str(asked.get("key") or request.request_id)
        slots = slots_of(block_ids, here.block_size, len(tokens) - 1)
        found = here.recorder.collect(slots, tokens, key, guidance=bool(asked.get("guidance")))
        here.collected[key] = found, request.num_preemptions
        return False, {METHOD: describe(found, request.num_preemptions)}

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As :meth:`request_finished`, for models whose layers share one kind of block.

        Raises:
            EngineError: several kinds of blocks, in which a token has no single slot.
        """
        if len(block_ids) != 1:
            raise EngineError(f"guidance needs one slot a token, this model has {len(block_ids)} kinds of KV blocks")
        return self.request_finished(request, block_ids[0])

    # -- Worker side

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing to load."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to save."""

    def wait_for_save(self) -> None:
        """Nothing to wait for."""


def request_options(params: Any) -> dict[str, Any]:
    """What a request's sampling parameters ask of us."""
    return (getattr(params, "extra_args", None) or {}).get(METHOD) or {}


def slots_of(blocks: Sequence[int], block_size: int, rows: int) -> torch.Tensor:
    """Slots ``(rows,)`` int64 of the first tokens of a request that owns ``blocks``.

    Raises:
        EngineError: the blocks hold fewer tokens.
    """
    if len(blocks) * block_size < rows:
        raise EngineError(f"{len(blocks)} blocks of {block_size} tokens do not hold {rows} rows")
    return slots_of_pages(torch.tensor(blocks, dtype=torch.int64), block_size)[:rows]


def describe(found: Collected, preemptions: int) -> dict[str, Any]:
    """What travels back with the output: plain data, a handle and counts."""
    data: dict[str, Any] = {"rows": found.rows, "invalid_rows": found.invalid_rows, "preemptions": preemptions}
    if found.guidance is not None:
        data |= {"key": found.guidance.key, "nbytes": found.guidance.nbytes}
    return data
