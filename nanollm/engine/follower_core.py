"""FollowerCore: what stands in for EngineCore on ranks above 0 under torchrun."""

from collections.abc import Sequence as AbstractSequence
from typing import Any

import numpy as np

from nanollm.config import EngineConfig, ModelConfig
from nanollm.engine.engine_core import EngineCore, EngineStats
from nanollm.engine.grammars import Grammars
from nanollm.engine.sequence import Sequence
from nanollm.outputs import EngineOutput, unpack_outputs
from nanollm.runtime.channel import Kind
from nanollm.runtime.executor import Follower
from nanollm.runtime.ranks import EngineDeadError
from nanollm.sampling_params import SamplingParams


class FollowerCore(EngineCore):
    """Validates requests as rank 0 does, but schedules nothing: step() runs rank 0's plans until it sends outputs."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig, follower: Follower, grammars: Grammars) -> None:
        sizes: Any = follower  # all that checks of requests look at
        super().__init__(config, model_config, sizes, overlap=False, grammars=grammars)
        self._follower = follower
        self._made: list[Sequence] = []  # for the call that is not agreed on yet
        self._expected: set[int] = set()  # requests whose outputs are waited for

    @property
    def has_unfinished(self) -> bool:
        return False

    def make_sequences(self, token_ids: AbstractSequence[int], params: SamplingParams, **kwargs: Any) -> list[Sequence]:
        sequences = super().make_sequences(token_ids, params, **kwargs)
        self._made += sequences
        return sequences

    def add(self, seq: Sequence) -> None:
        """Expect its outputs; rank 0 queues it."""
        self._expected.add(seq.request_id)

    def abort(self, request_id: int) -> bool:
        self._expected.discard(request_id)
        return False

    def step(self) -> list[EngineOutput]:
        """Run plans until rank 0 has outputs, and return those. EngineDeadError if it can't go on."""
        while True:
            outputs = unpack_outputs(self._serve(Kind.OUTPUTS))
            # Rank 0 may be running requests that it alone was given, those of compute_logits.
            if ours := [output for output in outputs if output.request_id in self._expected]:
                return ours

    def agree_on_call(self, digest: bytes) -> bool:
        """Whether every rank was called with the same inputs; digest is of this rank's."""
        self._follower.send(Kind.CALL, digest)
        same, next_request_id = np.frombuffer(self._serve(Kind.CALL), np.int32).tolist()
        # Rank 0 may have made calls of its own, or this rank one that was refused: number requests as rank 0 does.
        shift = next_request_id - self.next_request_id
        self.next_request_id = next_request_id
        for seq in self._made:
            seq.request_id += shift
        self._made.clear()
        return bool(same)

    def reset(self) -> None:
        """Nothing is scheduled here."""

    def get_stats(self) -> EngineStats:
        raise RuntimeError("get_stats works on rank 0 only")

    def reset_prefix_cache(self) -> None:
        raise RuntimeError("reset_prefix_cache works on rank 0 only")

    def _serve(self, until: Kind) -> bytearray:
        """Run plans until a message of this kind comes; returns its payload."""
        kind, payload = self._follower.serve()
        while kind is Kind.OUTPUTS is not until:  # of requests that this rank doesn't wait for
            kind, payload = self._follower.serve()
        if kind is not until:
            raise EngineDeadError(
                f"rank 0 sent {kind.name} where {until.name} was due: do all ranks make the same calls?"
            )
        return payload
