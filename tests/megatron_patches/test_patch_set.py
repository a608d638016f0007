"""The patch sets of patches/: valid files, and apply.sh applies all patches of a set or none."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_patches import script
from megatron_patches.__main__ import app, folder
from megatron_patches.patch import CORE_VERSIONS, release_of

PATCHES = Path(__file__).resolve().parents[2] / "patches"
SETS = sorted(path.parent for path in PATCHES.glob("core_v*/series"))
HEADER = ("Description", "Origin", "Forwarded", "Author", "Last-Update", "X-Upstream", "X-Remove-When")


def patch_files(patch_set: Path) -> list[Path]:
    names = [line for line in (patch_set / "series").read_text().splitlines() if not line.startswith("#")]
    return [patch_set / name for name in names]


def hunks(patch: Path) -> dict[str, list[tuple[int, list[str]]]]:
    """Return the hunks by target file: (first line of the original, lines with their signs)."""
    by_file: dict[str, list[tuple[int, list[str]]]] = {}
    target = ""
    for line in patch.read_text().partition("\n---\n")[2].splitlines():
        if line.startswith("--- "):
            target = ""
        elif line.startswith("+++ b/"):
            target = line.removeprefix("+++ b/")
        elif line.startswith("@@"):
            by_file.setdefault(target, []).append((int(re.match(r"@@ -(\d+)", line)[1]), []))
        elif target:
            by_file[target][-1][1].append(line)
    return by_file


def write_checkout(directory: Path, patch_set: Path, version: str) -> Path:
    """Create a git repository with only the context lines of the patches, at their places."""
    for patch in patch_files(patch_set):
        for name, parts in hunks(patch).items():
            lines: list[str] = []
            for start, signed in parts:
                original = [line[1:] for line in signed if not line.startswith("+")]
                lines += [f"# line {number}" for number in range(len(lines) + 1, start)] + original
            path = directory / name
            if not parts[0][0]:  # The patch creates the file.
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(lines) + "\n")
    info = directory / "megatron" / "core" / "package_info.py"
    info.parent.mkdir(parents=True, exist_ok=True)
    numbers = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
    info.write_text("".join(f"{name} = {number}\n" for name, number in numbers))
    git(directory, "init", "-q")
    git(directory, "add", ".")
    git(directory, "-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-qm", "recorded context")
    return directory


def git(directory: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=directory, check=True, capture_output=True, text=True).stdout


def apply(checkout: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(PATCHES / "apply.sh"), str(checkout), *flags], capture_output=True, text=True)


def versions(patch_set: Path) -> list[str]:
    """Return the versions of the trees that the set is made for."""
    return re.search(r"^# version: (.+)$", (patch_set / "series").read_text(), re.M)[1].split()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return write_checkout(tmp_path / "checkout", SETS[0], versions(SETS[0])[0])


def test_every_tested_version_has_a_set() -> None:
    assert {release_of(version) for patch_set in SETS for version in versions(patch_set)} == set(CORE_VERSIONS)


@pytest.mark.parametrize("patch_set", SETS, ids=lambda path: path.name)
def test_every_patch_of_the_series_is_valid(patch_set: Path) -> None:
    """Every patch has its header and only adds lines; every decorator is applied to one function.

    The file that imports the decorators is the same in all sets.
    """
    files = patch_files(patch_set)
    assert sorted(files) == sorted(patch_set.glob("*.patch"))
    added: list[str] = []
    for patch in files:
        header = patch.read_text().partition("\n---\n")[0]
        assert [line.partition(":")[0] for line in header.splitlines() if not line.startswith(" ")] == list(HEADER)
        assert patch_set.name in header
        signed = [line for parts in hunks(patch).values() for _, lines in parts for line in lines]
        assert {line[:1] for line in signed} <= {"+", " ", ""}
        added += [line[1:] for line in signed if line.startswith("+")]
    decorators = [line.removeprefix("@resharding.") for line in added if line.startswith("@")]
    training = [patch for patch in script.PATCHES if patch.module_name.startswith("megatron.training")]
    needed = [patch for patch in training if patch.is_needed_by(versions(patch_set)[0])]
    assert sorted(decorators) == sorted(patch.build.__name__ for patch in needed)
    targets = {f"+++ b/{patch.module_name.replace('.', '/')}.py" for patch in needed}
    assert targets <= {line for patch in files for line in patch.read_text().splitlines()}
    assert len(added) < 35
    new_file = [lines for patch in files for start, lines in hunks(patch).get("megatron/training/resharding.py", ())]
    assert new_file == [hunks(patch_files(SETS[0])[0])["megatron/training/resharding.py"][0][1]]


@pytest.mark.parametrize("patch_set", SETS, ids=lambda path: path.name)
def test_a_set_can_be_applied_and_reversed(patch_set: Path, tmp_path: Path) -> None:
    checkout = write_checkout(tmp_path / "checkout", patch_set, versions(patch_set)[0])
    assert apply(checkout).stdout == f"applied: {patch_set.name}, {len(patch_files(patch_set))} patches\n"
    assert "+@resharding.with_engine" in git(checkout, "diff")
    again = apply(checkout)
    assert (again.returncode, again.stdout.startswith("already applied")) == (0, True)
    assert apply(checkout, "--reverse").returncode == 0
    assert git(checkout, "status", "--porcelain") == ""


def test_the_command_applies_a_set(checkout: Path) -> None:
    assert folder() == PATCHES
    assert CliRunner().invoke(app, ["patch-source", str(checkout)]).exit_code == 0
    assert "+@resharding.with_engine" in git(checkout, "diff")
    assert CliRunner().invoke(app, ["patch-source", str(checkout), "--reverse"]).exit_code == 0
    assert git(checkout, "status", "--porcelain") == ""
    assert CliRunner().invoke(app, ["patch-source", str(checkout / "megatron")]).exit_code == 1


def test_a_hunk_that_does_not_fit_leaves_all_files_unchanged(checkout: Path) -> None:
    path = checkout / "megatron" / "training" / "training.py"
    path.write_text(path.read_text().replace("def train(", "def train_otherwise("))
    git(checkout, "-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-qam", "a fork")
    result = apply(checkout)
    assert result.returncode == 1
    assert "0002-training.patch: error: patch failed: megatron/training/training.py:" in result.stderr
    assert "core_v0.16.1 55ac7082517c" in result.stderr
    assert "0001" not in result.stderr
    assert git(checkout, "status", "--porcelain") == ""


def test_changes_of_the_user_are_refused_before_and_kept_after(checkout: Path) -> None:
    """A fork's suffix of the version is ignored, as at run time."""
    path, info = (checkout / "megatron" / name for name in ("training/training.py", "core/package_info.py"))
    info.write_text(info.read_text() + "PRE_RELEASE = '+corp1'\n")
    assert "commit or stash" in apply(checkout).stderr
    git(checkout, "-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-qam", "a fork")
    assert apply(checkout, "--reverse").returncode == 1
    assert apply(checkout).stdout.startswith(f"applied: {SETS[0].name}")
    path.write_text(path.read_text() + "# mine\n")
    assert apply(checkout).stdout.startswith("already applied")
    assert apply(checkout, "--reverse").returncode == 0
    added = [line for line in git(checkout, "diff", "-U0").splitlines() if line.startswith(("+", "-"))]
    assert added == ["--- a/megatron/training/training.py", "+++ b/megatron/training/training.py", "+# mine"]


def test_an_applied_tree_with_an_edited_hunk_is_refused_unchanged(checkout: Path) -> None:
    apply(checkout)
    path = checkout / "megatron" / "training" / "training.py"
    path.write_text(path.read_text().replace("@resharding.with_engine\n", ""))
    before = git(checkout, "diff")
    again = apply(checkout)
    reverse = apply(checkout, "--reverse")
    assert (again.returncode, reverse.returncode) == (1, 1)
    assert "the tree has changes of its own" in again.stderr
    assert "nothing was changed" in reverse.stderr
    assert "0002-training.patch: error: patch failed" in reverse.stderr
    assert "0001" not in reverse.stderr
    assert git(checkout, "diff") == before


@pytest.mark.parametrize(("tree", "patch_set"), [(SETS[0], SETS[-1]), (SETS[-1], SETS[0])])
def test_a_set_is_refused_by_a_tree_of_another_version(tree: Path, patch_set: Path, tmp_path: Path) -> None:
    """The version of a tree selects the set; if the version is wrong, nothing is changed."""
    checkout = write_checkout(tmp_path / "checkout", tree, versions(patch_set)[0])
    result = apply(checkout)
    assert result.returncode == 1
    assert "nothing was changed" in result.stderr
    assert git(checkout, "status", "--porcelain") == ""


@pytest.mark.parametrize("place", ["no repository", "another repository", "a checkout with changes"])
def test_any_tree_can_be_forced_and_reversed(tmp_path: Path, place: str) -> None:
    """A tree of another version gets the newest set that fits."""
    tree = write_checkout(tmp_path / "repository" / "vendored", SETS[1], "0.19.0")
    if place == "a checkout with changes":
        info = tree / "megatron" / "core" / "package_info.py"
        info.write_text(info.read_text() + "# mine\n")
    else:
        shutil.rmtree(tree / ".git")
    if place == "another repository":
        git(tree.parent, "init", "-q")
    before = {path: path.read_bytes() for path in tree.rglob("*.py")}
    assert apply(tree).returncode == 1
    applied = apply(tree, "--force")
    assert applied.stdout.splitlines()[-1] == f"applied: {SETS[1].name}, {len(patch_files(SETS[1]))} patches"
    assert "core_v0.19.0, which was not tested: run it with --resharding-allow-version" in applied.stdout
    assert "@resharding.with_engine" in (tree / "megatron" / "training" / "training.py").read_text()
    assert apply(tree, "--force").stdout.splitlines()[-1].startswith("already applied")
    command = ["patch-source", str(tree), "--reverse", "--force"]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert {path: path.read_bytes() for path in tree.rglob("*.py")} == before


def test_a_forced_tree_without_a_fitting_set_is_refused_unchanged(checkout: Path) -> None:
    path = checkout / "megatron" / "training" / "training.py"
    path.write_text(path.read_text().replace("def train(", "def train_otherwise("))
    before = git(checkout, "diff")
    assert "nothing was changed" in apply(checkout, "--force").stderr
    info = checkout / "megatron" / "core" / "package_info.py"
    info.write_text(info.read_text().replace("MINOR = 16", "MINOR = 99"))
    assert "no patch set for it that fits" in apply(checkout, "--force").stderr
    git(checkout, "checkout", "-q", str(info))
    assert git(checkout, "diff") == before


def test_other_versions_and_other_directories_are_refused(tmp_path: Path) -> None:
    other = write_checkout(tmp_path / "other", SETS[-1], "0.19.10")
    result = apply(other)
    assert result.returncode == 1
    assert "core_v0.19.10, and there is no patch set for it" in result.stderr
    assert "Check out one of: core_v0.16.1, core_v0.19.0" in result.stderr
    assert git(other, "status", "--porcelain") == ""
    assert "no Megatron-LM checkout" in apply(tmp_path).stderr
    assert "--force: the set whose hunks fit" in result.stderr
    shutil.rmtree(other / ".git")
    assert "not the root of a git checkout" in apply(other).stderr
    assert "usage" in subprocess.run([str(PATCHES / "apply.sh")], capture_output=True, text=True).stderr
