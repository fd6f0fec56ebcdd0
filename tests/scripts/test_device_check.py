"""The device check on a CPU: every part runs small, and what goes wrong is reported while the rest goes on."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def check(load_script: Callable[[str], Any]) -> Any:
    return load_script("device_check")


def test_every_part_reports_rows(check: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "device.json"
    assert check.main(["--quick", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert {"date", "device", "jax", "jaxlib", "commit"} <= report["where"].keys()
    assert list(report["parts"]) == ["kernels", "limits", "attention", "steps", "prefix"]
    assert all(part["rows"] for part in report["parts"].values())
    assert all(row["largest error"] <= check.LARGEST_ERROR[row["dtype"]] for row in report["parts"]["kernels"]["rows"])
    assert [row["batch"] for row in report["parts"]["steps"]["rows"]] == [2]
    assert all({"of copy", "of matmul"} & row.keys() for row in report["parts"]["attention"]["rows"])
    pools = [row.get("pool") for row in report["parts"]["attention"]["rows"]]
    assert pools == [None] * 2 + list(check.EIGHT_BITS.values()), "nothing is measured twice"
    assert "fp8" in {row.get("pool") for row in report["parts"]["kernels"]["rows"]}
    [prefix] = report["parts"]["prefix"]["rows"]
    assert prefix["cached"] > 0
    printed = capsys.readouterr().out
    assert all(f"\n{name} (" in printed for name in report["parts"])


def test_a_part_that_fails_does_not_end_the_visit(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(scale: object) -> Iterator[dict[str, Any]]:
        yield {"row": 1}
        raise RuntimeError("no such instruction")

    monkeypatch.setitem(check.PARTS, "attention", fails)
    found = check.run_parts(["attention", "limits"], check.SMALL, minutes=5)
    assert found["attention"]["rows"] == [{"row": 1}]
    assert "no such instruction" in found["attention"]["error"]
    assert len(found["limits"]["rows"]) == 3


def test_a_kernel_that_is_refused_costs_its_row_alone(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: Any, **options: Any) -> Any:
        raise NotImplementedError("no such layout")

    monkeypatch.setattr(check.ops, "extend_attention", refused)
    found = check.run_parts(["kernels"], check.SMALL, minutes=5)["kernels"]
    assert "error" not in found
    assert [row["passed"] for row in found["rows"]] == ["write" in row["case"] for row in found["rows"]]
    assert sum("no such layout" in row.get("error", "") for row in found["rows"]) == len(found["rows"]) - 2


def test_nothing_begins_when_the_time_is_over(check: Any) -> None:
    found = check.run_parts(["limits"], check.SMALL, minutes=0)
    assert not found["limits"]["rows"]
    assert "not begun" in found["limits"]["error"]


def test_an_error_too_large_or_nan_is_a_failure(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: Any, **options: Any) -> Any:
        return arguments[0] * float("nan")

    monkeypatch.setattr(check.ops, "extend_attention", wrong)
    report = check.run_parts(["kernels"], check.SMALL, minutes=5)
    assert not any(row["passed"] for row in report["kernels"]["rows"] if row["case"] != "write of tokens")
    monkeypatch.setattr(check, "run_parts", lambda *_: report)
    assert check.main(["--quick"]) == 1
