"""The patch sets of patches/: valid files, and apply.sh applies all patches of a set or none."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_patches import script
from megatron_patches.__main__ import app, folder
from megatron_patches.patch import CORE_VERSIONS, release_of
from tests.harness.launch import REPO_ROOT

PATCHES = REPO_ROOT / "patches"
SETS = sorted(path.parent for path in PATCHES.glob("core_v*/series"))
HEADER = (
    "Description",
    "Origin",
    "Forwarded",
    "Author",
    "Last-Update",
    "X-Upstream",
    "X-Remove-When",
)


def patch_files(patch_set: Path) -> list[Path]:
    names = [
        line for line in (patch_set / "series").read_text().splitlines() if not line.startswith("#")
    ]
    return [patch_set / name for name in names]


def hunks(patch: Path) -> dict[str, list[tuple[int, list[str]]]]:
    """Return the hunks by target file: (first line of the original, lines with their signs)."""
    by_file = {}
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
            lines = []
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
    git(
        directory,
        "-c",
        "user.name=t",
        "-c",
        "user.email=t@example.org",
        "commit",
        "-qm",
        "recorded context",
    )
    return directory


def git(directory: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=directory, check=True, capture_output=True, text=True
    ).stdout


def apply(checkout: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(PATCHES / "apply.sh"), str(checkout), *flags], capture_output=True, text=True
    )


def versions(patch_set: Path) -> list[str]:
    """Return the versions of the trees that the set is made for."""
    return re.search(r"^# version: (.+)$", (patch_set / "series").read_text(), re.M)[1].split()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return write_checkout(tmp_path / "checkout", SETS[0], versions(SETS[0])[0])


def test_every_tested_version_has_a_set() -> None:
    assert {release_of(version) for patch_set in SETS for version in versions(patch_set)} == set(
        CORE_VERSIONS
    )


@pytest.mark.parametrize("patch_set", SETS, ids=lambda path: path.name)
def test_every_patch_of_the_series_is_valid(patch_set: Path) -> None:
    """Every patch has its header and only adds lines; every decorator is applied to one function.

    The file that imports the decorators is the same in all sets.
    """
    files = patch_files(patch_set)
    assert sorted(files) == sorted(patch_set.glob("*.patch"))
    added = []
    for patch in files:
        header = patch.read_text().partition("\n---\n")[0]
        assert [
            line.partition(":")[0] for line in header.splitlines() if not line.startswith(" ")
        ] == list(HEADER)
        assert patch_set.name in header
        signed = [line for parts in hunks(patch).values() for _, lines in parts for line in lines]
        assert {line[:1] for line in signed} <= {"+", " ", ""}
        added += [line[1:] for line in signed if line.startswith("+")]
    decorators = [line.removeprefix("@resharding.") for line in added if line.startswith("@")]
    training = [
        patch for patch in script.PATCHES if patch.module_name.startswith("megatron.training")
    ]
    needed = [patch for patch in training if patch.is_needed_by(versions(patch_set)[0])]
    assert sorted(decorators) == sorted(patch.build.__name__ for patch in needed)
    targets = {f"+++ b/{patch.module_name.replace('.', '/')}.py" for patch in needed}
    assert targets <= {line for patch in files for line in patch.read_text().splitlines()}
    assert len(added) < 35
    new_file = [
        lines
        for patch in files
        for start, lines in hunks(patch).get("megatron/training/resharding.py", ())
    ]
    assert new_file == [hunks(patch_files(SETS[0])[0])["megatron/training/resharding.py"][0][1]]


@pytest.mark.parametrize("patch_set", SETS, ids=lambda path: path.name)
def test_a_set_can_be_applied_and_reversed(patch_set: Path, tmp_path: Path) -> None:
    checkout = write_checkout(tmp_path / "checkout", patch_set, versions(patch_set)[0])
    assert (
        apply(checkout).stdout
        == f"applied: {patch_set.name}, {len(patch_files(patch_set))} patches\n"
    )
    assert "+@resharding.with_engine" in git(checkout, "diff")
    again = apply(checkout)
    assert (again.returncode, again.stdout.startswith("already applied")) == (0, True)
    assert CliRunner().invoke(app, ["patch-source", str(checkout), "--reverse"]).exit_code == 0
    assert git(checkout, "status", "--porcelain") == ""


def test_changes_of_the_user_are_refused_before_and_kept_after(checkout: Path) -> None:
    """A fork's suffix of the version is ignored, as at run time."""
    path, info = (
        checkout / "megatron" / name for name in ("training/training.py", "core/package_info.py")
    )
    info.write_text(info.read_text() + "PRE_RELEASE = '+corp1'\n")
    assert "commit or stash" in apply(checkout).stderr
    commit(checkout)
    assert apply(checkout, "--reverse").returncode == 1
    assert apply(checkout).stdout.startswith(f"applied: {SETS[0].name}")
    path.write_text(path.read_text() + "# mine\n")
    assert apply(checkout).stdout.startswith("already applied")
    assert apply(checkout, "--reverse").returncode == 0
    added = [
        line for line in git(checkout, "diff", "-U0").splitlines() if line.startswith(("+", "-"))
    ]
    assert added == [
        "--- a/megatron/training/training.py",
        "+++ b/megatron/training/training.py",
        "+# mine",
    ]


def edit(checkout: Path, old: str, new: str, name: str = "training/training.py") -> None:
    path = checkout / "megatron" / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def commit(checkout: Path) -> None:
    git(checkout, "-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-qam", "a fork")


def rename_function(checkout: Path) -> None:
    edit(checkout, "def train(", "def train_otherwise(")


def fork(checkout: Path) -> None:
    rename_function(checkout)
    commit(checkout)


def edit_applied_hunk(checkout: Path) -> None:
    apply(checkout)
    edit(checkout, "@resharding.with_engine\n", "")


def claim_version(version: str, checkout: Path) -> None:
    info = checkout / "megatron" / "core" / "package_info.py"
    numbers = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
    info.write_text("".join(f"{name} = {number}\n" for name, number in numbers))
    commit(checkout)


def leave_git(checkout: Path) -> None:
    shutil.rmtree(checkout / ".git")


FAILED = ["0002-training.patch: error: patch failed: megatron/training/training.py:"]
REFUSED: dict[str, tuple[Callable[[Path], object], list[str], list[str]]] = {
    "a hunk does not fit": (fork, [], [*FAILED, "core_v0.16.1 55ac7082517c"]),
    "an applied hunk was edited": (edit_applied_hunk, [], ["the tree has changes of its own"]),
    "an applied hunk was edited, reversed": (
        edit_applied_hunk,
        ["--reverse"],
        [*FAILED, "nothing was changed"],
    ),
    "another version": (partial(claim_version, versions(SETS[-1])[0]), [], ["nothing was changed"]),
    "an unknown version": (
        *(partial(claim_version, "0.19.10"), []),
        [
            "core_v0.19.10, and there is no patch set for it",
            "Check out one of: core_v0.16.1, core_v0.19.0",
            "--force: the set whose hunks fit",
        ],
    ),
    "a fork, forced": (rename_function, ["--force"], ["nothing was changed"]),
    "a fork of an unknown version, forced": (
        *(
            lambda checkout: (rename_function(checkout), claim_version("0.99.1", checkout)),
            ["--force"],
        ),
        ["no patch set for it that fits"],
    ),
    "no git": (leave_git, [], ["not the root of a git checkout"]),
    "no Megatron-LM": (
        lambda checkout: shutil.rmtree(checkout / "megatron"),
        [],
        ["no Megatron-LM checkout"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_tree_stays_unchanged(checkout: Path, name: str) -> None:
    """A set is applied whole or not at all; the version of a tree selects it."""
    prepare, flags, texts = REFUSED[name]
    prepare(checkout)
    before = {path: path.read_bytes() for path in checkout.rglob("*.py")}
    result = apply(checkout, *flags)
    assert result.returncode == 1
    assert [text for text in texts if text not in result.stderr] == []
    # A patch that fits is no cause.
    assert ("0001" in result.stderr) == (name == "another version")
    assert {path: path.read_bytes() for path in checkout.rglob("*.py")} == before


@pytest.mark.parametrize(
    "place", ["no repository", "another repository", "a checkout with changes"]
)
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
    assert (
        applied.stdout.splitlines()[-1]
        == f"applied: {SETS[1].name}, {len(patch_files(SETS[1]))} patches"
    )
    assert (
        "core_v0.19.0, which was not tested: run it with --resharding-allow-version"
        in applied.stdout
    )
    assert "@resharding.with_engine" in (tree / "megatron" / "training" / "training.py").read_text()
    assert apply(tree, "--force").stdout.splitlines()[-1].startswith("already applied")
    command = ["patch-source", str(tree), "--reverse", "--force"]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert {path: path.read_bytes() for path in tree.rglob("*.py")} == before


def test_usage_and_other_directories(checkout: Path) -> None:
    assert folder() == PATCHES
    assert (
        "usage"
        in subprocess.run([str(PATCHES / "apply.sh")], capture_output=True, text=True).stderr
    )
    assert CliRunner().invoke(app, ["patch-source", str(checkout / "megatron")]).exit_code == 1
