"""Figure 14 from the file of a benchmark: which cases it has, and what is refused."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from tracefp4.cli.main import app
from tracefp4.errors import ConfigError
from tracefp4.report.throughput import EXPERTS, cases_of, draw_benchmark

ARMS = [arm for arms in EXPERTS.values() for arm in arms]


def row(name, arm, rate, detail="64 tok/s, from 8 layers"):
    return {"name": name, "arm": arm, "value": 1.0, "detail": detail, "numbers": {"tok_s": rate}}


def found(*rows):
    return {"device": "NVIDIA H200", "rows": list(rows)}


def test_a_case_needs_all_four_precisions_of_a_whole_model():
    whole, limited = "decode 30b whole compiled B64 8K", "decode 30b whole compiled memory-limited 8K"
    rows = [row(whole, arm, rate) for rate, arm in enumerate([*ARMS, "fp4 mxfp4-w4a4-kv4"], 1)]
    rows += [row("decode 30b 8/48 layers compiled B64 8K", arm, 1) for arm in ARMS]
    rows += [row("decode 30b whole compiled B16 8K", arm, 1) for arm in ARMS[1:]]
    rows += [row(limited, arm, 2.0, "B84 in 120 GiB, 56.9 of them weights, all 48 layers") for arm in ARMS]
    rows.append({"name": "weights 30b 8/48 layers", "arm": "bf16", "value": 1.0, "detail": "as kept"})
    cases = cases_of(found(*rows))
    assert [(case.name, case.source) for case in cases] == [(whole, "from 8 layers"), (limited, "all 48 layers")]
    assert [cases[0].rates[arm] for arm in ARMS] == [1, 2, 3, 4]
    assert cases[0].slug == "fig14-30b-whole-compiled-B64-8K"


def test_bars_say_tokens_a_second_of_each_precision():
    case = cases_of(found(*(row("decode 30b whole B64 8K", arm, 1000.0 * i) for i, arm in enumerate(ARMS, 1))))[0]
    axes = case.draw().axes[0]
    assert [bar.get_height() for bar in axes.patches] == [1000, 2000, 3000, 4000]
    assert {"1 000", "2 000", "3 000", "4 000"} <= {text.get_text() for text in axes.texts}
    assert [label.get_text() for label in axes.get_xticklabels()] == ["BF16 KV cache", "NVFP4 KV cache"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == list(EXPERTS)


def test_the_report_command_draws_a_benchmarks_file(tmp_path):
    path = tmp_path / "decode.json"
    path.write_text(json.dumps(found(*(row("decode 30b whole B64 8K", arm, 10.0) for arm in ARMS))))
    result = CliRunner().invoke(app, ["report", str(path), "--images", str(tmp_path / "new"), "--json"])
    assert result.exit_code == 0, result.output
    (image,) = json.loads(result.stdout)["figures"]
    assert image.endswith("new/fig14-30b-whole-B64-8K.png")
    assert (tmp_path / "new" / "fig14-30b-whole-B64-8K.png").read_bytes().startswith(b"\x89PNG")
    wrong = CliRunner().invoke(app, ["report", str(path), "--out", str(tmp_path / "page.html")])
    assert wrong.exit_code != 0 and "names of their own" in str(wrong.exception or wrong.output)


@pytest.mark.parametrize("text", ["no JSON", "[]", '{"rows": [1]}', json.dumps(found())])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="no JSON of|no decode step of a whole model"):
        draw_benchmark(path)
