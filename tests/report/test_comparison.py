"""Tables, figures and verdict of a comparison, from results made by hand."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from tracefp4.errors import ConfigError
from tracefp4.report import paper_figures
from tracefp4.report.arms import MAIN_METHODS, NVFP4, POSTHOC, TABLE_TITLES, Base, arms_of, parse_arm, to_probe
from tracefp4.report.comparison import gaps, verdict, write_comparison
from tracefp4.report.paper_figures import FIGURES, draw_all
from tracefp4.report.results import Evaluation, Results, RunResult, load, read_result, save
from tracefp4.report.run_data import Series
from tracefp4.report.tables import arm_row, build, cells, headings, markdown, to_csv, used, worst_window

BASE = Base(NVFP4, "r1-all+mid/s8")
ITEMS = 400


def scores(rate: float, seed: int) -> list[float]:
    """Right or wrong by item; the same items are hard for every arm."""
    hard = np.random.default_rng(7).random(ITEMS)
    noise = np.random.default_rng(seed).normal(0, 0.05, ITEMS)
    return [float(h + n < rate) for h, n in zip(hard, noise, strict=True)]


def result(seed: int, rate: float, mismatch: float, warm_start: str = "w", **more) -> RunResult:
    steps = list(range(40))
    rng = np.random.default_rng(seed)
    series = {
        "reward/mean": [rate * s / 40 for s in steps],
        "entropy": [1.0 - s / 100 for s in steps],
        "response_length/mean": [12.0 + s / 40 for s in steps],
        "mismatch_kl/mean": (mismatch * rng.uniform(0.8, 1.2, 40)).tolist(),
        "logprob_diff/max": (50 * mismatch * rng.uniform(0.8, 1.2, 40)).tolist(),
        "logprob_diff/min": (-60 * mismatch * rng.uniform(0.8, 1.2, 40)).tolist(),
        "logprob_diff/p999": (30 * mismatch * rng.uniform(0.9, 1.1, 40)).tolist(),
    }
    first, last = Evaluation(0, scores(0.3, seed)), Evaluation(40, scores(rate, seed + 10))
    best = Evaluation(20, scores(rate + 0.1, seed + 20))
    return RunResult(
        seed,
        "done",
        f"tracefp4 train c.toml --set seed={seed}",
        120.0,
        40,
        warm_start,
        {"device": "a GPU; more"},
        first,
        last,
        best,
        [(0, first.mean), (20, best.mean), (40, last.mean)],
        {name: Series(steps, values) for name, values in series.items()},
        **more,
    )


@pytest.fixture
def results() -> Results:
    members = {name: arms_of(name, BASE) for name in TABLE_TITLES if name != "main"}
    arms = list({a.name: a for group in members.values() for a in group}.values())
    rates = {"bf16": 0.6, "qat": 0.45, "qarl": 0.44, "quads": 0.52, "tis_sc": 0.55, "trace": 0.6}
    gaps_of = {"bf16": 1e-3, "trace": 1.2e-3}
    runs = {}
    for arm in arms:
        method = arm.name.partition("@")[0].partition(".")[0]
        runs[arm.name] = [result(seed, rates[method], gaps_of.get(method, 0.1)) for seed in (0, 1, 2)]
    for run in runs["bf16"]:
        run.posthoc = {m: scores(0.5 + 0.01 * i, run.seed + 30 + i) for i, m in enumerate(POSTHOC)}
    runs["trace"][0].measure = {
        "rows": [
            {"name": "qat", "route_replay": True, "plan": None, "code_steps": [0.97, 0.028, 0.001, 0.0005, 0.0005]},
            {"name": "guided", "route_replay": True, "plan": "r1-all+mid/s8", "code_steps": [1.0, 1e-5, 0, 0, 0]},
        ]
    }
    runs["trace"][0].profile = {"shares": {"forward": 0.8, "kv_dequantization": 0.1, "wa_guidance": 0.1}}
    return Results("sums", list(members), arms, runs, {n: [a.name for a in g] for n, g in members.items()})


# Arms -----------------------------------------------------------------------------------------------------------------


def test_tables_hold_the_rows_of_the_paper():
    names = {table: [arm.name for arm in arms_of(table, BASE)] for table in TABLE_TITLES}
    assert names["t1"] == list(MAIN_METHODS)
    assert names["t3"] == ["bf16", *(f"{m}@nvfp4-w4a4" for m in ("qat", "quads", "trace")), "qat@nvfp4-kv4", "trace@nvfp4-kv4"]  # fmt: skip  # noqa: E501
    assert names["t4"] == ["bf16", *(f"{m}@mxfp4-{s}-kv4" for s in ("w4a8", "w4a4") for m in ("qat", "trace"))]
    assert names["t5"][:2] == ["bf16", "trace"] and len(set(names["t5"])) == len(names["t5"])
    assert {"trace.r4-all-s8", "trace.r1-half", "trace.r1-quarter+mid", "trace.c1-all+mid-s2"} < set(names["t5"])
    assert {arm.plan[0] for arm in arms_of("t5", Base(NVFP4, "r2-all", pulls=False))[1:]} == {"r"}
    assert [arm.plan for arm in arms_of("t5", BASE, plans=["r3-all"])[1:]] == ["r3-all/s3"]
    assert names["t6"] == ["bf16", "tis_sc", "tis_sc.without-tis", "trace"]
    assert names["t7"] == ["bf16", "qat", "trace"]
    assert names["main"] == names["t1"]


def test_names_say_what_differs_from_the_configuration():
    other = Base("nvfp4-kv4", "r1-all/s8")
    assert [a.name for a in arms_of("t1", other)] == ["bf16", *(f"{m}@{NVFP4}" for m in MAIN_METHODS[1:])]
    arm = other.arm("trace", NVFP4, "r1-all/s3")
    assert (arm.name, arm.settings) == (f"trace@{NVFP4}.r1-all-s3", ("method=trace", f"spec={NVFP4}", "plan=r1-all/s3"))
    assert arm.label == "trace r1-all/s3"


def test_tables_show_the_part_of_a_plan_that_a_method_follows():
    assert BASE.arm("trace_quads").plan != BASE.arm("trace").plan == BASE.plan
    assert BASE.arm("trace_quads").plan.startswith("r1-all:kv") and BASE.arm("quads").plan == ""
    assert parse_arm("x:method=trace_quads,plan=r4-all+mid", BASE).plan == "r4-all:kv/s3"
    assert parse_arm("x:method=trace,plan=r1-half", BASE).plan == "r1-half"


def test_tables_name_the_scales_that_a_plan_takes_by_default() -> None:
    """Two bits, three where the trainer rounds less, and whole ones where engine and trainer drift apart."""
    for calm, trace, quads in ((True, "r1-all+mid/s2", "r1-all:kv/s3"), (False, "r1-all+mid/s8", "r1-all:kv")):
        base = Base(NVFP4, "r1-all+mid", calm=calm)
        assert (base.arm("trace").plan, base.arm("trace_quads").plan) == (trace, quads)
        assert parse_arm("x:method=trace,plan=r1-all", base).plan == ("r1-all/s3" if calm else "r1-all/s8")


def test_arms_of_the_users_own():
    arm = parse_arm("icepop:method=trace,correction.name=icepop", BASE)
    assert (arm.name, arm.plan, arm.settings) == ("icepop", "r1-all+mid/s8", ("method=trace", "correction.name=icepop"))
    for wrong in ("icepop", "x:correction.name=icepop", "a/b:method=qat", "x:method"):
        with pytest.raises(ConfigError, match="not of the form"):
            parse_arm(wrong, BASE)
    with pytest.raises(ConfigError, match="did you mean 't1'"):
        arms_of("t11", BASE)


# Tables ---------------------------------------------------------------------------------------------------------------


def test_scores_errors_and_paired_differences(results):
    rows = {row.method.split()[0]: row for row in build(results, "t1")}
    reference, qat = rows["bf16"], rows["qat"]
    means = [100 * np.mean(run.last.scores) for run in results.runs["qat"]]
    assert qat.score == pytest.approx(np.mean(means))
    assert qat.error == pytest.approx(np.std(means, ddof=1) / 3**0.5)
    assert reference.difference is None and qat.seeds == 3
    assert qat.difference == pytest.approx(qat.score - reference.score)
    low, high = qat.difference_interval
    assert low < qat.difference < high < 0
    # Pairing by item: the interval of the difference is narrower than that of either score.
    assert high - low < qat.interval[1] - qat.interval[0]
    assert qat.largest == pytest.approx(max(abs(v) for r in results.runs["qat"] for v in r.series["logprob_diff/min"].values))  # fmt: skip  # noqa: E501


def test_a_gain_is_over_the_arms_own_start(results):
    rows = {row.method.split()[0]: row for row in build(results, "t1")}
    for name in ("bf16", "qat"):
        own = [np.mean(run.last.scores) - np.mean(run.first.scores) for run in results.runs[name]]
        assert rows[name].gain == pytest.approx(100 * np.mean(own))
    assert rows["bf16"].beyond is None
    assert rows["qat"].beyond == pytest.approx(rows["qat"].gain - rows["bf16"].gain)
    low, high = rows["qat"].beyond_interval
    assert low < rows["qat"].beyond < high
    results.runs["qat"][0].first = None
    assert arm_row(results, results.arm("qat")).gain is not None
    for run in results.runs["qat"]:
        run.first = None
    row = arm_row(results, results.arm("qat"))
    assert row.gain is None and row.beyond is None and row.difference is not None


def test_unequal_warm_starts_are_refused(results):
    results.runs["qat"][1].warm_start = "other"
    with pytest.raises(ConfigError, match=r"'qat' and 'bf16' cannot be paired: with seed 1 .* other and w"):
        build(results, "t1")


def test_unequal_items_are_refused(results):
    results.runs["qat"][0].last.scores.pop()
    with pytest.raises(ConfigError, match=r"different items: \[399, 400\]"):
        build(results, "t1")
    for run in results.runs["qat"][1:]:
        run.last.scores.pop()
    with pytest.raises(ConfigError, match="'qat' was evaluated on 399 items"):
        build(results, "t1")


def test_only_common_seeds_are_paired(results):
    results.runs["qat"][2] = RunResult(2, "failed", note="out of memory")
    results.runs["bf16"][0] = RunResult(0, "missing")
    row = arm_row(results, results.arm("qat"))
    assert (row.seeds, row.failed) == (2, 1)
    only = np.mean(results.runs["qat"][1].last.scores) - np.mean(results.runs["bf16"][1].last.scores)
    assert row.difference == pytest.approx(100 * only)
    assert (row.difference_seeds, cells(row)[6]) == (1, f"{row.difference:+.1f} (1 of 2 seeds)")
    assert any("qat" in line and ", 1 seed." in line for line in verdict(results))
    notes = gaps(results)
    assert "qat, seed 2: failed. out of memory" in notes and "bf16: not run yet with seed 0." in notes


def test_score_centering_counts_at_its_best_step(results):
    rows = build(results, "t6")
    assert rows[1].step == "best, at step 20" and rows[3].step == "40"
    assert rows[1].score == pytest.approx(100 * np.mean([np.mean(r.best.scores) for r in results.runs["tis_sc"]]))


def test_post_hoc_rows_follow_the_reference(results):
    rows = build(results, "t7")
    assert [row.method for row in rows] == [
        "bf16",
        *(f"bf16, then {m}" for m in POSTHOC),
        "qat",
        "trace r1-all+mid/s8",
    ]
    assert rows[1].spec == "NVFP4 W/A + NVFP4 KV" and rows[1].difference < 0


def test_the_tail_is_that_of_the_worst_window(results):
    run = results.runs["trace"][0]
    run.series["logprob_diff/p999"] = Series(list(range(40)), [0.0] * 20 + [1.0] * 20)
    assert worst_window(run) == 1.0
    assert worst_window(run, 40) == 0.5
    assert worst_window(run, 100) == 0.5


def test_markdown_and_csv_hold_every_row(results):
    rows = build(results, "t1")
    text = markdown(results, "t1", rows)
    assert text.count("\n| ") == 1 + len(rows)
    head, *lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert all(line.count("|") == head.count("|") for line in lines)
    names = [name.strip() for name in head.strip("|").split("|")]
    assert len(set(names)) == len(names) == 16, "columns that no row fills are left out, and no two have one name"
    found = list(csv.DictReader(to_csv(rows).splitlines()))
    assert [float(line["score"]) for line in found] == pytest.approx([row.score for row in rows])
    assert all(len(cells(row)) == len(headings("qat")) for row in rows)
    assert len(set(headings("qat"))) == len(headings("qat"))


def test_bytes_that_left_the_engine_stand_beside_those_recorded(results):
    for run, shipped in zip(results.runs["trace"], (100.0, 200.0, 300.0), strict=True):
        run.series["guidance/bytes_per_token"] = Series([0, 1], [900.0, 1100.0])
        run.series["guidance/shipped_bytes_per_token"] = Series([0, 1], [shipped, shipped])
        run.series["guidance/saved_share"] = Series([0, 1], [0.8, 0.8])
        run.series["guidance/pulled_share"] = Series([0, 1], [0.05, 0.07])
        run.series["guidance/scale_check_failures"] = Series([0, 1], [0.0, 0.0])
    head, body = used(build(results, "t1"))
    line = dict(zip(head, body[-1], strict=True))
    assert (line["recorded bytes a token"], line["shipped bytes a token"]) == ("1 000", "200")
    assert (line["never shipped"], line["pulled"], line["scale checks failed"]) == ("80 %", "6 %", "0")


def test_differences_to_another_arm(results):
    rows = {row.method.split()[0]: row for row in build(results, "t1", "qat")}
    trace, qat = rows["trace"], rows["qat"]
    assert qat.against is None and qat.difference is not None
    assert trace.against == pytest.approx(trace.score - qat.score)
    low, high = trace.against_interval
    assert 0 < low < trace.against < high
    assert rows["bf16"].against == pytest.approx(-qat.difference)
    head, body = used(list(rows.values()), "qat")
    assert "95 % interval of the difference to qat" in head and all(len(line) == len(head) for line in body)
    results.runs["trace"][0].warm_start = results.runs["bf16"][0].warm_start = "other"
    with pytest.raises(ConfigError, match="'bf16' and 'qat' cannot be paired"):
        build(results, "t1", "qat")
    with pytest.raises(ConfigError, match="did you mean 'qat'"):
        build(results, "t1", "qta")


def test_an_arm_that_equals_the_reference_item_by_item_has_a_difference_of_zero(results):
    """Only the reference itself has none; after quantization its policy is another one."""
    for run in results.runs["bf16"]:
        run.posthoc["nvfp4"] = list(run.last.scores)
    reference, quantized, *_ = build(results, "t7")
    assert reference.difference is None
    assert quantized.difference == 0 and quantized.difference_interval == (0, 0)


# Verdict, figures, page -----------------------------------------------------------------------------------------------


def test_verdict_of_a_valid_comparison(results):
    text = " ".join(verdict(results))
    assert "bf16 learned" in text and "qat differs from bf16" in text
    assert "Inconclusive" not in text
    assert "trace is not below bf16" in text and "(within 1.5)" in text
    assert "never left" not in text
    results.runs["trace"][0].series["guidance/saved_share"] = Series([0, 1], [0.5, 0.3])
    assert "40 % of the guidance bytes never left the engine" in " ".join(verdict(results))


def test_a_reference_that_learned_nothing_makes_it_inconclusive(results):
    for run in results.runs["bf16"]:
        run.first = run.last
    text = " ".join(verdict(results))
    assert "Inconclusive" in text and "is not below" not in text
    results.runs["bf16"] = [RunResult(s, "failed") for s in (0, 1, 2)]
    assert verdict(results) == ["No finished run of bf16: differences to it are not known."]


def test_the_verdict_does_not_hang_on_the_order_of_tables(results):
    expected = verdict(results)
    for tables in (["t5", "t1", "t3"], ["t6", "t5", "t7"]):
        results.tables = tables
        results.members = {name: [a.name for a in arms_of(name, BASE)] for name in tables}
        assert verdict(results)[:4] == expected[:4], tables


def test_joint_rounding_leads_where_it_was_asked_for(results):
    """Figure 7 sets FP4 policies beside post-hoc quantization, so both have to be of one spec."""
    for tables, leading in ((["t3", "t7"], "t7"), (["t3", "t1", "t7"], "t1"), (["t4", "t3"], "t4")):
        results.tables = tables
        results.members = {name: [a.name for a in arms_of(name, BASE)] for name in tables}
        assert results.leading == leading
        specs = {arm.spec for arm in paper_figures._dynamics(results)} - {"bf16"}
        assert specs == ({"nvfp4-w4a4-kv4"} if leading != "t4" else {"mxfp4-w4a8-kv4"})


def test_without_qat_nothing_is_ranked(results):
    results.tables = ["t5"]
    results.members = {"t5": [a.name for a in arms_of("t5", BASE)]}
    text = " ".join(verdict(results))
    assert "Inconclusive as to ranking: no finished run of qat" in text
    assert "trace beside bf16, which ranks nothing here" in text and "is not below" not in text


def test_the_reference_may_be_in_a_later_table(results):
    members = {"main": arms_of("main", BASE, ["qat", "trace"]), "t7": arms_of("t7", BASE)}
    results.tables, results.members = [*members], {n: [a.name for a in g] for n, g in members.items()}
    text = " ".join(verdict(results))
    assert "qat differs from bf16" in text and "(within 1.5)" in text


def test_what_is_missing_is_said_in_the_markdown_too(results, tmp_path: Path):
    results.runs["trace"][0].measure = None
    results.runs["qat"][2] = RunResult(2, "failed", note="out of memory")
    results.runs["quads"] = results.runs["quads"][:1]
    text = write_comparison(results, tmp_path)["tables"].read_text(encoding="utf-8")
    for said in ("fig6 (", "qat, seed 2: failed. out of memory", "quads: one seed"):
        assert said in text


def test_every_figure_is_drawn_or_named(results):
    drawings, notes = draw_all(results)
    assert {d.name for d in drawings} == set(FIGURES) and not notes
    results.runs["trace"][0].measure = results.runs["trace"][0].profile = None
    drawings, notes = draw_all(results)
    assert {d.name for d in drawings} == set(FIGURES) - {"fig6", "fig10"}
    assert [note.split()[0] for note in notes] == ["fig6", "fig10"]


def test_curves_are_drawn_over_the_seeds_that_all_arms_have(results):
    arms = [results.arm(name) for name in ("bf16", "qat", "trace")]
    results.runs["qat"][1].status = "failed"
    for arm in arms:
        faint = [line for line in paper_figures._lines(results, arms, "reward/mean") if line.faint]
        assert len(faint) == 3 * 2
        assert {run.seed for run in paper_figures._runs(results, arms, arm)} == {0, 2}
    for run in results.runs["qat"]:
        run.status = "failed"
    assert len(paper_figures._runs(results, arms, arms[0])) == 3


def test_every_curve_of_a_figure_has_a_name_and_a_colour_of_its_own(results):
    tables = {"t5": arms_of("t5", BASE), "t6": arms_of("t6", BASE), "main": arms_of("main", BASE, MAIN_METHODS)}
    tables["main"].append(parse_arm("icepop:method=trace,correction.name=icepop", BASE))
    tables["w4a16"] = arms_of("main", BASE, ["bf16", "qat", "qat_w4a16", "quads", "tis_sc", "trace"])
    for name, arms in tables.items():
        results.tables, results.members = [name], {name: [arm.name for arm in arms]}
        results.arms = list({arm.name: arm for arm in [*results.arms, *arms]}.values())
        for arm in arms:
            results.runs.setdefault(arm.name, [result(0, 0.5, 1e-2)])
        drawn = paper_figures._dynamics(results)
        lines = [line for line in paper_figures._lines(results, drawn, "reward/mean") if not line.faint]
        assert len(lines) == min(len(arms), 7)
        for of in ("label", "colour"):
            assert len({getattr(line, of) for line in lines}) == len(lines), (name, of)


def test_arms_without_a_colour_are_named_as_left_out(results):
    results.tables, results.members = ["t5"], {"t5": [arm.name for arm in arms_of("t5", BASE)]}
    left = results.members["t5"][7:]
    assert any(f"left out: {', '.join(left)}." in note for note in draw_all(results)[1])


def test_arms_in_bfloat16_do_not_hide_the_others(results):
    arms = [*arms_of("main", BASE, ["bf16", "qat"]), parse_arm("slow:method=bf16,optimizer.lr=1e-6", BASE)]
    results.tables, results.members = ["main"], {"main": [arm.name for arm in arms]}
    results.arms.append(arms[-1])
    results.runs["slow"] = results.runs["bf16"]
    assert [arm.name for arm in paper_figures._dynamics(results)] == ["bf16", "qat", "slow"]


def test_the_probe_is_of_the_arm_of_the_configuration_and_its_figures_say_so(results):
    names = [arm.name for arm in results.arms]
    first = to_probe(results.arms)
    assert first is not None and first.name == "trace"
    assert names.index("trace") < names.index("trace@nvfp4-w4a4")
    other = Base("nvfp4-kv4", "r1-all/s8")
    arms = [arm for name in ("t3", "t5", "t1") for arm in arms_of(name, other)]
    chosen = to_probe([*arms_of("t3", BASE)[1:], *arms_of("t1", BASE)])
    assert chosen is not None and chosen.name == "trace"
    for given, expected in ((arms, "trace"), (arms_of("t1", other), f"trace@{NVFP4}"), (arms_of("t4", BASE), "trace@mxfp4-w4a8-kv4")):  # fmt: skip  # noqa: E501
        chosen = to_probe(given)
        assert chosen is not None and chosen.name == expected
    assert to_probe(arms_of("main", BASE, ["bf16", "qat"])) is None
    # An older probe of another arm is not what is drawn.
    results.runs["trace@nvfp4-w4a4"][0].measure = results.runs["trace"][0].measure
    results.runs["trace@nvfp4-w4a4"][0].profile = results.runs["trace"][0].profile
    results.arms.reverse()
    for build_figure in (paper_figures.codebook_steps, paper_figures.time_split):
        figure = build_figure(results)
        assert figure is not None
        text = " ".join(item.get_text() for item in figure.axes[0].texts)
        assert "arm trace: NVFP4 W/A + NVFP4 KV, plan r1-all+mid/s8" in text


def test_a_long_legend_stays_within_the_picture(results):
    figure = paper_figures.time_split(results)
    assert figure is not None
    figure.draw_without_rendering()
    (axes,) = figure.axes
    box = axes.get_legend().get_window_extent()
    assert box.x1 <= figure.bbox.x1 and box.y0 >= figure.bbox.y0


def test_everything_is_written_and_drawn_again_from_one_file(results, tmp_path: Path):
    paths = write_comparison(results, tmp_path)
    assert all(path.stat().st_size > 500 for path in paths.values())
    assert paths["fig1"].read_bytes().startswith(b"\x89PNG")
    page = paths["page"].read_text(encoding="utf-8")
    for text in (
        "T1. Joint NVFP4",
        "T7. The final FP4 policy",
        "tracefp4 train c.toml --set seed=0",
        "bf16, then hscale",
    ):
        assert text in page
    assert "<script" not in page and "src=" not in page
    again = load(tmp_path / "results.json")
    assert again == results
    assert build(again, "t1") == build(results, "t1")
    save(again, tmp_path / "results.json")
    (tmp_path / "results.json").write_text('{"format": 0}')
    with pytest.raises(ConfigError, match="no results file of this version"):
        load(tmp_path / "results.json")


def test_a_run_that_is_not_there_is_missing(tmp_path: Path):
    assert read_result(tmp_path, 3) == RunResult(3, "missing")
    (tmp_path / "job.json").write_text('{"status": "failed", "command": "c", "seconds": 1.0, "note": "killed"}')
    assert (read_result(tmp_path, 3).status, read_result(tmp_path, 3).note) == ("failed", "killed")
    (tmp_path / "job.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_result(tmp_path, 3)
