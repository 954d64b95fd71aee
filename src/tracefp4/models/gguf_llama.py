"""A Llama model out of a GGUF file, without llama.cpp.

GGUF is one file of named tensors and key-value metadata. Three things differ from a transformers checkpoint:

* **Blocks of small integers.** A ``Q4_1`` tensor stores 32 weights as 4-bit integers with an fp16 scale ``d`` and
  minimum ``m``: ``w = d q + m``. They are dequantized here to float32, exactly, and only then rounded to the dtype
  asked for.
* **Rotary order.** llama.cpp rotates neighbouring pairs ``(0, 1), (2, 3), ...`` of a head, transformers rotates halves
  ``(0, D/2), (1, D/2 + 1), ...``; its converter therefore interleaves the rows of the query and key projections of each
  head, and this undoes it.
* **The tokenizer** is a list of pieces and merges plus the *name* of a rule that splits text before merging. Rule
  ``smollm`` isolates every digit first and applies GPT-2's byte-level splitting to the rest (llama.cpp,
  ``LLAMA_VOCAB_PRE_TYPE_SMOLLM``). transformers' own GGUF reader leaves out the digit step, which changes the tokens of
  any text with two spaces or newlines before a digit; so the tokenizer is built here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tracefp4.errors import ModelError

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

_CONTROL = 3
"""Token type of special tokens (GGUF specification, ``tokenizer.ggml.token_type``)."""

_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def read_llama(path: Path, dtype: torch.dtype) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Read model and tokenizer.

    Args:
        path: a GGUF file of architecture ``llama`` without biases.
        dtype: dtype of the parameters; values are rounded to it once, from float32.

    Raises:
        ModelError: the package ``gguf`` is missing, or the file is of another kind.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ModelError("reading a GGUF file needs the package 'gguf': pip install 'tracefp4[models]'") from error
    reader = GGUFReader(path)
    if _field(reader, "general.architecture") != "llama":
        raise ModelError(f"{path.name}: GGUF architecture {_field(reader, 'general.architecture')!r}, expected 'llama'")
    return _model(reader, dtype), _tokenizer(reader)


def _field(reader: GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise ModelError(f"the GGUF file has no field {name!r}")
    return field.contents()


def _config(reader: GGUFReader) -> LlamaConfig:
    from transformers import LlamaConfig

    hidden, heads = _field(reader, "llama.embedding_length"), _field(reader, "llama.attention.head_count")
    return LlamaConfig(
        vocab_size=_field(reader, "llama.vocab_size"),
        hidden_size=hidden,
        intermediate_size=_field(reader, "llama.feed_forward_length"),
        num_hidden_layers=_field(reader, "llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=_field(reader, "llama.attention.head_count_kv"),
        head_dim=hidden // heads,
        max_position_embeddings=_field(reader, "llama.context_length"),
        # Stored as float32: 1e-5 comes back as 9.999999747e-06, which is the same float32 number.
        rms_norm_eps=float(f"{_field(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": float(_field(reader, "llama.rope.freq_base"))},
        tie_word_embeddings=not any(tensor.name == "output.weight" for tensor in reader.tensors),
        bos_token_id=_field(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=_field(reader, "tokenizer.ggml.eos_token_id"),
        pad_token_id=_field(reader, "tokenizer.ggml.padding_token_id"),
    )


def _model(reader: GGUFReader, dtype: torch.dtype) -> LlamaForCausalLM:
    from transformers import LlamaForCausalLM

    config = _config(reader)
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    model = model.to(dtype).to_empty(device="cpu")
    model.tie_weights()  # to_empty gives a tied head memory of its own
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are computed, not stored
    parameters = dict(model.named_parameters())
    missing = set(parameters)
    for tensor in reader.tensors:
        name = _parameter_name(tensor.name)
        if name not in parameters:
            raise ModelError(f"GGUF tensor {tensor.name!r} has no counterpart in a Llama model")
        value = _dequantize(tensor)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            value = rotary_halves(value, value.shape[0] * config.num_attention_heads // config.hidden_size)
        if value.shape != parameters[name].shape:
            raise ModelError(
                f"GGUF tensor {tensor.name!r} has shape {tuple(value.shape)}, not {tuple(parameters[name].shape)}"
            )
        with torch.no_grad():
            parameters[name].copy_(value)
        missing.discard(name)
    if missing:
        raise ModelError(f"the GGUF file lacks {len(missing)} tensors, the first of which is {min(missing)!r}")
    return model.eval()


def _parameter_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    _, layer, part = [*stem.split("."), "", ""][:3]
    return f"model.layers.{layer}.{_NAMES.get(part, part)}.{kind}"


def _dequantize(tensor: Any) -> Tensor:
    from gguf import dequantize

    # GGUF lists the fastest axis first; the dequantized array already has the order of torch.
    return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())


def rotary_halves(weight: Tensor, heads: int) -> Tensor:
    """Reorder the rows of a query or key projection from llama.cpp's rotary pairs to transformers' halves.

    Args:
        weight: ``(heads * head_dim, hidden)``; in each head, row ``2i + j`` is element ``i`` of half ``j``.
        heads: number of heads.
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, hidden)
    return pairs.transpose(1, 2).reshape(rows, hidden)


def _tokenizer(reader: GGUFReader) -> PreTrainedTokenizerFast:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    rule = _field(reader, "tokenizer.ggml.pre")
    if rule != "smollm":
        raise ModelError(f"GGUF tokenizer rule {rule!r} is unknown here (valid: smollm)")
    pieces: list[str] = _field(reader, "tokenizer.ggml.tokens")
    types: list[int] = _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in _field(reader, "tokenizer.ggml.merges")]
    backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    special = [piece for piece, kind in zip(pieces, types, strict=True) if kind == _CONTROL]
    backend.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=pieces[_field(reader, "tokenizer.ggml.bos_token_id")],
        eos_token=pieces[_field(reader, "tokenizer.ggml.eos_token_id")],
        pad_token=pieces[_field(reader, "tokenizer.ggml.padding_token_id")],
        unk_token=pieces[_field(reader, "tokenizer.ggml.unknown_token_id")],
        chat_template=_field(reader, "tokenizer.chat_template"),
        model_max_length=_field(reader, "llama.context_length"),
        clean_up_tokenization_spaces=False,
    )
