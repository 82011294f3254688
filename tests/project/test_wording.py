"""Tests that numbers have no false digits, and strings nothing that steers a terminal."""

from attnlens.wording import (
    big,
    clean,
    decimals_for,
    decimals_with_error,
    format_error,
    format_number,
    format_p,
    model_name,
)


def test_numbers_are_written_without_false_digits():
    samples = ([0.5, 0.003], [1.0, 0.2], [33.25], [333.3], [64.0, 12.0], [1.5e-5], [2.5e7])
    assert [decimals_for(values) for values in samples] == [3, 3, 1, 0, 0, -1, -1], "three figures of the largest"
    assert format_number(-0.0001, 3) == "0.000"
    assert format_number(None, 3) == format_number(float("nan"), 3) == "–"
    assert format_number(1.5e-5, -1) == "1.5e-05"
    errors = [format_error(error, 3) for error in (0.0123, 0.0006, 0.0004, 0.0)]
    assert errors == ["0.012", "0.001", "<0.0005", "0"], "only an error of 0 is written 0"
    assert format_error(0.3, 0) == "<0.5"
    assert decimals_with_error([0.0712, 0.03], 0.0099) == 3
    assert [decimals_with_error([13.0, 21.0], error) for error in (0.26, 0.0)] == [1, 0]
    numbers = [big(number) for number in (912, 1_300_000, 22_713_216, 7_240_000_000)]
    assert numbers == ["912", "1.3 M", "22.7 M", "7.24 B"]
    assert clean("a\tb\x1b[31m\u200b") == "a b�[31m�"


def test_no_p_value_is_printed_below_its_floor():
    assert list(map(format_p, (9e-43, 9.9e-5, 1e-4, 0.0312, None))) == ["< 1e-4", "< 1e-4", "0.0001", "0.031", "–"]


def test_a_local_model_is_named_by_its_folder_and_a_hub_id_in_full():
    names = [model_name(identity) for identity in ("org/name", "/data/runs/bert", "runs/a/final/", "demo")]
    assert names == ["org/name", "bert", "a/final", "demo"], "`final` alone does not identify a model"
