"""A run whose decoder is captured trains as one that goes step by step."""

from tracefp4.training.graphs import DecoderGraphs


def _metrics(run):
    found = []
    run.train(lambda _, metrics: found.append(metrics))
    return found


def test_metrics_of_a_captured_run(make_run, rerun):
    options = ("method=trace", "plan=r1-all+mid/s2", "steps=3", "train.unguided_every=0", "train.micro_tokens=64")
    plain, captured = make_run(*options), make_run(*options, folder="captured")
    assert plain.updater._graphs is None
    captured.updater._graphs = DecoderGraphs(captured.model, captured.sites, 64, rerun)
    one, other = _metrics(plain), _metrics(captured)
    assert captured.updater._graphs.failure is None and len(captured.updater._graphs) >= 1
    trained = [(a, b) for a, b in zip(one, other, strict=True) if "grad_norm" in a]
    assert trained
    for a, b in trained[:1]:  # later steps sample from weights that differ in their last bits
        assert a["reward/mean"] == b["reward/mean"]
        assert abs(a["grad_norm"] - b["grad_norm"]) <= 0.02 * a["grad_norm"]
        assert a["guidance/coverage"] == b["guidance/coverage"] == 1
        assert b["mismatch_kl/mean"] < 1e-3
        assert a.get("guidance/scale_check_failures") == b.get("guidance/scale_check_failures")


def test_measuring_changes_nothing(make_run, rerun):
    options = ("method=trace", "plan=r1-all+mid/s2", "steps=1", "eval.items=0", "train.micro_tokens=512")
    found, passes = [], []
    for every in (0, 1):
        run = make_run(*options, f"train.unguided_every={every}", folder=f"every-{every}")
        run.updater._graphs = DecoderGraphs(run.model, run.sites, 512, rerun)
        found += _metrics(run)
        passes.append(sum(program.runs for program in run.updater._graphs._programs.values()))
    bare, measured = found
    assert "guidance/flip_rate" in measured and "guidance/flip_rate" not in bare
    assert passes[0] == passes[1] > 0  # what trains takes the same way, measured or not
    kept = [k for k in bare if not k.startswith(("time", "throughput", "memory"))]
    assert {k: measured[k] for k in kept} == {k: bare[k] for k in kept}
