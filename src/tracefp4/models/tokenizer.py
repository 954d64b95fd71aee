"""The smallest tokenizer: one token a byte, for tiny models.

Ids 0 to 255 are the bytes of the UTF-8 text, so ``"A"`` is 65; five special tokens follow. Any text round-trips,
nothing has to be trained, and digits are separate tokens, which small models need for arithmetic. A chat is written as
a role token, the text, and the end token::

    <|user|>2+3=<|end|><|assistant|>5<|end|>

The tokenizer is an ordinary fast tokenizer of transformers (byte-level BPE without merges), so it is saved, loaded and
used like any other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END, PAD = "<|end|>", "<|pad|>"
ROLES = ("system", "user", "assistant")
SPECIAL: tuple[str, ...] = (END, PAD, *(f"<|{role}|>" for role in ROLES))
"""Special tokens in the order of their ids, from 256 on."""
VOCAB_SIZE = 256 + len(SPECIAL)

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception(\"unknown role '\" + message['role'] + \"' (valid: system, user, assistant)\") -}}"
    "{%- endif -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def byte_alphabet() -> list[str]:
    """The printable character that byte-level BPE writes for each byte, by byte value.

    Printable bytes of Latin-1 stand for themselves, the others take the code points from 256 on, in order (Radford et
    al., GPT-2, 2019).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def byte_tokenizer(max_length: int = 2048) -> PreTrainedTokenizerFast:
    """Build the byte tokenizer.

    Args:
        max_length: what the tokenizer reports as the longest input, in tokens.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: byte for byte, character in enumerate(byte_alphabet())}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
