"""Post-hoc quantizations of one finished run, evaluated one after another: ``python -m tracefp4.cli.posthoc RUN``.

The same as ``tracefp4 quantize RUN --method M`` and ``tracefp4 eval`` of the folder for every method, in one process,
on the run's own held-out items and sampling seed. Writes ``RUN/posthoc/<method>.json``; packed folders are temporary.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from tracefp4 import config as settings


def main(run: Path) -> None:
    """Quantize and evaluate with every method that has no result yet."""
    from tracefp4.evaluation.policy import EvalSettings, evaluate_policy
    from tracefp4.export.run import QuantizeSettings, quantize
    from tracefp4.report.arms import NVFP4, POSTHOC

    tree = settings.load(run / "config.toml")
    spec = tree.spec if tree.spec.startswith("nvfp4-w4") else NVFP4
    (run / "posthoc").mkdir(exist_ok=True)
    for method in POSTHOC:
        target = run / "posthoc" / f"{method}.json"
        if target.is_file():
            continue
        with tempfile.TemporaryDirectory(prefix="packed-", dir=run) as folder:
            packed = Path(folder) / "model"
            wanted = QuantizeSettings(
                str(run), packed, method, spec, tree.numerics, device=tree.device, calibrate=True, seed=tree.seed
            )
            found = quantize(wanted)
            evaluated = evaluate_policy(
                EvalSettings(
                    model=str(packed),
                    config=run / "config.toml",
                    overrides=(),
                    spec=None,
                    items=tree.eval.items,
                    samples=tree.eval.samples,
                    ks=(1,),
                    temperature=tree.eval.temperature,
                    threshold=1.0,
                    device=tree.device,
                    seed=tree.seed,
                )
            )
        data = {"method": method, "spec": spec, "errors": found["errors"], "by_item": evaluated["by_item"]}
        target.write_text(json.dumps(data) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
