"""Which architectures have a table, and the page about them."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from hybrid_engine.errors import UnknownModelError
from hybrid_engine.models import TABLES, ModelTable, table_for
from tests.harness.launch import REPO_ROOT
from tests.zoo.families import SIZES


@pytest.mark.parametrize("architectures", [[], None, ["OPTForCausalLM", "BertModel"]])
def test_unknown_architectures(architectures: list[str] | None) -> None:
    with pytest.raises(UnknownModelError) as caught:
        table_for({"architectures": architectures, **SIZES})
    assert all(name in str(caught.value) for name in (*TABLES, *(architectures or [])))


def test_the_page_about_models_is_up_to_date() -> None:
    """It lists every architecture and every field, and what it quotes is in the sources."""
    page = (REPO_ROOT / "docs" / "models.md").read_text()
    listed = re.findall(r"^\| (\w+) \|.*\.py \|", page, re.MULTILINE)
    assert sorted(listed) == sorted(TABLES)
    assert [f"`{field.name}`" for field in fields(ModelTable)] == re.findall(r"^\| (`\w+`) \|", _section(page), re.M)
    sources = "".join(path.read_text() for path in (REPO_ROOT / "hybrid_engine" / "models").glob("*.py"))
    quoted = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert quoted
    assert all(code in sources for code in quoted)


def _section(page: str) -> str:
    """The table of the fields of ModelTable."""
    return page.partition("`ModelTable` (")[2].partition("Names in rules")[0]
