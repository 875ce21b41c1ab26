"""Image files of clients' own data: finding them in folders, and decoding them within bounds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from flwr_kd.checks import DataError
from flwr_kd.data._base import AnyArray, require
from flwr_kd.data._files import check_regular
from flwr_kd.text import first_line

__all__ = ["IMAGE_ENDINGS", "MOST_PIXELS", "check_no_link", "decoded", "decoded_from", "image_files"]

IMAGE_ENDINGS = (".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""Endings of files that are read as images."""

MOST_PIXELS = 50_000_000
"""Pixels of the largest image that is decoded, which takes up to 1 GB of memory meanwhile."""

# Others that the library knows start programs, or are no pictures. Names often have the ending of another format.
_FORMATS = frozenset({"BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"})


def check_no_link(path: Path) -> None:
    """Raise DataError for a symbolic link to a file or folder; one that leads nowhere fails when it is read."""
    if path.is_symlink() and path.exists():
        raise DataError(
            f"{str(path)!r} is a symbolic link to {os.readlink(path)!r}; a folder of data may have none: put the "
            "files themselves there, or hard links (cp -rl)"
        )


def image_files(folder: Path) -> list[Path]:
    """Return all files below a folder, in the order of their names.

    Raises
    ------
    DataError
        If one is not named as an image, is a link, or is no regular file.
    OSError
        If a folder cannot be read.
    """

    def fail(error: OSError) -> None:
        raise error

    files: list[Path] = []
    for root, folders, names in os.walk(folder, onerror=fail, followlinks=False):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in folders:
            check_no_link(Path(root, name))
        for name in sorted(name for name in names if not name.startswith(".")):
            file = Path(root, name)
            if file.suffix.lower() not in IMAGE_ENDINGS:
                raise DataError(
                    f"the file {str(file)!r} is not an image; names of images end in {', '.join(IMAGE_ENDINGS)}"
                )
            check_no_link(file)
            files.append(file)
    return files


def decoded(file: Path) -> Tensor:
    """Return an image ``[1 or 3, H, W]`` in [0, 1].

    Raises
    ------
    DataError
        If it cannot be read, has too many pixels or several pages, or a range of values that is not known.
    """
    return decoded_from(file, repr(str(file)))


def decoded_from(file: Path | BinaryIO, name: str) -> Tensor:
    """Return an image ``[1 or 3, H, W]`` in [0, 1], as :func:`decoded`, from a file or from bytes.

    Parameters
    ----------
    file : Path or binary file
        Where the image is.
    name : str
        Its name in errors.
    """
    library = require("PIL.Image")
    try:
        if isinstance(file, Path):
            check_regular(file)
        library.init()  # it knows a format only then
        with library.open(file, formats=sorted(_FORMATS & library.OPEN.keys())) as image:
            _check_size(name, image.width, image.height)
            # The further images of a camera's MPO are previews. In other files they are pages of equal rank.
            frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
            if frames > 1:
                raise DataError(f"the image {name} has {frames} pages or frames, expected one")
            pixels = _pixels(image)
    except DataError:
        raise
    except Exception as error:  # the library's exceptions depend on the file's format
        raise DataError(f"the image {name} cannot be read: {first_line(error)}") from error
    if pixels is None:
        raise DataError(
            f"the image {name} has values of 32 bits, whose range is not known; save it with 8 or 16"
        )
    return torch.from_numpy(pixels)


def _check_size(name: str, width: int, height: int) -> None:
    if width * height > MOST_PIXELS:
        raise DataError(
            f"the image {name} has {width:,} x {height:,} pixels, at most {MOST_PIXELS:,} are read: make it smaller"
        )


def _pixels(image: Any) -> AnyArray | None:
    """Return float32 ``[1 or 3, H, W]`` in [0, 1]; None if the largest possible value is unknown."""
    # Values of 16 bits are read without conversion, because the library's conversion clips them at 255. It reads
    # those of a PNM, and in older versions those of a PNG, into 32 bits.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        return _scaled(np.asarray(image)[None], 65535)
    if image.mode in ("I", "F"):
        return None
    if image.mode in ("1", "L", "LA"):
        return _scaled(np.asarray(image.convert("L"))[None], 255)
    coloured = image if image.mode == "RGB" else image.convert("RGB")
    return _scaled(np.asarray(coloured).transpose(2, 0, 1), 255)


def _scaled(values: AnyArray, largest: int) -> AnyArray:
    # Whole numbers up to 24 bits have the same quotient in float32 as in float64 after rounding, in less memory.
    return np.divide(values, np.float32(largest), dtype=np.float32)
