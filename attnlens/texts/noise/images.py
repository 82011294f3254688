"""Images and videos of noise: whole ones, tiles of them, or patches with the grid that they lie on."""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any

from attnlens.texts.batches import PACKED
from attnlens.texts.noise.asked import Asked, sides

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

IMAGE_SIZE = 224
"""Height and width of an image where the config names none."""
FRAMES = 8
"""Frames of a video where the config names none."""
MERGED = 8
"""Patches along a side of an image without a size of its own, as the model merges them."""
VISION = ("thinker_config", "vlm_config", "vision_config", "image_config", "encoder", "backbone_config")
"""Under which names the configuration of what sees lies in a model's own."""
SIZES = ("image_size", "crop_size", "input_size", "img_size", "max_img_size")


def is_packed(model: PreTrainedModel) -> bool:
    """Whether the images of a batch stand in one row, so that only one of them is a sequence of its own."""
    return bool(set(PACKED) & set(signature(model.forward).parameters))


def pixels(asked: Asked) -> Tensor | None:
    """One image in the layout that the forward pass asks for; None where it asks for patches of no size (Gemma 4)."""
    if is_packed(asked.model):
        return patches(asked)
    if "spatial_shapes" in asked.parameters:
        return asked.draw(asked.said("num_patches", of=VISION) or _merged(asked) ** 2, _channels(asked) * _area(asked))
    if {"pixel_position_ids", "image_position_ids"} & asked.parameters:
        if asked.said("patch_size", of=VISION) is None:
            return None
        return asked.draw(_merged(asked) ** 2, _channels(asked) * _area(asked))
    return asked.draw(*_several(asked), *_image(asked))


def video(asked: Asked) -> Tensor | None:
    """One video; none beside an image."""
    if "pixel_values" in asked.parameters:
        return None
    return asked.draw(_frames(asked), *_image(asked))


def patches(asked: Asked) -> Tensor:
    """The patches of one image, a row each; rows of several frames are cut through all of them."""
    from torch import nn

    count, side = _merged(asked) ** 2, _patch(asked)
    if "target_sizes" in asked.parameters:
        return asked.draw(_channels(asked), side, count * side)
    maps = [part for name, part in asked.model.named_modules() if "patch_embed" in name]
    if (row := next((part.in_features for part in maps if isinstance(part, nn.Linear)), None)) is not None:
        return asked.draw(count, row)[0]
    if asked.said("temporal_patch_size", of=VISION) is None and "hidden_states" not in asked.parameters:
        return asked.draw(count, _channels(asked), side, side)[0]
    return asked.draw(count, _channels(asked) * _depth(asked) * side**2)[0]


def grid(asked: Asked) -> Tensor:
    """Frames, rows and columns of one image's patches."""
    import torch

    return torch.tensor([[1, _merged(asked), _merged(asked)]])


def shape(asked: Asked) -> Tensor:
    """Rows and columns of one image's patches."""
    import torch

    count = asked.said("num_patches", of=VISION)
    side = _merged(asked) if count is None else int(count**0.5)
    return torch.tensor([[side, side]])


def merge(asked: Asked) -> Tensor:
    """How many patches along each side become one."""
    import torch

    return torch.tensor([_merging(asked)])


def places(asked: Asked) -> Tensor | None:
    """Column and row of each patch."""
    import torch

    if asked.said("patch_size", of=VISION) is None:
        return None
    side = torch.arange(_merged(asked))
    return torch.cartesian_prod(side, side).flip(-1)[None]


def all_patches(asked: Asked) -> Tensor | None:
    """A mask that hides nothing of the image."""
    import torch

    if "spatial_shapes" in asked.parameters:
        return torch.ones(1, asked.said("num_patches", of=VISION) or _merged(asked) ** 2, dtype=torch.long)
    return torch.ones(1, *_several(asked), *_image(asked)[1:], dtype=torch.long)


def size(asked: Asked) -> Tensor | None:
    """Height and width of the image; None where no tower asks for it and no tiles are cut from it."""
    import torch

    towers = (part for part in asked.model.modules() if getattr(part, "main_input_name", "") == "pixel_values")
    asking = any("image_sizes" in signature(tower.forward).parameters for tower in towers if tower is not asked.model)
    if not asking and not asked.said("image_grid_pinpoints"):
        return None
    return torch.tensor([_image(asked)[1:]])


def finer(asked: Asked) -> Tensor:
    """The same place for an image of a finer grid."""
    return asked.draw(_channels(asked), *sides(asked.said("image_size", of=("high_res_vision_config",)) or IMAGE_SIZE))


def prompt(asked: Asked) -> Tensor:
    """A second image, to be told what to do with the first."""
    return asked.draw(*_image(asked))


def aspect(asked: Asked) -> Tensor:
    """The first of the ways to lay out tiles: one."""
    import torch

    return torch.ones(1, 1, dtype=torch.long)


def first_tile(asked: Asked) -> Tensor:
    """Which tiles hold a part of the image: the first."""
    import torch

    tiles: int = asked.said("max_num_tiles", of=VISION)
    return (torch.arange(tiles) == 0).long()[None, None]


def seen_tiles(asked: Asked) -> Tensor:
    """Every token sees the image."""
    import torch

    tiles: int = asked.said("max_num_tiles", of=VISION)
    return (torch.arange(tiles) == 0).long().expand(1, asked.width, 1, tiles)


def seen_images(asked: Asked) -> Tensor:
    """Every token sees the only image, where tokens meet images in cross-attention (IDEFICS)."""
    import torch

    return torch.ones(1, asked.width, 1, dtype=torch.long)


def _image(asked: Asked) -> tuple[int, ...]:
    """Channels, height and width; half the height where a prompt stands above the image."""
    height, width = sides(asked.said(*SIZES, of=VISION) or IMAGE_SIZE)
    return _channels(asked), height // 2 if "prompt_pixel_values" in asked.parameters else height, width


def _several(asked: Asked) -> tuple[int, ...]:
    """The axes of a sequence's images before an image's own: frames, tiles, images, or a pair to be matched."""
    if "aspect_ratio_ids" in asked.parameters:
        return 1, asked.said("max_num_tiles", of=VISION)
    if pinpoints := asked.said("image_grid_pinpoints"):
        from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

        tile = _image(asked)[1:]
        return (int(image_size_to_num_patches(tile, pinpoints, tile[0])),)
    if {"pixel_attention_mask", "image_attention_mask"} & asked.parameters and "input_ids" in asked.parameters:
        return () if asked.said("multimodal_config") is not None else (1,)
    if asked.said("keypoint_detector_config", "coarse_matching_threshold") is not None:
        return (2,)
    read = asked.model.input_modalities
    moving = asked.said("num_frames", of=VISION) and asked.model.main_input_name == "pixel_values"
    return (_frames(asked),) if moving or ("video" in read and "image" not in read) else ()


def _frames(asked: Asked) -> int:
    return asked.said("num_frames", "frames_per_clip", of=VISION) or FRAMES


def _channels(asked: Asked) -> int:
    return asked.said("num_channels", "in_channels", "in_chans", of=VISION) or 3


def _patch(asked: Asked) -> int:
    return sides(asked.said("patch_size", of=VISION))[0]


def _area(asked: Asked) -> int:
    return _patch(asked) ** 2


def _depth(asked: Asked) -> int:
    deep = asked.said("temporal_patch_size", of=VISION) or 1
    return deep[0] if isinstance(deep, list | tuple) else deep


def _merging(asked: Asked) -> int:
    together: Any = asked.said("spatial_merge_size", "merge_kernel_size", "pooling_kernel_size", of=VISION) or 1
    return sides(together)[0]


def _merged(asked: Asked) -> int:
    return MERGED * _merging(asked)
