"""``python -m megatron_patches review``: the list of reviewed fields against the sources of a megatron-core."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path

import megatron.core
import pytest
import yaml
from typer.testing import CliRunner

from megatron_patches.__main__ import app
from megatron_patches.errors import ReviewError
from megatron_patches.patch import CORE_VERSIONS, release_of
from megatron_patches.review import verdicts
from megatron_patches.review.comparison import compare
from megatron_patches.review.sources import SECTIONS, find_sources, installed_sources
from megatron_patches.review.verdicts import LIST, review_of, reviewed_versions
from tests.harness.launch import REPO_ROOT

INSTALLED = release_of(megatron.core.__version__)


def test_every_field_of_the_installed_version_is_reviewed() -> None:
    sources = installed_sources()
    assert sources is not None
    assert sources.version == INSTALLED
    assert len(sources.fields()) > 250
    assert compare(sources).is_reviewed, "run: python -m megatron_patches review " + INSTALLED


def test_every_supported_version_is_reviewed_and_later_ones_build_on_earlier() -> None:
    assert set(CORE_VERSIONS) <= set(reviewed_versions())
    counts = [sum(map(len, review_of(version).sections.values())) for version in reviewed_versions()]
    assert counts == sorted(counts)
    assert all(set(review_of(version).sections) <= set(SECTIONS) for version in reviewed_versions())


def test_a_version_gives_each_field_one_verdict() -> None:
    for version, sections in yaml.safe_load(LIST.read_text()).items():
        for section, changes in sections.items():
            flat = ("function", "refused", "gone")
            assert changes.keys() <= {"harmless", "handled", "defaults", *flat}, (version, section)
            fields = [field for verdict in flat for field in changes.get(verdict, ())]
            for verdict in ("harmless", "handled"):
                fields += [field for reasons in changes.get(verdict, {}).values() for field in reasons]
            assert len(fields) == len(set(fields)), (version, section)


def test_another_default_of_a_refused_field_asks_for_another_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = {"folded": {"default": False, "reason": "rows are folded"}}
    changes = {"1.0": {"Config": {"refused": refused}}, "1.1": {"Config": {"defaults": {"folded": True}}}}
    monkeypatch.setattr(verdicts, "_list", lambda: changes)
    monkeypatch.setattr(verdicts, "reviewed_versions", lambda: tuple(changes))
    assert review_of.__wrapped__("1.0").of("Config", "folded").accepts(False)
    with pytest.raises(ReviewError, match="folded has another default"):
        review_of.__wrapped__("1.1")


def later_tree(root: Path) -> Path:
    """A copy of the installed configuration classes as version 9.0.1: a field more, one less, another default."""
    core = Path(megatron.core.__file__).parent
    for file in ("package_info.py", *{place.partition(":")[0] for places in SECTIONS.values() for place in places}):
        if (core / file).is_file():
            (root / "megatron/core" / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(core / file, root / "megatron/core" / file)
    info = root / "megatron/core/package_info.py"
    info.write_text('MAJOR = 9\nMINOR = 0\nPATCH = 1\nPRE_RELEASE = ""\n')
    config = root / "megatron/core/distributed/distributed_data_parallel_config.py"
    text = config.read_text()
    assert "    nccl_ub: bool = False\n" in text
    assert "    bucket_size: Optional[int] = None\n" in text
    text = text.replace("    nccl_ub: bool = False\n", "")
    text = text.replace("    bucket_size: Optional[int] = None\n", "    bucket_size: Optional[int] = 7\n")
    config.write_text(text + '\n    fold_weights: bool = False\n    """Fold every weight\n    in half."""\n')
    (root / "megatron/core/folding.py").write_text("def fold(config):\n    return config.fold_weights\n")
    return root


def test_a_later_version_shows_what_is_new_gone_and_of_another_default(tmp_path: Path) -> None:
    tree = later_tree(tmp_path / "tree")
    wheel = Path(shutil.make_archive(str(tmp_path / "wheel"), "zip", tree))
    for source in (tree, wheel):
        result = CliRunner().invoke(app, ["review", str(source)])
        assert result.exit_code == 1, result.output
        assert f"9.0.1 against the review of {reviewed_versions()[-1]}: " in result.output
        for line in (
            "new   DistributedDataParallelConfig.fold_weights: bool = False   (distributed/",
            "      Fold every weight in half.\n      used in folding.py:2\n",
            "gone  DistributedDataParallelConfig.nccl_ub\n",
            "now   DistributedDataParallelConfig.bucket_size = 7, before None\n",
        ):
            assert line in result.output
    result = CliRunner().invoke(app, ["review", str(tree), "--yaml"])
    changes = yaml.safe_load(result.output)["9.0.1"]["DistributedDataParallelConfig"]
    assert changes["unread"]["fold_weights"] is False
    assert changes["defaults"]["bucket_size"] == 7
    assert "nccl_ub" in changes["gone"]


def test_the_installed_version_is_named_by_its_number() -> None:
    result = CliRunner().invoke(app, ["review", INSTALLED])
    assert (result.exit_code, result.output) == (
        0,
        f"megatron-core {INSTALLED} against the review of {INSTALLED}: nothing to review\n",
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("9.9.9", f"not the installed megatron-core .{INSTALLED}.; get its wheel: pip download .*megatron-core==9.9.9"),
        ("empty", "megatron/core is not megatron-core: .*package_info.py"),
        ("text.whl", "text.whl is not a wheel: File is not a zip file"),
    ],
)
def test_what_is_no_megatron_core_is_named(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.whl").write_text("text")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ReviewError, match=message):
        find_sources(name)


def test_the_page_of_refused_fields_is_up_to_date() -> None:
    made = runpy.run_path(str(REPO_ROOT / "docs" / "make_configuration.py"))["fields_page"]()
    assert (REPO_ROOT / "docs" / "megatron_fields.md").read_text() == made, "run: make docs"
