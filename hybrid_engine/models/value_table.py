"""The table of a value model: a model of some architecture whose output is one number for each token.

In place of the rows of the vocabulary the output layer has one row, `score.weight` [1, hidden_size]: the name that it
has in transformers' classes for the classification of sequences and tokens. Layers for multi-token prediction only
serve a loss over the vocabulary, and are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hybrid_engine.models.packing import Replicated
from hybrid_engine.models.table import ModelTable, Rule

HEAD = "score.weight"

_LAYER = "output_layer."


def value_table(table: ModelTable) -> ModelTable:
    """The table of the value model on this architecture. Embedding and head are two weights in it."""
    named = ((tuple(name for name in rule.names if not name.startswith(_LAYER)), rule) for rule in table.rules)
    rules = [Rule(names, rule.packing) for names, rule in named if names]
    of_head = _packed(table.rules) - _packed(rules)
    shapes = {name: shape for name, shape in table.shapes.items() if table.is_served(name) and name not in of_head}
    shapes[HEAD] = (1, table.dims.hidden_size)
    return replace(
        table,
        dims=replace(table.dims, tied_embeddings=False, num_mtp_layers=0),
        rules=(*rules, Rule((f"{_LAYER}weight",), Replicated(HEAD))),
        shapes=shapes,
        extras=replace(table.extras, logit_softcap=None),
        copies={},
        unserved=(),
        head="value",
        may_be_new=frozenset({HEAD}),
        left_out=frozenset({*table.shapes, *table.copies, "lm_head.weight"} - shapes.keys()),
    )


def _packed(rules: Iterable[Rule]) -> set[str]:
    """The patterns of all tensors that some rules pack."""
    return {tensor for rule in rules for tensor in rule.packing.tensors()}
