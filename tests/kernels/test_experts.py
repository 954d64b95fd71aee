"""Grouped expert products: the route exactly, products up to the order of fp32 additions."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tracefp4.errors import FormatError
from tracefp4.evaluation.bench_experts import EXPERTS, expert_configs
from tracefp4.formats import e2m1, words
from tracefp4.formats.blocks import quantize
from tracefp4.formats.spec import get_spec
from tracefp4.models.kernel_weights import arrange, packed_again, set_aside
from tracefp4.models.packing import pack_weight

GPU = torch.cuda.is_available()


INNER = 256
"""Columns that all of the tiles divide."""
ARMS = {
    "nvfp4-w4a4": "fp4 nvfp4 w4a4", "mxfp4-w4a4-kv4": "fp4 mxfp4 w4a4", "bf16": "bf16",
    "nvfp4-w4a16": "fp4 nvfp4 w4a16", "mxfp4-w4a16": "fp4 mxfp4 w4a16",
}  # fmt: skip
"""What the bench calls these specs."""


def gpu_tiles(spec, terms=1):
    """Every tile that a launch chooses or that the bench compares, and some more: configurations with heights."""
    return sorted(more_tiles(terms) | chosen_tiles(spec, terms) | (timed_tiles(spec) if terms == 1 else set()), key=str)


def timed_tiles(spec):
    """Those of the bench, which times one term: any height, for batches below and above its line at four tokens."""
    return {
        (config, rows)
        for rows in (8, 16, 32, 64, 128)
        for batch in (1, 64)
        for config in expert_configs(ARMS[spec], batch, rows, INNER)
    }


def chosen_tiles(spec, terms):
    """The defaults of all sizes of the bench, for routes of few and of many tiles."""
    from tracefp4.kernels.experts import ExpertWeight, default_config

    scales, found = None if spec == "bf16" else torch.empty(0), set()
    sizes = [size for _, _, hidden, inter in EXPERTS.values() for size in ((2 * inter, hidden), (hidden, inter))]
    for out, inner in sizes:
        weight = ExpertWeight(torch.empty(0), scales, None, out, inner, spec.startswith("mxfp4"))
        for rows in (8, 16, 32, 64, 128)[: 6 - terms]:
            for most in (1, 8, 24, 64, 128, 264, 1056, 4000):
                found.add((default_config(weight, SimpleNamespace(most=most, rows=rows), terms), rows))
    return found


def more_tiles(terms):
    """Around them. Long ones belong to programs of several warps, and two terms of the longest fit nowhere."""
    from tracefp4.kernels.experts import Config

    single = [(columns, unroll, 1, stages) for columns in (16, 32, 64) for unroll in (1, 2, 4) for stages in (2, 3, 4)]
    several = [(16, 2, 1, 6), (32, 2, 1, 6), (32, 2, 1, 8), (32, 1, 1, 10), (64, 2, 1, 6), (64, 1, 1, 3, 80)]
    several += [(64, 1, 1, 3, 96), (128, 1, 1, 4), (128, 1, 2, 3), (128, 1, 2, 4), (64, 1, 2, 4), (256, 1, 4, 3)]
    groups = [(64, unroll, 4, stages) for unroll in (1, 2) for stages in (3, 4)]
    groups += [(128, 1, 4, 3), (128, 1, 4, 4), (128, 2, 4, 3), (128, 1, 8, 3)]
    groups += [(64, 1, 4, 6), (64, 1, 4, 8), (128, 1, 4, 6)]
    short = {(Config(*size), rows) for size in (*single, *several) for rows in (8, 16, 32)}
    return short | {(Config(*size), rows) for size in groups for rows in (8, 16, 32, 64, 128)[: 6 - terms]}


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("spec", ARMS)
def test_tiles_of_the_device_are_those_that_are_chosen_and_timed(spec, terms):
    """The list itself, which no test without a GPU walks over."""
    from tracefp4.kernels.experts import Config

    tiles = gpu_tiles(spec, terms)
    assert len(set(tiles)) == len(tiles) < 220
    assert all(INNER % (64 * config.unroll) == 0 and rows <= (128 if terms == 1 else 64) for config, rows in tiles)
    if spec != "bf16" and terms == 1:
        limited, wide, pair = Config(128, 1, 4, 3, 128), Config(256, 1, 4, 3), Config(128, 1, 2, 3)
        assert {(config, rows) for config in (limited, wide, pair) for rows in (32, 64, 128)} <= set(tiles)


def ids(tokens, top_k, experts, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)])


@pytest.mark.parametrize("limit", [8192, 0])
@pytest.mark.parametrize(
    "tokens, top_k, experts, rows",
    [(1, 2, 8, 8), (1, 1, 1, 8), (5, 2, 3, 8), (17, 3, 40, 8), (40, 2, 6, 16), (64, 8, 128, 8), (150, 2, 5, 32)],
)
def test_route(tokens, top_k, experts, rows, limit, device, same, monkeypatch):
    """Every pair is in exactly one tile, of its expert, and every entry of the list is written."""
    from tracefp4.kernels import routing

    monkeypatch.setattr(routing, "COUNTING_LIMIT", limit)
    chosen = ids(tokens, top_k, experts)
    chosen[chosen == 1] = 0  # an expert without tokens, and tokens that name one expert twice
    found = routing.route(chosen.to(device), experts, rows)
    flat = chosen.flatten()
    order = torch.sort(flat, stable=True)[1]
    assert same(found.order, order.to(torch.int32))
    covered = []
    for expert, first, last in found.tiles.tolist():
        assert 0 <= expert < experts and 0 <= first <= last <= first + rows
        assert (flat[order[first:last]] == expert).all()
        covered += range(first, last)
    assert sorted(covered) == list(range(flat.numel()))
    assert len(found.tiles) == routing.max_tiles(flat.numel(), experts, rows)
    # Those that were hit stand side by side in front, so that no multiprocessor gets more of them than another.
    hit = flat.unique().tolist()
    assert [expert for expert, first, last in found.tiles[: len(hit)].tolist() if last > first] == hit
    assert sum(last > first for _, first, last in found.tiles.tolist()) <= found.most


def test_tiles_of_uneven_experts(device):
    """Sizes around multiples of a tile, in turn after each other: the entries that experts own never overlap."""
    from tracefp4.kernels.routing import route

    sizes = [0, 1, 7, 8, 9, 0, 15, 16, 17, 24, 3, 0, 33, 2, 0, 65]
    flat = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    flat = flat[torch.randperm(len(flat), generator=torch.Generator().manual_seed(3))]
    found = route(flat.view(-1, 1).to(device), len(sizes), 8)
    tiles = [tile for tile in found.tiles.tolist() if tile[2] > tile[1]]
    assert len(tiles) == sum(-(-size // 8) for size in sizes)
    for expert, size in enumerate(sizes):
        mine = sorted(tile[1:] for tile in tiles if tile[0] == expert)
        assert sum(last - first for first, last in mine) == size
        assert all(last - first == 8 for first, last in mine[:-1])


@pytest.mark.parametrize("spec", ARMS)
@pytest.mark.parametrize("per_token, terms", [(True, 1), (False, 1), (True, 2)])
def test_grouped_linear(spec, per_token, terms, device, monkeypatch):
    from tracefp4.kernels.experts import Config, ExpertWeight, grouped_linear
    from tracefp4.kernels.routing import route

    numerics, generator = get_spec(spec), torch.Generator().manual_seed(1)
    tokens, top_k, experts, out, inner = 7, 2, 4, 48, INNER if GPU else 128
    chosen = ids(tokens, top_k, experts)
    weight = torch.randn(experts, out, inner, generator=generator).bfloat16()
    x = torch.randn(tokens if per_token else tokens * top_k, inner, generator=generator).bfloat16()
    bias = torch.randn(experts, out, generator=generator).bfloat16()
    values, x_scale = x, None
    if numerics.activations is not None:
        q = quantize(x, numerics.activations)
        values, x_scale = q.operand(), q.decode_scale()
    second = torch.randn(x.shape, generator=generator).bfloat16() / 16 if terms == 2 else None
    if numerics.weights is None:
        kernel_weight = ExpertWeight(weight.to(device), None, None, out, inner)
        exact = weight.double()
    else:
        packed = pack_weight(weight, numerics.weights)
        operand = packed.operand()
        exact = operand.values.double()
        exact = exact if operand.scale is None else exact * operand.scale.double().view(-1, 1, 1)
        packed.codes, packed.scales = packed.codes.to(device), packed.scales.to(device)
        packed.global_scale = None if packed.global_scale is None else packed.global_scale.to(device)
        kernel_weight = arrange(packed)
    whole = values.double() if second is None else values.double() + second.double()
    scaled = whole if x_scale is None else whole * x_scale.double()
    rows_of = scaled.repeat_interleave(top_k, 0) if per_token else scaled
    flat = chosen.flatten()
    expected = torch.einsum("pk,pnk->pn", rows_of, exact[flat]) + bias[flat].double()
    if not GPU:  # what warp groups do, too
        monkeypatch.setattr("tracefp4.kernels.experts.warp_groups", lambda x: True)
    for config, rows in gpu_tiles(spec, terms) if GPU else [(Config(64, 1, 1, 2), 8), (Config(16, 2, 4, 2), 16)]:
        found = grouped_linear(
            values.to(device), None if x_scale is None else x_scale.to(device), kernel_weight,
            route(chosen.to(device), experts, rows), per_token=per_token, bias=bias.to(device), config=config,
            dtype=torch.float32, second=None if second is None else second.to(device),
        ).cpu()  # fmt: skip
        assert (found.double() - expected).abs().max() < 1e-4, (config, rows)


def test_scales_that_products_cannot_take_are_refused():
    weight = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    weight[1, 5, :32] *= 2.0**-120
    weight[1, 6] *= 2.0**40
    with pytest.raises(FormatError, match="expert 1 .* octaves apart"):
        arrange(pack_weight(weight, get_spec("mxfp4-w4a4-kv4").weights))


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("spec", ["nvfp4-w4a4", "mxfp4-w4a4-kv4", "bf16"])
def test_no_tile_changes_a_bit(spec, terms, device, same):
    """Batches choose tiles, so tiles must not matter: each adds the products of a row up in one order.

    Interpreted, products are NumPy's, which on some processors adds up in another order for another shape.
    """
    from tracefp4.kernels.experts import Config, ExpertWeight, grouped_linear
    from tracefp4.kernels.routing import route

    generator = torch.Generator().manual_seed(2)
    experts, out, inner = 3, 128, 768 if GPU else 128
    weight = torch.randn(experts, out, inner, generator=generator).bfloat16().to(device)
    numerics = get_spec(spec).weights
    arranged = arrange(pack_weight(weight, numerics)) if numerics else ExpertWeight(weight, None, None, out, inner)
    x = torch.randn(6, inner, generator=generator).bfloat16().to(device)
    second = torch.randn(6, inner, generator=generator).bfloat16().to(device) if terms == 2 else None
    chosen, first = ids(6, 2, experts).to(device), None
    # Interpreted: rows of a thread are one or several, which decides how their scales are read.
    tiles = gpu_tiles(spec, terms) if GPU else [(Config(16, 1, 1, 2), 8), (Config(32, 1, 1, 2), 8)]
    for config, rows in ((Config(64, 1, 1, 2), 8), *tiles):
        found = grouped_linear(
            x, None, arranged, route(chosen, experts, rows), per_token=True, dtype=torch.float32, second=second,
            config=config,
        )  # fmt: skip
        first = found if first is None else first
        assert same(found, first) if GPU else torch.allclose(found, first, rtol=1e-5, atol=1e-4), (config, rows)


def test_weighted_sum(device, same):
    from tracefp4.kernels.experts import weighted_sum

    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(6, 80, generator=generator).bfloat16()
    weights = torch.rand(3, 2, generator=generator)
    expected = rows.view(3, 2, 80).float() * weights[..., None]
    found = weighted_sum(rows.to(device), weights.to(device))
    assert same(found, (expected[:, 0] + expected[:, 1]).bfloat16())


class Peak(TorchDispatchMode):
    """Most bytes that the tensors made inside of it take at one time."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self._seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._seen |= {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for storage in [t.untyped_storage() for t in tree_leaves(out) if isinstance(t, torch.Tensor)]:
            if id(storage) not in self._seen:
                self._seen.add(id(storage))
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._gone, id(storage), storage.nbytes())
        return out

    def _gone(self, key, nbytes):
        self._seen.discard(key)
        self.now -= nbytes


def test_arranging_takes_less_than_three_times_the_weight_in_bfloat16():
    """What a sync may take on a GPU (test_engine.py), of which arranging a projection is the most; and the way back."""
    weight = torch.randn(4, 1024, 64, generator=torch.Generator().manual_seed(4)).bfloat16()
    packed = pack_weight(weight, get_spec("nvfp4-w4a4").weights)
    kept = packed.codes.nbytes + packed.scales.nbytes
    packed_again(arrange(packed), set_aside(packed), packed.numerics)  # tables are made once
    with Peak() as peak:
        arranged = arrange(packed)
    assert arranged.values.nbytes < peak.most < 3 * weight.nbytes - kept
    with Peak() as peak:
        packed_again(arranged, set_aside(packed), packed.numerics)
    assert packed.codes.nbytes < peak.most < 3 * weight.nbytes - kept


@pytest.mark.parametrize("group", [1, 2 * 40 * 128, 1 << 24])
@pytest.mark.parametrize("spec", ["nvfp4-w4a4", "mxfp4-w4a4-kv4"])
def test_arranged_weights_give_their_packed_bytes_back(spec, group, same, monkeypatch):
    """However many experts are taken at a time, and into memory that held other weights."""
    monkeypatch.setattr("tracefp4.models.kernel_weights._GROUP", group)
    numerics = get_spec(spec).weights
    weight = torch.randn(3, 40, 128, generator=torch.Generator().manual_seed(2)).bfloat16()
    weight[1, 3], weight[2, :, :64] = 0.0, 0.0
    packed = pack_weight(weight, numerics)
    into = arrange(pack_weight(weight.flip(0), numerics))
    held = [into.values.data_ptr(), into.scales.data_ptr()]
    for arranged in (arrange(packed), arrange(packed, into)):
        again = packed_again(arranged, set_aside(packed), numerics)
        for found, expected in zip(again.parts(), packed.parts(), strict=True):
            assert same(found, expected)
        for expert in range(3):
            rows = words.to_words(e2m1.unpack(packed.codes[expert]))
            assert torch.equal(arranged.values[expert], rows.view(40, -1, 16).transpose(0, 1))
    assert held == [into.values.data_ptr(), into.scales.data_ptr()]


class Operations(TorchDispatchMode):
    """Counts the operations of PyTorch that are more than a view: launches, on a GPU."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not (func.is_view or func.overloadpacket._qualified_op_name.startswith("aten::new_empty"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("spec", ["nvfp4-w4a4", "mxfp4-w4a4-kv4"])
def test_experts_are_arranged_together(spec):
    """A sync is bound by launches, so their number must not grow with that of the experts."""
    numerics = get_spec(spec).weights
    counts = []
    for experts in (2, 2, 16):  # the first makes the tables
        packed = pack_weight(
            torch.randn(experts, 32, 64, generator=torch.Generator().manual_seed(1)).bfloat16(), numerics
        )
        into = arrange(packed)
        with Operations() as seen:
            packed_again(arrange(packed, into), set_aside(packed), numerics)
        counts.append(seen.count)
    assert counts[1] == counts[2] < 50


@pytest.mark.parametrize("tokens", [1, 40, 700])
def test_routes_of_several_layers_are_those_of_each(tokens, device):
    from tracefp4.kernels.routing import route, route_layers

    generator = torch.Generator().manual_seed(tokens)
    experts = torch.rand(3, tokens, 7, generator=generator)[..., :6].topk(2, -1)[1].to(device)
    for layer, (found, starts) in enumerate(route_layers(experts, 7, 16)):
        alone = route(experts[layer], 7, 16)
        assert found.order.dtype is torch.int32
        assert torch.equal(found.order, alone.order)
        assert torch.equal(found.tiles, alone.tiles)
        counts = torch.bincount(experts[layer].reshape(-1), minlength=7)
        assert torch.equal(starts.diff(), counts)
        assert starts[0] == 0


def test_few_experts_with_many_tokens_get_narrower_programs():
    """128 tokens for each of eight experts: the second product of SmolLM2-MoE has columns for 72 wide programs."""
    from tracefp4.kernels.experts import ExpertWeight, default_config, tile_rows

    rows = tile_rows(1024, 8)
    assert rows == 64
    for plain in (False, True):
        for experts, out, inner, columns in ((8, 3072, 576, 128), (8, 576, 1536, 64), (128, 2048, 768, 128)):
            pairs = SimpleNamespace(most=experts + 16, rows=rows)
            scales = None if plain else torch.empty(0)
            config = default_config(ExpertWeight(torch.empty(0), scales, None, out, inner), pairs)
            assert config.columns == columns and config.warps == 4
            assert (inner // 64) % config.unroll == 0
