"""A hook of mkdocs: pages of the site that are not in docs/, and links to the repository's files.

Every page is written to be read in the repository too, so that its links are relative to its own
file. On the site a link to another page leads to that page, and one to a source file, which the
site does not have, becomes plain text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]

# Page of the site -> file of the repository.
OUTSIDE = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "example.md": "examples/gpt_rl/README.md",
    "patches.md": "patches/README.md",
    "recipe.md": "examples/recipes/README.md",
    "security.md": "SECURITY.md",
}
# Heading of the API reference -> names that the site documents by their docstrings.
REFERENCE = {
    "Configuration": ["config.loading.load_config", "config.keys.HybridConfig"],
    "GRPO and PPO: `hybrid_engine.rl`": [
        "rl.loop.train",
        "rl.loop.Loop",
        "rl.conversations.converse",
        "rl.conversation_state.Conversation",
        "rl.config.LoopConfig",
        "rl.config.GrpoConfig",
        "rl.config.PpoConfig",
        "rl.run_files.RunFiles",
        "rl.losses",
    ],
    "The worker": ["trainer.worker.ActorHybridWorker"],
    "Reference and critic models": [
        "trainer.reference_and_critic.ReferenceModel",
        "trainer.reference_and_critic.ValueModel",
        "trainer.reference_and_critic.generalized_advantages",
        "trainer.reference_and_critic.value_loss",
    ],
    "More of PPO: `hybrid_engine.trainer.reference_and_critic.advantages`": [
        "trainer.reference_and_critic.advantages.whitened",
        "trainer.reference_and_critic.advantages.explained_variance",
    ],
    "Batches: `hybrid_engine.trainer.batches`": [
        "trainer.batches.build_batch",
        "trainer.batches.pack",
        "trainer.batches.pack_rows",
        "trainer.batches.PackedRows",
        "trainer.batches.mean_weights",
    ],
    "The engine": ["hybrid_engine.HybridEngine", "trainer.megatron.train_engine.TrainEngine"],
    "Your own Megatron": ["attaching.attachment.prepare", "attaching.attachment.attach"],
    "Generation": [
        "backends.vllm.Sampling",
        "backends.vllm.Completion",
        "backends.vllm.InferenceEngine",
    ],
    "Arguments for chats: `hybrid_engine.backends.vllm.prompts`": [
        "backends.vllm.prompts.ChatArguments",
    ],
    "Switches": [
        "switch.report.ReshardReport",
        "switch.states.State",
        "switch.sharding_manager.ShardingManager",
    ],
    "A job": ["ranks.job.Job"],
    "Ports: `hybrid_engine.ports`": ["ports"],
    "Errors: `hybrid_engine.errors`": ["errors"],
}
PATCHES = [
    "megatron_patches.patch.apply",
    "megatron_patches.patch.revert",
    "megatron_patches.patch.Patch",
]
REFERENCE_PAGE = "api.md"

_FILE = re.compile(r"^<!-- file: (\S+) -->$", re.MULTILINE)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def reference() -> str:
    """Return the page of the API reference, which mkdocstrings fills with docstrings."""
    names = {
        heading: [f"hybrid_engine.{name}" for name in documented]
        for heading, documented in REFERENCE.items()
    }
    names["Patches: `megatron_patches`"] = PATCHES
    lines = [
        "# API reference",
        "Import names from `hybrid_engine`, unless the heading gives another module.",
    ]
    for heading, documented in names.items():
        lines += [f"## {heading}", *(f"::: {name}" for name in documented)]
    return "\n\n".join(lines) + "\n"


def source_of(page: str) -> str:
    """Return the file of the repository that a page of the site is made of."""
    return OUTSIDE.get(page, f"docs/{page}")


def page_of(source: str) -> str | None:
    """Return the site's page or picture of a file of the repository; None if it is not there."""
    pages = {file: page for page, file in OUTSIDE.items()}
    inside = (
        source.removeprefix("docs/")
        if source.startswith("docs/") and not source.endswith(".py")
        else None
    )
    return pages.get(source, inside)


def with_links_of_the_site(markdown: str, page: str) -> str:
    """Return a page's text with links relative to the page, or removed if they leave the site."""

    def replaced(found: re.Match[str]) -> str:
        picture, text, link, anchor = found.groups()
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source_of(page)), link))
        there = page_of(posixpath.join(target, "README.md") if (ROOT / target).is_dir() else target)
        if there is None:
            return text
        path = posixpath.relpath(there, posixpath.dirname(page) or ".")
        return f"{picture}[{text}]({path}{anchor or ''})"

    return _LINK.sub(replaced, markdown)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of `OUTSIDE` and the API reference."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, REFERENCE_PAGE, content=reference()))
    for page, source in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page, and put in the files that it names: the site has no sources."""
    whole = with_links_of_the_site(markdown, page.file.src_uri)
    return _FILE.sub(lambda found: f"```python\n{(ROOT / found[1]).read_text()}```", whole)
