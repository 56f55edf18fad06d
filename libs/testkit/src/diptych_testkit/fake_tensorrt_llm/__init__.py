"""TensorRT-LLM's LLM API without a GPU: its names, its strictness and its bad habits.

`fake_tensorrt_llm.at("1.3.0")` is an installed engine of that version: what `import_module` would
give of it is what `importer` gives. Engines that share a `World` can hand KV to each other.
"""

from diptych_testkit.fake_tensorrt_llm.installed import Installed, at
from diptych_testkit.fake_tensorrt_llm.world import Faults, World

__all__ = ["Faults", "Installed", "World", "at"]
