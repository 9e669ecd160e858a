"""Which class runs which architecture of config.json."""

from nanollm.models.llama import LlamaForCausalLM
from nanollm.models.qwen2 import Qwen2ForCausalLM
from nanollm.models.qwen3 import Qwen3ForCausalLM

# Its keys are config.SUPPORTED_ARCHITECTURES, which can be read without importing torch.
MODELS: dict[str, type[Qwen3ForCausalLM]] = {
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "LlamaForCausalLM": LlamaForCausalLM,
}
