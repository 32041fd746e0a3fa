"""Tiny models of transformers, built from configurations: nothing is downloaded."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

Kind = Literal[
    "encoder", "decoder", "encoder-decoder", "mixture of experts", "state space", "vision", "speech", "text and image"
]
Inputs = Callable[[], dict[str, Any]]
Prepare = Callable[[nn.Module, Mapping[str, Any]], None]
Loss = Callable[[Any, Mapping[str, Any]], Tensor]

VOCABULARY = 40
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 32, "initializer_range": 0.2,
}  # fmt: skip
_DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
_ENCODER = {**_SIZES, **_DROPOUT}
# A cache of keys is of no use in training; with checkpoints it is a logged warning, which breaks the graph.
_DECODER = {**_SIZES, **_SPECIAL, "num_key_value_heads": 1, "attention_dropout": 0.1, "use_cache": False}
_EXPERTS = {**_DECODER, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
_SEQ2SEQ = {
    **_SPECIAL, "vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
    "max_position_embeddings": 32, "dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1,
    "init_std": 0.2, "use_cache": False, "decoder_start_token_id": 1,
}  # fmt: skip
_T5 = {
    "vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2,
    "dropout_rate": 0.1, "use_cache": False, "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
_STATES = {
    **_SPECIAL, "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, "use_cache": False
}  # fmt: skip
_IMAGES = {
    **_DROPOUT, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
    "image_size": 8, "patch_size": 4, "num_labels": 5, "initializer_range": 0.2,
}  # fmt: skip
_WAVES = {
    **_SIZES, "num_hidden_layers": 1, "hidden_dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1,
    "feat_proj_dropout": 0.1,
    "final_dropout": 0.1, "layerdrop": 0.0, "conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (8, 4),
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2,
    "apply_spec_augment": False, "ctc_zero_infinity": True, "pad_token_id": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """One model class, its configuration, its inputs, and what torch.compile needs to trace it as one graph.

    Attributes:
        name: Name of the model class.
        kind: What it is.
        config: Name of the class of its configuration.
        settings: What is set in the configuration.
        inputs: Makes the inputs; ``labels`` are among them where the model computes the loss itself.
        has_checkpoints: Whether gradient checkpointing is switched on.
        dtype: float64, where the model takes it.
        loss: From the model's output and the inputs to the loss.
        obstacle: What breaks the graph if nothing is done, in torch.compile alone too.
        remedy: What makes one graph of it; "" where nothing does.
        prepare: Applies the remedy to the model.
        remedied_inputs: Inputs by which the remedy is applied.
        variant: What tells two cases of one class apart.
    """

    name: str
    kind: Kind
    config: str
    settings: Mapping[str, Any]
    inputs: Inputs
    has_checkpoints: bool = False
    dtype: torch.dtype = torch.float64
    loss: Loss = lambda out, _: out.loss
    obstacle: str = ""
    remedy: str = ""
    prepare: Prepare | None = None
    remedied_inputs: Inputs | None = None
    variant: str = ""

    @property
    def works(self) -> bool:
        """Whether the model can be traced as one graph, perhaps by the remedy."""
        return not self.obstacle or bool(self.remedy)

    def make(self) -> nn.Module:
        """The model as its class makes it, in training mode."""
        library = importlib.import_module("transformers")
        model: nn.Module = getattr(library, self.name)(getattr(library, self.config)(**self.settings))
        if self.has_checkpoints:
            model.activation_checkpointing_enable({"use_reentrant": False})
        return model.to(self.dtype).train()

    def make_inputs(self, *, remedied: bool = True) -> dict[str, Any]:
        """The inputs, in the model's dtype."""
        made = (self.remedied_inputs if remedied and self.remedied_inputs is not None else self.inputs)()
        return {
            name: t.to(self.dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for name, t in made.items()
        }


def _ids(*shape: int) -> Tensor:
    return torch.randint(3, VOCABULARY, shape)


def _tokens() -> dict[str, Any]:
    return {"input_ids": _ids(2, 6), "labels": _ids(2, 6)}


def _padded() -> dict[str, Any]:
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1, 4:] = 0
    return {**_tokens(), "attention_mask": mask}


def _sentences() -> dict[str, Any]:
    return {"input_ids": _ids(2, 6), "labels": torch.tensor([1, 3])}


def _images(size: int = 8) -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.tensor([1, 3])}


def _segments() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.randint(0, 5, (2, 16, 16))}


def _spectrograms() -> dict[str, Any]:
    return {"input_features": torch.randn(2, 8, 16), "labels": _ids(2, 5)}


def _patches_of_sound() -> dict[str, Any]:
    return {"input_values": torch.randn(2, 16, 8), "labels": torch.tensor([1, 3])}


def _sound() -> dict[str, Any]:
    return {"input_values": torch.randn(2, 160)}


def _transcribed() -> dict[str, Any]:
    return {**_sound(), "labels": _ids(2, 3)}


def _pairs() -> dict[str, Any]:
    return {"input_ids": _ids(2, 6), "pixel_values": torch.randn(2, 3, 8, 8), "return_loss": True}


def _ctc(out: Any, _: Mapping[str, Any]) -> Tensor:
    """The loss that the model would compute, outside of it."""
    scores = out.logits.log_softmax(-1).transpose(0, 1)
    lengths = [torch.full((2,), n) for n in (scores.shape[0], 3)]
    return functional.ctc_loss(scores, torch.tensor([[4, 7, 9], [5, 5, 8]]), *lengths, zero_infinity=True)


def _freeze_encoder(model: nn.Module, _: Mapping[str, Any]) -> None:
    model.freeze_feature_encoder()


def _freeze_if_possible(model: nn.Module, _: Mapping[str, Any]) -> None:
    """What reads the sound sets ``requires_grad`` of an input while its parameters need gradients."""
    model.feature_extractor._freeze_parameters()


def _use_batched_experts(model: nn.Module, _: Mapping[str, Any]) -> None:
    model.set_experts_implementation("batched_mm")


def _call_once(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    with torch.no_grad():
        model(**inputs)


_RECORDED: dict[str, Any] = {
    "remedy": "one call under `torch.no_grad()` before `gr.transform`",
    "prepare": _call_once,
}
_LOCK = "takes a lock to install the hooks that record {}"

ARCHITECTURES = (
    Architecture("BertForMaskedLM", "encoder", "BertConfig", _ENCODER, _padded),
    Architecture(
        "RobertaForTokenClassification", "encoder", "RobertaConfig",
        {**_ENCODER, "num_hidden_layers": 1, "num_labels": VOCABULARY, "use_cache": False}, _tokens,
        has_checkpoints=True,
    ),
    Architecture(
        "DistilBertForSequenceClassification", "encoder", "DistilBertConfig",
        {"vocab_size": VOCABULARY, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32, "num_labels": 5,
         "max_position_embeddings": 32, "initializer_range": 0.2}, _sentences,
    ),
    Architecture("AlbertForMaskedLM", "encoder", "AlbertConfig", {**_ENCODER, "embedding_size": 8}, _tokens),
    Architecture(
        "DebertaV2ForTokenClassification", "encoder", "DebertaV2Config",
        {**_ENCODER, "num_hidden_layers": 1, "num_labels": VOCABULARY, "relative_attention": True,
         "pos_att_type": ["p2c", "c2p"]}, _tokens,
    ),
    Architecture(
        "ModernBertForMaskedLM", "encoder", "ModernBertConfig",
        {**_SIZES, **_SPECIAL, "cls_token_id": 1, "sep_token_id": 2, "attention_dropout": 0.1, "mlp_dropout": 0.1,
         "embedding_dropout": 0.1, "local_attention": 4}, _tokens,
    ),
    Architecture(
        "GPT2LMHeadModel", "decoder", "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "use_cache": False,
         "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2}, _tokens, has_checkpoints=True,
    ),
    Architecture("LlamaForCausalLM", "decoder", "LlamaConfig", _DECODER, _padded, has_checkpoints=True),
    Architecture(
        "Qwen2ForCausalLM", "decoder", "Qwen2Config",
        {**_DECODER, "num_hidden_layers": 1, "tie_word_embeddings": True}, _tokens,
    ),
    Architecture(
        "Gemma2ForCausalLM", "decoder", "Gemma2Config",
        {**_DECODER, "num_hidden_layers": 1, "head_dim": 8, "sliding_window": 4}, _tokens,
    ),
    Architecture(
        "OPTForCausalLM", "decoder", "OPTConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 32,
         "max_position_embeddings": 32, "word_embed_proj_dim": 16, "dropout": 0.1, "use_cache": False,
         "init_std": 0.2}, _tokens,
    ),
    Architecture(
        "BloomForCausalLM", "decoder", "BloomConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 1, "n_head": 2, "hidden_dropout": 0.1,
         "attention_dropout": 0.1, "use_cache": False, "initializer_range": 0.2}, _tokens, has_checkpoints=True,
    ),
    Architecture("T5ForConditionalGeneration", "encoder-decoder", "T5Config", _T5, _tokens),
    Architecture("BartForConditionalGeneration", "encoder-decoder", "BartConfig", _SEQ2SEQ, _tokens),
    Architecture(
        "MarianMTModel", "encoder-decoder", "MarianConfig", _SEQ2SEQ, _tokens, has_checkpoints=True
    ),
    Architecture(
        "MixtralForCausalLM", "mixture of experts", "MixtralConfig",
        {**_DECODER, "num_hidden_layers": 1, "num_local_experts": 3, "num_experts_per_tok": 2,
         "output_router_logits": True}, _tokens, dtype=torch.float32,  # grouped_mm takes no float64
        variant="with the loss of the router", obstacle=_LOCK.format("the router's scores"), **_RECORDED,
    ),
    Architecture(
        "MixtralForCausalLM", "mixture of experts", "MixtralConfig",
        {**_DECODER, "num_local_experts": 3, "num_experts_per_tok": 2, "experts_implementation": "eager"}, _tokens,
        variant='`experts_implementation="eager"`',
        obstacle="loops over the experts that were chosen, which depends on data",
        remedy='`model.set_experts_implementation("batched_mm")`', prepare=_use_batched_experts,
    ),
    Architecture(
        "Qwen2MoeForCausalLM", "mixture of experts", "Qwen2MoeConfig",
        {**_EXPERTS, "num_hidden_layers": 1, "shared_expert_intermediate_size": 8,
         "experts_implementation": "batched_mm"}, _tokens,
        variant='`experts_implementation="batched_mm"`',
    ),
    Architecture(
        "OlmoeForCausalLM", "mixture of experts", "OlmoeConfig", {**_EXPERTS, "num_hidden_layers": 1}, _tokens,
        dtype=torch.float32, has_checkpoints=True,
    ),
    Architecture(
        "SwitchTransformersForConditionalGeneration", "mixture of experts", "SwitchTransformersConfig",
        {**_T5, "num_decoder_layers": 1, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1,
         "num_experts": 2, "expert_capacity": 8}, _tokens,
        obstacle="converts parameters in the forward (`self.classifier.to(dtype)`), and loops over the experts that "
        "were chosen, which depends on data",
    ),
    Architecture("MambaForCausalLM", "state space", "MambaConfig", _STATES, _tokens),
    Architecture(
        "Mamba2ForCausalLM", "state space", "Mamba2Config",
        {**_STATES, "expand": 2, "num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4}, _tokens,
    ),
    Architecture("ViTForImageClassification", "vision", "ViTConfig", _IMAGES, _images, has_checkpoints=True),
    Architecture(
        "SwinForImageClassification", "vision", "SwinConfig",
        {**_DROPOUT, "image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2],
         "window_size": 4, "drop_path_rate": 0.1, "num_labels": 5, "initializer_range": 0.2}, partial(_images, 16),
    ),
    Architecture(
        "ConvNextForImageClassification", "vision", "ConvNextConfig",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 2, "num_labels": 5,
         "drop_path_rate": 0.1, "initializer_range": 0.2}, partial(_images, 16),
    ),
    Architecture(
        "ResNetForImageClassification", "vision", "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "num_labels": 5},
        partial(_images, 16),
    ),
    Architecture(
        "SegformerForSemanticSegmentation", "vision", "SegformerConfig",
        {**_DROPOUT, "num_encoder_blocks": 1, "depths": [1], "sr_ratios": [2], "hidden_sizes": [8],
         "patch_sizes": [3], "strides": [2], "num_attention_heads": [2], "mlp_ratios": [2],
         "decoder_hidden_size": 8, "num_labels": 5, "initializer_range": 0.2}, _segments,
        obstacle=_LOCK.format("the hidden states"), **_RECORDED,
    ),
    Architecture(
        "WhisperForConditionalGeneration", "speech", "WhisperConfig",
        {**_SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16,
         "suppress_tokens": None, "begin_suppress_tokens": None}, _spectrograms,
    ),
    Architecture(
        "Wav2Vec2ForCTC", "speech", "Wav2Vec2Config", _WAVES, _transcribed, loss=_ctc,
        obstacle="sets `requires_grad` of an input; with `labels` it branches on `labels.max()`",
        remedy="`model.freeze_feature_encoder()`, and the loss outside of the model, without `labels`",
        prepare=_freeze_encoder, remedied_inputs=_sound,
    ),
    Architecture(
        "ASTForAudioClassification", "speech", "ASTConfig",
        {**_IMAGES, "max_length": 16, "num_mel_bins": 8, "frequency_stride": 4, "time_stride": 4}, _patches_of_sound,
    ),
    Architecture(
        "CLIPModel", "text and image", "CLIPConfig",
        {"text_config": {**_SIZES, **_SPECIAL, "num_hidden_layers": 1, "attention_dropout": 0.1},
         "vision_config": {**_IMAGES, "attention_dropout": 0.1}, "projection_dim": 8}, _pairs,
    ),
)  # fmt: skip

_ROBERTA = {**_ENCODER, "num_hidden_layers": 1, "use_cache": False, "is_decoder": False}
_SMALL = {**_DECODER, "num_hidden_layers": 1}
_HEADS = {**_SMALL, "head_dim": 8}
_SPEECH = {**_WAVES, "vocab_size": VOCABULARY}


def _sound_with_mask() -> dict[str, Any]:
    return {**_sound(), "attention_mask": torch.ones(2, 160, dtype=torch.long)}


def _last_hidden(out: Any, _: Mapping[str, Any]) -> Tensor:
    hidden = out[0].double()
    return (hidden.flatten() * torch.cos(torch.arange(hidden.numel(), dtype=hidden.dtype))).sum()


def _ids_alone() -> dict[str, Any]:
    return {"input_ids": _ids(2, 6)}


def _pixels(size: int = 8) -> Inputs:
    return lambda: {"pixel_values": torch.randn(2, 3, size, size)}


def _encoder(name: str, config: str, settings: Mapping[str, Any] = _ENCODER, **others: Any) -> Architecture:
    return Architecture(name, "encoder", config, {**settings, "num_hidden_layers": 1}, _tokens, **others)


def _decoder(name: str, config: str, settings: Mapping[str, Any] = _SMALL, **others: Any) -> Architecture:
    return Architecture(name, "decoder", config, settings, _tokens, **others)


# Without a row of their own in docs/architectures.md; tests/conformance examines them.
FURTHER = (
    _encoder("RobertaForMaskedLM", "RobertaConfig", _ROBERTA),
    _encoder("CamembertForMaskedLM", "CamembertConfig", _ROBERTA),
    _encoder("XLMRobertaForMaskedLM", "XLMRobertaConfig", _ROBERTA),
    _encoder("RobertaPreLayerNormForMaskedLM", "RobertaPreLayerNormConfig", _ROBERTA),
    _encoder("Data2VecTextForMaskedLM", "Data2VecTextConfig", _ROBERTA),
    _encoder("ElectraForMaskedLM", "ElectraConfig", {**_ENCODER, "embedding_size": 8}),
    _encoder("MPNetForMaskedLM", "MPNetConfig"),
    _encoder("DebertaForMaskedLM", "DebertaConfig", {**_ENCODER, "relative_attention": True, "pos_att_type": ["c2p",
        "p2c"]}),
    _encoder("ErnieForMaskedLM", "ErnieConfig"),
    _encoder("MegatronBertForMaskedLM", "MegatronBertConfig"),
    _encoder("RoFormerForMaskedLM", "RoFormerConfig", {**_ENCODER, "embedding_size": 16}),
    _encoder("RemBertForMaskedLM", "RemBertConfig", {**_ENCODER, "input_embedding_size": 8,
        "output_embedding_size": 8}),
    _encoder("ConvBertForMaskedLM", "ConvBertConfig", {**_ENCODER, "embedding_size": 16, "conv_kernel_size": 3}),
    _encoder("SqueezeBertForMaskedLM", "SqueezeBertConfig", {**_ENCODER, "embedding_size": 16, "q_groups": 1,
        "k_groups": 1, "v_groups": 1, "post_attention_groups": 1, "intermediate_groups": 1, "output_groups": 1}),
    _encoder("FNetForMaskedLM", "FNetConfig", {**_ENCODER, "use_tpu_fourier_optimizations": False}),
    _encoder("NystromformerForMaskedLM", "NystromformerConfig", {**_ENCODER, "num_landmarks": 2,
        "segment_means_seq_len": 6}, obstacle="in torch.compile it adds a mask that does not fit its landmarks"),
    _encoder("MobileBertForMaskedLM", "MobileBertConfig", {**_ENCODER, "embedding_size": 16,
        "intra_bottleneck_size": 16}),
    _encoder("LayoutLMForTokenClassification", "LayoutLMConfig", {**_ENCODER, "num_labels": VOCABULARY}),
    _encoder("EuroBertForMaskedLM", "EuroBertConfig", {**_HEADS, "mask_token_id": 3}),
    Architecture("FunnelForMaskedLM", "encoder", "FunnelConfig", {"vocab_size": VOCABULARY, "block_sizes": [1, 1],
        "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 32, "num_decoder_layers": 1}, _tokens),
    _decoder("MistralForCausalLM", "MistralConfig"),
    _decoder("PhiForCausalLM", "PhiConfig", {**_SMALL, "resid_pdrop": 0.1, "embd_pdrop": 0.1}),
    _decoder("Phi3ForCausalLM", "Phi3Config", {**_SMALL, "original_max_position_embeddings": 32, "resid_pdrop": 0.1,
        "embd_pdrop": 0.1}),
    _decoder("GemmaForCausalLM", "GemmaConfig", _HEADS),
    _decoder("Gemma3ForCausalLM", "Gemma3TextConfig", {**_HEADS, "sliding_window": 4}),
    _decoder("Qwen3ForCausalLM", "Qwen3Config", _HEADS),
    _decoder("Qwen3NextForCausalLM", "Qwen3NextConfig", {**_HEADS, "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 2,
        "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 0,
        "mlp_only_layers": [0, 1]}, dtype=torch.float32),
    _decoder("OlmoForCausalLM", "OlmoConfig"),
    _decoder("Olmo2ForCausalLM", "Olmo2Config"),
    _decoder("Olmo3ForCausalLM", "Olmo3Config"),
    _decoder("OlmoHybridForCausalLM", "OlmoHybridConfig", {**_SMALL, "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 2,
        "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}, dtype=torch.float32),
    _decoder("DogeForCausalLM", "DogeConfig"),
    _decoder("FalconForCausalLM", "FalconConfig", {"vocab_size": VOCABULARY, "hidden_size": 16,
        "num_hidden_layers": 1, "num_attention_heads": 2, "use_cache": False, "alibi": False, "hidden_dropout": 0.1}),
    _decoder("StableLmForCausalLM", "StableLmConfig", {**_SMALL, "hidden_dropout": 0.1}),
    _decoder("CohereForCausalLM", "CohereConfig"),
    _decoder("Starcoder2ForCausalLM", "Starcoder2Config", {**_SMALL, "residual_dropout": 0.1,
        "embedding_dropout": 0.1}),
    _decoder("GraniteForCausalLM", "GraniteConfig"),
    _decoder("GlmForCausalLM", "GlmConfig", _HEADS),
    _decoder("NemotronForCausalLM", "NemotronConfig"),
    _decoder("SmolLM3ForCausalLM", "SmolLM3Config"),
    _decoder("HeliumForCausalLM", "HeliumConfig", _HEADS),
    _decoder("PersimmonForCausalLM", "PersimmonConfig", {**_SMALL, "hidden_dropout": 0.1}),
    _decoder("ApertusForCausalLM", "ApertusConfig"),
    _decoder("GPTNeoXForCausalLM", "GPTNeoXConfig", {**_SIZES, **_SPECIAL, "num_hidden_layers": 1,
        "use_cache": False, "hidden_dropout": 0.1}),
    _decoder("GPTNeoForCausalLM", "GPTNeoConfig", {"vocab_size": VOCABULARY, "hidden_size": 16, "num_layers": 2,
        "attention_types": [[["global", "local"], 1]], "num_heads": 2, "window_size": 4,
        "max_position_embeddings": 32, "embed_dropout": 0.1, "resid_dropout": 0.1, "attention_dropout": 0.1,
        "use_cache": False, "bos_token_id": 1, "eos_token_id": 2}),
    _decoder("GPTJForCausalLM", "GPTJConfig", {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 1, "n_head": 2,
        "rotary_dim": 4, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1, "n_positions": 32,
        "use_cache": False, "bos_token_id": 1, "eos_token_id": 2}),
    _decoder("MptForCausalLM", "MptConfig", {"resid_pdrop": 0.1, "vocab_size": VOCABULARY, "d_model": 16,
        "n_layers": 1, "n_heads": 2, "max_seq_len": 32, "use_cache": False}),
    _decoder("BioGptForCausalLM", "BioGptConfig", {**_ENCODER, **_SPECIAL, "num_hidden_layers": 1,
        "use_cache": False, "layerdrop": 0.0}),
    _decoder("XGLMForCausalLM", "XGLMConfig", {**_SPECIAL, "vocab_size": VOCABULARY, "d_model": 16, "ffn_dim": 32,
        "num_layers": 1, "attention_heads": 2, "max_position_embeddings": 32, "layerdrop": 0.0, "use_cache": False},
        dtype=torch.float32),
    Architecture("Qwen3MoeForCausalLM", "mixture of experts", "Qwen3MoeConfig", {**_EXPERTS, "num_hidden_layers": 1,
        "head_dim": 8, "experts_implementation": "batched_mm"}, _tokens),
    Architecture("GptOssForCausalLM", "mixture of experts", "GptOssConfig", {**_HEADS, "num_local_experts": 3,
        "num_experts_per_tok": 2, "sliding_window": 4, "experts_implementation": "batched_mm",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, _tokens),
    Architecture("FalconMambaForCausalLM", "state space", "FalconMambaConfig", _STATES, _tokens),
    Architecture("RwkvForCausalLM", "state space", "RwkvConfig", {**_SPECIAL, "vocab_size": VOCABULARY,
        "hidden_size": 16, "attention_hidden_size": 16, "num_hidden_layers": 2, "context_length": 32,
        "use_cache": False}, _tokens),
    Architecture("PegasusForConditionalGeneration", "encoder-decoder", "PegasusConfig", _SEQ2SEQ, _tokens),
    Architecture("MBartForConditionalGeneration", "encoder-decoder", "MBartConfig", _SEQ2SEQ, _tokens),
    Architecture("BlenderbotSmallForConditionalGeneration", "encoder-decoder", "BlenderbotSmallConfig", _SEQ2SEQ,
        _tokens),
    Architecture("M2M100ForConditionalGeneration", "encoder-decoder", "M2M100Config", {**_SEQ2SEQ,
        "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}, _tokens),
    Architecture("MT5ForConditionalGeneration", "encoder-decoder", "MT5Config", {**_T5, "num_decoder_layers": 1},
        _tokens),
    Architecture("UMT5ForConditionalGeneration", "encoder-decoder", "UMT5Config", {**_T5, "num_decoder_layers": 1},
        _tokens),
    Architecture("ProphetNetForConditionalGeneration", "encoder-decoder", "ProphetNetConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
        "num_encoder_layers": 1, "num_decoder_layers": 1, "num_encoder_attention_heads": 2,
        "num_decoder_attention_heads": 2, "max_position_embeddings": 32, "use_cache": False,
        "disable_ngram_loss": True}, _tokens),
    Architecture("DeiTForImageClassification", "vision", "DeiTConfig", _IMAGES, _images),
    Architecture("BeitForImageClassification", "vision", "BeitConfig", {**_IMAGES,
        "use_relative_position_bias": True}, _images),
    Architecture("Dinov2ForImageClassification", "vision", "Dinov2Config", _IMAGES, _images),
    Architecture("ConvNextV2ForImageClassification", "vision", "ConvNextV2Config", {"hidden_sizes": [8, 16],
        "depths": [1, 1], "num_stages": 2, "patch_size": 2, "num_labels": 5, "drop_path_rate": 0.1},
        partial(_images, 16)),
    Architecture("RegNetForImageClassification", "vision", "RegNetConfig", {"embedding_size": 8, "hidden_sizes": [8,
        16], "depths": [1, 1], "groups_width": 4, "num_labels": 5}, partial(_images, 16)),
    Architecture("MobileNetV2ForImageClassification", "vision", "MobileNetV2Config", {"depth_multiplier": 0.35,
        "num_labels": 5, "image_size": 32}, partial(_images, 32)),
    Architecture("PoolFormerForImageClassification", "vision", "PoolFormerConfig", {"hidden_sizes": [8, 16],
        "depths": [1, 1], "num_encoder_blocks": 2, "patch_sizes": [3, 3], "strides": [2, 2], "padding": [1, 1],
        "num_labels": 5}, partial(_images, 16)),
    Architecture("PvtForImageClassification", "vision", "PvtConfig", {**_DROPOUT, "image_size": 32,
        "num_encoder_blocks": 2, "depths": [1, 1], "sequence_reduction_ratios": [2, 1], "hidden_sizes": [8, 16],
        "patch_sizes": [4, 2], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
        "num_labels": 5}, partial(_images, 32)),
    Architecture("YolosForObjectDetection", "vision", "YolosConfig", {**_IMAGES, "image_size": [8, 8],
        "num_detection_tokens": 3}, _pixels(), loss=_last_hidden),
    Architecture("DetrModel", "vision", "DetrConfig", {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
        "num_queries": 3, "use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False,
        "backbone_config": {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1],
        "layer_type": "basic", "out_features": ["stage2"]}}, _pixels(32), loss=_last_hidden,
        obstacle="in training it branches on whether its hidden states are finite"),
    Architecture("Swinv2ForImageClassification", "vision", "Swinv2Config", {**_DROPOUT, "image_size": 16,
        "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4, "num_labels": 5},
        partial(_images, 16)),
    Architecture("ViTMAEForPreTraining", "vision", "ViTMAEConfig", {**_IMAGES, "decoder_num_attention_heads": 2,
        "decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_intermediate_size": 32,
        "mask_ratio": 0.5}, _pixels()),
    Architecture("SiglipModel", "text and image", "SiglipConfig", {"text_config": {**_SIZES, **_SPECIAL,
        "num_hidden_layers": 1, "attention_dropout": 0.1, "projection_size": 16}, "vision_config": {**_IMAGES,
        "attention_dropout": 0.1}}, _pairs),
    Architecture("ViltModel", "text and image", "ViltConfig", {**_ENCODER, "num_hidden_layers": 1, "image_size": 8,
        "patch_size": 4}, lambda: {"input_ids": _ids(2, 6), "pixel_values": torch.randn(2, 3, 8, 8)},
        loss=_last_hidden, obstacle="takes the sizes of its images from the values of a mask"),
    Architecture("HubertModel", "speech", "HubertConfig", _SPEECH, _sound, loss=_last_hidden,
        prepare=_freeze_if_possible),
    Architecture("WavLMModel", "speech", "WavLMConfig", _SPEECH, _sound, loss=_last_hidden,
        prepare=_freeze_if_possible),
    Architecture("SEWModel", "speech", "SEWConfig", {**_SPEECH, "squeeze_factor": 1}, _sound, loss=_last_hidden,
        prepare=_freeze_if_possible),
    Architecture("Data2VecAudioModel", "speech", "Data2VecAudioConfig", _SPEECH, _sound, loss=_last_hidden,
        prepare=_freeze_if_possible),
    Architecture("UniSpeechModel", "speech", "UniSpeechConfig", {**_SPEECH, "num_codevectors_per_group": 4}, _sound,
        loss=_last_hidden, prepare=_freeze_if_possible),
    Architecture("Speech2TextForConditionalGeneration", "speech", "Speech2TextConfig", {**_SEQ2SEQ,
        "max_source_positions": 16, "max_target_positions": 16, "input_feat_per_channel": 8, "input_channels": 1,
        "conv_channels": 8, "num_conv_layers": 1, "conv_kernel_sizes": (3,)},
        lambda: {"input_features": torch.randn(2, 16, 8), "labels": _ids(2, 5)}),
    Architecture("PatchTSTForPrediction", "decoder", "PatchTSTConfig", {"num_input_channels": 2,
        "context_length": 16, "patch_length": 4, "patch_stride": 4, "num_hidden_layers": 1, "d_model": 16,
        "num_attention_heads": 2, "ffn_dim": 32, "prediction_length": 4, "attention_dropout": 0.1, "loss": "mse"},
        lambda: {"past_values": torch.randn(2, 16, 2), "future_values": torch.randn(2, 4, 2)}),
    Architecture("DecisionTransformerModel", "decoder", "DecisionTransformerConfig", {"state_dim": 3, "act_dim": 2,
        "hidden_size": 16, "n_layer": 1, "n_head": 2, "max_ep_len": 20, "use_cache": False},
        lambda: {"states": torch.randn(2, 4, 3), "actions": torch.randn(2, 4, 2), "rewards": torch.randn(2, 4, 1),
        "returns_to_go": torch.randn(2, 4, 1), "timesteps": torch.randint(0, 20, (2, 4)),
        "attention_mask": torch.ones(2, 4)}, loss=_last_hidden),
)  # fmt: skip
