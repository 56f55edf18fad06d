"""What numbers in an adapter's options may be: TOML knows negative ones, `nan` and `inf` too."""

from typing import Annotated

import msgspec

Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
"""A deadline or a period."""
Pause = Annotated[float, msgspec.Meta(ge=0, le=86_400)]
"""A period that may be none."""
Millis = Annotated[int, msgspec.Meta(ge=0, le=86_400_000)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
"""0: the default."""
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
Fraction = Annotated[float, msgspec.Meta(gt=0, lt=1)]
