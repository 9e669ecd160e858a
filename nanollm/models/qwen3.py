"""Qwen3 (Qwen Team, 2025): the whole model, at any tensor-parallel degree."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from nanollm.config import ModelConfig
from nanollm.distributed.tp_group import TPGroup
from nanollm.layers.activation import GatedMLP
from nanollm.layers.attention import Attention
from nanollm.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from nanollm.layers.hidden import Hidden
from nanollm.layers.moe import SparseMLP
from nanollm.layers.norm import RMSNorm
from nanollm.layers.rotary import rope_table
from nanollm.layers.step_batch import StepBatch
from nanollm.layers.weights import TensorPart
from nanollm.models.checkpoint import Checkpoint

logger = logging.getLogger("nanollm")


class DecoderLayer(nn.Module):
    """Pre-norm attention, then pre-norm feed-forward, each adding to the residual stream."""

    def __init__(self, config: ModelConfig, tp: TPGroup, *, qk_norm: bool, sparse: bool = False) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, tp, qk_norm=qk_norm)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SparseMLP(config, tp) if sparse else GatedMLP(config, tp)

    def forward(self, hidden: Hidden, batch: StepBatch, rope_PH: Tensor) -> Hidden:
        hidden = self.self_attn(self.input_layernorm(hidden), batch, rope_PH)
        return self.mlp(self.post_attention_layernorm(hidden))


class Decoder(nn.Module):
    """Embedding, decoder layers and the final norm; named so that module paths are Hugging Face's tensor names."""

    def __init__(self, config: ModelConfig, tp: TPGroup, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, batch: StepBatch, rope_PH: Tensor) -> Hidden:
        hidden = self.embed_tokens(batch.token_ids_T)
        for layer in self.layers:
            hidden = layer(hidden, batch, rope_PH)
        return self.norm(hidden)


class Qwen3ForCausalLM(nn.Module):
    """hidden() takes a StepBatch, lm_head gives this rank's logits [L, V_r]. max_position bounds the rotary table.

    A model that differs in its decoder layers only overrides make_layer, whose index counts layers from 0.
    """

    qk_norm = True

    def __init__(self, config: ModelConfig, tp: TPGroup, max_position: int) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, tp, (self.make_layer(config, tp, i) for i in range(config.num_layers)))
        tied = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, tp, tied_to=tied)
        # Made on the CPU on purpose: the same table whatever the device and dtype.
        with torch.device("cpu"):
            rope_PH = rope_table(config.rope, config.head_dim, max_position)
        self.rope_PH = nn.Buffer(rope_PH.to(self.lm_head.weight.device), persistent=False)

    def make_layer(self, config: ModelConfig, tp: TPGroup, index: int) -> nn.Module:
        return DecoderLayer(config, tp, qk_norm=self.qk_norm)

    def hidden(self, batch: StepBatch) -> Hidden:
        """What the LM head reads, at the tokens whose logits are wanted."""
        hidden = self.model(batch, self.rope_PH)
        return hidden if batch.logit_rows_L is None else hidden.rows(batch.logit_rows_L)

    def weights_per_token(self) -> int:
        """How many of this rank's weights a token is multiplied with in one layer: in that where they are the most."""

        def weights(layer: nn.Module) -> int:
            idle = sum(module.idle_weights for module in layer.modules() if isinstance(module, SparseMLP))
            return sum(parameter.numel() for parameter in layer.parameters()) - idle

        return max(map(weights, self.model.layers))

    @contextmanager
    def few_layers(self) -> Iterator[None]:
        """Inside, the model has its first layer, which has no residual to add to, and one more of each kind, and still
        launches every kind of kernel that it has. Layers of the same modules are of a kind; override this if not."""
        layers = self.model.layers
        kinds = {tuple(map(type, layer.modules())): layer for layer in layers[1:]}
        self.model.layers = nn.ModuleList([layers[0], *kinds.values()])
        try:
            yield
        finally:
            self.model.layers = layers

    def untie_if_heads_differ(self, checkpoint: Checkpoint) -> None:
        """Where config.json says that the head is the embeddings, but the checkpoint has another one, that one counts,
        as in transformers. Each rank decides for its own rows."""
        (part,) = self.model.embed_tokens.tensor_parts("model.embed_tokens")
        found = [checkpoint.shapes.get(name) for name in (part.name, "lm_head.weight")]
        if self.lm_head.tied and found == [part.shape, part.shape] and part.target.numel():
            embeddings_rD, head_rD = (checkpoint.read(name, part.index) for name in (part.name, "lm_head.weight"))
            if embeddings_rD.dtype != head_rD.dtype or not torch.equal(embeddings_rD, head_rD):
                logger.warning("config.json ties lm_head.weight to the embeddings, but they differ: not tied")
                self.lm_head.untie()

    def tensor_parts(self) -> list[TensorPart]:
        """What to load: every part of every parameter of this rank."""
        layers = ((path, module) for path, module in self.named_modules() if path and hasattr(module, "tensor_parts"))
        return [part for path, module in layers for part in module.tensor_parts(path)]

    def ignored_tensors(self) -> list[str]:
        """Checkpoint tensors that may be there without a use: the head of a model whose embeddings are tied."""
        return ["lm_head.weight"] if self.lm_head.tied else []
