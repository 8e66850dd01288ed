"""The images: 1,797 handwritten digits that scikit-learn brings, and which of them no run may see before its end."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from dualtune.data.held_out import held_out
from dualtune.errors import EnvironmentFault

HELD_OUT = 0.2  # of the images
SPLIT = 0  # the seed of the split: the held-out images are the same in every run
BRIGHTEST = 16.0  # the largest value of a pixel


@dataclass(frozen=True, slots=True)
class Images:
    """Images with their labels. Legend: D images, I pixels."""

    pixels_DI: np.ndarray  # float64, from 0 to 1
    labels_D: np.ndarray  # from 0 to 9

    def __len__(self) -> int:
        return len(self.labels_D)

    def chosen(self, which_D: Any) -> Images:
        """Return some of the images, by their indices or by a mask."""
        return Images(self.pixels_DI[which_D], self.labels_D[which_D])


@dataclass(frozen=True, slots=True)
class DigitsData:
    """Images to train on (a run takes its probes from them), and others that only measure the result."""

    train: Images
    held_out: Images


def read_digits() -> DigitsData:
    """Return the images of scikit-learn, which has them in its package. EnvironmentFault if it is not installed."""
    try:
        load_digits: Any = import_module("sklearn.datasets").load_digits
    except ImportError as error:
        raise EnvironmentFault(
            f"the images of digits: they come with scikit-learn, which could not be imported ({error}). "
            "Install it with: pip install 'dualtune[bench]'"
        ) from error
    pixels_DI, labels_D = load_digits(return_X_y=True)
    return split(Images(pixels_DI / BRIGHTEST, labels_D), SPLIT)


def split(images: Images, seed: int) -> DigitsData:
    """Hold out a fifth of the images."""
    is_held_out = held_out(len(images), HELD_OUT, seed)
    return DigitsData(images.chosen(~is_held_out), images.chosen(is_held_out))
