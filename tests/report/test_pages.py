"""The pages: self-contained, escaped, complete; what they claim follows from the data."""

import re
from html.parser import HTMLParser

import pytest

from tracefp4.cli import main
from tracefp4.errors import ConfigError
from tracefp4.report.compare import compare_runs, mean_series
from tracefp4.report.headline import data_size, headline, share, verdict
from tracefp4.report.run_data import Series, read_run
from tracefp4.report.run_report import choose_samples, flatten, update_summary, write_report


class Collector(HTMLParser):
    """Tags that are open, and addresses that a browser would fetch."""

    def __init__(self):
        super().__init__()
        self.fetched, self.tags = [], set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href") and not value.startswith("#")]


def collect(page):
    collector = Collector()
    collector.feed(page)
    return collector


def test_page_of_a_run(write_run):
    folder = write_run()
    path = write_report(folder)
    assert path == folder / "report.html"
    page = path.read_text()
    for text in (
        "chain_sum: trace",
        "Train-rollout mismatch",
        "Coverage",
        "100 %",
        "5.2 KiB",
        "transformers",
        "5.24.0",
    ):
        assert text in page
    assert page.count("<svg") == 9
    assert not (folder / "report.html.partial").exists()


def test_page_needs_nothing_from_outside(write_run):
    page = write_report(write_run()).read_text()
    found = collect(page)
    assert found.fetched == []
    assert not found.tags & {"script", "link", "iframe", "object"}
    assert "url(http" not in page
    assert "default-src 'none'" in page
    assert "prefers-color-scheme:dark" in page


def test_texts_of_a_run_are_escaped(write_run):
    page = write_report(write_run()).read_text()
    assert "&lt;answer&gt;5&lt;/answer&gt;" in page
    assert "<answer>" not in page


def test_ids_within_a_page_are_unique_or_equal_glyphs(write_run):
    page = write_report(write_run()).read_text()
    clips = re.findall(r'<clipPath id="([^"]+)"', page)
    assert len(clips) == len(set(clips))


def test_page_names_failed_scale_checks(write_run):
    folder = write_run(steps=3)
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 3, "guidance/scale_check_failures": 0.04, "time/step_s": 9.5}\n')
    page = write_report(folder).read_text()
    assert "4.00% of the checks of restored block scales failed" in page
    assert "9.50 s a step" in page


def test_page_says_what_is_missing(write_run):
    folder = write_run(extras=False)
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text().replace('"entropy"', '"entropi"'))
    page = write_report(folder, folder / "sub" / "page.html").read_text()
    assert "Not recorded in this run, and therefore not shown: entropy." in page
    assert "No samples were recorded." in page
    assert page.count("<svg") == 8


def test_headline_follows_from_the_data(write_run):
    run = read_run(write_run(steps=20))
    head = headline(run)
    assert head.steps == 20
    assert head.reward_first == pytest.approx(run.series("reward/mean").head(2))
    assert head.coverage == 1.0
    said = verdict(run, head)
    assert len(said) == 3
    assert "times as much" in said[1]
    run.rows[3]["guidance/coverage"] = 0.99996
    assert "> 99.99 %" in verdict(run, headline(run))[2]


def test_verdict_claims_no_gain_where_there_is_none(write_run):
    run = read_run(write_run(steps=20))
    for row in run.rows:
        row["mismatch_kl/mean"] = 1.0
    said = verdict(run, headline(run))[1]
    assert "which is less" in said
    assert "above the 1.4e-3" in said


def test_run_without_step_metrics_still_has_a_page(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval/t/pass@1": 0.25, "eval/t/pass@1_ci": [0.2, 0.3]}\n')
    assert "Notes" in write_report(tmp_path).read_text()


def test_images(write_run, tmp_path):
    write_report(write_run(), images=tmp_path / "images")
    names = {path.name for path in (tmp_path / "images").iterdir()}
    assert {"overview.png", "reward.png", "mismatch.png"} <= names


def test_unwritable_target_is_a_sentence(write_run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report(write_run(), tmp_path / "file" / "report.html")


def test_samples_are_worst_and_best_of_first_and_last_step():
    rows = [{"step": s, "reward": r} for s in (0, 3, 9) for r in (0.5, 0.0, 1.0)]
    assert [(row["step"], row["reward"]) for row in choose_samples(rows)] == [(0, 0.0), (0, 1.0), (9, 0.0), (9, 1.0)]
    assert choose_samples([]) == []
    assert len(choose_samples([{"step": 0}])) == 1


def test_comparison(write_run, tmp_path):
    folders = [write_run(f"{m}-{s}", method=m, seed=s, steps=20) for m in ("bf16", "trace") for s in (0, 1)]
    page = compare_runs(folders, tmp_path / "c.html", images=tmp_path / "i").read_text()
    assert collect(page).fetched == []
    for text in ("Comparison: bf16, trace", "Settings that differ", "bf16 (bf16-1)", "Held-out chain_sum"):
        assert text in page
    assert (tmp_path / "i" / "compare_mismatch_kl_mean.png").exists()


def test_comparison_refuses_what_it_cannot_show(write_run, tmp_path):
    one = write_run(steps=3)
    with pytest.raises(ConfigError, match="at least 2 runs"):
        compare_runs([one], tmp_path / "c.html")
    with pytest.raises(ConfigError, match="1 labels were given for 2 runs"):
        compare_runs([one, one], tmp_path / "c.html", ["a"])
    with pytest.raises(ConfigError, match="at most 6 arms"):
        compare_runs([one] * 7, tmp_path / "c.html", list("abcdefg"))


def test_mean_over_seeds_uses_common_steps_only():
    mean = mean_series([Series([0, 1, 2], [1.0, 2.0, 3.0]), Series([1, 2, 3], [4.0, 5.0, 6.0])])
    assert mean == Series([1, 2], [3.0, 4.0])


def test_flatten_names_settings_as_overrides_do():
    assert flatten({"a": 1, "b": {"c": {"d": [1]}, "e": {}}}) == {"a": 1, "b.c.d": [1], "b.e": {}}


@pytest.mark.parametrize(("size", "text"), [(640, "640 B"), (5310, "5.2 KiB"), (2**21, "2.0 MiB")])
def test_data_size(size, text):
    assert data_size(size) == text


@pytest.mark.parametrize(("value", "text"), [(1.0, "100 %"), (0.99999, "> 99.99 %"), (0.5, "50 %"), (0.0, "0 %")])
def test_share_never_rounds_up_to_all(value, text):
    assert share(value) == text


def test_command(write_run, tmp_path, capsys):
    folder = write_run(steps=5)
    assert main.run(["report", str(folder), "--out", str(tmp_path / "p.html"), "--json"]) == 0
    assert f'"report": "{tmp_path / "p.html"}"' in capsys.readouterr().out
    assert main.run(["report", str(folder), "--label", "x"]) == 2
    assert (
        main.run(
            ["report", str(folder), str(folder), "--label", "x", "--label", "y", "--out", str(tmp_path / "c.html")]
        )
        == 0
    )


def test_summary_is_extended(write_run):
    folder = write_run(steps=3, extras=False)
    update_summary(folder, {"environment": {"torch": "2.13"}})
    update_summary(folder, {"mismatch_kl_floor": 1e-3})
    assert read_run(folder).summary == {"environment": {"torch": "2.13"}, "mismatch_kl_floor": 1e-3}
