"""Models of timm, diffusers and torch_geometric, small or from tiny configurations: nothing is downloaded."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["LIBRARY_MODELS", "LibraryModel", "find_libraries", "let_dropouts_drop"]

_LIBRARIES: list[torch.library.Library] = []
FOLDER = "GRADREWRITE_ZOO"


def find_libraries() -> None:
    """Let the libraries be found in the folder that ``GRADREWRITE_ZOO`` names, and torchvision be imported.

    Beside a torch that its C library is not for, torchvision lacks operators that it gives fake implementations; timm
    and transformers import it, and nothing here calls these operators. It has a folder of its own in .ci/run because
    programs that do not know of this could not import lightning.
    """
    folder = os.environ.get(FOLDER)
    if folder and folder not in sys.path:
        sys.path.append(folder)
    if _LIBRARIES or importlib.util.find_spec("torchvision") is None:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    _LIBRARIES.append(library)  # operators live as long as their library
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


@dataclass(frozen=True)
class LibraryModel:
    """One model of a library.

    Attributes:
        library: Name of the package.
        name: Its name there; of diffusers and torch_geometric that of the class.
        inputs: Makes its inputs, by name.
        settings: What it is made with.
        variant: What tells two cases of one class apart.
    """

    library: str
    name: str
    inputs: Callable[[], Mapping[str, Any]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    variant: str = ""

    def make(self) -> nn.Module:
        """The model in training mode, in float64; each of its dropouts drops something."""
        if self.library == "timm":
            find_libraries()
            made = importlib.import_module("timm").create_model(self.name, pretrained=False, **self.settings)
        elif self.library == "diffusers":
            find_libraries()
            made = getattr(importlib.import_module("diffusers"), self.name)(**self.settings)
        else:
            made = getattr(importlib.import_module("torch_geometric.nn.models"), self.name)(**self.settings)
        model: nn.Module = made.to(torch.float64).train()
        let_dropouts_drop(model)
        return model


def let_dropouts_drop(model: nn.Module) -> None:
    """Give dropouts with a probability of 0 another one."""
    for module in model.modules():
        if isinstance(module, nn.Dropout) and module.p == 0:
            module.p = 0.1


def _randn(*size: int) -> Tensor:
    return torch.randn(size, dtype=torch.float64)


def _images(size: int) -> Callable[[], Mapping[str, Any]]:
    return lambda: {"x": _randn(2, 3, size, size)}


def _timm(name: str, **settings: Any) -> LibraryModel:
    size = settings.get("img_size", 64)
    size = size[0] if isinstance(size, tuple) else size
    return LibraryModel("timm", name, _images(size), {"num_classes": 5, **settings})


def _noisy(channels: int = 4, size: int = 8, **others: Callable[[], Tensor]) -> Callable[[], Mapping[str, Any]]:
    return lambda: {
        "sample": _randn(2, channels, size, size), "timestep": torch.tensor([3, 7]), "return_dict": False,
        **{name: make() for name, make in others.items()},
    }  # fmt: skip


def _patches(**others: Callable[[], Any]) -> Callable[[], Mapping[str, Any]]:
    return lambda: {
        "hidden_states": _randn(2, 4, 8, 8), "timestep": torch.tensor([3, 7]), "return_dict": False,
        **{name: make() for name, make in others.items()},
    }  # fmt: skip


def _graph(**others: Callable[[], Any]) -> Callable[[], Mapping[str, Any]]:
    """Five nodes, eight edges."""

    def make() -> Mapping[str, Any]:
        edges = torch.tensor([[0, 1, 2, 3, 4, 0, 2, 1], [1, 2, 3, 4, 0, 2, 0, 4]])
        return {"x": _randn(5, 4), "edge_index": edges, **{name: make() for name, make in others.items()}}

    return make


_GRAPH = {"in_channels": 4, "hidden_channels": 8, "num_layers": 2, "out_channels": 3, "dropout": 0.2}
_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
_TINY_UNET = {
    "sample_size": 8, "in_channels": 4, "out_channels": 4, "block_out_channels": (8, 16), "layers_per_block": 1,
    "norm_num_groups": 4,
}  # fmt: skip
_DIT = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 1, "sample_size": 8}

LIBRARY_MODELS = (
    *(
        _timm(f"test_{name}", **settings)
        for name, settings in {
            "byobnet": {"drop_rate": 0.1}, "convnext": {"drop_path_rate": 0.1}, "convnext2": {}, "convnext3": {},
            "efficientnet": {"drop_rate": 0.1}, "efficientnet_evos": {}, "efficientnet_gn": {}, "efficientnet_ln": {},
            "mambaout": {"drop_rate": 0.1}, "nfnet": {}, "resnet": {"drop_path_rate": 0.1},
            "vit": {"img_size": 32, "proj_drop_rate": 0.1}, "vit2": {"img_size": 32}, "vit3": {"img_size": 32},
            "vit4": {"img_size": 32}, "vit_relpos": {"img_size": 32, "attn_drop_rate": 0.1},
        }.items()
    ),
    _timm("test_coatnet", img_size=64), _timm("test_maxvit", img_size=64),
    _timm("deit_tiny_patch16_224", **_VIT, drop_path_rate=0.1),
    _timm("beit_base_patch16_224", **_VIT, attn_drop_rate=0.1),
    _timm("eva02_tiny_patch14_224", **{**_VIT, "num_heads": 2}, proj_drop_rate=0.1),
    _timm("cait_xxs24_224", **_VIT),
    _timm("swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=8, depths=(1, 1), num_heads=(1, 2)),
    _timm("swinv2_tiny_window8_256", img_size=32, window_size=4, embed_dim=8, depths=(1, 1), num_heads=(1, 2)),
    _timm("densenet121", growth_rate=4, block_config=(1, 1), drop_rate=0.1),
    _timm("vgg11", drop_rate=0.1),
    _timm("resnest14d"),
    _timm("regnetx_002", drop_path_rate=0.1),
    _timm("mobilenetv3_small_050", drop_rate=0.1),
    _timm("ghostnet_050"),
    _timm("lcnet_035"),
    _timm("xcit_nano_12_p16_224", img_size=32, embed_dim=16, depth=1, num_heads=2),
    _timm("pit_ti_224", img_size=64, base_dims=(8, 8), depth=(1, 1), heads=(1, 2)),
    _timm("hiera_tiny_224", img_size=(32, 32), embed_dim=8, num_heads=1, stages=(1, 1), q_pool=1),
    _timm("levit_128s", img_size=64, embed_dim=(8, 16), num_heads=(1, 2), depth=(1, 1), key_dim=8),
    LibraryModel(
        "diffusers", "UNet2DModel", _noisy(),
        {**_TINY_UNET, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
         "up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "attention_head_dim": 8, "dropout": 0.1},
    ),
    LibraryModel(
        "diffusers", "UNet2DConditionModel", _noisy(encoder_hidden_states=lambda: _randn(2, 3, 8)),
        {**_TINY_UNET, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
         "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "cross_attention_dim": 8, "attention_head_dim": 2,
         "dropout": 0.1},
    ),
    LibraryModel(
        "diffusers", "AutoencoderKL", lambda: {"sample": _randn(2, 3, 16, 16), "return_dict": False},
        {"block_out_channels": (4, 8), "norm_num_groups": 2, "latent_channels": 2,
         "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2},
    ),
    LibraryModel(
        "diffusers", "VQModel", lambda: {"sample": _randn(2, 3, 16, 16), "return_dict": False},
        {"block_out_channels": (4, 8), "norm_num_groups": 2, "latent_channels": 2, "num_vq_embeddings": 8,
         "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2},
    ),
    LibraryModel(
        "diffusers", "DiTTransformer2DModel", _patches(class_labels=lambda: torch.tensor([1, 2])),
        {**_DIT, "norm_num_groups": 4, "num_embeds_ada_norm": 10, "dropout": 0.1},
    ),
    LibraryModel(
        "diffusers", "PixArtTransformer2DModel",
        _patches(encoder_hidden_states=lambda: _randn(2, 3, 8), added_cond_kwargs=dict),
        {**_DIT, "norm_num_groups": 4, "cross_attention_dim": 16, "caption_channels": 8, "dropout": 0.1,
         "out_channels": 4},
    ),
    LibraryModel(
        "diffusers", "SD3Transformer2DModel",
        _patches(encoder_hidden_states=lambda: _randn(2, 3, 8), pooled_projections=lambda: _randn(2, 8)),
        {**_DIT, "patch_size": 2, "joint_attention_dim": 8, "caption_projection_dim": 16, "pooled_projection_dim": 8,
         "out_channels": 4},
    ),
    LibraryModel(
        "diffusers", "UNet1DModel", lambda: {"sample": _randn(2, 4, 16), "timestep": torch.tensor([3, 7]),
            "return_dict": False},
        {"sample_size": 16, "in_channels": 4, "out_channels": 4, "block_out_channels": (8, 16), "extra_in_channels": 8,
         "down_block_types": ("DownBlock1DNoSkip", "DownBlock1D"), "up_block_types": ("UpBlock1D", "UpBlock1DNoSkip")},
    ),
    *(LibraryModel("torch_geometric", name, _graph(), _GRAPH) for name in ("GCN", "GraphSAGE", "GIN", "GAT",
        "EdgeCNN")),
    LibraryModel("torch_geometric", "GAT", _graph(), {**_GRAPH, "v2": True, "heads": 2, "jk": "cat"}, "v2, two heads"),
    LibraryModel(
        "torch_geometric", "PNA", _graph(),
        {**_GRAPH, "aggregators": ["mean", "max", "std"], "scalers": ["identity", "amplification"],
         "deg": torch.tensor([0, 3, 2])},
    ),
    LibraryModel(
        "torch_geometric", "SGFormer", _graph(batch=lambda: torch.zeros(5, dtype=torch.long)),
        {"in_channels": 4, "hidden_channels": 8, "out_channels": 3},
    ),
)  # fmt: skip
