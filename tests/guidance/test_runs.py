"""Records by run: what replaces bits leaves no second copy of them behind."""

from __future__ import annotations

import weakref

import torch

from tracefp4.formats.spec import get_spec
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.record import restrict
from tracefp4.guidance.runs import SiteRuns
from tracefp4.models.layout import describe
from tracefp4.models.tiny import tiny_model


def test_settled_runs_have_the_bits_once(make) -> None:
    layout = describe(tiny_model("qwen3_moe"))
    shapes = layout.site_shapes(get_spec("nvfp4-w4a4-kv4"))
    whole = make("r2-all+mid/s2", shapes, range(20), num_layers=layout.num_layers)
    runs = SiteRuns.of(restrict(whole, Plan.parse("c2-all+mid/s2"), shapes, layout.num_layers).sites)
    before = {}
    for site, record in runs.items():
        record.planes = whole.sites[site].planes.clone()
        before[site] = weakref.ref(record.planes)
    settled = runs.settled()
    for site, record in settled.items():
        assert before[site]() is None and record.code_checks is None
        assert torch.equal(record.planes, whole.sites[site].planes)
        assert runs[site].planes.data_ptr() == record.planes.data_ptr()
    assert any(len(run.sites) > 1 for run in settled.table.runs)
