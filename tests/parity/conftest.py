"""Prints the largest error of every comparison at the end of a run."""

import pytest


@pytest.fixture
def measured(record_property):
    """`measured(what, error)` notes a largest absolute error for the summary."""

    def note(what, error):
        record_property("parity", (what, error))

    return note


def pytest_terminal_summary(terminalreporter):
    rows = {}
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in report.user_properties:
            if name == "parity":
                rows[value[0]] = max(rows.get(value[0], 0.0), value[1])
    if rows:
        terminalreporter.section("largest absolute error against Hugging Face")
        for what, error in sorted(rows.items()):
            terminalreporter.write_line(f"{error:9.1e}  {what}")
