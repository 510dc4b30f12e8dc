from __future__ import annotations

import math
from pathlib import Path

import pytest

from needlepoint.optimized.protocol.stages import STAGES
from needlepoint.verify.numerics import error_model
from needlepoint.verify.numerics.error_model import ACCUMULATORS, Constant
from needlepoint.verify.numerics.limits import Limits

PAGE = Path(__file__).parents[2] / "docs" / "limits.md"


def write(folder: Path, text: str) -> Path:
    path = folder / "limits.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_every_stage_has_a_limit_with_unit_and_derivation() -> None:
    limits = Limits.default()

    assert tuple(limits) == STAGES
    assert len(limits) == len(STAGES)
    for limit in limits.values():
        assert limit.value == 1
        assert limit.unit
        assert len(limit.derivation) > 20
        assert limit.floor > 0


@pytest.mark.parametrize(("ratio", "passes"), [(0.0, True), (1.0, True), (1.01, False)])
def test_a_limit_passes_up_to_itself(ratio: float, passes: bool) -> None:
    assert Limits.default()["pooled"].passes(ratio) is passes


@pytest.mark.parametrize("ratio", [math.nan, math.inf])
def test_what_is_no_number_never_passes(ratio: float) -> None:
    assert not Limits.default()["pooled"].passes(ratio)


def test_scale_reaches_the_whole_table(tmp_path: Path) -> None:
    limits = Limits.load(write(tmp_path, "scale = 1e6"))

    assert {limit.value for limit in limits.values()} == {1e6}
    assert limits["scores"].derivation == Limits.default()["scores"].derivation


def test_an_entry_sets_its_stage_and_scale_leaves_it_alone(tmp_path: Path) -> None:
    limits = Limits.load(write(tmp_path, "scale = 3\n[scores]\nvalue = 0.5\n[topk]\nvalue = 2"))

    assert limits["scores"].value == 0.5
    assert limits["topk"].value == 2
    assert limits["pooled"].value == 3


def test_an_empty_file_is_the_default_table(tmp_path: Path) -> None:
    assert Limits.load(write(tmp_path, "")) == Limits.default()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pool = 1", "unknown entry 'pool', expected 'scale' or a stage of input, projected"),
        ("[rope]\nvalue = 1", "unknown entry 'rope'"),
        ("scale = 0", "scale = 0, expected a positive finite number"),
        ("scale = -1.5", "scale = -1.5"),
        ("scale = inf", "scale = inf"),
        ("scale = nan", "scale = nan"),
        ("scale = true", "scale = True"),
        ("scale = '3'", "scale = '3'"),
        ("scale = 1" + 400 * "0", "scale = 10000"),
        ("scale = [1]", r"scale = \[1\]"),
        ("[pooled]\nvalue = 0", "pooled.value = 0"),
        ("[pooled]\nlimit = 1", r"entry \[pooled\] holds .*exactly one key: value = Y"),
        ("[pooled]\nvalue = 1\nunit = 'x'", r"entry \[pooled\] holds"),
        ("[pooled]", r"entry \[pooled\] holds"),
        ("pooled = 3", r"entry \[pooled\] holds 3"),
        ("scale = ", "not valid TOML"),
        ("#" * 70_000, "more than 65536 bytes"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)

    with pytest.raises(ValueError, match=message) as error:
        Limits.load(path)

    assert str(path) in str(error.value)


def test_a_missing_file_is_a_value_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.toml: cannot read the limits file"):
        Limits.load(tmp_path / "nowhere.toml")


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "limits.toml"
    path.write_bytes(b"scale = \xff")

    with pytest.raises(ValueError, match="not valid TOML"):
        Limits.load(path)


def _constants() -> dict[str, Constant]:
    named = {k: v for k, v in vars(error_model).items() if isinstance(v, Constant)}
    return named | {f"ACCUMULATORS[{name.value}]": c for name, c in ACCUMULATORS.items()}


def test_the_page_states_every_constant_with_its_value() -> None:
    rows = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split(" | ")]
        if len(cells) >= 3 and cells[0].startswith("| `"):
            rows[cells[0].removeprefix("| ").strip("`")] = cells[1]

    constants = _constants()
    assert set(constants) <= set(rows)
    for name, constant in constants.items():
        text = rows[name]
        value = 2.0 ** int(text.removeprefix("2^")) if text.startswith("2^") else float(text)
        assert value == constant.value, name
        assert constant.unit
        assert constant.derivation
