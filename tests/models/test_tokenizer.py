"""The byte tokenizer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracefp4.models.tokenizer import END, PAD, SPECIAL, VOCAB_SIZE, byte_alphabet, byte_tokenizer

TOKENIZER = byte_tokenizer()


@settings(max_examples=200, deadline=None)
@given(st.text().filter(lambda text: not any(token in text for token in SPECIAL)))
def test_ids_are_the_bytes_of_the_text_and_decode_to_it(text):
    ids = TOKENIZER(text).input_ids
    assert ids == list(text.encode("utf-8"))
    assert TOKENIZER.decode(ids) == text


def test_alphabet_has_a_character_for_every_byte():
    alphabet = byte_alphabet()
    assert len(set(alphabet)) == 256
    assert alphabet[ord("A")] == "A" and alphabet[ord(" ")] == "Ġ" and alphabet[ord("\n")] == "Ċ"


def test_special_tokens_follow_the_bytes():
    assert TOKENIZER.convert_tokens_to_ids(list(SPECIAL)) == list(range(256, 256 + len(SPECIAL)))
    assert (TOKENIZER.eos_token, TOKENIZER.pad_token, TOKENIZER.bos_token) == (END, PAD, None)
    assert len(TOKENIZER) == VOCAB_SIZE


def test_chat_is_roles_text_and_ends():
    chat = [{"role": "user", "content": "2+3="}]
    text = TOKENIZER.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|user|>2+3=<|end|><|assistant|>"
    whole = TOKENIZER.apply_chat_template([*chat, {"role": "assistant", "content": "5"}], tokenize=False)
    assert whole == text + "5<|end|>"
    assert len(TOKENIZER(text).input_ids) == 4 + 3
    assert TOKENIZER.decode(TOKENIZER(whole).input_ids, skip_special_tokens=True) == "2+3=5"


def test_unknown_role_is_refused():
    with pytest.raises(Exception, match="unknown role 'tool'"):
        TOKENIZER.apply_chat_template([{"role": "tool", "content": ""}], tokenize=False)


def test_saved_and_loaded_it_is_the_same(tmp_path):
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    byte_tokenizer(64).save_pretrained(tmp_path)
    text = "é  12\n\n3 <|user|>x<|end|>"
    for cls in (AutoTokenizer, PreTrainedTokenizerFast):
        loaded = cls.from_pretrained(tmp_path)
        assert loaded(text).input_ids == TOKENIZER(text).input_ids
        assert (loaded.eos_token_id, loaded.pad_token_id, loaded.model_max_length) == (256, 257, 64)
        assert loaded.chat_template == TOKENIZER.chat_template
        assert loaded.decode([72, 105, 32, 46]) == "Hi ."


def test_padding_uses_the_pad_token():
    batch = TOKENIZER(["ab", "a"], padding=True)
    assert batch.input_ids[1] == [97, 257] and batch.attention_mask[1] == [1, 0]
