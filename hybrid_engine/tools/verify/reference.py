"""Log-probabilities by transformers, computed in a separate process.

The process is separate because vLLM replaces some of transformers' classes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from contextlib import AbstractContextManager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from hybrid_engine.errors import ReshardError
from hybrid_engine.ranks.signals_and_forks import end_with_parent

if TYPE_CHECKING:
    import numpy
    import torch

_SECONDS_TO_END = 10


class Reference(AbstractContextManager["Reference"]):
    """Client of a process that computes log-probabilities with transformers, on the CPU.

    The first use starts the process. It ends with the context manager, and also when this process
    ends for any reason. A multiprocessing pool would leave its named semaphores in /dev/shm when
    all processes are killed.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def __exit__(self, *error: object) -> None:
        self._end()

    def _end(self, patience: float = _SECONDS_TO_END) -> int | None:
        """End the process and return its exit status; None if it was not started.

        The next use starts another process.
        """
        process = self._process
        connection = self._connection
        self._process = None
        self._connection = None
        if process is None or connection is None:
            return None
        connection.close()
        try:
            return process.wait(patience)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def log_probs(
        self,
        checkpoint: Path,
        tokens: torch.Tensor,
        dtype: str = "float32",
        timeout: float = 600,
    ) -> torch.Tensor:
        """Return the log-probabilities of every token of the vocabulary after every position.

        Args:
            checkpoint: directory of the model.
            tokens: [B, S] int64.
            dtype: dtype of the computation.
            timeout: seconds.

        Returns:
            [B, S, vocabulary] float32.

        Raises:
            ReshardError: transformers failed (the message has its error), its process exited, or
                the timeout expired.
        """
        import torch

        connection = self._connection or self._start()
        try:
            connection.send((str(checkpoint), tokens.tolist(), dtype))
            if not connection.poll(timeout):
                # A late answer would be taken for the answer to the next request.
                self._end(patience=0)
                raise ReshardError(
                    "transformers computed no log-probabilities "
                    f"of {checkpoint} within {timeout:g} s",
                    code="reference-timeout",
                )
            values, error = connection.recv()
        except (EOFError, ConnectionError):
            status = self._end()
            raise ReshardError(
                f"the transformers process exited with status {status} on {checkpoint}",
                code="reference-exited",
            ) from None
        if error is not None:
            raise ReshardError(
                f"transformers cannot compute log-probabilities of {checkpoint}:\n{error}",
                code="reference-failed",
            )
        return torch.from_numpy(values)

    def _start(self) -> Connection:
        self._connection, other_end = Pipe()
        with other_end:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "hybrid_engine.tools.verify.reference",
                    str(other_end.fileno()),
                    str(os.getpid()),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=[other_end.fileno()],
            )
        return self._connection


def main(descriptor: str, parent: str) -> None:
    """Answer requests from `descriptor` until its other end is closed or process `parent` ends."""
    end_with_parent(int(parent))
    with Connection(int(descriptor)) as connection:
        while True:
            try:
                request = connection.recv()
            except EOFError:
                return
            try:
                connection.send((_log_probs(*request), None))
            except Exception:
                connection.send((None, traceback.format_exc()))


def _log_probs(checkpoint: str, tokens: list[list[int]], dtype: str) -> numpy.ndarray:
    import torch
    import transformers

    from hybrid_engine.models.families import read_model

    torch.set_num_threads(1)
    # The class of the table: AutoModelForCausalLM selects by model_type, which transformers may not
    # know (kimi_k2), and requires the code of an auto_map. The loader also selects by model_type
    # when it fuses experts, so it is set to that of the class.
    table, values = read_model(Path(checkpoint))
    model_class = getattr(transformers, table.architecture)
    config_class = model_class.config_class
    config = config_class.from_dict({**values, "model_type": config_class.model_type})
    model = model_class.from_pretrained(
        checkpoint,
        config=config,
        dtype=getattr(torch, dtype),
        # Others ignore features that they lack, such as Gemma-2's soft caps.
        attn_implementation="eager",
    )
    with torch.no_grad():
        return model.eval()(torch.tensor(tokens)).logits.float().log_softmax(-1).numpy()


if __name__ == "__main__":
    main(*sys.argv[1:])
