"""Prompts as token ids, and the pairs of a warm start."""

import pytest

from tracefp4.config import TaskConfig
from tracefp4.errors import ConfigError, TaskError
from tracefp4.rl.prompts import Prompter
from tracefp4.rl.sft_data import check_targets, gold_pairs
from tracefp4.rl.tasks.base import Message, TaskItem
from tracefp4.rl.tasks.reasoning_gym import ReasoningGymTask


class ByteTokenizer:
    """Bytes, with 256 for the end of a sequence and 257 for its beginning."""

    eos_token_id = 256
    chat_template = None

    def encode(self, text, *, add_special_tokens=True):
        return [257] * add_special_tokens + list(text.encode())

    def decode(self, ids, skip_special_tokens=False):
        return bytes(i for i in ids if i < 256).decode()


class ChatTokenizer(ByteTokenizer):
    chat_template = "some template"

    def apply_chat_template(self, conversation, *, tokenize, add_generation_prompt):
        assert not tokenize and add_generation_prompt
        return "".join(f"<{m['role']}>{m['content']}" for m in conversation) + "<assistant>"


def prompter(tokenizer, **options):
    return Prompter(tokenizer, TaskConfig(options={"prompt": options, "template": "of the task"}))


TEXT = TaskItem("t", "2+2=", target="4")
TURNS = TaskItem("c", (Message("user", "hi"), Message("assistant", "yes?"), Message("user", "2+2")))


def test_text_is_encoded_as_it_stands():
    assert prompter(ByteTokenizer()).encode(TEXT) == (257, *b"2+2=")
    assert Prompter(ByteTokenizer()).encode(TEXT) == (257, *b"2+2=")


def test_conversations_use_the_chat_template():
    p = prompter(ChatTokenizer())
    assert p.encode(TURNS) == tuple(b"<user>hi<assistant>yes?<user>2+2<assistant>")
    assert p.encode(TEXT) == (257, *b"2+2=")


def test_style_system_and_suffix():
    p = prompter(ChatTokenizer(), style="chat", system="S", suffix=" Answer:")
    assert p.render(TEXT) == "<system>S<user>2+2= Answer:<assistant>"
    p = prompter(ByteTokenizer(), style="plain", system="S", suffix=" Answer:")
    assert p.render(TEXT) == "S\n2+2= Answer:"
    assert p.render(TURNS) == "S\nhi\nyes?\n2+2 Answer:"


def test_a_missing_chat_template_names_the_way_out():
    with pytest.raises(TaskError, match="style = 'plain'"):
        prompter(ByteTokenizer()).encode(TURNS)


def test_bad_options_and_prompts_are_refused():
    with pytest.raises(ConfigError, match=r"task.options.prompt.sufix'.*did you mean 'suffix'"):
        prompter(ByteTokenizer(), sufix="x")
    with pytest.raises(TaskError, match="item 't' has 5 tokens, more than"):
        prompter(ByteTokenizer(), max_tokens=4).encode(TEXT)


def test_pairs_cut_where_a_rollout_cuts():
    assert gold_pairs([TEXT], prompter(ByteTokenizer())) == [((257, *b"2+2="), (*b"4", 256))]


def test_pairs_need_a_target_and_an_end():
    with pytest.raises(TaskError, match=r"'c' has no known answer.*warm_start.steps = 0"):
        gold_pairs([TURNS], prompter(ChatTokenizer()))
    endless = ByteTokenizer()
    endless.eos_token_id = None
    with pytest.raises(TaskError, match="end-of-sequence"):
        gold_pairs([TEXT], prompter(endless))


def test_decoding_leaves_special_tokens_out():
    assert prompter(ByteTokenizer()).decode((257, *b"4", 256)) == "4"


def test_targets_earn_the_full_reward():
    options = {"template": "{expression}=", "extract": "last_line"}
    check_targets(ReasoningGymTask("chain_sum", options))
    wrong = ReasoningGymTask("chain_sum", options | {"target": "{answer}\n0"})
    with pytest.raises(TaskError, match="disagree"):
        check_targets(wrong)
