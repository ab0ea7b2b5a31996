"""How photographs become network inputs: the Inception papers' random crop, and the central one."""

import math

import numpy as np
from PIL import Image

Box = tuple[float, float, float, float]


def random_box(width: int, height: int, rng: np.random.Generator) -> Box:
    """Draw a crop of 8 to 100 % of the area, its sides 3:4 to 4:3.

    Args:
      width: The image's.
      height: The image's.
      rng: The source of randomness.

    Returns:
      Left, top, right and bottom, within the image.

    Examples:
      >>> left, top, right, bottom = random_box(500, 375, np.random.default_rng(0))
      >>> 0 <= left < right <= 500 and 0 <= top < bottom <= 375
      True
    """
    for _ in range(10):
        area = rng.uniform(0.08, 1.0) * width * height
        ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        crop_width, crop_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            left = int(rng.integers(width - crop_width + 1))
            top = int(rng.integers(height - crop_height + 1))
            return left, top, left + crop_width, top + crop_height
    # Only a very long or very small image gets here.
    return central_box(width, height, share=1.0)


def central_box(width: int, height: int, share: float = 0.875) -> Box:
    """Return the square in the middle that spans this share of the shorter side.

    Examples:
      >>> central_box(160, 80)
      (45.0, 5.0, 115.0, 75.0)
    """
    side = share * min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def cut(image: Image.Image, box: Box, image_size: int, *, mirror: bool = False) -> np.ndarray:
    """Cut a box out and resize it, anti-aliased.

    Args:
      image: An RGB image.
      box: Left, top, right and bottom.
      image_size: The result's width and height.
      mirror: Mirror the result left to right.

    Returns:
      uint8, (image_size, image_size, 3).

    Examples:
      >>> cut(Image.new("RGB", (40, 30), "red"), (5, 5, 15, 25), 2)[0].tolist()
      [[255, 0, 0], [255, 0, 0]]
    """
    resized = np.asarray(image.resize((image_size, image_size), Image.Resampling.BILINEAR, box))
    return np.ascontiguousarray(resized[:, ::-1]) if mirror else resized
