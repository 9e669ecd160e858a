"""FollowerCore: what stands in for EngineCore on ranks above 0 under torchrun."""

from array import array

from nanollm.config import EngineConfig, ModelConfig
from nanollm.engine.engine_core import EngineCore, EngineStats
from nanollm.engine.sequence import Sequence
from nanollm.outputs import EngineOutput
from nanollm.runtime.channel import Kind, LinkClosedError
from nanollm.runtime.executor import Follower
from nanollm.runtime.ranks import EngineDeadError
from nanollm.runtime.step_plan import StepPlan, StepResult

_FINISH_REASONS = (None, "stop", "length", "abort")


class FollowerCore(EngineCore):
    """Validates requests as rank 0 does, but schedules nothing: step() runs rank 0's plans until it sends outputs."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig, follower: Follower) -> None:
        super().__init__(config, model_config, _NoExecutor(follower), overlap=False)
        self._follower = follower

    @property
    def has_unfinished(self) -> bool:
        return False

    def add(self, seq: Sequence) -> None:
        """Nothing: rank 0 queues it."""

    def abort(self, request_id: int) -> bool:
        return False

    def step(self) -> list[EngineOutput]:
        """Run plans until rank 0 has outputs, and return those. EngineDeadError if rank 0 is gone."""
        return unpack_outputs(self._serve(Kind.OUTPUTS))

    def agree_on_call(self, digest: bytes) -> bool:
        """Whether every rank was called with the same inputs; digest is of this rank's."""
        self._follower.send(Kind.CALL, digest)
        return self._serve(Kind.CALL) == b"\1"

    def get_stats(self) -> EngineStats:
        raise RuntimeError("get_stats works on rank 0 only")

    def reset_prefix_cache(self) -> None:
        raise RuntimeError("reset_prefix_cache works on rank 0 only")

    def _serve(self, until: Kind) -> bytearray:
        try:
            kind, payload = self._follower.serve()
        except LinkClosedError:
            raise EngineDeadError("rank 0 is gone") from None
        except Exception as error:
            self._follower.report()
            raise EngineDeadError(f"this rank failed: {error}") from error
        if kind is not until:
            raise EngineDeadError(
                f"rank 0 sent {kind.name} where {until.name} was due: do all ranks make the same calls?"
            )
        return payload


class _NoExecutor:
    """Enough of an executor for the checks that requests are held against."""

    def __init__(self, follower: Follower) -> None:
        self.num_kv_blocks, self.max_model_len = follower.num_kv_blocks, follower.max_model_len

    def submit(self, plan: StepPlan) -> None:
        raise RuntimeError("only rank 0 schedules")

    def collect(self) -> StepResult:
        raise RuntimeError("only rank 0 schedules")

    def discard(self) -> None:
        """Nothing is ever submitted here."""


def pack_outputs(outputs: list[EngineOutput]) -> bytes:
    """Outputs as int32 words: id, finish reason, stop token or -1, cached tokens, number of new tokens, new tokens."""
    words = array("i")
    for output in outputs:
        stop = -1 if output.stop_reason is None else output.stop_reason
        finish = _FINISH_REASONS.index(output.finish_reason)
        words.extend([output.request_id, finish, stop, output.num_cached_tokens, len(output.new_token_ids)])
        words.extend(output.new_token_ids)
    return words.tobytes()


def unpack_outputs(payload: "bytes | bytearray") -> list[EngineOutput]:
    """The inverse of pack_outputs; metrics and logits stay on rank 0."""
    words, outputs, at = array("i", payload), [], 0
    while at < len(words):
        request_id, finish, stop, num_cached, count = words[at : at + 5]
        at += 5 + count
        new_token_ids = words[at - count : at].tolist()
        stop_reason = None if stop < 0 else stop
        outputs.append(EngineOutput(request_id, new_token_ids, _FINISH_REASONS[finish], stop_reason, num_cached))
    return outputs
