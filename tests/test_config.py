"""Configuration files: what is accepted, what is refused, and that a resolved config reads back equal."""

import pathlib

import pytest

from tracefp4 import config, config_text
from tracefp4.errors import ConfigError


def test_resolved_config_reads_back_equal(tmp_path):
    tree = config.load(None, ['task.options={min_terms=2, \'x-y\'=[1, 2.5], text="a\\"b"}', "steps=7", "eval.items=3"])
    path = tmp_path / "config.toml"
    path.write_text(config_text.to_toml(tree))
    assert config.load(path) == tree


def test_overrides_take_toml_values_and_bare_words():
    tree = config.load(None, ["method=qat", "train.gradient_checkpointing=false", "optimizer.lr=3e-4"])
    assert (tree.method, tree.train.gradient_checkpointing, tree.optimizer.lr) == ("qat", False, 3e-4)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("stepz=3", "unknown config key 'stepz' (did you mean 'steps'?)"),
        ("train.sample=3", "unknown config key 'train.sample' (did you mean 'samples'?)"),
        ("steps=-1", "'steps'"),
        ("loss.name=grop", "'loss.name'"),
        ("steps", "not of the form"),
        ("steps.x=1", "steps"),
    ],
)
def test_bad_settings_are_named(override, expected):
    with pytest.raises(ConfigError) as caught:
        config.load(None, [override])
    assert expected in str(caught.value)


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        config.load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("steps = = 3")
    with pytest.raises(ConfigError, match="cannot be read"):
        config.load(tmp_path / "bad.toml")


def test_reference_page_is_up_to_date():
    page = pathlib.Path(__file__).parent.parent / "docs" / "configuration.md"
    assert page.read_text(encoding="utf-8") == config_text.reference(), (
        "write config_text.reference() to docs/configuration.md"
    )
