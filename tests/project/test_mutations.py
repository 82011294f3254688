"""Tests that the planted faults can be planted; `tests/mutations.py` plants them and runs the tests."""

from mutations import FAULTS, ROOT


def test_every_fault_has_one_place():
    places = {fault: (ROOT / "attnlens" / fault.file).read_text().count(fault.right) for fault in FAULTS}
    assert {fault: count for fault, count in places.items() if count != 1} == {}
    assert all(fault.right != fault.wrong for fault in FAULTS)
