"""What set-up refuses of a job, and what it says of its time, with fakes of both engines."""

from __future__ import annotations

import time
from unittest import mock

import pytest
import torch

from hybrid_engine.errors import ConfigError, ReshardError
from hybrid_engine.ranks.agreement import Agreement
from hybrid_engine.ranks.job import Job
from tests.hybrid_engine.switch.fakes import INFER, Rig


def refusal_of(rig: Rig) -> str:
    """Before there is a group, or anything is moved."""
    with mock.patch.object(Job, "new_group") as new_group, pytest.raises(ConfigError) as caught:
        rig.build()
    assert not new_group.called
    assert not rig.offloader.is_offloaded("param")
    return str(caught.value)


def test_a_job_on_another_device_than_the_training_weights_is_refused(job: None) -> None:
    assert refusal_of(Rig(build=False, device="meta")).endswith(
        "Job.device: meta, but training weights of rank 0 are on cpu. Pass their device: Job.join(..., device=...)"
    )


@pytest.mark.parametrize(("device", "refused"), [("cuda", False), ("cuda:1", False), ("cuda:0", True)])
def test_a_device_without_a_number_is_any_of_its_kind(job: None, device: str, refused: bool) -> None:
    rig = Rig(build=False, device=device)
    rig.training.param = mock.Mock(device=torch.device("cuda", 1))  # no further than that: it has no memory to export
    with pytest.raises(ConfigError if refused else ReshardError) as caught:
        rig.build()
    assert refused == ("Job.device: cuda:0, but training weights of rank 0 are on cuda:1" in str(caught.value))


def test_a_job_of_another_timeout_than_the_configuration_is_refused(job: None) -> None:
    rig = Rig(build=False)
    rig.config = rig.config.model_copy(update={"timeout_seconds": 61.0})
    assert "generate_config.timeout_seconds: 61, but the job was joined with 60" in refusal_of(rig)


def test_waits_for_what_other_ranks_hold_count_as_set_up(job: None, monkeypatch: pytest.MonkeyPatch) -> None:
    gather = Agreement.gather

    def slow(self: Agreement, value: object, phase: str = "gather") -> list[object]:
        time.sleep(0.2 if phase in ("exchange of layouts", "comparison of plans") else 0)
        return gather(self, value, phase)

    monkeypatch.setattr(Agreement, "gather", slow)
    seconds = Rig().manager.enter(INFER).seconds_by_phase
    assert seconds["layout"] > 0.4  # of both sides
    assert seconds["plan"] > 0.2
