"""A minute of bursts, aborts and preemptions on a GPU leaves nothing behind; with NANOLLM_SOAK_SECONDS=300, five."""

import pytest
import torch

from nanollm import LLM
from tests.soak import Soak, soak_seconds

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SECONDS = soak_seconds(60)


@pytest.mark.timeout(SECONDS + 300)
def test_bursts_and_aborts_leave_nothing_behind_on_a_gpu() -> None:
    # Each running request keeps one block back for its growth: small blocks keep back little, and it is preempted.
    settings = {"block_size": 16, "num_kv_blocks": 1200, "max_num_seqs": 256, "max_num_batched_tokens": 2048}
    with LLM("qwen3-0.6b", load_format="dummy", skip_tokenizer_init=True, max_model_len=2048, **settings) as llm:
        soak = Soak(llm, probes_in_crowd=False)
        soak.run(SECONDS)
    soak.check()
