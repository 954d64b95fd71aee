"""A policy whose keys are stored in another basis."""

from __future__ import annotations

import copy

import pytest
import torch

from tracefp4.core import Kind, Site
from tracefp4.errors import CheckpointError
from tracefp4.formats.spec import get_spec
from tracefp4.models.binding import bound
from tracefp4.models.key_basis import KeyBasis, basis_of, set_basis
from tracefp4.models.layout import describe
from tracefp4.rl.policies import load_named
from tracefp4.training.batch import Example, collate
from tracefp4.training.key_basis import FILE, read_bases, store_keys, write_bases
from tracefp4.training.policy import token_logprobs
from tracefp4.training.sites import TrainerSites


@pytest.fixture(scope="module")
def policy():
    return load_named("tiny-moe", "cpu").model.float().eval()


def examples(count: int) -> list[Example]:
    generator = torch.Generator().manual_seed(1)
    return [
        Example(tuple(torch.randint(0, 60, (12 + 5 * i,), generator=generator).tolist()), 1, index=i)
        for i in range(count)
    ]


def scores(model, spec: str) -> torch.Tensor:
    batch = collate(examples(4), torch.device("cpu"))
    with bound(model, TrainerSites(describe(model), get_spec(spec))), torch.no_grad():
        return token_logprobs(model, batch)[0][batch.response]


@pytest.mark.parametrize("name", ["rotated", "centred", "centred-rotated"])
def test_a_policy_in_bfloat16_is_the_same_and_a_copy_has_the_basis(policy, name) -> None:
    model = copy.deepcopy(policy)
    store_keys(model, describe(model), name, examples(6), 64)
    assert torch.allclose(scores(model, "bf16"), scores(policy, "bf16"), atol=1e-4)
    assert not torch.equal(scores(model, "nvfp4-kv4"), scores(policy, "nvfp4-kv4"))
    assert torch.equal(scores(copy.deepcopy(model), "nvfp4-kv4"), scores(model, "nvfp4-kv4"))


def test_the_centre_is_the_mean_over_real_rows_however_they_are_batched(policy) -> None:
    model, layout = copy.deepcopy(policy), describe(policy)
    given = examples(5)
    store_keys(model, layout, "centred", given, 64)
    seen: dict[Site, list[torch.Tensor]] = {}

    class Looking(TrainerSites):
        def values(self, site, x, numerics):
            if site.kind is Kind.K:
                seen.setdefault(site, []).append(x.view(-1, layout.kv_heads, layout.head_dim))
            return x

    sites = Looking(layout, get_spec("nvfp4-kv4"))
    with bound(policy, sites), torch.no_grad():
        for example in given:
            batch = collate([example], torch.device("cpu"))
            with sites.batch(batch):
                token_logprobs(policy, batch)
    for layer, path in layout.attentions.items():
        basis = basis_of(model.get_submodule(path))
        assert basis is not None and basis.centre is not None and basis.signs is None
        expected = torch.cat(seen[Site(layer, Kind.K)]).mean(0)
        assert torch.allclose(basis.centre.squeeze(1), expected, atol=1e-4)


def test_bases_are_written_and_read_again(policy, tmp_path) -> None:
    model, again = copy.deepcopy(policy), copy.deepcopy(policy)
    layout, file = describe(policy), tmp_path / FILE
    write_bases(model, layout, file)
    assert not file.exists()
    read_bases(again, layout, file)
    store_keys(model, layout, "centred-rotated", examples(4), 64)
    write_bases(model, layout, file)
    read_bases(again, layout, file)
    assert torch.equal(scores(model, "nvfp4-kv4"), scores(again, "nvfp4-kv4"))
    write_bases(policy, layout, file)
    assert not file.exists()


def test_bases_of_another_model_are_refused(policy, tmp_path) -> None:
    model, layout, file = copy.deepcopy(policy), describe(policy), tmp_path / FILE
    path = layout.attentions[0]
    set_basis(model.get_submodule(path), KeyBasis(None, torch.ones(layout.head_dim * 2)))
    write_bases(model, layout, file)
    with pytest.raises(CheckpointError, match="basis of layer 0 is of heads of another size"):
        read_bases(copy.deepcopy(policy), layout, file)
