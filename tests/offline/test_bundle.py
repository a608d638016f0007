"""The offline bundle of small stand-ins: sizes, hashes, parts, what is missing, and what is run there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest

from offline import bundle, packing, run, vllm, wheels
from offline.packing import Item, archive, compressed, write_folders
from offline.wheels import Wanted, collect, read_installed, read_list, requirements_of

LIMIT = 2**19 + 40_000
FACTS = {"python": "{}.{}".format(*sys.version_info), "torch": "", "cuda": "13", "missing": {}, "expected": {}}


def make_wheel(
    directory: Path, name: str, version: str, requires: str = "", files: Mapping[str, bytes] | None = None
) -> Path:
    path = directory / f"{name}-{version}-py3-none-any.whl"
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + (
        f"Requires-Dist: {requires}\n" * bool(requires)
    )
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}-{version}.dist-info/METADATA", text)
        for file, contents in (files or {}).items():
            wheel.writestr(file, contents)
    return path


@pytest.fixture
def items(tmp_path: Path) -> list[Item]:
    """In the place of pytest is a package that prints its arguments and an environment variable."""
    modules = {"pure/__init__.py": b"found = 1", "pure-1.0.data/purelib/extra.py": b"extra = 2"}
    wheel = make_wheel(
        tmp_path, "pure", "1.0", files={**modules, "pure-1.0.data/scripts/pure": b"", "pure-1.0.data/": b""}
    )
    main = b"import json, os, sys, pure\nprint(json.dumps([sys.argv[1:], os.environ['HF_HUB_OFFLINE'], pure.found]))"
    tree = [("pytest/__init__.py", b""), ("pytest/__main__.py", main)]
    return [
        archive("hybrid_engine.tar.xz", "tree", 1, tree),
        Item(wheel.name, "wheel", "packages", 1, wheel.read_bytes()),
        compressed("large.so.xz", "packages/vllm/large.so", 2, os.urandom(90_000)),
    ]


@pytest.fixture
def folders(tmp_path: Path, items: list[Item]) -> list[Path]:
    sizes = write_folders(tmp_path / "bundle", items, FACTS, Path(run.__file__), LIMIT)
    assert max(sizes) <= LIMIT
    return [tmp_path / "bundle" / str(number + 1) for number in range(len(sizes))]


def there(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Without anything of this checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(folder / "run.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder.parent, timeout=60)


def test_a_large_file_is_cut_into_parts_that_come_together_in_any_order(folders: list[Path], tmp_path: Path) -> None:
    manifest = run.read_manifest(folders[0])
    (large,) = (item for item in manifest["items"] if item["name"] == "large.so.xz")
    assert sorted(part["folder"] for part in large["parts"]) == [1, 2, 3]
    place = tmp_path / "place"
    for folder in reversed(folders):
        assert not (place / "packages" / "vllm" / "large.so").exists()
        assert run.unpack(folder, place) == []
    assert len((place / "packages" / "vllm" / "large.so").read_bytes()) == 90_000
    assert run.what_is_missing(manifest, place) == {}
    packages = place / "packages"
    assert sorted(str(path.relative_to(packages)) for path in packages.rglob("*.py")) == [
        "extra.py",
        "pure/__init__.py",
    ]


def test_the_same_files_give_the_same_bundle(folders: list[Path], items: list[Item], tmp_path: Path) -> None:
    files = [("b", b"2"), ("a", b"1")]
    assert archive("x", "", 1, files).contents == archive("x", "", 1, files).contents
    before = folders[0].joinpath("manifest.json").read_text()
    write_folders(tmp_path / "bundle", items, FACTS, Path(run.__file__), LIMIT)
    assert folders[0].joinpath("manifest.json").read_text() == before


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes instead of"),
        (lambda path: path.write_bytes(b"\0" + path.read_bytes()[1:]), "another SHA-256"),
        (lambda path: path.unlink(), "is missing: carry the folder again"),
    ],
)
def test_a_spoiled_file_is_named(
    folders: list[Path], tmp_path: Path, spoil: Callable[[Path], object], says: str
) -> None:
    spoil(folders[0] / "hybrid_engine.tar.xz")
    (fault,) = run.unpack(folders[0], tmp_path / "place")
    assert says in fault
    assert "hybrid_engine.tar.xz" in fault
    assert run.what_is_missing(run.read_manifest(folders[0]), tmp_path / "place")[1] != []


def test_a_newer_bundle_takes_the_place_of_an_older_one(folders: list[Path], items: list[Item], tmp_path: Path) -> None:
    place = tmp_path / "place"
    for folder in folders:
        run.unpack(folder, place)
    newer = [
        archive("hybrid_engine.tar.xz", "tree", 1, [("hybrid_engine/new.py", b"")]),
        items[1],
        compressed("large.so.xz", "packages/vllm/large.so", 2, bytes(range(256)) * 400),
    ]
    write_folders(tmp_path / "newer", newer, FACTS, Path(run.__file__), LIMIT)
    manifest = run.read_manifest(tmp_path / "newer" / "1")
    assert len(run.what_is_missing(manifest, place)) == 2
    for folder in sorted((tmp_path / "newer").iterdir()):
        assert run.unpack(folder, place) == []
    assert run.what_is_missing(manifest, place) == {}
    assert [path.name for path in (place / "tree" / "hybrid_engine").iterdir()] == ["new.py"]
    assert (place / "packages" / "vllm" / "large.so").read_bytes() == bytes(range(256)) * 400


def test_pytest_runs_with_what_was_unpacked(folders: list[Path], tmp_path: Path) -> None:
    place = tmp_path / "place"
    for folder in folders[:-1]:
        assert there(folder, str(place), "--unpack").returncode == 0
    ended = there(folders[0], str(place), "--records", "figures")
    assert "large.so.xz of folder 1, 2, 3 is not unpacked" in ended.stderr
    arguments, offline, found = json.loads(ended.stdout)
    checks = str(place / "tree" / "tests" / "gpu")
    always = [checks, f"--confcutdir={checks}", *run.PYTEST]
    assert (arguments, offline, found) == ([*always, "--records", "figures"], "1", 1)
    ended = there(folders[-1], str(place), "-k", "stage1")
    assert "not unpacked" not in ended.stderr
    assert json.loads(ended.stdout)[0] == [*always, "-k", "stage1"]


def test_without_the_first_stage_nothing_runs(folders: list[Path], tmp_path: Path) -> None:
    ended = there(folders[-1], str(tmp_path / "place"))
    assert ended.returncode == run.USAGE
    assert "hybrid_engine.tar.xz of folder 1 is not unpacked" in ended.stderr
    assert there(folders[-1]).returncode == run.USAGE


def test_another_machine_than_the_bundle_was_made_for() -> None:
    manifest = {
        **FACTS,
        "python": "2.7",
        "torch": "0.1",
        "expected": {"pytest": "0.1", "no-such-package": "1", "numpy": ""},
    }
    python, torch, pytest_version, absent = run.what_differs(manifest)
    assert python.startswith("Python 3.")
    assert torch.startswith("torch ")
    assert pytest_version.startswith("pytest ")
    assert absent == "no-such-package is not installed, and expected here: 1"
    assert run.what_differs(FACTS) == []


def test_what_the_machine_has_is_not_carried_unless_another_wheel_refuses_it(tmp_path: Path) -> None:
    for name, version, requires in (
        ("one", "1.0", "two>=2"),
        ("two", "2.1", ""),
        ("three", "3.0", "absent; python_version<'3'"),
    ):
        make_wheel(tmp_path, name, version, requires)
    wanted = [Wanted("one", 1), Wanted("two", 1), Wanted("three", 2)]

    def carried(text: str) -> set[str]:
        (tmp_path / "list").write_text(text)
        collected, missing = collect(wanted, read_installed(tmp_path / "list"), tmp_path)
        assert missing == {}
        return {each.name for each in collected}

    assert carried("Package Version\n------- -------\nthree   3.0\ntwo     2.5\n") == {"one"}
    assert carried("three==9\ntwo==1.9\n") == {"one", "two"}
    assert carried("two\n") == {"one", "three"}
    assert list(requirements_of(tmp_path / "three-3.0-py3-none-any.whl")) == []


def test_a_wheel_that_cannot_be_had_is_said_and_the_rest_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    make_wheel(cache, "one", "1.0")
    (tmp_path / "wheels.txt").write_text("# stage 1\none\n# stage 2\nno-such-package==1\n")
    (tmp_path / "run.py").write_bytes(Path(run.__file__).read_bytes())
    monkeypatch.setattr(bundle, "HERE", tmp_path)
    monkeypatch.setattr(bundle, "_tree", lambda: [("file", b"")])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert bundle.main([str(tmp_path / "made"), "--cache", str(cache)]) == 1
    assert "without no-such-package, which stage 2 needs: No matching distribution" in capsys.readouterr().err
    manifest = run.read_manifest(tmp_path / "made" / "1")
    assert [item["name"] for item in manifest["items"]] == ["hybrid_engine.tar.xz", "one-1.0-py3-none-any.whl"]
    assert run.what_is_missing(manifest, tmp_path)[2][0].startswith("no-such-package could not be had")


def test_a_folder_and_this_checkout_travel_together() -> None:
    assert packing.FOLDER_NBYTES + sum(len(contents) for _, contents in bundle._tree()) <= 64 * 2**20


def test_extensions_that_only_a_later_stage_needs_are_carried_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "_tree", lambda: [])
    wheel = make_wheel(tmp_path, "vllm", "1", files=dict.fromkeys(vllm.EXTENSIONS, b""))
    carried = [[item.name for item in bundle.items_of({Wanted("vllm", 2): wheel}, last)][2:] for last in (2, 3)]
    assert carried == [["_C_stable_libtorch.abi3.so.xz"], [f"{Path(name).name}.xz" for name in vllm.EXTENSIONS]]


def test_a_download_that_broke_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[list[str]]()

    def download(wanted: Iterable[Wanted], directory: Path) -> str:
        calls.append([each.name for each in wanted])
        make_wheel(directory, calls[-1][0], "1.0")
        return ""

    monkeypatch.setattr(wheels, "_download", download)
    found, missing = collect([Wanted("one", 1), Wanted("two", 1)], {}, tmp_path)
    assert (len(found), missing) == (2, {})
    assert calls == [["one", "two"], ["two"]]


def test_an_empty_list_of_what_is_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("-------\n")
    for path in ("list", "none"):
        with pytest.raises(SystemExit) as ended:
            bundle.main([str(tmp_path / "made"), "--have", str(tmp_path / path)])
        assert ended.value.code == 2


def test_what_is_left_out_of_vllms_wheel(tmp_path: Path) -> None:
    path = tmp_path / "vllm-1-py3-none-any.whl"
    large = b"\0" * (vllm.SMALL + 1)
    files = {
        "vllm/__init__.py": b"",
        "vllm/small.abi3.so": b"",
        "vllm/vllm-rs": b"",
        "vllm/third_party/x.hpp": b"",
        "vllm/x.h": b"",
    }
    with zipfile.ZipFile(path, "w") as wheel:
        for name, contents in {**files, "vllm/_large.abi3.so": large, **dict.fromkeys(vllm.EXTENSIONS, large)}.items():
            wheel.writestr(name, contents)
    assert [name for name, _ in vllm.files_of(path)] == [
        "vllm/__init__.py",
        "vllm/small.abi3.so",
        "vllm/x.h",
        vllm.EMPTY,
    ]
    assert [vllm.extension_of(path, name) for name in vllm.EXTENSIONS] == [large] * 2


def test_the_list_names_each_package_once_and_its_stage() -> None:
    wanted = read_list(Path(bundle.__file__).with_name("wheels.txt"))
    names = [each.name for each in wanted]
    assert len(names) == len(set(names))
    assert {each.stage for each in wanted} == {1, 2}
    assert not {"torch", "triton", "cuda-bindings"} & set(names)


def test_the_list_has_what_our_own_packages_require() -> None:
    project = tomllib.loads((bundle.REPOSITORY / "pyproject.toml").read_text())["project"]
    required = {Wanted(each, 1).name for each in project["dependencies"]}
    listed = {each.name for each in read_list(Path(bundle.__file__).with_name("wheels.txt"))}
    assert required - listed == {"torch", "jinja2"}  # the one is there, and requires the other


def test_the_first_stage_has_pytest() -> None:
    names = {each.name for each in read_list(Path(bundle.__file__).with_name("wheels.txt")) if each.stage == 1}
    assert {"pytest", "pytest-timeout", "iniconfig", "pluggy", "packaging", "pygments"} <= names
