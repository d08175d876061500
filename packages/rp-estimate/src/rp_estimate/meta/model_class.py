"""Which of transformers' classes a config's model is: for text alone, or for images and text."""

from __future__ import annotations

from typing import Any

# Of the configs of transformers.
_OF_IMAGES = ("image_token_id", "image_token_index", "img_token_id", "image_patch_id")
_OF_OTHERS = ("video_token_id", "video_token_index", "audio_token_id", "audio_token_index")


def sees(config: Any) -> bool:
    """Return whether transformers has a model for images and text of a config.

    >>> from transformers import LlamaConfig, LlavaConfig
    >>> sees(LlavaConfig()), sees(LlamaConfig())
    (True, False)
    """
    from transformers.models.auto import modeling_auto

    return config.model_type in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


def placeholders(config: Any) -> frozenset[int]:
    """Return the tokens that the model of a config replaces by what it sees or hears.

    >>> from transformers import LlavaConfig, LlamaConfig
    >>> sorted(placeholders(LlavaConfig(image_token_index=9))), sorted(placeholders(LlamaConfig()))
    ([9], [])
    """
    found = (getattr(config, name, None) for name in (*_OF_IMAGES, *_OF_OTHERS)) if sees(config) else ()
    return frozenset(one for one in found if isinstance(one, int))


def model_class(config: Any, *, with_images: bool) -> Any:
    """Return the class that makes and loads the model of a config: of those for images only where it must be.

    `with_images`: whether it is to read some. Without, it is that for text, if there is one.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    is_for_text = config.model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    is_for_images = sees(config) and (with_images or not is_for_text)
    return transformers.AutoModelForImageTextToText if is_for_images else transformers.AutoModelForCausalLM
