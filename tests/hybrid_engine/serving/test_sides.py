"""Each side alone, in a job of one process that has no weights: what is kept of a job when it goes wrong."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from msgspec.structs import replace

from hybrid_engine.errors import HybridEngineError
from hybrid_engine.serving.invitation import TOKEN, Invitation, MeetingPlace, Update
from hybrid_engine.serving.receiver import WeightReceiver
from hybrid_engine.serving.roles import NoInference

CPU = torch.device("cpu")


class NoWeights(NoInference):
    """A worker's."""

    def take_rank(self, rank: int) -> None:
        self.rank = rank


def test_an_invitation_that_is_refused_ends_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "secret")
    receiver = WeightReceiver(NoWeights(), NoWeights(), 0, CPU)
    with closing(MeetingPlace(None)) as place:
        invitation = Invitation(
            place=place.place, name=place.name, first_rank=0, num_workers=1, size=1, settings={"timeout_seconds": 60}
        ).signed()
        receiver.join(invitation)
        receiver.switch(Update(name=place.name, to="infer", version=3))
        for refused in (replace(invitation, proof=""), replace(invitation, num_workers=0).signed()):
            with pytest.raises(HybridEngineError, match=r"HYBRID_ENGINE_TOKEN|counts 0 workers"):
                receiver.join(refused)
        receiver.switch(Update(name=place.name, to="train", version=3))
        receiver.leave()
