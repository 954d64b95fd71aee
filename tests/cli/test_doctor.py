"""The diagnosis: version ranges, exit codes, and that a broken seam is seen."""

import json

import pytest

from tracefp4.cli import doctor, main, selftest
from tracefp4.models import directory


@pytest.mark.parametrize(
    ("version", "status"),
    [
        (None, "fail"),
        ("2.10.1", "fail"),
        ("2.11.0+cu130", "ok"),
        ("2.13.0", "ok"),
        ("2.14.0rc1", "warn"),
        ("10.0", "warn"),
    ],
)
def test_version_ranges(version, status):
    check = doctor.check_version("torch", version, "2.11", "2.14")
    assert check.status == status
    if status == "fail":
        assert "pip install" in check.detail


def test_doctor_as_json(capsys):
    code = main.run(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    checks = {check["name"]: check for check in found["checks"]}
    assert checks["transformers seams"]["status"] == "ok", checks["transformers seams"]["detail"]
    assert code == 0
    assert found["ok"]
    assert {"python", "torch", "transformers", "FP4 hardware", "memory", "engines", "cache"} <= set(checks)


def test_cache_is_where_models_look_for_it(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(directory.CACHE_VARIABLE, "~/models")
    found = {check.name: check for check in doctor.diagnose()}["cache"]
    assert (found.status, found.detail) == ("ok", str(tmp_path / "models"))
    assert not (tmp_path / "models").exists(), "a diagnosis writes nothing"
    assert directory.cache_dir() == tmp_path / "models"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(directory.CACHE_VARIABLE, str(tmp_path / "file"))
    found = {check.name: check for check in doctor.diagnose()}["cache"]
    assert found.status == "warn"
    assert directory.CACHE_VARIABLE in found.detail


def test_failure_is_exit_code_one(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "diagnose", lambda: [doctor.Check("torch", "fail", "not installed")])
    assert main.run(["doctor"]) == 1
    assert capsys.readouterr().out == "fail  torch  not installed\n"


def test_a_seam_that_is_passed_by_is_named(monkeypatch):
    monkeypatch.setattr(selftest.PassThrough, "route", lambda self, indices: None)
    fault = selftest.check_seams()
    assert fault is not None
    assert "router seam was reached 0 times" in fault


def test_a_seam_that_changes_logits_is_named(monkeypatch):
    monkeypatch.setattr(selftest.PassThrough, "middle", lambda self, h, pairs: selftest.Operand(2 * h, None))
    fault = selftest.check_seams()
    assert fault is not None
    assert "logits change" in fault


def test_environment_names_versions_and_device():
    found = doctor.environment()
    assert {"tracefp4", "python", "torch", "transformers", "platform"} <= set(found)
    assert all(isinstance(value, str) for value in found.values())
