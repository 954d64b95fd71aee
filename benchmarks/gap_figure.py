"""Draw measurements of several engines side by side: the gap of rollout and trainer, a group of bars for each trainer.

python benchmarks/gap_figure.py docs/images/engines-gap.png embedded=docs/results/cpu-measure.json \
    SGLang=docs/results/sglang-measure-smollm2.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

LABELS = {
    "bf16_floor": "BF16\nfloor",
    "fp4_vs_bf16": "FP4 rollout,\nBF16 trainer",
    "qat": "QAT",
    "r1-l15": "guided\nr1-l15\n(paper)",
    "r1-all:kv": "guided\nr1-all:kv",
    "r1-all": "guided\nr1-all",
    "r1-all+mid": "guided\nr1-all+mid",
}
"""Rows that are drawn, in order: by trainer, or by plan of a guided one."""


def rows_of(path: Path) -> dict[str, dict]:
    """Rows with replayed routes, decoder ``bracket``, by the keys of :data:`LABELS`."""
    found = json.loads(path.read_text(encoding="utf-8"))
    rows = found.get("measurement", found)["rows"]
    kept = [row for row in rows if row["route_replay"] and row["decoder"] in (None, "bracket")]
    # Whole scales: without a word in older measurements, ``/s8`` in newer ones.
    return {(row["plan"] or row["name"]).removesuffix("/s8"): row for row in kept}


def main(target: Path, inputs: list[str]) -> None:
    """Draw ``NAME=FILE`` inputs into ``target``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 3.6), layout="constrained")
    width = 0.8 / len(inputs)
    for index, item in enumerate(inputs):
        name, _, file = item.partition("=")
        rows = rows_of(Path(file))
        places = [i for i, key in enumerate(LABELS) if key in rows]
        found = [rows[key] for key in LABELS if key in rows]
        middle = [row["k3"] for row in found]
        low = [row["k3"] - row["k3_ci"][0] for row in found]
        high = [row["k3_ci"][1] - row["k3"] for row in found]
        x = [place + (index - (len(inputs) - 1) / 2) * width for place in places]
        axes.bar(x, middle, width * 0.92, yerr=[low, high], capsize=2, label=name)
    axes.set_yscale("log")
    axes.set_xticks(range(len(LABELS)), list(LABELS.values()))
    axes.set_ylabel("k3 of trainer against rollout")
    axes.set_title("SmolLM2-MoE, NVFP4 W4A4 and KV4, routes replayed; 95 % intervals by prompt", fontsize=10)
    axes.legend(title="rollout engine", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
