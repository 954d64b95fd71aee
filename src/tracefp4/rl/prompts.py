"""From task items to token ids.

Text is encoded as it stands; a conversation is rendered by the tokenizer's chat template with the opening of the
assistant's turn. A completion to imitate is encoded *apart from its prompt* and ends with the end-of-sequence token:
in a rollout the first sampled token follows the prompt's last one, so training must cut at the same place even where
the tokenizer would have merged across it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tracefp4.config import TaskConfig
from tracefp4.errors import TaskError
from tracefp4.rl.tasks.base import Message, PromptOptions, TaskItem, read_options


class Tokenizer(Protocol):
    """What is needed of a transformers tokenizer."""

    eos_token_id: int | None
    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        ...

    def apply_chat_template(self, conversation: list[dict[str, str]], **kwargs: Any) -> Any:
        """Render a conversation."""
        ...


class Prompter:
    """Renders and encodes prompts and completions.

    Args:
        tokenizer: of the policy.
        config: the task; its ``options.prompt`` table says how prompts look (:class:`PromptOptions`).
    """

    def __init__(self, tokenizer: Tokenizer, config: TaskConfig | None = None) -> None:
        self.tokenizer = tokenizer
        table = config.options.get("prompt", {}) if config is not None else {}
        self.options = read_options(PromptOptions, table, "task.options.prompt")

    def render(self, item: TaskItem) -> str:
        """The text that the policy sees.

        Raises:
            TaskError: a conversation, and a tokenizer without a chat template.
        """
        options, prompt = self.options, item.prompt
        messages = [Message("user", prompt)] if isinstance(prompt, str) else list(prompt)
        if options.system:
            messages.insert(0, Message("system", options.system))
        if options.suffix:
            messages[-1] = Message(messages[-1].role, messages[-1].content + options.suffix)
        if not self._is_chat(item):
            return "\n".join(message.content for message in messages)
        if not getattr(self.tokenizer, "chat_template", None):
            raise TaskError(
                "the prompts are conversations and the tokenizer has no chat template; "
                "set task.options.prompt.style = 'plain'"
            )
        turns = [{"role": message.role, "content": message.content} for message in messages]
        return self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)

    def encode(self, item: TaskItem) -> tuple[int, ...]:
        """Token ids of an item's prompt.

        Raises:
            TaskError: an empty prompt, or one longer than ``options.prompt.max_tokens``.
        """
        # A chat template writes special tokens itself.
        ids = tuple(self.tokenizer.encode(self.render(item), add_special_tokens=not self._is_chat(item)))
        if not ids:
            raise TaskError(f"the prompt of item {item.id!r} has no tokens")
        if 0 < self.options.max_tokens < len(ids):
            raise TaskError(
                f"the prompt of item {item.id!r} has {len(ids)} tokens, more than "
                f"task.options.prompt.max_tokens = {self.options.max_tokens}"
            )
        return ids

    def encode_completion(self, text: str) -> tuple[int, ...]:
        """Token ids of a completion, with the end-of-sequence token.

        Raises:
            TaskError: the tokenizer names no such token.
        """
        if self.tokenizer.eos_token_id is None:
            raise TaskError("the tokenizer has no end-of-sequence token, so a completion cannot end")
        return (*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)  # type: ignore[attr-defined]

    def _is_chat(self, item: TaskItem) -> bool:
        style = self.options.style
        return style == "chat" or (style == "auto" and not isinstance(item.prompt, str))
