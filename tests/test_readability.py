"""Budgets of size and readability."""

from __future__ import annotations

import json

from tests.harness.readability import RECORDED, measured


def test_no_package_exceeds_its_budget() -> None:
    budgets = json.loads(RECORDED.read_text())
    exceeded = [
        f"{package}: {figure} is {count}, budget {budgets.get(package, {}).get(figure, 0)}"
        for package, figures in measured().items()
        for figure, count in figures.items()
        if count > budgets.get(package, {}).get(figure, 0)
    ]
    assert exceeded == [], "cut something, or record it and say why in the commit"
